"""Run `python -m launch simulate` in a separate process, and read its output."""

import re
import subprocess
from typing import NamedTuple

from tests.conftest import run


class Row(NamedTuple):
    """A line of the final table."""

    code: int
    seconds: float
    meaning: str


def simulate(*arguments, **options) -> subprocess.CompletedProcess:
    return run("-m", "launch", "simulate", *arguments, **options)


def rows(output: str) -> dict[str, Row]:
    """Return the final table: text of the column `node` -> Row."""
    table = output.partition(f"\n{'node':<16}exit code   seconds  explanation\n")[2].partition("\n\n")[0]
    found = {}
    for line in table.splitlines():
        found[line[:16].strip()] = Row(int(line[16:25]), float(line[25:35]), line[37:])
    return found


def fired(output: str, fault: str) -> float:
    """Return the seconds from the start until the fault fired."""
    line = re.search(
        rf"^\[simulate\] fault {re.escape(fault)}: \D.* time=([\d.]+) step=\d+ pid=", output, re.M
    )
    assert line, f"{fault} did not fire\n{output}"
    return float(line[1])
