"""A fixture of pytest: does a training script continue exactly after it was killed?

    # conftest.py
    pytest_plugins = ["prove_plugin"]

    # test_resume.py
    def test_resume(prove):
        prove("train.py", "--out", "{out}", files="*.pt", resume=["--resume"])

The script trains once to its end, and once more with SIGKILLs and restarts. Then the tensors and numbers in
its files are compared and, if it writes a receipt (receipt.py), its samples. It needs pytest and torch.
"""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

_POLL = 0.05  # seconds


@pytest.fixture
def prove(tmp_path: Path) -> Callable[..., None]:
    """Return a function that fails the test if a script does not continue exactly.

    script: its path. options: "{out}" in them is the folder of a run, which is new and empty.
    files: the pattern of the files of torch.save in that folder.
    resume: the options that a restart has in addition.
    kills: SIGKILLs, each after a file was written.
    limit: seconds for one start.
    """

    def run(
        script: str, *options: str, files: str, resume: Sequence[str], kills: int = 2, limit: float = 600.0
    ) -> None:
        """Train once to the end and once with kills, and compare: the test calls it."""
        whole = tmp_path / "whole"
        killed = tmp_path / "killed"
        commands = []
        for folder in (whole, killed):
            folder.mkdir()
            command = [sys.executable, script]
            command.extend(word.replace("{out}", str(folder)) for word in options)
            commands.append(command)
        # first without a kill: the other run is compared with this one
        _finish(commands[0], limit)
        assert any(whole.rglob(files)), f"{script} has written no {files} into {{out}}"
        for number in range(kills):
            command = list(commands[1])
            if number:  # the first start has nothing to resume from
                command += resume
            _kill_after_write(command, killed, files, limit)
        _finish([*commands[1], *resume], limit)
        different = list(_compare(whole, killed, files))
        assert not different, f"after {kills} kills: {', '.join(different[:5])} ({len(different)} in all)"
        _compare_receipts(whole, killed)

    return run


@contextlib.contextmanager
def _started(command: list[str]) -> Iterator[subprocess.Popen]:
    """Start a command. At the end of the block, kill it and the processes that it has started."""
    process = subprocess.Popen(command, start_new_session=True)
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _finish(command: list[str], limit: float) -> None:
    """Run the script to its end, which must be without an error."""
    with _started(command) as process:
        code = process.wait(limit)
    assert code == 0, f"the script ended with {code}"


def _kill_after_write(command: list[str], folder: Path, files: str, limit: float) -> None:
    """Run the script until a new file is whole, and kill it then."""
    before = _state(folder, files)
    end = time.monotonic() + limit
    with _started(command) as process:
        while not any(_is_whole(path) for path, _ in _state(folder, files) - before):
            assert process.poll() is None, "the script ended before a new file: let it save more often"
            assert time.monotonic() < end, f"no new file in {limit:g} s"
            time.sleep(_POLL)


def _state(folder: Path, files: str) -> set[tuple[Path, int]]:
    """Return (path, time of the last write) of the files that the running script has written so far."""
    state = set()
    for path in folder.rglob(files):
        with contextlib.suppress(FileNotFoundError):  # it was renamed
            state.add((path, path.stat().st_mtime_ns))
    return state


def _is_whole(path: Path) -> bool:
    """Return whether a file can be read: the script may still write it."""
    try:
        _load(path)
    except Exception:  # it is being written
        return False
    return True


def _load(path: Path) -> Any:
    return torch.load(path, map_location="cpu", weights_only=False)  # the script's own file


def _compare(first: Path, second: Path, files: str) -> Iterator[str]:
    """Yield the names of the values that differ."""
    first_names = {str(path.relative_to(first)) for path in first.rglob(files)}
    second_names = {str(path.relative_to(second)) for path in second.rglob(files)}
    for name in sorted(first_names ^ second_names):
        yield f"only one run has {name}"
    for name in sorted(first_names & second_names):
        first_values = dict(_values(name, _load(first / name)))
        second_values = dict(_values(name, _load(second / name)))
        for part in sorted(first_values.keys() | second_values.keys()):
            if first_values.get(part) != second_values.get(part):
                yield f"{part} differs"


def _values(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Yield (name, bits) of each tensor, number and text in nested containers."""
    if isinstance(value, torch.Tensor):
        bits = value.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        yield name, (str(value.dtype), tuple(value.shape), bits)
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from _values(f"{name}: {key}", item)
    elif isinstance(value, list | tuple):
        for number, item in enumerate(value):
            yield from _values(f"{name}[{number}]", item)
    elif isinstance(value, int | float | str | bytes | None):
        yield name, repr(value)


def _compare_receipts(*folders: Path) -> None:
    """Fail the test if the samples of two runs differ. A script without a receipt has nothing to compare."""
    places = [path.parent for folder in folders for path in folder.rglob("receipt-0.bin")]
    if not places:
        return
    assert len(places) == len(folders), f"expected one receipt in each run, found {places}"
    import receipt

    equal, text = receipt.compare(*(receipt.read(str(place)) for place in places))
    assert equal, f"data {text}"
