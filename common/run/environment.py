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


def describe(
    args: argparse.Namespace,
    model: torch.nn.Module,
    autocast: Any,
    total_steps: int | None,
    steps_per_epoch: int,
    folder: tuple[str, str] | None = None,
) -> list[str]:
    """Return the lines that a training prints before its first step: model, device, batch and output folder.

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
        sample = torch.ones(1, 1, dtype=weights[0].dtype, device=device)
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
                hint = f" (--batch_size {batch}/gpu: {batch} each)"
        in_all = f", {total_steps:,} in all" if total_steps else ""
        threads = ""
        if device.type == "cpu":
            count = torch.get_num_threads()
            threads = f", {in_words(THREADS, count)}{' each' if world_size > 1 else ''}"
        lines += [
            f"global batch {batch} = {processes} x {local}{hint}{threads}; "
            f"{steps_per_epoch:,} steps an epoch{in_all}"
        ]
    if folder and not writes_nothing(args):
        shown, path = folder[0], shlex.quote(folder[1])
        lines += [f"results in {shown}; to watch: python -m launch report {path}, or tensorboard --logdir"]
    return lines


def job() -> str:
    """Return the file name of the running job."""
    return os.path.basename(sys.argv[0])


def facts() -> dict[str, str | int]:
    """Return versions, device and nodes of this process. CUDA is queried only if the job uses it."""
    world_size = ranks.world_size()
    per_node = count_in(os.environ, "LOCAL_WORLD_SIZE") or 1  # set by a launcher of processes
    module = accelerator.in_use()
    found = {
        "job": job(),
        "bootfile": __version__,
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "device": getattr(module, "get_device_name", accelerator.kind)() if module else describe_processor(),
        "cores": available_cores(),
        "nodes": max(1, world_size // per_node),
        "processes per node": min(per_node, world_size),
        "world size": world_size,
        "backend": torch.distributed.get_backend() if ranks.is_initialized() else "none",
    }
    return found | machine.describe()


def describe_processor() -> str:
    """Return the name of this node's processor."""
    return f"CPU, {processor.name()}"
