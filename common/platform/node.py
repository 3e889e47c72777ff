"""Check a node before a job runs on it: one finding per subject.

code  names              an error is
0                        (none; warnings do not stop a job)
10    accelerators       fewer GPUs than the platform promised, or none although --enable_gpu=true
11    shm                no /dev/shm on Linux, or one that is full or cannot be written
12    outputs            a folder that is not writable, or has no room for two checkpoints
13    limits             too few open files or processes to train
14    master, interface  a master that does not resolve or has no route
15    versions           a torch that is too old or does not fit NumPy

If several subjects have errors, the first in this order gives the code. The check changes nothing: NCCL_* and
GLOO_* variables are only shown, under `presets`.
"""

import argparse
import contextlib
import copy
import math
import os
import platform
import re
import resource
import shutil
import socket
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch

from bootfile.ground import accelerator
from bootfile.ground.errors import BadInput, print_line
from bootfile.ground.numbers import count_in, counted
from bootfile.machine import control_groups
from common.platform import network
from common.platform.place import promised_gpus
from common.platform.topology import Topology, is_distributed

_SHM = 1e9  # bytes that platforms guarantee; DataLoader workers pass their batches through /dev/shm
_NO_ROOM = 0.3e9  # bytes: two checkpoints of 134 MB, because the old one is kept while the new one is written
_LITTLE_ROOM = 5e9  # bytes
_OK = "ok"
_WARNING = "warning"
_ERROR = "error"
_CODES = {
    "accelerators": 10,
    "shm": 11,
    "outputs": 12,
    "limits": 13,
    "master": 14,
    "interface": 14,
    "versions": 15,
}
# Batches in shared memory are open files. Every process has tens of threads, which count as processes.
_FEW = 128  # open files or processes: too few to train
_ENOUGH = 1024

# Memory that the kernel frees when a group needs it: version 2, and version 1 with the groups below.
_RECLAIMABLE = {
    "inactive_file", "active_file", "slab_reclaimable", "total_inactive_file", "total_active_file",
}  # fmt: skip


class Finding:
    """The result for one subject, `name`.

    facts: the beginning of `text`.
    errors, warnings: sentences, the rest of it. `verdict` is "error" if there are errors, else "warning" if
        any, else "ok".
    """

    def __init__(self, name: str, facts: str, errors: Sequence[str] = (), warnings: Sequence[str] = ()):
        self.name = name
        self.verdict = _ERROR
        if not errors:
            self.verdict = _WARNING if warnings else _OK
        self.text = " ".join("; ".join(filter(None, [facts, *errors, *warnings])).split())

    def __str__(self) -> str:
        return f"check name={self.name} verdict={self.verdict} {self.text}"


def inspect(
    args: argparse.Namespace, env: Mapping[str, str], topology: Topology, probe: Callable[[str], str]
) -> list[Finding]:
    """Check every subject once, in the order of the table, then `infiniband` and `presets`.

    args: output_dir (a path) and enable_gpu (None: a GPU is used if there is one). CUDA is not initialised,
    and nothing is left on the disk. probe: returns the folder of output_dir, or raises BadInput.
    """
    return [
        _accelerators(args, env, topology),
        _shm(),
        _outputs(args.output_dir, probe),
        _limits(),
        *_network(topology),
        _versions(),
        infiniband(topology),
        _presets(env),
    ]


def print_findings(args: argparse.Namespace, topology: Topology, folder: str) -> None:
    """Print one line of facts about the node, then a line for every warning and error. folder: of the output.
    A job calls it at its start. It resolves no name and runs no program, so it takes milliseconds. An error
    ends the job where it shows: devices.select() refuses missing GPUs."""
    accelerators = _accelerators(args, os.environ, topology)
    versions = _versions()
    presets = _presets(os.environ)
    folders = [_shm(), _outputs(folder, str)]
    findings = [accelerators, *folders, _limits(), versions, presets]
    facts = [versions.text, accelerators.text]
    # otherwise it has a line of its own
    facts.extend(f"{finding.name} {finding.text}" for finding in folders if finding.verdict == _OK)
    facts.append(f"presets {presets.text}")
    print_line(f"preflight {worst(findings)}: {', '.join(facts)}")
    for finding in findings:
        if finding.verdict != _OK:
            print_line(str(finding))


