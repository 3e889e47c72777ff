"""Write the results of `make gpu`: one JSON file and one table in Markdown."""

import datetime
import json
import os
import subprocess

import torch

from bootfile.ground.files import write_atomic
from common.ground.files import ROOT
from tests.benchmarks import rounds

JSON, TABLE = "gpu.json", "gpu.md"


def describe(is_small: bool) -> dict:
    """Return the conditions of the figures: hardware, driver, versions, date."""
    query = ["nvidia-smi", "--query-gpu=driver_version,memory.total", "--format=csv,noheader"]
    return {
        "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
        "rehearsal": is_small,
        "machine": rounds.describe(),
        "gpus": torch.cuda.device_count(),
        "driver and memory": "none" if is_small else _first_line(query),
        "cuda": torch.version.cuda or "none",
        "cudnn": torch.backends.cudnn.version() or "none",
        "commit": _first_line(["git", "-C", ROOT, "rev-parse", "--short", "HEAD"]),
    }


def gpu_state() -> str:
    """Return clocks (MHz), power (W), temperature (C), throttle reasons and used memory (MiB) of the GPUs."""
    names = "clocks.sm,clocks.mem,power.draw,temperature.gpu,clocks_throttle_reasons.active,memory.used"
    return _first_line(["nvidia-smi", f"--query-gpu={names}", "--format=csv,noheader,nounits"])


def gpu_name() -> str:
    """Return the name of the first GPU."""
    return _first_line(["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"])


def _first_line(command: list[str]) -> str:
    try:
        printed = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return "unknown"
    return printed.strip().partition("\n")[0] or "unknown"


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
        name = f"{result['stage']} ({result['seconds']:.0f} s)"
        for row in result["rows"]:
            met = {None: "", True: "yes", False: "**no**"}[row["met"]]
            lines.append(f"| {name} | {row['figure']} | {_value(row)} | {_aim(row)} | {met} |")
        if result["failed"]:
            reason = result["failed"].replace("|", "\\|")
            lines.append(f"| {name} | failed | {reason} | | **no** |")
    return "\n".join(lines)


def _value(row: dict) -> str:
    if isinstance(row["value"], str):
        return row["value"].replace("|", "\\|")
    return f"{_number(row['value'])} {row['unit']}".strip()


def _aim(row: dict) -> str:
    if row.get("aim") is None:
        return ""
    return f"{'at most ' if row['at_most'] else ''}{_number(row['aim'])}"


def _number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
