"""Choose the device of a process."""

import argparse
import os
import socket
import sys

import torch

from bootfile.ground import accelerator
from bootfile.ground.errors import BadInput
from common.platform.place import promised_gpus, resolve
from common.platform.topology import Topology, is_distributed


def select(args: argparse.Namespace, topology: Topology) -> torch.device:
    """Return the GPU of this process, or the CPU if there is no GPU or --enable_gpu is false.

    Every process of a job calls it when it knows its rank, before it loads anything.

    args: enable_gpu (None: a GPU if there is one). If a node has more processes than GPUs, they
    share them. A process that starts the others of its node does not touch the GPUs.

    Raises BadInput if GPUs are missing or unusable, or if a job of one process was started as several.
    """
    # this runs in every process, before the first message between them
    count = topology.world_size
    if count > 1 and not is_distributed(args):
        hint = "use jobs/train_ddp.py"
        if not os.path.exists(os.path.join(os.path.dirname(sys.argv[0]), "train_ddp.py")):  # a user's project
            hint = "add the blocks for several, as `python -m launch new PROJECT --ddp` writes them"
        raise BadInput(f"this job is one process, but {topology.source} started {count}: {hint}")
    # the driver is asked for the number only: a process that starts others must not use a GPU
    gpus = count_gpus(args)
    promised = promised_gpus(os.environ)
    if args.enable_gpu is not False and promised and gpus < promised:
        raise BadInput(f"the platform promised {promised} GPUs, torch {torch.__version__} sees {gpus}")
    if not gpus:
        return torch.device("cpu")
    device = torch.device(accelerator.kind(), (topology.local_rank or 0) % gpus)
    if not topology.starts_processes:
        from common.distributed import accelerators  # a job on the CPU has none

        accelerators.open_gpu(device)
    return device


def find_topology(args: argparse.Namespace) -> Topology:
    """Return the topology of the job and the place of this process in it. Without --processes_per_node a node
    starts one process per GPU. Every process calls it first. Raises BadInput."""
    gpus = count_gpus(args) if is_distributed(args) else 0
    return resolve(args, os.environ, gpus)


def count_gpus(args: argparse.Namespace) -> int:
    """Return the number of GPUs that the job may use on this node, without touching them. Raises BadInput."""
    gpus = accelerator.count()
    if accelerator.kind() == "mps" and (is_distributed(args) or not args.enable_gpu):
        gpus = 0  # gloo cannot send its tensors; it was not run, so only if it is asked for
    if args.enable_gpu and not gpus:
        raise BadInput(
            f"--enable_gpu=true, but torch {torch.__version__} sees no GPU on {socket.gethostname()}"
        )
    if args.enable_gpu is False:
        return 0
    return gpus
