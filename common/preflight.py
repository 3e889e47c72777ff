"""What this node offers, checked before a job relies on it: one finding per subject, within seconds.

code  names              an error is
0                        (none; warnings do not stop a job)
10    accelerators       fewer GPUs than the platform promised, or none where --enable_gpu=true
11    shm                no /dev/shm on Linux, or one that is full or cannot be written
12    outputs, scratch   a folder that cannot be written, or has no room for two checkpoints
13    limits             too few open files or processes to train
14    master, interface  a master that does not resolve or has no route, a preset interface that is not there
15    versions, packages torch below the floor or at odds with NumPy, a package missing that every job imports

Where several subjects have errors, the first in this order gives the code. Nothing is changed: NCCL_* and
GLOO_* variables are shown under `presets` as they are.
"""

import concurrent.futures
import errno
import importlib.metadata
import os
import platform
import re
import resource
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from common import interfaces
from common.arguments import local_output
from common.exits import BadInput
from common.topology import Topology, promised_gpus

NETWORK_SECONDS = 3.0  # for resolving names and reaching the master together
_SHM = 1e9  # bytes that platforms guarantee; DataLoader workers hand their batches over through /dev/shm
_NO_ROOM = 0.3e9  # bytes: two checkpoints of 134 MB, as the older one is kept while the newer is written
_LITTLE_ROOM = 5e9  # bytes
_DRIVERS = {11: 450, 12: 525, 13: 580}  # CUDA: first driver branch (CUDA release notes, minor compatibility)
_NEEDED = ("numpy", "tqdm")  # imported by every job
_OPTIONAL = {
    "torchvision": "image folders", "pillow": "image folders", "scikit-learn": "--dataset digits",
    "tensorboard": "TensorBoard events",
}  # fmt: skip
_CODES = {
    "accelerators": 10, "shm": 11, "outputs": 12, "scratch": 12, "limits": 13, "master": 14, "interface": 14,
    "versions": 15, "packages": 15,
}  # fmt: skip


@dataclass(frozen=True)
class Finding:
    """One subject of the check. verdict: "ok", "warning" or "error"; code: that of the table, 0 without an
    error."""

    name: str
    verdict: str
    text: str
    code: int

    def __str__(self) -> str:
        return f"check name={self.name} verdict={self.verdict} {self.text}"


def inspect(args, env: Mapping[str, str], topology: Topology) -> list[Finding]:
    """Every subject once, in the order of the table, `presets` last, within about NETWORK_SECONDS.

    args: output_dir (a path) and enable_gpu (None: a GPU is used if there is one). CUDA is not initialised,
    and nothing is left on the disk.
    """
    host = _master_to_find(topology)
    deadline = time.monotonic() + NETWORK_SECONDS
    master = _start(_addresses, host, topology.master_port) if host else None  # DNS may be slow: first of all
    own = _start(_addresses, socket.gethostname(), None)
    driver = _start(_driver, True)
    found = [
        _accelerators(args, env, topology),
        _shm(),
        _outputs(args.output_dir, probe=True),
        _scratch(env),
        _limits(topology),
    ]
    found += _network(env, topology, master, own, deadline)
    return [*found, _versions(driver.result()), _packages(), _presets(env)]


def first_lines(args, topology: Topology) -> None:
    """Print what a job says of its node when it starts: one line of facts, then a line for every warning and
    error. Takes no time to speak of: no name is resolved, no program is run.

    Raises BadInput where there are fewer GPUs than the platform promised; anything else is only said.
    """
    accelerators = _accelerators(args, os.environ, topology)
    if accelerators.verdict == "error":
        raise BadInput(accelerators.text)
    versions, presets = _versions(_driver(False)), _presets(os.environ)
    found = [
        accelerators, _shm(), _outputs(args.output_dir, probe=False), _scratch(os.environ), _limits(topology),
        versions, presets,
    ]  # fmt: skip
    troubles = [finding for finding in found if finding.verdict != "ok"]
    facts = [versions.text, accelerators.text]
    facts += [f"{finding.name} {finding.text}" for finding in found[1:4] if finding.verdict == "ok"]
    facts += [f"presets {presets.text}"]
    print("\n".join([f"preflight {verdict(found)}: {', '.join(facts)}", *map(str, troubles)]), flush=True)


def verdict(found: list[Finding]) -> str:
    """The worst verdict of all."""
    return max((finding.verdict for finding in found), key=["ok", "warning", "error"].index)


