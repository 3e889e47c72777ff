"""The page and the file of a proof. `prove --check` compares the file with the current tree, versions,
hardware and files.

    {"proof": 1, "made": ..., "job": "jobs/train.py", "verdict": "exact: ...", "exit_code": 0, "notes": [...],
     "tree": {"commit": ..., "clean": true}, "versions": {...}, "hardware": {...}, "files": {path: sha256},
     "runs": [{"run": "reference", "result": "", "done": "", "commands": [...], "seed": 0,
               "files": {path: sha256}, "machines": [{"step": 1, "threads": 2, ...}]}, ...],
     "comparisons": [{"run": ..., "part": "data", "equal": true, "text": ...}, ...]}

proof: the version of this schema.
job: the path of the job as the user gave it.
tree: the git commit of the job's folder, and whether no tracked file differs from it; null without git.
files: the job and its modules: the Python files below its folder (find_modules), or those that `launch pack`
    would upload with it if `python -m launch prove` made the proof.
runs: what was done to them, the commands, and what was compared: receipts, digests of the state, and weights.
machines: what computed a run (bootfile/machine/facts.py); [] for a script that does not use Bootfile.
"""

import contextlib
import json
import os
import platform
import re
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal

from bootfile import __version__
from bootfile.console import outputs
from bootfile.ground import accelerator, git
from bootfile.ground.errors import BadInput, import_optional
from bootfile.ground.files import explained, read_file, sha256_file
from bootfile.histories import read_states
from bootfile.machine import facts as machine
from bootfile.machine import processor
from bootfile.machine.cores import available_cores
from bootfile.machine.differences import INSTRUCTIONS
from bootfile.prove.cases import REFERENCE
from bootfile.prove.job import Job
from bootfile.prove.verdict import Row
from bootfile.receipt import records
from bootfile.receipt.compare import PARTS, find_files
from bootfile.records import read_starts

if TYPE_CHECKING:
    import pydantic
else:
    pydantic = import_optional("pydantic", "proofs are checked with pydantic")

PAGE_MARK = "a page of launch prove"
MARK = r'^\{\s*"proof": \d+,'  # the beginning of such a file
_MOST = 2**26  # bytes of it
_MOST_MODULES = 1000  # of a script
_NO_MODULES = ("__pycache__", "node_modules", "site-packages")  # folders
# a function of a script that returns its modules: path in its folder -> path of the file
FindModules = Callable[[str], dict[str, str]]
_RECORDS = ("state.jsonl", records.FILE, "receipt-*.bin")  # in a run's folder
_MACHINE = (*INSTRUCTIONS, "libraries", "OpenBLAS", "settings")  # the threads are those of each run
_PAGE = os.path.join(os.path.dirname(os.path.abspath(__file__)), "page.html")


