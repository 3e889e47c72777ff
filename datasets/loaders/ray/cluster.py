"""The Ray cluster of a job: one that is there, or one of the job's own nodes that ends with it.

Nodes run as children of a keeper, a process that ends them when the job's end of a pipe closes, however the
job ended. Ray listens on all interfaces, and whoever reaches its ports may run code there: a cluster that is
started here asks for a token (Ray's documentation, "Token authentication"), and has no dashboard.
"""

import contextlib
import ctypes
import fcntl
import json
import multiprocessing
import os
import secrets
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

import torch

from common import interfaces
from common.exits import BadInput, import_optional
from common.files import ROOT
from common.performance import cores
from common.platforms import whole
from datasets.loaders.ray.pool import CURE, NODE, OWN, available, brief, is_address, no_cluster

psutil = import_optional("psutil", "a Ray cluster of the job needs psutil")

HELP = "of Ray: auto (default: this machine is a node), start (of the job's own nodes), or HOST:PORT"
PORT = 6379  # Ray's own, where it is free
_UP = 90.0  # seconds for a node to start
_REACHED = 5.0  # seconds for the head to take a connection
_DRAINED = 5.0  # seconds for it to end by itself: Ray would give its workers 30, but the job has ended
_KEEP = "import sys; sys.path.insert(0, {!r}); from datasets.loaders.ray import cluster; cluster.keep()"

_kept: list[subprocess.Popen] = []  # their pipes stay open as long as this process lives


def join(address: str, from_first=None, rank: int = 0, world_size: int = 1, say=print) -> None:
    """Make "auto" mean this cluster for every loader of this process.

    address: as HELP says. from_first: gives rank 0's value to all processes of the job; each must call this.
    With "start" rank 0's node is the head, and the other nodes of the job join it; RAY_AUTH_TOKEN, where it
    is set for the job, is the cluster's token, and lets further machines join. Raises BadInput.
    """
    reason = available()
    if reason:
        raise BadInput(f"--ray_address {address}: {reason}")
    if address == "auto":
        return
    local_rank, local = whole(os.environ, "LOCAL_RANK", 0), whole(os.environ, "LOCAL_WORLD_SIZE", 1)
    if address == "start":
        open_to_others = world_size > local or "RAY_AUTH_TOKEN" in os.environ
        found, failed = None, None
        if rank == 0:
            try:
                found = _start_head(open_to_others)
            except BadInput as error:
                failed = str(error)
        found, failed = (from_first or (lambda value: value))((found, failed))
        if failed:
            raise BadInput(failed)
        address, token = found
        os.environ |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": token}
        if rank == 0:
            say(f"ray: a cluster of this job at {address}" + _invitation(address, open_to_others))
        elif local_rank == 0:
            _start_node(address, token)
    else:
        if not is_address(address):
            raise BadInput(f"--ray_address {address} is not auto, start or HOST:PORT")
        if local_rank == 0 and not _is_node_of(address):
            host, _, port = address.rpartition(":")
            try:
                socket.create_connection((host, int(port)), _REACHED).close()
                _start_node(address, os.environ.get("RAY_AUTH_TOKEN"), "--num-cpus=0")
            except (OSError, OverflowError, BadInput) as error:
                raise BadInput(f"--ray_address: {no_cluster(address, str(error), CURE)}") from error
    os.environ["RAY_ADDRESS"] = address
    if own := _own_address(address):
        os.environ[NODE] = own


def find_own() -> bool:
    """Make "auto" mean the cluster that start_own() has started here for this job, if there is one."""
    if not os.path.exists(_record_path()):
        return False
    with _record() as file:
        return _take(file)


