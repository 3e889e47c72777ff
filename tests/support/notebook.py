"""Run the cells of jobs/quickstart.ipynb and store their outputs in it.

    python -m tests.support.notebook

What the cells print is stored as plain text, with the folders of this machine replaced by names.
"""

import contextlib
import io
import json
import os
import re
import socket
import sys
import types
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
NOTEBOOK = ROOT / "jobs" / "quickstart.ipynb"


def sources(notebook: dict[str, Any]) -> list[str]:
    """Return the text of each cell of code."""
    return ["".join(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == "code"]


def run(cells: list[str]) -> list[str]:
    """Run the cells as Jupyter does, in the notebook's folder. Return what each of them printed."""
    space: dict[str, Any] = {}
    display = types.ModuleType("IPython.display")
    vars(display)["HTML"] = str
    sys.modules |= {"IPython": types.ModuleType("IPython"), "IPython.display": display}
    os.chdir(NOTEBOOK.parent)
    printed = []
    for cell in cells:
        with contextlib.redirect_stdout(io.StringIO()) as output:
            exec(compile(cell, str(NOTEBOOK), "exec"), space)
        printed.append(output.getvalue())
    runs = str(space["RUNS"])
    return [_without_places(text, runs) for text in printed]


def _without_places(text: str, runs: str) -> str:
    """Return the text without the names of folders and of the host of this machine."""
    places = {runs: "RUNS", str(ROOT): "bootfile", sys.prefix: "venv", socket.gethostname(): "host"}
    for place, name in places.items():
        text = text.replace(place, name)
    return re.sub(r"pid=\d+", "pid=1234", text)


def main() -> None:
    notebook = json.loads(NOTEBOOK.read_text(encoding="utf-8"))
    code = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    for number, (cell, text) in enumerate(zip(code, run(sources(notebook)), strict=True), start=1):
        cell["execution_count"] = number
        lines = text.splitlines(keepends=True)
        cell["outputs"] = [{"name": "stdout", "output_type": "stream", "text": lines}] if lines else []
    NOTEBOOK.write_text(json.dumps(notebook, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