def check_memory(model: torch.nn.Module, shape: tuple[int, ...], batch: int, share: float = 1.0) -> None:
    """Raise BadInput if a training step on the CPU needs more memory than is free: the kernel would kill the
    job without a line.

    shape: of an input. batch: samples of a forward pass of one process. share: of float32's bytes that
    activations take. They are counted on the meta device, which computes nothing; a model that it does not
    support is not checked.
    """
    try:
        # two batches of different sizes: what does not depend on the size is in both
        copied = copy.deepcopy(model).to("meta")
        few = _saved_bytes(copied, (2, *shape))
        more = _saved_bytes(copied, (4, *shape))
    except Exception:  # it has an operator without a meta kernel, or Python code that reads values
        return
    sample = share * (more - few) / 2  # bytes of each sample: what does not depend on the batch cancels out
    rest = 2 * sum(parameter.nbytes for parameter in model.parameters())  # gradients and momentum
    # the processes of a node share its memory, and check it at the same time
    free = available_memory() / (count_in(os.environ, "LOCAL_WORLD_SIZE") or 1)
    if sample * batch + rest > free:
        most = max(0, int((free - rest) / sample))
        raise BadInput(
            f"a step with {batch} samples {list(shape)} in each process needs about "
            f"{_gb(sample * batch + rest)} of memory, and {_gb(free)} are free: at most {most} samples fit. "
            "Use a smaller --batch_size, or --accumulate N, which divides it, or --grad_checkpointing"
        )


def _saved_bytes(model: torch.nn.Module, shape: tuple[int, ...]) -> int:
    """Return the bytes of the tensors that a forward pass keeps for the backward pass."""
    kept: dict[int, torch.UntypedStorage] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        kept[storage._cdata] = storage  # several views of one storage count once
        return tensor

    def unpack(tensor: torch.Tensor) -> torch.Tensor:  # for a backward pass, which does not come
        return tensor

    # autograd calls keep() for each tensor that it saves; on the meta device they have no memory
    with torch.autograd.graph.saved_tensors_hooks(keep, unpack):
        model(torch.empty(shape, device="meta"))
        return sum(storage.nbytes() for storage in kept.values())


def available_memory(root: str = "/") -> float:
    """Return the free bytes of this node, or of the control groups if that is less; infinity if they are not
    known. root: see control_groups.py."""
    free = math.inf
    with contextlib.suppress(OSError):
        if kilobytes := re.search(r"MemAvailable: +(\d+)", Path(root, "proc/meminfo").read_text()):
            free = int(kilobytes[1]) * 1024
    return min(free, _free_memory_of_groups(root))


def _free_memory_of_groups(root: str = "/") -> float:
    """Return the bytes that the control groups still allow; infinity without a limit. Memory that the kernel
    can free, such as the cache of files, counts as free."""
    free = math.inf
    for folder in control_groups.find_folders("memory", root):
        # beyond memory.high the kernel slows a process down so much that it hardly continues
        limits = _read_numbers(folder, "memory.max", "memory.high", "memory.limit_in_bytes")
        # the memory of this process, if the group does not tell what it uses
        used = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        for current in _read_numbers(folder, "memory.current", "memory.usage_in_bytes")[:1]:
            used = max(0, current - _reclaimable_memory(folder))
        free = min([free, *(limit - used for limit in limits)])
    return max(0.0, free)


def _read_numbers(folder: Path, *names: str) -> list[int]:
    """Return the numbers in these files of a control group, without those that it does not have."""
    numbers = (control_groups.read_number(folder / name) for name in names)
    return [number for number in numbers if number is not None]


def _reclaimable_memory(folder: Path) -> int:
    """Return the bytes in memory.stat that the kernel can free. Of version 1 the sums with the groups below
    count, in place of those of the group alone."""
    numbers = {}
    for line in control_groups.read_text(folder / "memory.stat").splitlines():
        name, _, number = line.partition(" ")
        if name in _RECLAIMABLE and number.isdigit():
            numbers[name.removeprefix("total_")] = int(number)  # the line of the sum comes later
    return sum(numbers.values())


def worst(findings: list[Finding]) -> str:
    """Return the worst verdict."""
    verdicts = {finding.verdict for finding in findings}
    return next((verdict for verdict in (_ERROR, _WARNING) if verdict in verdicts), _OK)


def exit_code(findings: list[Finding]) -> int:
    """Return the code of the first error, or 0."""
    return next((_CODES[finding.name] for finding in findings if finding.verdict == _ERROR), 0)