def start_own(reason: str, say=print) -> None:
    """Start a cluster of this machine alone, and make "auto" mean it. It ends with this process.

    The ranks of a job and the workers of a DataLoader share the one that the first of them starts. reason:
    why no other cluster is used. Raises BadInput.
    """
    with _record() as file:
        if _take(file):
            return
        try:
            address, token = _start_head(False, file.name)
        except BadInput:
            os.unlink(file.name)
            raise
        process = psutil.Process()
        entry = {"address": address, "token": token, "pid": process.pid, "began": process.create_time()}
        file.seek(0)
        file.truncate()
        file.write(json.dumps(entry))
        file.flush()
        _take(file)
    say(f"ray: {brief(reason)}; a cluster is started at {address}, which ends with this process")


def _record_path() -> str:
    """Of the file that says which cluster start_own() has started."""
    joined = torch.distributed.is_available() and torch.distributed.is_initialized()
    world_size = torch.distributed.get_world_size() if joined else int(os.environ.get("WORLD_SIZE", 1))
    shared = world_size > 1 or multiprocessing.parent_process() is not None
    owner = os.getppid() if shared else os.getpid()  # ranks and workers of a machine have one parent
    return os.path.join(tempfile.gettempdir(), f"bootfile-ray-{os.getuid()}-{owner}")


@contextlib.contextmanager
def _record():
    """That file, locked. Only this user can read it: it has the token."""

    def opened(path: str, flags: int) -> int:
        return os.open(path, flags | os.O_CREAT | os.O_NOFOLLOW, 0o600)

    path = _record_path()
    try:
        file = open(path, "r+", opener=opened)  # noqa: SIM115
    except OSError as error:
        raise BadInput(f"cannot write the address of a Ray cluster to {path}: {error}") from error
    with file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield file


def _take(file) -> bool:
    """Whether a file of _record() names a cluster whose process lives; then "auto" means it."""
    file.seek(0)
    text = file.read()
    with contextlib.suppress(ValueError, psutil.Error):
        entry = json.loads(text)
        if psutil.Process(entry["pid"]).create_time() == entry["began"]:
            os.environ |= {
                "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": entry["token"],
                "RAY_ADDRESS": entry["address"], OWN: entry["address"],
            }  # fmt: skip
            return True
    return False


def leave() -> None:
    """End the nodes that this process has started on this machine, and wait for it."""
    while _kept:
        _end(_kept.pop())
    for name in ("RAY_ADDRESS", NODE, OWN):
        os.environ.pop(name, None)


def keep() -> None:
    """The keeper's life: told on stdin what to run, it says "up" or why not, and ends with its stdin."""
    told = json.loads(sys.stdin.readline())
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)  # the job decides, or its end does
    if sys.platform == "linux":
        PR_SET_CHILD_SUBREAPER = 36
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)  # what Ray leaves behind becomes this one's child
    folder = tempfile.mkdtemp(prefix="ray-")
    try:
        node = subprocess.Popen(
            [sys.executable, "-c", "from ray.scripts.scripts import main; main()", "start", "--block",
             *told["arguments"], *([f"--temp-dir={folder}"] if "--head" in told["arguments"] else [])],
            env=os.environ | told["environment"] | {"RAY_TMPDIR": folder}, stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            preexec_fn=lambda: signal.signal(signal.SIGTERM, signal.SIG_DFL),
        )  # fmt: skip
        lines = []
        for line in node.stdout:
            lines.append(line.strip())
            if "Ray runtime started" in line:
                break
        up = node.poll() is None and "Ray runtime started" in "".join(lines[-1:])
        print("up" if up else " ".join(line for line in lines if line)[-600:], flush=True)
        if up:
            _drain(node.stdout)
            sys.stdin.read()
        with contextlib.suppress(ProcessLookupError):
            node.terminate()
        try:
            node.wait(_DRAINED)
        except subprocess.TimeoutExpired:
            node.kill()
            node.wait()
    finally:
        left = psutil.Process().children(recursive=True)
        for process in left:
            with contextlib.suppress(psutil.Error):
                process.kill()
        psutil.wait_procs(left, 5)
        shutil.rmtree(folder, ignore_errors=True)
        if told["record"]:
            with contextlib.suppress(OSError):
                text = Path(told["record"]).read_text()
                if told["environment"]["RAY_AUTH_TOKEN"] in text:  # else it is already that of another job
                    os.unlink(told["record"])