class _Proof(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(extra="forbid", strict=True)
    proof: Literal[1]
    made: str
    job: str
    verdict: str
    exit_code: int
    notes: list[str]
    tree: dict[str, str | bool | None]
    versions: dict[str, str]
    hardware: dict[str, str | int]
    files: dict[str, str]
    runs: list[dict[str, Any]]
    comparisons: list[dict[str, Any]]


def find_modules(script: str) -> dict[str, str]:
    """Return the script and the Python files below its folder: path in the folder -> path of the file.

    Hidden folders, virtual environments and installed packages are skipped. A folder that is a symbolic link
    is not entered. Raises BadInput if there are more than 1000 modules, or if a folder cannot be read.
    """
    script = os.path.abspath(script)
    root = os.path.dirname(script)
    modules = {os.path.basename(script): script}

    def stop(error: OSError) -> None:
        raise error

    with explained(f"the modules of {script} cannot be read"):
        # a link to a folder is not entered: it may lead out of the project, for example to all data
        for folder, folders, names in os.walk(root, onerror=stop):
            shown = [name for name in folders if not name.startswith(".") and name not in _NO_MODULES]
            folders[:] = [name for name in shown if not os.path.exists(f"{folder}/{name}/pyvenv.cfg")]
            paths = [os.path.join(folder, name) for name in names if name.endswith(".py")]
            modules |= {os.path.relpath(path, root): path for path in paths if os.path.isfile(path)}
            # a script in the home folder, for example: its digests would take longer than the runs
            if len(modules) > _MOST_MODULES:
                raise BadInput(f"{root} has more than {_MOST_MODULES} modules")
    return dict(sorted(modules.items()))


def describe_code(job: str, find_modules: FindModules = find_modules) -> tuple[dict[str, Any], list[str]]:
    """Return (tree and files of a job, lines on what they do not cover). Raises BadInput if a file cannot be
    read."""
    path = os.path.abspath(job)
    limits = []
    try:
        files = find_modules(path)
    except BadInput as reason:  # for example, thousands of modules are in the folder
        files = {os.path.basename(path): path}
        limits.append(f"of the modules, --check compares only {job}: {reason}")
    commit, _, dirty = (git.describe_tree(os.path.dirname(path)) or "").partition("-")
    if dirty or not commit:
        limits.append("--check compares modules only: no commit has the other files")
    with explained(f"the code of {job} cannot be read"):
        digests = {name: sha256_file(file) for name, file in files.items()}
    tree = {"commit": commit or None, "clean": not dirty if commit else None}
    return {"tree": tree, "files": digests}, limits


def describe_node() -> dict[str, Any]:
    """Return versions and hardware of this node, for the file of a proof and for --check. The name of an
    accelerator makes this process use it: call it after the runs, which may need all of its memory."""
    facts = machine.describe()
    versions = {
        "bootfile": __version__,
        "python": platform.python_version(),
        "torch": str(facts["torch"]),
        "numpy": str(facts["numpy"]),
    }
    hardware = {
        "processor": f"CPU, {processor.name()}",
        "cores": available_cores(),
        **{name: facts[name] for name in _MACHINE},
        "accelerators": _describe_accelerators(),
    }
    return {"versions": versions, "hardware": hardware}


def _describe_accelerators() -> str:
    """Return the number of accelerators and the name of the first one, such as "2 x NVIDIA H100", or their
    type if it gives no name; "none" without one."""
    name = accelerator.kind()
    with contextlib.suppress(RuntimeError, AttributeError):  # none, it is busy, or its module knows no names
        name = accelerator.of(name).get_device_name()
    return f"{accelerator.count()} x {name}" if accelerator.count() else "none"


def describe(
    job: Job,
    code: dict[str, Any],
    rows: list[Row],
    verdict: tuple[str, int],
    notes: list[str],
) -> dict[str, Any]:
    """Return the content of the file, before the folders of the runs are deleted. code: of describe_code(),
    before the runs. Raises BadInput."""
    runs = [(REFERENCE, "", ""), *((row.case.name, row.result, row.done) for row in rows)]
    return {
        "proof": 1,
        "made": time.strftime("%Y-%m-%d %H:%M:%S %Z"),
        "job": job.script,
        "verdict": verdict[0],
        "exit_code": verdict[1],
        "notes": notes,
        **code,
        **describe_node(),
        "runs": [_describe_run(job, *run) for run in runs],
        "comparisons": [{"run": row.case.name, **line._asdict()} for row in rows for line in row.lines],
    }


def write(page_path: str, path: str, facts: dict[str, Any]) -> None:
    """Write what describe() has returned as a page and as the file of a proof. Raises BadInput."""
    from bootfile.console import page  # imports jinja2, which only --to needs

    command = facts["runs"][0]["commands"][0]
    # part -> run -> the text of their comparison: the table of the page
    lines = facts["comparisons"]
    texts = {part: {line["run"]: line["text"] for line in lines if line["part"] == part} for part in PARTS}
    text = page.render(
        _PAGE,
        mark=PAGE_MARK,
        title=f"{facts['verdict'].partition(':')[0]}: {command}",
        command=command,
        texts=texts,
        facts=facts,
    )
    with outputs.open_result(page_path) as file:
        file.write(text.encode("utf-8", "replace"))
    with outputs.open_result(path) as file:
        file.write(json.dumps(facts, indent=1, ensure_ascii=False).encode("utf-8", "replace") + b"\n")


def _describe_run(job: Job, name: str, result: str, done: str) -> dict[str, Any]:
    """Return what the file of a proof has of one run. Raises BadInput if a file of the run cannot be read."""
    folder = job.folder(name)
    files = [file for pattern in (*_RECORDS, job.weights) for file in find_files(folder, pattern)]
    with explained(f"the run {folder} cannot be read"):
        digests = {file: sha256_file(os.path.join(folder, file)) for file in files}
    starts = read_starts(folder)
    states = read_states(folder)
    return {
        "run": name,
        "result": result,
        "done": done,
        "commands": job.commands.get(name, []),
        "seed": starts[0]["settings"].get("seed") if starts else None,
        "files": digests,
        # the last state has the history of the whole run
        "machines": states[max(states)].get("machines", []) if states else [],
    }


def read(path: str) -> _Proof:
    """Read and check a proof. Raises BadInput."""
    try:
        with explained(path):
            return _Proof.model_validate_json(read_file(path, _MOST))
    except pydantic.ValidationError as error:
        wrong = error.errors(include_url=False)[0]
        reason = f"{'.'.join(map(str, wrong['loc']))} {wrong['msg']}".strip()
        raise BadInput(f"{path} is not a proof of schema 1 that `prove --to` wrote: {reason}") from None


def find_changes(proof: _Proof, job: str, find_modules: FindModules = find_modules) -> list[str]:
    """Return a line for each reason why a proof does not hold for a job on this node; [] if it holds. Raises
    BadInput."""
    changes = []
    if proof.exit_code != 0 or not proof.verdict.startswith("exact: "):
        changes.append(f"the verdict was not exact: {proof.verdict}")
    code, _ = describe_code(job, find_modules)
    # it imports torch and asks for the GPUs, but no job runs
    now = code | describe_node()
    for group in ("tree", "versions", "hardware"):
        before, after = getattr(proof, group), now[group]
        for name in sorted(before.keys() | after.keys()):
            old, new = _show(before.get(name)), _show(after.get(name))
            if old != new:
                changes.append(f"{name} {old} -> {new}")
    words = {(True, False): "removed", (False, True): "added"}  # was it a module, is it one
    for name in sorted({name for name, _ in proof.files.items() ^ now["files"].items()}):
        changes.append(f"{name} {words.get((name in proof.files, name in now['files']), 'changed')}")
    return changes


def _show(value: object) -> str:
    """Return a fact as a part of a line. Of a commit, return the first digits."""
    text = str(value)
    text = {"None": "none", "True": "yes", "False": "no"}.get(text, text)
    return text[:12] if re.fullmatch("[0-9a-f]{40}", text) else text