def _accelerators(args: argparse.Namespace, env: Mapping[str, str], topology: Topology) -> Finding:
    gpus = accelerator.count()
    promised = promised_gpus(env)
    processes = topology.processes_per_node
    noun = "process" if processes == 1 else "processes"
    facts = f"{counted(gpus, 'GPU')}, {processes} {noun} per node"
    if "CUDA_VISIBLE_DEVICES" in env:
        facts += f", CUDA_VISIBLE_DEVICES={env['CUDA_VISIBLE_DEVICES']!r}"
    errors = []
    warnings = []
    # one finding: the first of these that is true explains the others
    if args.enable_gpu is False:
        facts += ", not used: --enable_gpu=false"
    elif promised and gpus < promised:
        errors.append(f"the platform promised {promised} GPUs, torch {torch.__version__} sees {gpus}")
    elif args.enable_gpu and not gpus:
        errors.append(f"--enable_gpu=true, but torch {torch.__version__} sees no GPU")
    elif 0 < gpus < processes:
        warnings.append(
            f"{processes} processes share {gpus} GPUs, with gloo instead of nccl and slower, unless the "
            "launcher assigns one GPU to each"
        )
    elif gpus > processes and is_distributed(args):  # otherwise one process may use all: train_dp.py
        warnings.append(f"{gpus - processes} of {gpus} GPUs stay idle: one process uses one GPU")
    return Finding("accelerators", facts, errors, warnings)


def _shm() -> Finding:
    path = "/dev/shm"
    if sys.platform != "linux":  # there is no such folder
        return Finding("shm", f"no {path} on {sys.platform}")
    if not os.access(path, os.W_OK | os.X_OK):
        return Finding("shm", "", [f"{path} is not a writable folder"])
    size, _, free = shutil.disk_usage(path)
    errors = [f"{path} is full"] if free < 1e6 else []
    warnings = []
    if free < _SHM:
        warnings.append("below 1 GB, workers of --data_backend pytorch may not fit: docker run --shm-size")
    return Finding("shm", f"{_gb(free)} of {_gb(size)} free at {path}", errors, warnings)


def _outputs(path: str, probe: Callable[[str], str]) -> Finding:
    try:
        folder = path = probe(path)
    except BadInput as error:
        return Finding("outputs", "", [str(error)])
    while not os.path.exists(folder):  # the job makes it later, on the disk of a folder above
        folder = os.path.dirname(os.path.abspath(folder))
    space = os.statvfs(folder)
    free = space.f_bavail * space.f_frsize
    files = space.f_favail
    errors = [f"no room for two checkpoints ({_gb(_NO_ROOM)})"] if free < _NO_ROOM else []
    if space.f_files and files < 100:  # f_files is 0 on file systems that do not count files
        errors.append(f"room for only {files} new files")
    warnings = [f"below {_gb(_LITTLE_ROOM)}"] if free < _LITTLE_ROOM and not errors else []
    return Finding("outputs", f"{_gb(free)} free at {path}", errors, warnings)


def _limits() -> Finding:
    """Check the soft limits, which the kernel enforces, and those of the control groups."""
    facts = []
    errors = []
    warnings = []
    limits = [
        ("open_files", "set ulimit -n", resource.getrlimit(resource.RLIMIT_NOFILE)[0]),
        ("processes", "set ulimit -u", resource.getrlimit(resource.RLIMIT_NPROC)[0]),
    ]
    # a container may have fewer than its user
    groups = control_groups.process_limits()
    limits += [("processes", f"raise {limit.name} to", limit.most) for limit in groups]
    for name, advice, most in limits:
        is_limited = most != resource.RLIM_INFINITY
        facts.append(f"{name}={most if is_limited else 'unlimited'}")
        if is_limited and most < _ENOUGH:
            findings = errors if most < _FEW else warnings
            findings.append(f"low limit of {name.replace('_', ' ')}: {advice} {_ENOUGH} or more")
    return Finding("limits", " ".join(facts), errors, warnings)


def _network(topology: Topology) -> tuple[Finding, Finding]:
    """Return the findings `master` and `interface`: the address of the master, and this node's interface to
    it."""
    host = topology.master_host
    port = topology.master_port
    if not host or (topology.nodes == 1 and topology.level == "node"):  # it uses loopback
        return Finding("master", "none needed: one node"), Finding("interface", "loopback: one node")
    # the name may be that of a pod which is not up yet: then a later start finds it
    try:
        address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][4]
    except (OSError, UnicodeError) as error:
        reason = getattr(error, "strerror", None) or error
        master = Finding("master", f"{host}:{port}", [f"the master's host name does not resolve ({reason})"])
        return master, Finding("interface", "not known without the address of the master")
    master = Finding("master", f"{host}:{port} is {address[0]}")
    try:
        name, local = network.interface_to(str(address[0]), port or 1)
    except OSError as error:
        return master, Finding("interface", "none", [f"no route to {address[0]}: {error.strerror}"])
    warnings = []
    if topology.nodes > 1 and network.is_loopback(local):  # each node would meet only itself
        warnings = [f"{topology.nodes} nodes, but {address[0]} is an address within one machine"]
    return master, Finding("interface", f"{name} with {local}", warnings=warnings)