def exit_code(found: list[Finding]) -> int:
    """That of the first error, or 0."""
    return next((finding.code for finding in found if finding.code), 0)


def _finding(name: str, facts: str, errors: list[str], warnings: list[str]) -> Finding:
    worst = "error" if errors else "warning" if warnings else "ok"
    text = "; ".join([*([facts] if facts else []), *errors, *warnings])
    return Finding(name, worst, " ".join(text.split()), _CODES[name] if errors else 0)


def _accelerators(args, env: Mapping[str, str], topology: Topology) -> Finding:
    gpus, promised, processes = torch.cuda.device_count(), promised_gpus(env), topology.processes_per_node
    facts = f"{gpus} GPUs, {processes} processes per node"
    if "CUDA_VISIBLE_DEVICES" in env:
        facts += f", CUDA_VISIBLE_DEVICES={env['CUDA_VISIBLE_DEVICES']!r}"
    errors, warnings = [], []
    if args.enable_gpu is False:
        facts += ", not used: --enable_gpu=false"
    elif promised and gpus < promised:
        errors.append(f"the platform promised {promised} GPUs, torch {torch.__version__} sees {gpus}")
    elif args.enable_gpu and not gpus:
        errors.append(f"--enable_gpu=true, but torch {torch.__version__} sees no GPU")
    elif 0 < gpus < processes:
        warnings.append(f"{processes} processes share {gpus} GPUs: gloo instead of nccl, and slower")
    elif gpus > processes and hasattr(args, "processes_per_node"):  # one process may use all: train_dp.py
        warnings.append(f"{gpus - processes} of {gpus} GPUs stay idle: one process uses one GPU")
    return _finding("accelerators", facts, errors, warnings)


def _shm() -> Finding:
    path = "/dev/shm"
    if sys.platform != "linux":
        return _finding("shm", f"no {path} on {sys.platform}", [], [])
    if not _writable(path):
        return _finding("shm", "", [f"{path} is no folder that can be written"], [])
    space = os.statvfs(path)
    free, size = space.f_bavail * space.f_frsize, space.f_blocks * space.f_frsize
    errors = [f"{path} is full"] if free < 1e6 else []
    small = f"below {_SHM / 1e9:.0f} GB, DataLoader workers can end with a bus error: use few, or none"
    warnings = [small] if free < _SHM else []
    return _finding("shm", f"{_gb(free)} of {_gb(size)} free at {path}", errors, warnings)


def _outputs(path: str, probe: bool) -> Finding:
    if probe:  # write a file there, and take it away again
        try:
            path = local_output(path)
        except BadInput as error:
            return _finding("outputs", "", [str(error)], [])
    return _room("outputs", path, [])


def _scratch(env: Mapping[str, str]) -> Finding:
    """Where a platform mounts fast scratch, else where temporary files go."""
    named = env.get("TMPDIR")
    lost = f"TMPDIR={named} is no folder that can be written"
    warnings = [lost] if named and not _writable(named) else []
    for path in filter(None, ("/cache", named, "/tmp")):
        if _writable(path):
            return _room("scratch", path, warnings)
    return _finding("scratch", "", ["neither /cache nor TMPDIR nor /tmp can be written"], warnings)


def _room(name: str, path: str, warnings: list[str]) -> Finding:
    folder = os.path.abspath(path)
    while not os.path.exists(folder):
        folder = os.path.dirname(folder)
    space = os.statvfs(folder)
    free, files = space.f_bavail * space.f_frsize, space.f_favail
    errors = [f"no room for two checkpoints ({_gb(_NO_ROOM)})"] if free < _NO_ROOM else []
    if space.f_files and files < 100:  # some file systems do not count: f_files is 0 there
        errors.append(f"no more than {files} new files")
    little = [f"below {_gb(_LITTLE_ROOM)}"] if free < _LITTLE_ROOM and not errors else []
    return _finding(name, f"{_gb(free)} free at {path}", errors, [*little, *warnings])