def _drain(stream) -> None:
    threading.Thread(target=stream.read, daemon=True).start()


def _start_head(open_to_others: bool, record: str | None = None) -> tuple[str, str]:
    """(address, token) of a new cluster whose head is this node. record: a file that is deleted with it."""
    token = os.environ.get("RAY_AUTH_TOKEN") or secrets.token_hex(32)
    if len(token) < 16:
        raise BadInput(f"RAY_AUTH_TOKEN has {len(token)} characters: take at least 16")
    own = interfaces.outward() if open_to_others else (None, "127.0.0.1")
    if own is None:
        raise BadInput("--ray_address start: this node has no address at which others could reach it")
    host = own[1]
    port = PORT if _is_free(host, PORT) else _free(host)
    _start(
        ["--head", f"--node-ip-address={host}", f"--port={port}", "--include-dashboard=false",
         "--disable-usage-stats"], token, record,
    )  # fmt: skip
    return f"{host}:{port}", token


def _start(arguments: list[str], token: str | None, record: str | None = None) -> None:
    """A node on this machine, in the care of a keeper. Raises BadInput with what Ray says."""
    if not any(argument.startswith("--num-cpus") for argument in arguments):
        arguments = [*arguments, f"--num-cpus={cores.available()}"]
    arguments = [*arguments, "--min-worker-port=0", "--max-worker-port=0", "--dashboard-agent-listen-port=0"]
    inherited = filter(None, [os.environ.get("PYTHONPATH")])
    environment = {"PYTHONPATH": os.pathsep.join([ROOT, *inherited])}
    if token:
        environment |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": token}
    keeper = subprocess.Popen(
        [sys.executable, "-c", _KEEP.format(ROOT)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        start_new_session=True, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    _kept.append(keeper)
    told = {"arguments": arguments, "environment": environment, "record": record}
    keeper.stdin.write(json.dumps(told) + "\n")
    keeper.stdin.flush()
    readable, _, _ = select.select([keeper.stdout], [], [], _UP)
    said = keeper.stdout.readline().strip() if readable else f"it has not started within {_UP:g} s"
    if said != "up":
        _kept.remove(keeper)
        _end(keeper)
        raise BadInput(f"no node of a Ray cluster on {socket.gethostname()}: {said}")


def _start_node(address: str, token: str | None, *arguments: str) -> None:
    own = _own_address(address)
    _start(["--address", address, *([f"--node-ip-address={own}"] if own else []), *arguments], token)


def _own_address(address: str) -> str | None:
    """That with which this node reaches the head, None on the head's own loopback. Ray's own guess asks the
    way to the Internet, which may not be there."""
    with contextlib.suppress(OSError):
        own = interfaces.interface_to(address.rpartition(":")[0], 1)[1]
        return None if own.startswith("127.") else own
    return None


def _end(keeper: subprocess.Popen) -> None:
    with contextlib.suppress(OSError):
        keeper.stdin.close()
    try:
        keeper.wait(30)
    except subprocess.TimeoutExpired:
        keeper.kill()
        keeper.wait()
    keeper.stdout.close()


def _invitation(address: str, open_to_others: bool) -> str:
    if not open_to_others:
        return ""
    command = f"RAY_AUTH_MODE=token RAY_AUTH_TOKEN=... ray start --address={address} --block"
    return f"; further machines join with: {command}"


def _is_node_of(address: str) -> bool:
    own = _own_address(address)
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            said = process.cmdline() if process.name() == "raylet" else []
            here = own is None or f"--node_ip_address={own}" in said  # not another container's that is seen
            if f"--gcs-address={address}" in said and here:
                return True
    return False


def _is_free(host: str, port: int) -> bool:
    try:
        with socket.create_server((host, port)):
            return True
    except OSError:
        return False


def _free(host: str) -> int:
    with socket.create_server((host, 0)) as server:
        return server.getsockname()[1]
