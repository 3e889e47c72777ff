"""Find, start, join and leave a Ray cluster.

Ray listens on all interfaces, and any client that reaches its ports can run code. So a cluster that is
started here requires a token (Ray's documentation, "Token authentication"), and has no dashboard.
"""

import contextlib
import fcntl
import importlib.metadata
import importlib.util
import os
import secrets
import socket
import subprocess
import tempfile
from collections.abc import Callable
from typing import Any

import torch

from common import interfaces
from common.exits import BadInput
from common.files import ROOT
from common.platforms import available_cores, whole
from datasets.loaders.ray.node import UP, psutil
from datasets.loaders.ray.wire import RAY, read, start, stop, write

HELP = "Ray cluster: auto (default: that of this machine), start (one on the job's nodes), or HOST:PORT"
CURE = "pass --ray_address start"
NODE = "BOOTFILE_RAY_NODE"  # environment: the address under which this node has joined, if it is known
OWN = "BOOTFILE_RAY_OWN"  # environment: the address of the cluster that a loader has started on this machine
_REACHED = 5.0  # seconds for the head to accept a connection
_END = 30.0  # seconds for a node to end

_nodes: list[tuple[subprocess.Popen, socket.socket]] = []  # that this process has started


class NoCluster(BadInput):
    """There is no Ray cluster at the address. reason: Ray's message. cure: advice besides `ray start`."""

    def __init__(self, address: str, reason: str, cure: str):
        place = "on this machine" if address == "auto" else f"at {address}"
        if address == os.environ.get("RAY_ADDRESS"):
            place += " (RAY_ADDRESS)"
        self.reason = reason.partition(" Please ")[0].rstrip(".")  # without advice that names Ray's options
        super().__init__(f"no Ray cluster {place}: {self.reason}; run `ray start --head` there, or {cure}")


def unavailable() -> str | None:
    """Return why Ray cannot be used here, or None."""
    if importlib.util.find_spec("ray") is None:
        return f"Ray is not installed: pip install {RAY}"
    version = importlib.metadata.version("ray")
    if tuple(map(int, version.split(".")[:2])) < (2, 52):
        return f"Ray {version} cannot ask for tokens: pip install {RAY}"
    return None


def is_address(text: str) -> bool:
    """Return whether the text is HOST:PORT."""
    host, _, port = text.rpartition(":")
    return bool(host) and port.isdecimal() and "/" not in host


def join(
    address: str,
    broadcast: Callable[[Any], Any] = lambda value: value,
    rank: int = 0,
    world_size: int = 1,
    log: Callable[[str], None] = print,
) -> None:
    """Make "auto" mean this cluster for every loader of this process.

    address: see HELP. "start": rank 0's node is the head, and the job's other nodes join it.
    broadcast: returns rank 0's value on all ranks. All ranks must call join().
    rank, world_size: of this process.
    log: called with one line of text.
    If RAY_AUTH_TOKEN is set for the job, it is the cluster's token, and more machines may join. Raises
    BadInput.
    """
    if reason := unavailable():
        raise BadInput(f"--ray_address {address}: {reason}")
    if address == "auto":
        return
    first_here = whole(os.environ, "LOCAL_RANK", 0) == 0
    if address == "start":
        shared = world_size > whole(os.environ, "LOCAL_WORLD_SIZE", 1) or "RAY_AUTH_TOKEN" in os.environ
        started = failed = None
        if rank == 0:
            try:
                started = _start_head(shared)
            except BadInput as error:
                failed = str(error)
        started, failed = broadcast((started, failed))
        if failed:
            raise BadInput(failed)
        address, token = started
        os.environ |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": token}
        if rank == 0:
            command = f"RAY_AUTH_MODE=token RAY_AUTH_TOKEN=... ray start --address={address} --block"
            more = f"; other machines join with: {command}" if shared else ""
            log(f"ray: a cluster of this job at {address}{more}")
        elif first_here:
            _start_node(address)
    elif not is_address(address):
        raise BadInput(f"--ray_address {address} is not auto, start or HOST:PORT")
    elif first_here and not _has_node_of(address):
        if not _is_reached(address):
            raise BadInput(f"--ray_address: {NoCluster(address, 'it accepts no connection', CURE)}")
        try:
            _start_node(address, cpus=0)
        except BadInput as error:
            raise BadInput(f"--ray_address: {NoCluster(address, str(error), CURE)}") from error
    os.environ["RAY_ADDRESS"] = address
    if own := _own_address(address):
        os.environ[NODE] = own


