"""Initialise torch.distributed for a job, with any launcher or platform."""

import argparse
import atexit
import contextlib
import datetime
import functools
import multiprocessing
import os
import re
import socket
import threading
from typing import Any

import torch

from bootfile.ground import accelerator, errors
from bootfile.ground.numbers import count_in
from bootfile.processes import ranks
from common.distributed import devices, launcher, rendezvous
from common.distributed.options import add_arguments  # noqa: F401  # jobs name it here
from common.ground import endings
from common.platform import network, platforms
from common.platform.topology import Topology

_TEARDOWN = 3.0  # seconds
_COMMUNICATION = re.compile(
    r"^Dist\w*Error|\b(gloo|nccl|socket|store|broken pipe|pair closure)\b|connection (closed|reset|refused)"
    r"|timed out waiting",
    re.IGNORECASE,
)


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
    if may_share:
        backend = f"{gpu_backend} or gloo"
    elif gpus:
        backend = gpu_backend
    else:
        backend = "gloo"
    # all ranks wait here for each other, at most --timeout seconds
    store = rendezvous.meet(topology, args.timeout, backend)
    if topology.world_size > 1:
        endings.at_end("processes", functools.partial(_leave_group, topology))
    elif gpus:  # nccl warns if its group is not destroyed
        endings.at_end("device", _end_alone)
    if may_share:
        # how many GPUs the job really has is known only when all ranks have named theirs
        all_gpus = rendezvous.count_different(store, topology, devices.identify_gpu(), args.timeout)
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
    if uses_gloo:
        variable = "GLOO_SOCKET_IFNAME"
        is_used = topology.world_size > 1
    else:
        variable = "NCCL_SOCKET_IFNAME"
        is_used = topology.nodes > 1 and backend == "nccl"
    preset = os.environ.get(variable)
    if preset and (is_used or backend == "nccl"):
        error = network.missing_interface(variable, preset)
        if error:
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
            if not uses_gloo and platforms.has_local_rank_0():
                errors.print_line(f"{variable}=={name}: also for gradients, without InfiniBand")


def _leave_group(topology: Topology, error: BaseException | None) -> None:
    """Exit without the interpreter's teardown, which aborts if a gloo thread still runs; after a lost peer, a
    library may hang in its destructor. BadInput and an interrupt have codes of their own: see entry().

    Each rank calls it last, when its main() has ended. error: what has ended it; None after its last line.
    """
    # a normal end: this rank has nothing left to send
    if error is None:
        _destroy_group()
        if multiprocessing.parent_process():  # torchrun --run-path waits until main() returns
            atexit.register(errors.leave, 0)
            return
        errors.leave(0)
    if not isinstance(error, Exception) or isinstance(error, errors.BadInput):
        return
    from bootfile.processes import stuck  # only a run that trains has one

    stuck.explain(error)
    first_line = next(iter(str(error).splitlines()), "")
    if isinstance(error, RuntimeError) and _COMMUNICATION.search(f"{type(error).__name__} {first_line}"):
        endings.say_error(
            f"rank {topology.rank} on {socket.gethostname()} lost contact with another process: {first_line}"
        )
        errors.leave(endings.LOST_CONTACT)
    endings.say_traceback(error)
    errors.leave(1)


def _end_alone(error: BaseException | None) -> None:
    """Destroy the group of a process that is alone. It then ends as any program: what follows main() runs,
    for example the next cell of a notebook. After an error of the GPU the group may not end: then exit.

    It is called last, when main() has ended. error: what has ended it; None after its last line.
    """
    if not torch.distributed.is_initialized() or _destroy_group():
        return
    if error is None:
        errors.leave(0)
    if not isinstance(error, Exception) or isinstance(error, errors.BadInput):
        return
    endings.say_traceback(error)
    errors.leave(1)


def _destroy_group() -> bool:
    """Destroy the group of nccl, within 3 s. gloo's is not destroyed: in torch 2.1 this deadlocks if a thread
    of gloo waits for the interpreter's lock. Return whether nothing of nccl is left."""
    if ranks.uses_gloo():
        return True
    module = accelerator.of(accelerator.kind())
    is_destroyed = threading.Event()

    def destroy(device: Any) -> None:  # in a thread: with a lost peer it may not return
        with contextlib.suppress(Exception):  # an error of the GPU, which has ended main()
            module.set_device(device)  # a new thread uses GPU 0 by default
            torch.distributed.destroy_process_group()
            is_destroyed.set()

    # the main thread waits some seconds for it: the caller ends the process if it has not returned
    with contextlib.suppress(Exception):
        ending = threading.Thread(target=destroy, args=[module.current_device()], daemon=True)
        ending.start()
        ending.join(_TEARDOWN)
    return is_destroyed.is_set()
