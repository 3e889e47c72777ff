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

    autocast: the context of mixed precision, or a context that does nothing.
    total_steps: the optimizer steps of the whole run, if they are known.
    folder: that of the results, as the user knows it, and its path on this node.
    """
    weights = list(model.parameters())
    device = weights[0].device
    options = vars(args)  # most jobs have some of those that are read here
    precision = options.get("precision")
    if not precision:
        with autocast:  # it does not name its type: that of a product tells it
            sample = torch.ones(1, 1, dtype=weights[0].dtype, device=device)
            precision = str((sample @ sample).dtype).removeprefix("torch.")
    name = options.get("arch") or type(model).__name__.strip("_")
    count = sum(weight.numel() for weight in weights)
    lines = [f"model {name}: {count:,} parameters, device {device.type}, precision {precision}"]
    if options.get("batch_size"):
        in_all = f", {total_steps:,} in all" if total_steps else ""
        lines.append(f"{_describe_batch(options, device)}; {steps_per_epoch:,} steps an epoch{in_all}")
    if folder and not writes_nothing(args):
        shown, path = folder
        lines.append(
            f"results in {shown}; to watch: python -m launch report {shlex.quote(path)}, or tensorboard "
            "--logdir"
        )
    return lines


def _describe_batch(options: dict[str, Any], device: torch.device) -> str:
    """Return how the processes share the global batch: "global batch 256 = 2 GPUs x 128"."""
    batch = options["batch_size"]
    world_size = ranks.world_size()
    threads = f", {in_words(THREADS, torch.get_num_threads())}" if device.type == "cpu" else ""
    if world_size == 1:
        return f"global batch {batch} = 1 process x {batch}{threads}"
    text = f"global batch {batch} = {world_size} {'processes' if ranks.uses_gloo() else 'GPUs'}"
    text += f" x {batch // world_size}"
    if not options.get("batch_size_per_gpu"):  # the user may have meant the batch of a GPU
        text += f" (--batch_size {batch}/gpu: {batch} each)"
    return f"{text}{threads} each" if threads else text


def job() -> str:
    """Return the file name of the running job."""
    return os.path.basename(sys.argv[0])


def facts() -> dict[str, str | int]:
    """Return versions, device and nodes of this process. CUDA is queried only if the job uses it."""
    world_size = ranks.world_size()
    per_node = count_in(os.environ, "LOCAL_WORLD_SIZE") or 1  # set by a launcher of processes
    module = accelerator.in_use()  # of torch, for its devices; None on a CPU
    name_device = getattr(module, "get_device_name", accelerator.kind)
    packages = [f"{name} {sys.modules[name].__version__}" for name in PACKAGES if name in sys.modules]
    of_process: dict[str, str | int] = {
        "job": job(),
        "bootfile": __version__,
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "device": name_device() if module else f"CPU, {processor.name()}",
        "cores": available_cores(),
        "nodes": max(1, world_size // per_node),
        "processes per node": min(per_node, world_size),
        "world size": world_size,
        "backend": torch.distributed.get_backend() if ranks.is_initialized() else "none",
        "packages": ", ".join(packages),
    }
    return of_process | machine.describe()
