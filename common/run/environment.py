"""Describe what a job runs on and with: versions, device, nodes, model, batch."""

import argparse
import os
import platform
import shlex
import sys
from typing import Any

import torch

from bootfile import __version__
from bootfile.ground import accelerator
from bootfile.ground.numbers import count_in
from bootfile.machine import facts as machine
from bootfile.machine import processor
from bootfile.machine.cores import available_cores
from bootfile.machine.differences import THREADS, in_words
from bootfile.processes import ranks
from common.run.output import writes_nothing

PACKAGES = ("torchvision", "PIL", "simplejpeg", "cv2", "nvidia.dali")  # other versions may give other pixels


def describe(
    args: argparse.Namespace,
    model: torch.nn.Module,
    autocast: Any,
    total_steps: int | None,
    steps_per_epoch: int,
    folder: tuple[str, str] | None = None,
) -> list[str]:
    """Return the lines that a training prints before its first step: model, device, batch and output folder.
    Log.start() calls it on rank 0.

    args: the arguments of the job.
    model: the raw model.
    autocast: the context of mixed precision, or a context that does nothing.
    total_steps: the optimizer steps of the whole run, if they are known.
    steps_per_epoch: the optimizer steps of an epoch.
    folder: that of the results, as the user knows it, and its path on this node.
    """
    weights = list(model.parameters())
    device = weights[0].device
    with autocast:
        # the type of a product tells it: a context of mixed precision has no name for it
        sample = torch.ones(1, 1, dtype=weights[0].dtype, device=device)
        precision = str((sample @ sample).dtype).removeprefix("torch.")
    given = vars(args)  # most jobs have some of these options
    precision = given.get("precision") or precision
    name = given.get("arch") or type(model).__name__.strip("_")
    count = sum(weight.numel() for weight in weights)
    lines = [f"model {name}: {count:,} parameters, device {device.type}, precision {precision}"]
    if given.get("batch_size"):
        text = _describe_batch(given["batch_size"], not given.get("batch_size_per_gpu"), device)
        in_all = f", {total_steps:,} in all" if total_steps else ""
        lines.append(f"{text}; {steps_per_epoch:,} steps an epoch{in_all}")
    if folder and not writes_nothing(args):
        shown, path = folder
        lines.append(
            f"results in {shown}; to watch: python -m launch report {shlex.quote(path)}, or tensorboard "
            "--logdir"
        )
    return lines


def _describe_batch(batch: int, has_hint: bool, device: torch.device) -> str:
    """Return how the processes share the global batch: "global batch 256 = 2 GPUs x 128". has_hint: name the
    option with which each process would have as large a batch."""
    world_size = ranks.world_size()
    processes = "1 process"
    if world_size > 1:
        noun = "processes" if ranks.uses_gloo() else "GPUs"
        processes = f"{world_size} {noun}"
    text = f"global batch {batch} = {processes} x {batch // world_size}"
    if has_hint and world_size > 1:
        text += f" (--batch_size {batch}/gpu: {batch} each)"
    if device.type == "cpu":
        text += f", {in_words(THREADS, torch.get_num_threads())}"
        if world_size > 1:
            text += " each"
    return text


def job() -> str:
    """Return the file name of the running job."""
    return os.path.basename(sys.argv[0])


def facts() -> dict[str, str | int]:
    """Return versions, device and nodes of this process. CUDA is queried only if the job uses it. Rank 0
    calls it with the first report (starts.jsonl)."""
    world_size = ranks.world_size()
    per_node = count_in(os.environ, "LOCAL_WORLD_SIZE") or 1  # set by a launcher of processes
    module = accelerator.in_use()
    device: str = f"CPU, {processor.name()}"
    if module:
        device = getattr(module, "get_device_name", accelerator.kind)()
    backend = torch.distributed.get_backend() if ranks.is_initialized() else "none"
    of_process: dict[str, str | int] = {
        "job": job(),
        "bootfile": __version__,
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "device": device,
        "cores": available_cores(),
        "nodes": max(1, world_size // per_node),
        "processes per node": min(per_node, world_size),
        "world size": world_size,
        "backend": backend,
        "packages": ", ".join(
            f"{name} {sys.modules[name].__version__}" for name in PACKAGES if name in sys.modules
        ),
    }
    return of_process | machine.describe()
