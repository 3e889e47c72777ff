"""Let the job of a run read steps of it again, in a process of its own that writes nothing into the run."""

import json
import os
import shutil
import subprocess
import sys
import tempfile

import numpy as np

from common.exact.state import OPERATION
from common.ground.exits import BadInput
from common.ground.files import ROOT
from datasets.loaders import replay
from datasets.loaders.backends import CACHED
from datasets.loaders.replay import Step
from launch.data.run import Run
from launch.simulate.commands import get_option

# options of a run that its data do not depend on, or that are chosen here
_DROPPED = OPERATION - {"data_url", "scan"} | {"config", "distribute_mode", "freeze", "pack_form", "prof"}
_CHOSEN = {"enable_gpu": False, "resume": "never", "training_only": True}
_ENGINES = {**CACHED, "dali-gpu": "dali", "ray": "threads"}  # they need no cache, GPU or cluster


def find_script(run: Run, given: str | None) -> str:
    """Return the path of the run's job: `given`, or the file of this name in jobs/.

    The path in starts.jsonl is not used, because the folder of the run may be another user's. Raises BadInput
    if the file is missing.
    """
    name = os.path.basename(str(run.starts[-1]["environment"].get("job")))
    path = given or os.path.join(ROOT, "jobs", name)
    if not os.path.isfile(path):
        hint = "" if given else f": name the script of the run, {name}, with --job SCRIPT"
        raise BadInput(f"{path}: no such file{hint}")
    return path


def read_steps(run: Run, script: str, steps: list[int], options: list[str], pixels: bool) -> list[Step]:
    """Return steps of a run, after their digests were compared with the receipt.

    script: its job.
    options: of the job; they replace those of the run.
    pixels: whether images are needed.
    Raises BadInput if the job fails, or if the data changed.
    """
    for step in steps:
        run.check(step, np.zeros(0, np.uint64))
    with tempfile.TemporaryDirectory(prefix="bootfile-data-") as folder:
        settings = _settings(run, run.start_of(steps[-1]), folder, get_option(options, "--cache_dir"))
        config = os.path.join(folder, "settings.json")
        with open(config, "w", encoding="utf-8") as file:
            json.dump(settings, file)
        request = replay.ask(folder, [(step, run.world_size(step)) for step in steps], pixels)
        words = [script, f"--config={config}", f"--output_dir={os.path.join(folder, 'output')}", *options]
        environment = os.environ | {replay.REQUEST: request}
        job = subprocess.run([sys.executable, *words], capture_output=True, text=True, env=environment)
        answer = replay.read(folder) if job.returncode == 0 else None
    if answer is None:
        lines = job.stderr.strip().splitlines() or ["it read no step with a loader of datasets/loaders"]
        reason = next((line for line in lines if line.startswith("error: ")), lines[-1])
        raise BadInput(f"{script} could not read the data: {reason.removeprefix('error: ')}")
    fingerprint, answered = answer
    theirs = run.starts[-1].get("training data")
    if theirs and theirs != fingerprint:
        raise BadInput(
            f"the training data of {run.folder} had the fingerprint {theirs}, and now it is {fingerprint}: "
            "the data changed, or the run had another --job, or another --data_url (after --)"
        )
    for each in answered:
        run.check(each.step, each.sums.numpy().view(np.uint64))
    return answered


def _settings(run: Run, start: dict, folder: str, cache_dir: str | None) -> dict:
    """Return the options of a start of the run for the job. The run's index of images is copied to `folder`:
    if files have changed, the job scans them, and must not replace the run's index."""
    given = start["settings"]
    settings = {name: value for name, value in given.items() if value is not None and name not in _DROPPED}
    settings |= {name: value for name, value in _CHOSEN.items() if name in given}
    if "data_backend" in given:
        backend = str(start.get("data backend") or given["data_backend"])
        settings["data_backend"] = _ENGINES.get(backend, backend)
    if "cache_dir" in given and cache_dir is None:
        settings["cache_dir"] = os.path.join(folder, "index")
        if index := run.find_index(None):
            name = os.path.basename(index.folder)
            shutil.copytree(index.folder, os.path.join(folder, "index", name))
    return settings
