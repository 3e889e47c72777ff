"""Describe the samples of a step as a table."""

from typing import Any

from common.ground.exits import printable
from datasets.loaders.replay import Step
from datasets.sampling.effects import CUTMIX, NOTHING, ONE, OPERATIONS, operation_at

_LONGEST = 70  # characters of an item
_FACTORS = ("brightness", "contrast", "saturation")


def rows(step: Step) -> list[list[str]]:
    """Return the lines of a step, the first one with the names of the columns. A column that is empty for all
    samples is left out."""
    parameters = {name: column.tolist() for name, column in step.parameters.items()}
    lines = [["rank", "id", "label", "crop", "flip", "effects", "file" if step.names else "item"]]
    for place, (rank, id) in enumerate(zip(step.ranks.tolist(), step.ids.tolist(), strict=True)):
        values = {name: column[place] for name, column in parameters.items()}
        other = int(step.ids[place ^ 1]) if (place ^ 1) < len(step.ids) else id
        content = step.names or step.items
        described = label(step, place), _crop(values), _flip(values), _effects(values, other)
        lines.append([str(rank), str(id), *described, _shorten(content[place]) if content else ""])
    used = [number for number, column in enumerate(zip(*lines[1:], strict=True)) if any(column)]
    return [[line[number] for number in used] for line in lines]


def label(step: Step, place: int) -> str:
    """Return the name of a sample's class, or its number; "" for an item, which shows its target itself."""
    if step.items:
        return ""
    return printable(step.classes[place]) if step.classes else str(int(step.labels[place]))


def _shorten(content: str) -> str:
    content = printable(content)
    return content if len(content) <= _LONGEST else f"{content[: _LONGEST - 3]}..."


def _crop(values: dict[str, Any]) -> str:
    """Return the box in the image, for example 120x80+5+7: width, height, left, top. A window of a padded
    image has no size of its own."""
    if "top" not in values:
        return ""
    size = f"{values['width']}x{values['height']}" if "width" in values else ""
    return f"{size}+{values['left']}+{values['top']}"


def _flip(values: dict[str, Any]) -> str:
    if "flip" not in values:
        return ""
    return ("no", "yes", "vertical", "both")[int(values["flip"])]


def _effects(values: dict[str, Any], other: int) -> str:
    """Return the changes of the pixels in words. other: id of the other sample of the pair that is mixed."""
    if "operation" not in values:
        return ""
    words = []
    for place in range(9):  # RandAugment's operations
        operation, strength = operation_at(values["operation"], values["strength"], place)
        words += [f"{OPERATIONS[operation]} {strength}"] if operation else []
    words += [f"{name} {values[name] / ONE:.2f}" for name in _FACTORS if values[name] != ONE]
    if values["erase_height"]:
        box = f"{values['erase_width']}x{values['erase_height']}+{values['erase_left']}+{values['erase_top']}"
        words.append(f"erased {box}")
    if values["mix"] != NOTHING:
        words.append(
            f"{'cutmix' if values['mix'] == CUTMIX else 'mixup'} {values['share'] / ONE:.2f} with {other}"
        )
    return ", ".join(words)
