"""Which process this is, and on which device; joining the others."""

import argparse
import contextlib
import datetime
import os
import re
import socket
import sys
import threading
import traceback

import torch

from common import arguments, exits
from common.distributed import barrier, interfaces, launcher, preemption, rendezvous
from common.distributed.batchnorm import synchronize_batchnorm
from common.distributed.gradients import compress_gradients, settle_buckets
from common.distributed.topology import Topology, is_distributed, resolve
from common.exits import BadInput
from common.performance import allocator
from common.preflight import node

__all__ = [
    "add_arguments", "compress_gradients", "device", "from_first", "join", "meet_again", "same_everywhere",
    "settle_buckets", "share_buffers", "synchronize_batchnorm",
]  # fmt: skip

_TEARDOWN = 3.0  # seconds
_COMMUNICATION = re.compile(
    r"^Dist\w*Error|\b(gloo|nccl|socket|store|broken pipe|pair closure)\b|connection (closed|reset|refused)"
    r"|timed out waiting",
    re.IGNORECASE,
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What platforms inject, and what they leave open; --rank and --world_size count nodes."""
    parser.add_argument("--init_method", help="tcp://host:port of the first node")
    parser.add_argument("--rank", type=int, help="index of this node")
    parser.add_argument("--world_size", type=int, help="number of nodes")
    parser.add_argument("--local-rank", "--local_rank", type=int, help="of torch.distributed.launch")
    parser.add_argument("--processes_per_node", type=arguments.positive_int, help="default: the GPUs, else 1")
    parser.add_argument(
        "--rank_level", choices=["node", "process"], help="what a bare RANK counts, if it is unclear"
    )
    parser.add_argument(
        "--timeout", type=arguments.positive_float, default=300, help="seconds (default: 300)"
    )


def device(args: argparse.Namespace) -> torch.device:
    """The device of this process; says who it is, and what is amiss on this node.

    args: enable_gpu (None takes a GPU if there is one). Raises BadInput, also for a job of one process that
    was started as several.
    """
    topology = _topology(args)
    if launcher.first_on_node():
        print(topology, flush=True)
        node.print_findings(args, topology)
    if topology.world_size > 1 and not is_distributed(args):
        raise BadInput(
            f"this job is one process, but {topology.source} started {topology.world_size}: "
            "take jobs/train_ddp.py"
        )
    return _device(args, topology)


def join(args: argparse.Namespace) -> tuple[torch.device, int, int]:
    """(device, rank, world_size) of this process, with torch.distributed initialised.

    args: init_method, rank, world_size, rank_level (as the platform and the user said), processes_per_node,
    enable_gpu, timeout (seconds, for meeting and for every communication after it). Where the platform
    started one process per node, this one starts the node's processes, waits, and leaves with their exit
    code: it does not return. The backend is nccl where every rank owns a GPU, else gloo. Raises BadInput and
    NoRendezvous.
    """
    topology = _topology(args)
    if topology.local_rank is None and topology.processes_per_node > 1:
        sys.exit(launcher.start(topology, args.grace))
    launcher.die_with_parent()
    backend = "nccl" if topology.processes_per_node <= _gpus_of_node(args, topology) else "gloo"
    store = rendezvous.meet(topology, args.timeout, backend)
    if backend == "gloo":
        _choose_interface(topology)
    torch.distributed.init_process_group(
        backend,
        store=store,
        rank=topology.rank,
        world_size=topology.world_size,
        timeout=datetime.timedelta(seconds=args.timeout),
    )
    if topology.world_size > 1:
        exits.on_failure(lambda error: _explain(error, topology))
        exits.on_success(_leave_group)
        preemption.share(store)
        barrier.share(store, topology.rank, topology.world_size, args.timeout)
    return _device(args, topology), topology.rank, topology.world_size


def meet_again() -> None:
    """Wait for the other processes for up to six hours, where --timeout bounds all other waits: reading data
    for the first time takes long, and not equally long on every node. Says now and then what is waited for.
    Raises NoRendezvous."""
    barrier.everybody("prepared", "to prepare")


def from_first(value):
    """Rank 0's value, on every process."""
    values = [value]
    if torch.distributed.get_world_size() > 1:
        torch.distributed.broadcast_object_list(values)
    return values[0]


def same_everywhere(name: str, value) -> None:
    """Raises BadInput where a process has another value than rank 0, naming both."""
    values = [value] * torch.distributed.get_world_size()
    if len(values) > 1:
        torch.distributed.all_gather_object(values, value)
    for rank, other in enumerate(values):
        if other != values[0]:
            raise BadInput(f"{name}: rank 0 has {values[0]}, rank {rank} has {other}")


def share_buffers(model: torch.nn.Module) -> None:
    """Give every process rank 0's buffers (BatchNorm's statistics), which are those that are saved."""
    if torch.distributed.get_world_size() > 1:
        for buffer in model.buffers():
            torch.distributed.broadcast(buffer, 0)


def _topology(args: argparse.Namespace) -> Topology:
    if is_distributed(args):
        args.processes_per_node = args.processes_per_node or _gpus(args) or None
    return resolve(args, os.environ)


def _gpus(args: argparse.Namespace) -> int:
    """GPUs to use on this node, counted without touching them."""
    gpus = torch.cuda.device_count()
    if args.enable_gpu and not gpus:
        raise BadInput(
            f"--enable_gpu=true, but torch {torch.__version__} sees no GPU on {socket.gethostname()}"
        )
    return 0 if args.enable_gpu is False else gpus


def _gpus_of_node(args: argparse.Namespace, topology: Topology) -> int:
    """GPUs that this node's processes share. Slurm may show each process its own only, and says how many
    there are."""
    visible, said = _gpus(args), os.environ.get("SLURM_GPUS_ON_NODE", "")
    return int(said) if visible and topology.source == "slurm" and said.isdecimal() else visible


def _device(args: argparse.Namespace, topology: Topology) -> torch.device:
    """Processes that outnumber the GPUs share them. One that will only start others touches none."""
    gpus = _gpus(args)
    if not gpus:
        allocator.keep_memory()
        return torch.device("cpu")
    chosen = torch.device("cuda", (topology.local_rank or 0) % gpus)
    if topology.local_rank is not None or topology.processes_per_node == 1:
        torch.cuda.set_device(chosen)
    return chosen


def _choose_interface(topology: Topology) -> None:
    """Make gloo use the interface that reaches the master; it would ask for the host's own name, and find
    127.0.1.1.

    What the platform preset stays.
    """
    if topology.world_size == 1 or "GLOO_SOCKET_IFNAME" in os.environ:
        return
    host = "127.0.0.1" if topology.nodes == 1 else topology.master_host
    with contextlib.suppress(OSError):
        name, own = interfaces.interface_to(host, topology.master_port or 1)
        if own.startswith("127.") and topology.nodes > 1 and not rendezvous.is_loopback(host):
            # The master's own name, which its /etc/hosts has on loopback: what leads outside is meant.
            name, own = interfaces.outward() or (None, own)
        if name:
            os.environ["GLOO_SOCKET_IFNAME"] = name


def _explain(error: Exception, topology: Topology) -> None:
    """Leave at once: a communication library that lost a peer may wait for it in its destructor, or abort."""
    first_line = next(iter(str(error).splitlines()), "")
    if isinstance(error, RuntimeError) and _COMMUNICATION.search(f"{type(error).__name__} {first_line}"):
        exits.say_error(
            f"rank {topology.rank} on {socket.gethostname()} lost contact with another process: {first_line}"
        )
        exits.leave(exits.LOST_CONTACT)
    traceback.print_exception(error)
    exits.leave(1)


def _leave_group() -> None:
    """Leave after all is written, without the interpreter's teardown, which aborts if a gloo thread still
    runs. gloo's group is not destroyed: that of torch 2.1 holds the interpreter's lock while it waits for a
    thread of its own, which may wait for the same lock."""
    if torch.distributed.get_backend() != "gloo":
        ending = threading.Thread(target=torch.distributed.destroy_process_group, daemon=True)
        ending.start()
        ending.join(_TEARDOWN)
    exits.leave(0)
