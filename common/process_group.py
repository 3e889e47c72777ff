"""Which process this is, and on which device; joining the others."""

import argparse
import atexit
import ctypes
import datetime
import os
import signal
import socket
import subprocess
import sys
import time

import torch

from common.batchnorm import synchronize_batchnorm
from common.exits import ERROR_PIPE, BadInput
from common.topology import Topology, resolve

_STARTED_BY = (
    "BOOTFILE_STARTED_BY"  # process id of the parent, set in processes that a node's first one started
)
_STORE_IS_PARENTS = "BOOTFILE_STORE_IS_PARENTS"  # set where that parent also holds the store
_TIMEOUT = datetime.timedelta(seconds=300)

__all__ = ["device", "first_on_node", "join", "synchronize_batchnorm"]


def first_on_node() -> bool:
    """Whether this process speaks for its node before the group exists: one line a node, not one a
    process."""
    return os.environ.get("LOCAL_RANK", "0") == "0" and _STARTED_BY not in os.environ


def device(enable_gpu: bool | None, local_rank: int = 0) -> torch.device:
    """The device of one process. enable_gpu: None takes a GPU if there is one. Raises BadInput.

    Processes that outnumber the GPUs share them.
    """
    gpus = _gpus(enable_gpu)
    if not gpus:
        return torch.device("cpu")
    chosen = torch.device("cuda", local_rank % gpus)
    torch.cuda.set_device(chosen)
    return chosen


def _gpus(enable_gpu: bool | None) -> int:
    """GPUs to use on this node, counted without touching them."""
    gpus = torch.cuda.device_count()
    if enable_gpu and not gpus:
        raise BadInput(
            f"--enable_gpu=true, but torch {torch.__version__} sees no GPU on {socket.gethostname()}"
        )
    return 0 if enable_gpu is False else gpus


def join(args: argparse.Namespace) -> tuple[torch.device, int, int]:
    """(device, rank, world_size) of this process, with torch.distributed initialised.

    args: init_method, rank, world_size (as the platform injected them), processes_per_node, enable_gpu. Where
    the platform started one process per node, this one starts the node's processes, waits, and leaves with
    their exit code: it does not return. The backend is nccl where every rank owns a GPU, else gloo.
    """
    gpus = _gpus(args.enable_gpu)
    args.processes_per_node = args.processes_per_node or gpus or 1
    topology = resolve(args, os.environ)
    if first_on_node():
        print(topology, flush=True)
    if topology.local_rank is None and topology.processes_per_node > 1:
        sys.exit(_start_processes(topology))
    if _STARTED_BY in os.environ:
        _die_with_parent(int(os.environ[_STARTED_BY]))
    own = device(args.enable_gpu, topology.local_rank or 0)
    backend = "nccl" if gpus and topology.processes_per_node <= gpus else "gloo"
    if topology.nodes == 1 or (topology.master_host or "").startswith("127."):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", _loopback())  # else gloo resolves the host's own name
    torch.distributed.init_process_group(
        backend, store=_store(topology), rank=topology.rank, world_size=topology.world_size, timeout=_TIMEOUT
    )
    atexit.register(_leave)
    return own, topology.rank, topology.world_size


def _store(topology: Topology) -> torch.distributed.Store:
    if topology.world_size == 1:
        return torch.distributed.HashStore()
    agent_has_it = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True" or _STORE_IS_PARENTS in os.environ
    store = torch.distributed.TCPStore(
        topology.master_host,
        topology.master_port,
        is_master=topology.rank == 0 and not agent_has_it,
        wait_for_workers=False,
        timeout=_TIMEOUT,
    )
    return torch.distributed.PrefixStore("bootfile", store)


def _start_processes(topology: Topology) -> int:
    """Run this command once for every process of the node. Returns the exit code of the first that failed, or
    0."""
    environment = dict(os.environ)
    if (
        topology.nodes == 1
    ):  # the parent holds the store, on loopback, at a port that nobody can take meanwhile
        listener = socket.create_server(("127.0.0.1", 0))
        host, port = listener.getsockname()
        # Kept in a local name: the store lives as long as this function, and so as long as the children.
        store = torch.distributed.TCPStore(
            host, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach()
        )
        environment[_STORE_IS_PARENTS] = "1"
    else:
        host, port, store = topology.master_host, topology.master_port, None
    receive_errors, send_errors = os.pipe()
    count = topology.processes_per_node
    environment |= {
        "MASTER_ADDR": host,
        "MASTER_PORT": str(port),
        "WORLD_SIZE": str(topology.world_size),
        "LOCAL_WORLD_SIZE": str(count),
        ERROR_PIPE: str(send_errors),
        _STARTED_BY: str(os.getpid()),
    }
    environment.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // count)))
    children = []

    def forward(number, frame):
        for child in children:
            child.send_signal(number)

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, forward)
    for local_rank in range(count):
        own = {"LOCAL_RANK": str(local_rank), "RANK": str(topology.rank + local_rank)}
        children.append(
            subprocess.Popen(
                [sys.executable, *sys.orig_argv[1:]], env=environment | own, pass_fds=[send_errors]
            )
        )
    os.close(send_errors)
    code = _wait(children)
    with os.fdopen(receive_errors) as lines:
        sys.stderr.writelines(dict.fromkeys(lines))  # all processes read the same data: the same error once
    del store
    return code


def _wait(children: list[subprocess.Popen]) -> int:
    """Wait for all; when one fails, end the others. 128 + n for a process that signal n ended."""
    while True:
        codes = [child.poll() for child in children]
        failed = next((code for code in codes if code), None)
        if failed or None not in codes:
            break
        time.sleep(0.05)
    if failed is None:
        return 0
    for child in children:
        if child.poll() is None:
            child.terminate()
    deadline = time.monotonic() + 5
    for child in children:
        try:
            child.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()
    return failed if failed > 0 else 128 - failed


def _die_with_parent(parent: int) -> None:
    """A parent killed without notice must not leave processes behind that hold the GPUs."""
    if sys.platform == "linux":
        PR_SET_PDEATHSIG = 1
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != parent:  # it died before the call
            sys.exit(128 + signal.SIGTERM)


def _loopback() -> str:
    return "lo" if sys.platform == "linux" else "lo0"


def _leave() -> None:
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
