"""The box of an image that a crop needs."""

Box = tuple[int, int, int, int]  # top, left, height, width; pixels


def scaled(top: int, left: int, height: int, width: int, scale: float, rows: int, columns: int) -> Box:
    """Return the box in the scaled image, which has `rows` rows and `columns` columns."""
    top, left = min(round(top * scale), rows - 1), min(round(left * scale), columns - 1)
    height, width = max(round(height * scale), 1), max(round(width * scale), 1)
    return top, left, min(height, rows - top), min(width, columns - left)
