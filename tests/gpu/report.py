"""Write the results of `make gpu`: one JSON file and one table in Markdown."""

import datetime
import json
import os
import platform
import subprocess

import torch

from common.ground.files import ROOT, write_atomic
from common.platform.platforms import available_cores
from common.run import starts

JSON, TABLE = "gpu.json", "gpu.md"


def describe(is_small: bool) -> dict:
    """Return the conditions of the figures: hardware, driver, versions, date."""
    query = ["nvidia-smi", "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader"]
    name, driver, memory = (_first_line(query).split(", ") + ["unknown"] * 2)[:3]
    return {
        "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
        "rehearsal": is_small,
        "hardware": starts.environment()["device"] if is_small else f"{name}, {memory}",
        "driver": "none" if is_small else driver,
        "gpus": torch.cuda.device_count(),
        "cores": available_cores(),
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "cuda": torch.version.cuda or "none",
        "cudnn": torch.backends.cudnn.version() or "none",
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "commit": _first_line(["git", "-C", ROOT, "rev-parse", "--short", "HEAD"]),
        "load_average": os.getloadavg()[0],
    }


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
        f"{head}{machine['date']}, {machine['gpus']} x {machine['hardware']}, driver {machine['driver']}, "
        f"{machine['cores']} cores, Python {machine['python']}, torch {machine['torch']}, "
        f"CUDA {machine['cuda']}, cuDNN {machine['cudnn']}, "
        f"commit {machine['commit']}, load average {machine['load_average']:.2f}",
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