def _limits(topology: Topology) -> Finding:
    """The soft limits: those that count."""
    kinds = {"open_files": "NOFILE", "processes": "NPROC", "locked_memory": "MEMLOCK", "core_size": "CORE"}
    soft = {name: resource.getrlimit(getattr(resource, f"RLIMIT_{kind}"))[0] for name, kind in kinds.items()}
    unlimited = resource.RLIM_INFINITY
    shown = [f"{name}={'unlimited' if value == unlimited else value}" for name, value in soft.items()]
    errors, warnings = [], []
    # Batches in flight hold open files, and every process has tens of threads, which count as processes.
    for name, option in (("open_files", "-n"), ("processes", "-u")):
        if soft[name] != unlimited and soft[name] < 1024:
            few = f"few {name.replace('_', ' ')}: ulimit {option} 1024 or more"
            (errors if soft[name] < 128 else warnings).append(few)
    infiniband = "/sys/class/infiniband"
    if topology.nodes > 1 and soft["locked_memory"] != unlimited and os.path.isdir(infiniband):
        warnings.append("NCCL over InfiniBand registers memory: ulimit -l unlimited")
    if soft["core_size"] and not _text("/proc/sys/kernel/core_pattern").startswith("|"):
        warnings.append("a crash may fill the disk with a core file: ulimit -c 0")
    return _finding("limits", " ".join(shown), errors, warnings)


def _master_to_find(topology: Topology) -> str | None:
    """The host that processes connect to; those of a single node that starts them itself meet on loopback."""
    return topology.master_host if topology.nodes > 1 or topology.level == "process" else None


