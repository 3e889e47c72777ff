"""What a run computed, without its times: runs of the same bits have the same facts. And changed jobs."""

import contextlib
import json
from pathlib import Path

from bootfile.exact import checked_files, digest, files
from bootfile.histories import read_states
from bootfile.receipt.reading import read_records
from tests.conftest import ROOT

_OF_TIME = {
    "time", "images_per_s", "samples_per_s", "tokens_per_s", "data_time", "ranks", "compute_time",
    "memory_mb", "generations", "lost_processes", "lost_seconds", "useful_share",
}  # fmt: skip


def is_whole(path: str) -> bool:
    """Return whether a checkpoint is not damaged, by its checksum."""
    with contextlib.suppress(files.Refused):
        return bool(checked_files.verify(path))
    return False


def facts(output: Path) -> dict:
    """Return the state of each checkpoint and epoch (weights, buffers, optimizer, average), the figures of
    each report and evaluation, the samples of each step, and the files of weights."""
    text = (output / "metrics.jsonl").read_text()
    lines = [json.loads(line, parse_constant=str) for line in text.splitlines()]  # NaN equals NaN
    figures = [{name: each for name, each in line.items() if name not in _OF_TIME} for line in lines]
    return {
        "state": {step: line["parts"] for step, line in read_states(str(output)).items()},
        "figures": figures,
        "samples": read_records(str(output)).tobytes(),
        "weights": {
            path.name: digest.summarize(0, checked_files.load(str(path)))["digest"]
            for path in output.glob("*.pth")
        },
    }


def changed(job: str, path: Path, *changes: tuple[str, str]) -> Path:
    """Write a copy of a job, as a user changes it, and return its path. job: a name in jobs/, or a
    text. changes: (line, new lines)."""
    text = job if "\n" in job else (ROOT / "jobs" / job).read_text(encoding="utf-8")
    here = "os.path.dirname(os.path.dirname(os.path.abspath(__file__)))"
    for old, new in ((here, repr(str(ROOT))), *changes):
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    path.write_text(text, encoding="utf-8")
    return path