def _versions() -> Finding:
    cuda = torch.version.cuda
    driver = find_driver()
    nccl = None
    if cuda and torch.distributed.is_nccl_available():
        nccl = ".".join(map(str, torch.cuda.nccl.version()))
    versions: dict[str, str | None] = {"python": platform.python_version(), "torch": torch.__version__}
    versions |= {"CUDA": cuda, "NCCL": nccl, "driver": driver, **_ascend()}
    facts = ", ".join(f"{name} {version}" for name, version in versions.items() if version)
    errors = ["torch 2.1 or later is needed"] if torch.__version__ < "2.1" else []
    try:
        # the first conversion would fail in the training, after the data were read
        torch.zeros(1).numpy()
    except RuntimeError as error:  # NumPy is missing, or torch was built for another major version
        errors.append(f"torch cannot use NumPy ({error}): install another, torch before 2.3 needs numpy<2")
    cpu_only = "this torch was built without CUDA: it will not use the GPUs"
    return Finding("versions", facts, errors, [cpu_only] if driver and not cuda else [])


def infiniband(topology: Topology, root: str = "/") -> Finding:
    """Return the finding `infiniband`: its ports with state, link layer and rate, and whether the driver's
    module for peer memory is loaded (NCCL reads GPU memory over the network with it, or with DMA-BUF).

    root: the folder that has sys and proc. A warning if the job has several nodes and no port is active.
    """
    ports = []
    for folder in sorted(Path(root, "sys/class/infiniband").glob("*/ports/*")):
        facts = [f"{folder.parts[-3]}/{folder.name}"]
        for name in ("state", "link_layer", "rate"):  # "4: ACTIVE", "InfiniBand", "400 Gb/sec (4X NDR)"
            with contextlib.suppress(OSError):
                facts.append((folder / name).read_text().rpartition(": ")[2].strip())
        ports.append(" ".join(facts))
    modules = ""
    with contextlib.suppress(OSError):
        modules = Path(root, "proc/modules").read_text()
    peer = "nvidia_peermem" if re.search(r"^nvidia_peermem ", modules, re.MULTILINE) else "none"
    is_idle = ports and not any(" ACTIVE" in port for port in ports)
    warnings = ["no port is active: NCCL uses TCP"] if topology.nodes > 1 and is_idle else []
    return Finding("infiniband", f"{', '.join(ports) or 'no ports'}; peer memory {peer}", warnings=warnings)


def _presets(env: Mapping[str, str]) -> Finding:
    named = sorted(name for name in env if name.startswith(("NCCL_", "GLOO_")))
    interfaces = [name for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME") if env.get(name)]
    # gloo and NCCL would fail at the first collective, without the name
    missing = [network.explain_interfaces(name, env[name]) for name in interfaces]
    facts = " ".join(f"{name}={env[name]}" for name in named)
    return Finding("presets", facts or "none", warnings=[*filter(None, missing)])


def find_driver() -> str | None:
    """Return the version of NVIDIA's driver, such as "535.129.03"; None without a driver."""
    try:
        with open("/proc/driver/nvidia/version") as file:
            text = file.read()
    except OSError:
        return None
    match = re.search(r"\b\d{3,}\.\d+(\.\d+)?\b", text)
    return match[0] if match else None


def _ascend(root: str = "/usr/local/Ascend") -> dict[str, str]:
    """Return the versions of the driver of Ascend NPUs and of CANN, as they are installed: CANN -> 8.0."""
    toolkit = "ascend-toolkit/latest/*-linux/ascend_toolkit_install.info"
    versions = {}
    for name, pattern in {"NPU driver": "driver/version.info", "CANN": toolkit}.items():
        for path in sorted(Path(root).glob(pattern))[:1]:
            match = re.search(r"(?im)^version=(\S+)", path.read_text(encoding="utf-8", errors="replace"))
            versions[name] = match[1] if match else ""
    return versions


def _gb(count: float) -> str:
    return f"{count / 1e9:.1f} GB"
