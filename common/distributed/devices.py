"""Choose the device of a process."""

import argparse
import os
import socket

import torch

from common.exits import BadInput
from common.topology import Topology, is_distributed, promised_gpus, resolve


def select(args: argparse.Namespace) -> torch.device:
    """Return the GPU of this process, or the CPU if there is none or --enable_gpu is false.

    args: enable_gpu (None: a GPU if there is one). Processes that outnumber the GPUs share them. A process
    that starts the others of its node does not touch the GPUs. Raises BadInput if a GPU was asked for, or
    promised by the platform, and torch sees none, and for a job of one process that was started as several.
    """
    topology = find_topology(args)
    if topology.world_size > 1 and not is_distributed(args):
        raise BadInput(
            f"this job is one process, but {topology.source} started {topology.world_size}: "
            "take jobs/train_ddp.py"
        )
    gpus, promised = count_gpus(args), promised_gpus(os.environ)
    if args.enable_gpu is not False and promised and gpus < promised and topology.local_rank is None:
        raise BadInput(f"the platform promised {promised} GPUs, torch {torch.__version__} sees {gpus}")
    if not gpus:
        return torch.device("cpu")
    device = torch.device("cuda", (topology.local_rank or 0) % gpus)
    if not topology.starts_processes:
        torch.cuda.set_device(device)
    return device


def find_topology(args: argparse.Namespace) -> Topology:
    """Return which process this is. A node starts one process per GPU if nothing else is said: then
    args.processes_per_node is set. Raises BadInput."""
    if is_distributed(args):
        args.processes_per_node = args.processes_per_node or count_gpus(args) or None
    return resolve(args, os.environ)


def count_gpus(args: argparse.Namespace) -> int:
    """Return how many GPUs of this node may be used, without touching them. Raises BadInput."""
    gpus = torch.cuda.device_count()
    if args.enable_gpu and not gpus:
        raise BadInput(
            f"--enable_gpu=true, but torch {torch.__version__} sees no GPU on {socket.gethostname()}"
        )
    return 0 if args.enable_gpu is False else gpus


def count_gpus_of_node(args: argparse.Namespace, topology: Topology) -> int:
    """Return how many GPUs the processes of this node share. Slurm may show each process its own only."""
    visible, text = count_gpus(args), os.environ.get("SLURM_GPUS_ON_NODE", "")
    return int(text) if visible and topology.source == "slurm" and text.isdecimal() else visible
