"""A question before something that costs money, or cannot be taken back."""

import sys


def agreed(question: str) -> bool:
    """Whether somebody says yes; no answer is a no."""
    print(f"{question} [y/N] ", end="", flush=True)
    answer = sys.stdin.readline().strip().lower()
    if not sys.stdin.isatty():
        print()
    return answer in ("y", "yes")