def _network(env, topology: Topology, master, own, deadline: float) -> list[Finding]:
    """The findings `master` and `interface`. master, own: futures of _addresses (master None: one node)."""
    presets = {name: env[name] for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME") if name in env}
    shown = "".join(f", {name}={value}" for name, value in presets.items())
    errors = [trouble for name, value in presets.items() if (trouble := _preset_trouble(name, value))]
    if master is None:
        none = _finding("master", "none needed: one node", [], [])
        return [none, _finding("interface", f"loopback: one node{shown}", errors, [])]
    where = f"{topology.master_host}:{topology.master_port}"
    address, why = _first(master, deadline)
    if address is None:
        unknown = _finding("master", where, [f"the master's host name {why}"], [])
        return [unknown, _finding("interface", f"not known before the master is{shown}", errors, [])]
    check = _own_port if topology.node_rank == 0 else _other_port
    found = [_finding("master", f"{where} is {address[0]}", *check(topology, address, deadline))]
    try:
        name, local = interfaces.interface_to(*address[:2])
    except OSError as error:
        errors.append(f"no way to {address[0]}: {error.strerror}")
        return [*found, _finding("interface", f"none{shown}", errors, [])]
    warnings = []
    if topology.nodes > 1 and _loopback(local):
        warnings.append(f"the {topology.nodes} nodes meet at {address[0]}, which works on one machine only")
    elif topology.nodes > 1 and "GLOO_SOCKET_IFNAME" not in presets:
        named, why = _first(own, deadline)
        if named is None or _loopback(named[0]):
            lost = f"{socket.gethostname()}, this host's name, {f'is {named[0]}' if named else why}"
            warnings.append(f"{lost}: gloo would wait there; jobs here set GLOO_SOCKET_IFNAME={name}")
    return [*found, _finding("interface", f"{name} with {local}{shown}", errors, warnings)]


def _first(addresses: concurrent.futures.Future, deadline: float) -> tuple[tuple | None, str]:
    """(first socket address, ""), or (None, why there is none)."""
    try:
        return addresses.result(timeout=max(0.0, deadline - time.monotonic()))[0], ""
    except concurrent.futures.TimeoutError:
        return None, f"does not resolve (no answer within {NETWORK_SECONDS:.0f} s)"
    except (OSError, UnicodeError) as error:
        return None, f"does not resolve ({getattr(error, 'strerror', None) or error})"


def _own_port(topology: Topology, address: tuple, deadline: float) -> tuple[list[str], list[str]]:
    """(errors, warnings) of the node that is the master itself."""
    # Processes that a launcher started find its store listening already.
    port = topology.master_port if topology.level == "node" else 0
    with _socket(address) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as the store does
        try:
            probe.bind((address[0], port, *address[2:]))
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                return [], [f"port {port} is taken on this node: by a job that runs already?"]
            return [], [f"node 0 is the master, but {address[0]} is no address of it: {error.strerror}"]
    return [], []


def _other_port(topology: Topology, address: tuple, deadline: float) -> tuple[list[str], list[str]]:
    """(errors, warnings) of the way from this node to the master's port."""
    seconds = min(1.0, max(0.2, deadline - time.monotonic()))
    with _socket(address) as probe:
        probe.settimeout(seconds)
        try:
            probe.connect(address)
        except ConnectionRefusedError:
            return [], ["not listening yet (refused): start node 0"]
        except TimeoutError:
            return [], [f"no answer within {seconds:.1f} s: not started yet, or a firewall"]
        except OSError as error:
            return [f"cannot be reached: {error.strerror}"], []
    return [], []


def _socket(address: tuple) -> socket.socket:
    return socket.socket(socket.AF_INET6 if ":" in address[0] else socket.AF_INET, socket.SOCK_STREAM)


def _preset_trouble(name: str, value: str) -> str | None:
    """Why a *_SOCKET_IFNAME finds no interface on this node. gloo: exact names, all of them; NCCL: prefixes,
    or exact names after "=", of which one will do; "^" excludes."""
    there = [interface for _, interface in socket.if_nameindex()]
    asked = value.lstrip("=").split(",")
    if name.startswith("NCCL"):
        same = str.__eq__ if value.startswith("=") else str.startswith
        lacking = not value.startswith("^") and not any(same(have, ask) for have in there for ask in asked)
    else:
        lacking = not set(asked) <= set(there)
    return f"{name}={value}, but the interfaces here are {', '.join(there)}" if lacking else None


def _versions(driver: str | None) -> Finding:
    cuda, nccl = torch.version.cuda, None
    if cuda and torch.distributed.is_nccl_available():
        nccl = ".".join(map(str, torch.cuda.nccl.version()))
    facts = (
        f"python {platform.python_version()}, torch {torch.__version__}, CUDA {cuda or 'none'}, "
        f"NCCL {nccl or 'none'}, driver {driver or 'none'}"
    )
    errors, warnings = [], []
    if torch.__version__ < (2, 1):
        errors.append("torch 2.1 or later is needed")
    try:
        torch.zeros(1).numpy()
    except RuntimeError as error:  # a NumPy of another generation than torch was built for, or none
        errors.append(f"torch cannot use NumPy ({error}): install another, torch before 2.3 needs numpy<2")
    if driver and not cuda:
        warnings.append("this torch was built without CUDA: it will not use the GPUs")
    elif driver and int(driver.split(".")[0]) < (least := _DRIVERS.get(int(cuda.split(".")[0]), 0)):
        warnings.append(f"CUDA {cuda} needs driver {least} or later, or NVIDIA's cuda-compat package")
    return _finding("versions", facts, errors, warnings)


def _packages() -> Finding:
    facts, errors, warnings = [], [], []
    for name in (*_NEEDED, *_OPTIONAL):
        try:
            facts.append(f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            if name in _NEEDED:
                errors.append(f"every job needs {name}: pip install {name}")
            else:
                warnings.append(f"no {_OPTIONAL[name]} without {name}: pip install {name}")
    return _finding("packages", ", ".join(facts), errors, warnings)


def _presets(env: Mapping[str, str]) -> Finding:
    named = sorted(name for name in env if name.startswith(("NCCL_", "GLOO_")))
    return _finding("presets", " ".join(f"{name}={env[name]}" for name in named) or "none", [], [])


def _driver(ask_program: bool) -> str | None:
    """The version of NVIDIA's driver, such as "535.129.03"; None without one."""
    text = _text("/proc/driver/nvidia/version")
    if not text and ask_program and shutil.which("nvidia-smi"):
        command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        try:
            text = subprocess.run(command, capture_output=True, text=True, timeout=2).stdout
        except (OSError, subprocess.TimeoutExpired):
            return None
    match = re.search(r"\b\d{3,}\.\d+(\.\d+)?\b", text)
    return match[0] if match else None


def _addresses(host: str, port: int | None) -> list[tuple]:
    """Socket addresses, at least one. Raises OSError."""
    return [entry[4] for entry in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)]


def _start(function: Callable, *arguments) -> concurrent.futures.Future:
    """Call in a thread that does not keep the process alive: a name server that is silent blocks for
    minutes."""
    future = concurrent.futures.Future()

    def work():
        try:
            future.set_result(function(*arguments))
        except Exception as error:
            future.set_exception(error)

    threading.Thread(target=work, daemon=True).start()
    return future


def _loopback(address: str) -> bool:
    return address.startswith("127.") or address == "::1"


def _writable(path: str) -> bool:
    return os.path.isdir(path) and os.access(path, os.W_OK | os.X_OK)


def _text(path: str) -> str:
    """A file of /proc, "" where there is none."""
    try:
        with open(path) as file:
            return file.read()
    except OSError:
        return ""


def _gb(count: float) -> str:
    return f"{count / 1e9:.1f} GB"
