"""Text from outside, made safe to print."""


def printable(text: str) -> str:
    """Return the text with every character that is not printable as a backslash escape: one line, which does
    not control a terminal. Backslashes of the text itself stay as they are."""
    if text.isprintable():
        return text
    return "".join(
        each if each.isprintable() else each.encode("unicode_escape").decode("ascii") for each in text
    )
