"""Record how a run was started: starts.jsonl has one line for each start, and is never truncated.

    {"time": 1795212080.9, "step": 40, "steps": 180, "laps": {"set-up": 2.2, ...},
     "lost": {"step": 55, "time": 1795212071.3}, "settings": {...}, "ignored": [...], "environment": {...}}

time: when training began or continued, in seconds of time.time().
step, steps: the step after which it began, and the total.
laps: the seconds before training, by kind of work.
lost: the last report of the previous start, if it was after `step`.
training data: the fingerprint of the data.
data backend: the loader's backend; with --data_backend auto, the one that was chosen.
sampling: the values that determine the ids of each step: sampler, samples, global batch, seed.
settings: the job's arguments, without credentials.
ignored: the names of the options that the job did not know.
script: the path of the job on its node.
environment: versions, device, nodes.
"""

import argparse
import contextlib
import os
import platform
import shlex
import sys
from collections.abc import Mapping
from typing import Any

import numpy
import torch

from common import __version__
from common.console import arguments
from common.distributed import ranks
from common.ground import accelerator
from common.ground.exits import BadInput
from common.ground.files import append_json_line, parse_json_lines, read_json_lines
from common.platform.platforms import available_cores, count_in
from common.run.output import Output, writes_nothing

FILE = "starts.jsonl"  # in a run's output folder
_MOST = 2**26  # bytes of FILE
_OBJECTS = ("settings", "environment")


def write(folder: str, args: argparse.Namespace, **facts: Any) -> None:
    """Append a start to FILE in the folder. facts: the other entries of the line. Raises OSError."""
    known = {
        "settings": arguments.settings(args),
        "ignored": getattr(args, "ignored", []),
        "environment": environment(),
        "script": os.path.abspath(sys.argv[0]),
    }
    append_json_line(os.path.join(folder, FILE), facts | known)


def read(folder: str, whole: bool = False) -> list[dict]:
    """Return the starts of the run in a folder, in order, without damaged lines. whole: raise BadInput if
    lines are damaged."""
    with contextlib.suppress(OSError):
        return _keep_complete(read_json_lines(os.path.join(folder, FILE), _MOST, whole))
    return []


def read_output(output: Output) -> list[dict]:
    """Return the starts of the run in an output, those at its URL on a new node. Raises BadInput."""
    starts = read(output.folder)
    if not starts and output.url:
        from common.object_store.store import ObjectStore  # a job without a URL imports nothing of it

        starts = _keep_complete(parse_json_lines(ObjectStore(output.url).read_version(FILE)[0]))
    return starts


def check_settings(settings: Mapping[str, Any], kinds: dict[str, Any], folder: str) -> dict[str, Any]:
    """Return the settings of a start that have a type in `kinds`, checked as those of a command line: the
    run's folder may be another user's. Raises BadInput."""
    checked = {}
    for name, kind in kinds.items():
        if settings.get(name) is not None:
            try:
                checked[name] = kind(str(settings[name]))
            except argparse.ArgumentTypeError as error:
                raise BadInput(f"{os.path.join(folder, FILE)}: {name}: {error!s:.200}") from None
    return checked


def _keep_complete(starts: list[dict]) -> list[dict]:
    return [each for each in starts if all(isinstance(each.get(name), dict) for name in _OBJECTS)]


def describe(
    args: argparse.Namespace,
    model: torch.nn.Module,
    autocast: Any,
    total_steps: int | None,
    steps_per_epoch: int,
    folder: tuple[str, str] | None = None,
    device: torch.device | None = None,
) -> list[str]:
    """Return the lines that a training prints before its first step: model, device, batch and output folder.

    args: the arguments of the job.
    model: the raw model.
    autocast: the context of mixed precision, or a context that does nothing.
    total_steps: the optimizer steps of the whole run, if they are known.
    steps_per_epoch: the optimizer steps of an epoch.
    folder: that of the results, as the user knows it, and its path on this node.
    device: default: the device of the model.
    """
    weights = list(model.parameters())
    device = device or weights[0].device
    with autocast:
        sample = torch.ones(1, 1, dtype=weights[0].dtype, device=weights[0].device)
        precision = str((sample @ sample).dtype).removeprefix("torch.")
    precision = getattr(args, "precision", precision)  # a sharded model has an option for it
    name = getattr(args, "arch", type(model).__name__.strip("_"))
    count = sum(each.numel() for each in weights)
    lines = [f"model {name}: {count:,} parameters, device {device.type}, precision {precision}"]
    if batch := getattr(args, "batch_size", None):
        world_size = ranks.world_size()
        local = batch // world_size
        processes, hint = "1 process", ""
        if world_size > 1:
            owns_gpu = not ranks.uses_gloo()
            processes = f"{world_size} {'GPUs' if owns_gpu else 'processes'}"
            if not getattr(args, "batch_size_per_gpu", None):
                hint = f" (--batch_size_per_gpu {batch}: {batch} each)"
        in_all = f", {total_steps:,} in all" if total_steps else ""
        lines += [
            f"global batch {batch} = {processes} x {local}{hint}; {steps_per_epoch:,} steps an epoch{in_all}"
        ]
    if folder and not writes_nothing(args):
        shown, path = folder[0], shlex.quote(folder[1])
        lines += [f"results in {shown}; to watch: python -m launch report {path}, or tensorboard --logdir"]
    return lines


def job() -> str:
    """Return the file name of the running job."""
    return os.path.basename(sys.argv[0])


def environment() -> dict[str, str | int]:
    """Return versions, device and nodes of this process. CUDA is queried only if the job uses it."""
    world_size = ranks.world_size()
    per_node = count_in(os.environ, "LOCAL_WORLD_SIZE") or 1  # set by a launcher of processes
    module = accelerator.in_use()
    facts = {
        "job": job(),
        "bootfile": __version__,
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "numpy": numpy.__version__,
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "device": getattr(module, "get_device_name", accelerator.kind)() if module else processor(),
        "cores": available_cores(),
        "nodes": max(1, world_size // per_node),
        "processes per node": min(per_node, world_size),
        "world size": world_size,
        "backend": torch.distributed.get_backend() if ranks.is_initialized() else "none",
    }
    if module and accelerator.kind() == "cuda":
        facts |= {"CUDA": torch.version.cuda or "none", "cuDNN": torch.backends.cudnn.version() or "none"}
    return facts


def processor() -> str:
    """Return the name of this node's processor."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            names = [line.partition(":")[2].strip() for line in file if line.startswith("model name")]
    except OSError:  # not Linux
        names = []
    return f"CPU, {names[0] if names else platform.machine()}"
