"""Types of the options that say how a folder of images is read."""

import argparse
import decimal

from datasets.folders.splits import NO_SPLITS


def fraction(text: str) -> float:
    """Parse an argument: "0.1%" and "0.001" are 0.001. Raises ArgumentTypeError outside 0..1."""
    try:
        whole = 100 if text.endswith("%") else 1
        value = decimal.Decimal(text.removesuffix("%")) / whole
        if 0 <= value <= 1:
            return float(value)
    except ArithmeticError:
        pass
    raise argparse.ArgumentTypeError(f"{text!r} is not a share like 0.1% or 0.001, in 0..1")


def val_share(text: str) -> float:
    """Parse an argument: "10%" and "0.1" are 0.1. Raises ArgumentTypeError unless 0 < value < 1."""
    value = fraction(text)
    if 0 < value < 1:
        return value
    raise argparse.ArgumentTypeError(f"{text!r} is not a share like 10% or 0.1, above 0 and below 1")


def splits(text: str) -> str:
    """Parse an argument: "TRAIN,VAL", two different names, or "none". Raises ArgumentTypeError."""
    names = text.split(",")
    if text == NO_SPLITS or (len({*names}) == len(names) == 2 and all(map(str.strip, names))):
        return text
    raise argparse.ArgumentTypeError(f"{text!r} is not two names of folders, TRAIN,VAL, or {NO_SPLITS}")
