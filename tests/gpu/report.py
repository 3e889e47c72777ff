"""Write the results of `make gpu`: one JSON file and one table in Markdown."""

import datetime
import hashlib
import json
import os
import shutil
import subprocess
from pathlib import Path

import torch

import bootfile
from bootfile.ground.files import write_atomic
from common.ground.files import ROOT
from tests.benchmarks import rounds

JSON, TABLE = "gpu.json", "gpu.md"
# clocks, power, temperature, used memory, and why the clocks are lower: newer drivers have its first name
_STATE = ("clocks.sm", "clocks.mem", "power.draw", "temperature.gpu", "memory.used")
_REASONS = ("clocks_event_reasons.active", "clocks_throttle_reasons.active")
_UNKNOWN = "unknown"
_ROOMS = ("bootfile", "common", "datasets", "jobs", "launch", "tests")


def describe(is_small: bool, commit: str | None = None) -> dict:
    """Return the conditions of the figures: hardware, driver, versions, date.

    commit: default that of git; without git what describe_code() returns.
    """
    if commit is None:
        commit = _first_line(["git", "-C", ROOT, "rev-parse", "--short", "HEAD"])
    if commit == _UNKNOWN:
        commit = describe_code(ROOT)
    return {
        "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
        "rehearsal": is_small,
        "machine": rounds.describe(),
        "gpus": torch.cuda.device_count(),
        "driver and memory": "none" if is_small else ", ".join(query("driver_version", "memory.total")),
        "cuda": torch.version.cuda or "none",
        "cudnn": torch.backends.cudnn.version() or "none",
        "commit": commit,
        "states": {} if is_small else {"begin": gpu_state()},
    }


def describe_code(root: str) -> str:
    """Return the version and a digest of the modules of a repository, which may be a copy without git."""
    digest = hashlib.sha256()
    for room in _ROOMS:
        for path in sorted(Path(root, room).rglob("*.py")):
            name = path.relative_to(root).as_posix()
            digest.update(f"{name} {hashlib.sha256(path.read_bytes()).hexdigest()}\n".encode())
    return f"{bootfile.__version__}, digest {digest.hexdigest()[:12]}"


def gpu_state() -> dict[str, str]:
    """Return clocks, power, temperature, used memory, and the reasons of lower clocks of the first GPU."""
    state = dict(zip(_STATE, query(*_STATE), strict=True))
    for name in _REASONS:
        value = query(name)[0]
        if value != _UNKNOWN:
            return state | {name: value}
    return state


def gpu_name() -> str:
    """Return the name of the first GPU."""
    return query("name")[0]


def query(*names: str) -> list[str]:
    """Return fields of nvidia-smi, "unknown" for each that it does not have. It refuses all fields for one
    that it does not know: then each is asked for alone."""
    command = ["nvidia-smi", f"--query-gpu={','.join(names)}", "--format=csv,noheader"]
    values = [value.strip() for value in _first_line(command).split(",")]
    if len(values) == len(names):
        return values
    return [query(name)[0] for name in names] if len(names) > 1 else [_UNKNOWN]


def _first_line(command: list[str]) -> str:
    try:
        printed = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return _UNKNOWN
    return printed.strip().partition("\n")[0] or _UNKNOWN


def archive(folder: str, parts: dict[str, str]) -> None:
    """Write NAME.tar.gz of each part that has files. parts: name -> its folder."""
    for name, part in parts.items():
        if os.listdir(part):
            shutil.make_archive(os.path.join(folder, name), "gztar", part)


def write(folder: str, machine: dict, results: list[dict]) -> None:
    """Write both files."""
    write_atomic(
        os.path.join(folder, JSON), json.dumps({"machine": machine, "stages": results}, indent=1) + "\n"
    )
    write_atomic(os.path.join(folder, TABLE), format_table(machine, results) + "\n")


def format_table(machine: dict, results: list[dict]) -> str:
    """Return the table. results: those of lab.run_stages()."""
    head = (
        "**A rehearsal on a CPU: the figures are not valid for a GPU.**\n\n" if machine["rehearsal"] else ""
    )
    lines = [
        f"{head}{machine['date']}, {machine['gpus']} x {machine['machine']}, driver and memory "
        f"{machine['driver and memory']}, CUDA {machine['cuda']}, cuDNN {machine['cudnn']}, "
        f"commit {machine['commit']}",
        "",
        "| stage | figure | value | aim | met |",
        "|---|---|---|---|---|",
    ]
    for result in results:
        name = result["stage"]
        if result["is_over"]:
            name += f" ({result['seconds']:.0f} s)"
        for row in result["rows"]:
            met = {None: "", True: "yes", False: "**no**"}[row["met"]]
            lines.append(f"| {name} | {row['figure']} | {_value(row)} | {_aim(row)} | {met} |")
        if not result["is_over"]:
            lines.append(f"| {name} | has not ended | | | |")
        if result["failed"]:
            reason = result["failed"].replace("|", "\\|")
            lines.append(f"| {name} | failed | {reason} | | **no** |")
    return "\n".join(lines)


def _value(row: dict) -> str:
    if isinstance(row["value"], str):
        return row["value"].replace("|", "\\|")
    value = f"{_number(row['value'])} {row['unit']}".strip()
    if "range" in row:
        value += f" ({'-'.join(map(_number, row['range']))}), n={row['n']}"
    return value


def _aim(row: dict) -> str:
    if row.get("aim") is None:
        return ""
    return f"{'at most ' if row['at_most'] else ''}{_number(row['aim'])}"


def _number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
