"""Levels of instructions with which PyTorch computes, so that a run may move between kinds of CPUs.

    python jobs/train_exact.py --cpu_level avx2

A CPU kernel of PyTorch exists for several instruction sets, and a sum of floats depends on the one that is
used. By default ATen, oneDNN and MKL each take the widest set that this CPU has, and MKL also asks for the
vendor. A level makes all three take the same one on every CPU that has it:

    native    what this CPU offers (the default)
    avx2      for CPUs with AVX2: Intel since Haswell (2013), AMD since Zen (2017)
    any       for every x86-64 CPU

All three read their variables when torch is imported, so apply() comes before that. This module imports no
torch.
"""

import os
from collections.abc import MutableMapping, Sequence

OPTION = "--cpu_level"
HELP = (
    "instruction set of a run that moves between kinds of CPUs: avx2, or any (of x86-64); native: that of "
    "this CPU, also if the checkpoint has another one (default: that of this CPU)"
)
NATIVE = "native"
# MKL_CBWR=AVX2 has no effect on a CPU that is not Intel's. MKL's COMPATIBLE needs SSE2 only.
VARIABLES: dict[str, dict[str, str]] = {
    "avx2": {"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2", "MKL_CBWR": "COMPATIBLE"},
    "any": {"ATEN_CPU_CAPABILITY": "default", "ONEDNN_MAX_CPU_ISA": "SSE41", "MKL_CBWR": "COMPATIBLE"},
}
LEVELS = (NATIVE, *VARIABLES)


def read_level(words: Sequence[str]) -> str | None:
    """Return the level that a command line names; None without the option, or if the level is not known."""
    level = None
    for word, following in zip(words, [*words, ""][1:], strict=True):
        name, equals, value = word.partition("=")
        if name.replace("-", "_") == OPTION.replace("-", "_"):
            # the last one counts, as in argparse, which refuses another value later
            value = value if equals else following
            level = value if value in LEVELS else None
    return level


def apply(words: Sequence[str], environment: MutableMapping[str, str]) -> None:
    """Set the variables of the level that a command line names; nothing without one, or for "native"."""
    environment.update(VARIABLES.get(read_level(words) or NATIVE, {}))


def level_in_use() -> str | None:
    """Return the level whose variables this process has; None if it is not one of VARIABLES."""
    now = dict(os.environ)
    return next((level for level, variables in VARIABLES.items() if now == now | variables), None)
