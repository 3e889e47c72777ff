"""Initialise torch.distributed for a job, with any launcher or platform."""

import argparse
import contextlib
import datetime
import functools
import os
from typing import Any

import torch

from bootfile.ground import accelerator, errors
from bootfile.ground.numbers import count_in
from common.distributed import accelerators, devices, launcher, rendezvous
from common.distributed.options import add_arguments  # noqa: F401  # jobs name it here
from common.ground import endings
from common.platform import network, place
from common.platform.topology import Topology


def meet(args: argparse.Namespace, topology: Topology) -> dict[str, Any]:
    """Wait until all processes of the job are reachable, and return the arguments of init_process_group().

    Each rank calls it in main(), when the processes of its node were started. In a member of an elastic job
    it does not wait: the members have met.

    args: timeout (seconds, for this call and every later collective) and enable_gpu. The backend is nccl if
    every rank has a GPU of its own, else gloo. If the job ends with an error, it does not wait for lost
    peers. Raises BadInput and NoRendezvous.
    """
    launcher.die_with_parent()
    if torch.distributed.is_initialized():  # %run for a second time in one notebook
        size = torch.distributed.get_world_size()
        if size > 1:
            raise errors.BadInput(f"a process group of {size} exists: call destroy_process_group() first")
        torch.distributed.destroy_process_group()
    if topology.members and not topology.members.is_alone:
        return topology.members.options(topology, args.timeout)
    # this process has its rank now; the others of the job may not have begun
    gpus = devices.count_gpus(args)
    if gpus and topology.source == "slurm":  # it may show each process only its own GPU
        gpus = count_in(os.environ, "SLURM_GPUS_ON_NODE") or gpus
    gpu_backend = accelerator.backend() if gpus else ""  # nccl, for example
    # processes share GPUs, or the launcher shows each one only its own GPU
    may_share = 0 < gpus < topology.processes_per_node
    backend = f"{gpu_backend} or gloo" if may_share else gpu_backend or "gloo"
    # all ranks wait here for each other, at most --timeout seconds
    store = rendezvous.meet(topology, args.timeout, backend)
    if topology.world_size > 1 or gpus:
        from common.distributed import leaving  # a job of one process on the CPU ends as any program

        if topology.world_size > 1:
            endings.at_end("processes", functools.partial(leaving.leave_group, topology))
        else:  # nccl warns if its group is not destroyed
            endings.at_end("device", leaving.end_alone)
    if may_share:
        # how many GPUs the job really has is known only when all ranks have named theirs
        all_gpus = rendezvous.count_different(store, topology, accelerators.identify_gpu(), args.timeout)
        backend = gpu_backend if all_gpus == topology.world_size else "gloo"
        kind = accelerator.kind()
        if backend == "gloo" and kind != "cuda":
            raise errors.BadInput(
                f"{topology.world_size} processes share the accelerators ({kind}, {all_gpus} in all), and "
                "gloo sends none of their tensors: start one process for each, or add --enable_gpu=false"
            )
    # in the environment, before the first connection: gloo and NCCL read it when the group is made
    choose_interface(topology, backend)
    options = {
        "backend": backend,
        "store": store,
        "rank": topology.rank,
        "world_size": topology.world_size,
        "timeout": datetime.timedelta(seconds=args.timeout),
    }
    if backend == "nccl" and torch.__version__ >= "2.3":  # it connects at once, and barrier() knows the GPU
        options["device_id"] = torch.device("cuda", accelerator.of("cuda").current_device())
    return options


def choose_interface(topology: Topology, backend: str) -> None:
    """Make gloo, and nccl between nodes, use the interface that reaches the master. By default gloo resolves
    the name of the host, which may give 127.0.1.1, and nccl takes the first interface, perhaps that of a
    container or a VPN. An interface that the platform has set is not changed. Raises BadInput if it does not
    exist.

    Each rank calls it before it initialises the group; in an elastic job the agents do, before they fork.
    """
    uses_gloo = "gloo" in backend
    variable = "GLOO_SOCKET_IFNAME" if uses_gloo else "NCCL_SOCKET_IFNAME"
    is_used = topology.world_size > 1 if uses_gloo else backend == "nccl" and topology.nodes > 1
    preset = os.environ.get(variable)
    is_read = is_used or backend == "nccl"
    if preset and is_read and (error := network.explain_interfaces(variable, preset)):
        raise errors.BadInput(error)
    if not is_used or preset is not None:
        return
    host = "127.0.0.1" if topology.nodes == 1 or not topology.master_host else topology.master_host
    with contextlib.suppress(OSError):
        name, address = network.interface_to(host, topology.master_port or 1)
        if address.startswith("127.") and topology.nodes > 1 and not network.is_loopback(host):
            # The /etc/hosts of the master maps its name to loopback: use the interface to other nodes.
            name, _ = network.interface_to(network.OUTSIDE, 1)
        if name:
            os.environ[variable] = name if uses_gloo else f"={name}"  # NCCL: without "=" it is a prefix
            if not uses_gloo and place.has_local_rank_0():
                errors.print_line(f"{variable}=={name}: also for gradients, without InfiniBand")
