"""Compute with a level of instructions (levels.py), or refuse it. Only a run with a level loads this module.

This module imports no torch.
"""

import os
import platform
import sys

from bootfile.ground.errors import BadInput
from bootfile.machine.levels import LEVELS, NATIVE, OPTION, VARIABLES, level_in_use


def use(level: str) -> None:
    """Compute with the instruction set of a level in this process and in those that it starts.

    level: one of LEVELS. Call it before torch is imported. Raises BadInput if torch was imported before, if
    the level is not known, or if this CPU does not have it.
    """
    if level not in LEVELS:
        raise BadInput(f"{level!r} is not a level of instructions: expected one of {', '.join(LEVELS)}")
    if level == NATIVE:
        return
    if "torch" in sys.modules:
        raise BadInput(f"instructions.use({level!r}) comes after the import of torch: call it before")
    _check_cpu(level)
    os.environ.update(VARIABLES[level])


def _check_cpu(level: str) -> None:
    """Raise BadInput if this CPU does not have a level."""
    from bootfile.machine import processor  # it imports NumPy, which a command line does not need

    if platform.machine() not in ("x86_64", "AMD64"):
        raise BadInput(f"level {level} of instructions: this CPU is {platform.machine()}, expected x86-64")
    if level == "avx2" and processor.widest() not in ("AVX2", "AVX512"):
        raise BadInput(f"level {level}: {processor.name()} has no AVX2: use level any ({OPTION} any)")


def check(level: str | None) -> None:
    """Raise BadInput if torch does not compute with this level, although an option asks for it."""
    if level is None or level == NATIVE:
        return
    _check_cpu(level)
    from bootfile.machine import facts  # it imports torch, which a command line does not need

    # torch reads the variables at its import: one that came too late shows in what it uses
    used = facts.aten_instructions().lower()
    expected = VARIABLES[level]["ATEN_CPU_CAPABILITY"]
    if level_in_use() == level and used == expected:
        return
    raise BadInput(
        f"{OPTION} {level}: torch was imported before the level was set, and computes with {used.upper()}: "
        "give the option on the command line, not in a file of --config, and start a new Python in a notebook"
    )