def start_own(reason: str, log: Callable[[str], None] = print) -> None:
    """Start a cluster of this machine alone, and make "auto" mean it. It ends with this process.

    The job's ranks on this machine share the cluster that one of them starts. reason: why no other cluster is
    used. Raises BadInput.
    """
    joined = torch.distributed.is_available() and torch.distributed.is_initialized()
    world_size = torch.distributed.get_world_size() if joined else whole(os.environ, "WORLD_SIZE", 1)
    owner = os.getppid() if world_size > 1 else os.getpid()  # the ranks of a machine have one parent
    path = os.path.join(tempfile.gettempdir(), f"bootfile-ray-{os.getuid()}-{owner}")
    with open(path, "a+", opener=_open_private) as record:
        fcntl.flock(record, fcntl.LOCK_EX)
        record.seek(0)
        address, _, token = record.read().partition(" ")
        if not _is_reached(address):
            try:
                address, token = _start_head(False, path)
            except BadInput:
                os.unlink(path)
                raise
            record.truncate(0)
            record.write(f"{address} {token}")
            log(f"ray: {reason}; a cluster is started at {address}, which ends with this process")
    os.environ |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": token, "RAY_ADDRESS": address, OWN: address}


def _open_private(path: str, flags: int) -> int:
    """Open a file that only this user can read, because it holds a token."""
    return os.open(path, flags | os.O_CREAT | os.O_NOFOLLOW, 0o600)


def _is_reached(address: str) -> bool:
    """Return whether a process accepts connections at HOST:PORT."""
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host, int(port)), _REACHED).close()
    except (OSError, OverflowError, ValueError):
        return False
    return True


def leave() -> None:
    """End the nodes that this process has started on this machine, and wait for them."""
    while _nodes:
        stop(*_nodes.pop(), _END)
    for name in ("RAY_ADDRESS", NODE, OWN):
        os.environ.pop(name, None)


def _start_head(shared: bool, record: str = "") -> tuple[str, str]:
    """Start a cluster whose head is this node. Return (address, token). record: deleted at its end."""
    token = os.environ.get("RAY_AUTH_TOKEN") or secrets.token_hex(32)
    if len(token) < 16:
        raise BadInput(f"RAY_AUTH_TOKEN has {len(token)} characters: take at least 16")
    own = interfaces.outward() if shared else (None, "127.0.0.1")
    if own is None:
        raise BadInput("--ray_address start: this node has no address at which others could reach it")
    with socket.create_server((own[1], 0)) as server:
        port = server.getsockname()[1]
    arguments = [f"--node-ip-address={own[1]}", f"--port={port}", "--include-dashboard=false"]
    _start(["--head", *arguments, "--disable-usage-stats"], available_cores(), token, record)
    return f"{own[1]}:{port}", token


def _start_node(address: str, cpus: int | None = None) -> None:
    """Let this machine join a cluster. cpus: number that it offers (default: available_cores())."""
    own = _own_address(address)
    arguments = ["--address", address, *([f"--node-ip-address={own}"] if own else [])]
    _start(arguments, available_cores() if cpus is None else cpus, os.environ.get("RAY_AUTH_TOKEN"))


def _start(arguments: list[str], cpus: int, token: str | None, record: str = "") -> None:
    """Start a node on this machine, which ends with this process. Raises BadInput with Ray's message."""
    ports = ["--min-worker-port=0", "--max-worker-port=0", "--dashboard-agent-listen-port=0"]
    environment = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": token} if token else {}
    paths = filter(None, [ROOT, os.environ.get("PYTHONPATH")])
    process, connection = start("node", PYTHONPATH=os.pathsep.join(paths), **environment)
    _nodes.append((process, connection))
    connection.settimeout(UP)
    try:
        file = connection.makefile("rwb")
        write(file, ([*arguments, f"--num-cpus={cpus}", *ports], record))
        reason, _ = read(file)
    except (OSError, EOFError):
        reason = f"it has not started within {UP:g} s"
    if reason:
        stop(*_nodes.pop(), _END)
        raise BadInput(f"cannot start a node of a Ray cluster on {socket.gethostname()}: {reason}")


def _own_address(address: str) -> str | None:
    """Return the address with which this node reaches the head; None on the head's own loopback.

    Ray's own guess needs a route to the Internet.
    """
    with contextlib.suppress(OSError):
        own = interfaces.interface_to(address.rpartition(":")[0], 1)[1]
        return None if own.startswith("127.") else own
    return None


def _has_node_of(address: str) -> bool:
    """Return whether a node of the cluster runs on this machine, and not in another container."""
    own = _own_address(address)
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            words = process.cmdline() if process.name() == "raylet" else []
            if f"--gcs-address={address}" in words and (own is None or f"--node_ip_address={own}" in words):
                return True
    return False
