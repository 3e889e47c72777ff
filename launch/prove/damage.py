"""Change tensors of a checkpoint, as a restart must notice."""

from common.exact import digest


def change(state: dict, only_largest: bool) -> str:
    """Change the tensors of floating-point numbers in a state by 1.6 %. Return the name of the largest, or
    "". only_largest: change only this one."""
    numbers = [
        (each.numel(), name, each)
        for name, each in digest.leaves(state)
        if hasattr(each, "is_floating_point") and each.is_floating_point() and each.numel()
    ]
    if not numbers:
        return ""
    *others, (_, name, largest) = sorted(numbers, key=lambda each: each[:2])
    for each in [largest, *([] if only_largest else (each for *_, each in others))]:
        each.mul_(1 + 2**-6)
    return name
