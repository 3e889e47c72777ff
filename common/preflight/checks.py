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

import importlib.metadata
import os
import platform
import re
import resource
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Mapping

import torch

from common.distributed.topology import Topology, is_distributed, promised_gpus
from common.exits import BadInput
from common.files import is_url
from common.output_folder import local_output
from common.preflight import reachability
from common.preflight.findings import Finding, finding

_SHM = 1e9  # bytes that platforms guarantee; DataLoader workers hand their batches over through /dev/shm
_NO_ROOM = 0.3e9  # bytes: two checkpoints of 134 MB, as the older one is kept while the newer is written
_LITTLE_ROOM = 5e9  # bytes
_DRIVERS = {11: 450, 12: 525, 13: 580}  # CUDA: first driver branch (CUDA release notes, minor compatibility)
_NEEDED = ("numpy", "tqdm")  # imported by every job
_OPTIONAL = {
    "torchvision": "image folders", "pillow": "image folders", "scikit-learn": "--dataset digits",
    "tensorboard": "TensorBoard events",
}  # fmt: skip


def inspect(args, env: Mapping[str, str], topology: Topology) -> list[Finding]:
    """Every subject once, in the order of the table, `presets` last, within about reachability.SECONDS.

    args: output_dir (a path) and enable_gpu (None: a GPU is used if there is one). CUDA is not initialised,
    and nothing is left on the disk.
    """
    host = reachability.master_to_find(topology)
    deadline = time.monotonic() + reachability.SECONDS
    ask = reachability.start  # in threads, as DNS may be slow: first of all
    master = ask(reachability.addresses, host, topology.master_port) if host else None
    own = ask(reachability.addresses, socket.gethostname(), None)
    driver = ask(_driver, True)
    found = [
        _accelerators(args, env, topology),
        _shm(),
        _outputs(args.output_dir, probe=True),
        _scratch(env),
        _limits(topology),
    ]
    found += reachability.findings(env, topology, master, own, deadline)
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
    elif gpus > processes and is_distributed(args):  # one process may use all: train_dp.py
        warnings.append(f"{gpus - processes} of {gpus} GPUs stay idle: one process uses one GPU")
    return finding("accelerators", facts, errors, warnings)


def _shm() -> Finding:
    path = "/dev/shm"
    if sys.platform != "linux":
        return finding("shm", f"no {path} on {sys.platform}", [], [])
    if not _writable(path):
        return finding("shm", "", [f"{path} is no folder that can be written"], [])
    space = os.statvfs(path)
    free, size = space.f_bavail * space.f_frsize, space.f_blocks * space.f_frsize
    errors = [f"{path} is full"] if free < 1e6 else []
    small = f"below {_SHM / 1e9:.0f} GB, DataLoader workers can end with a bus error: use few, or none"
    warnings = [small] if free < _SHM else []
    return finding("shm", f"{_gb(free)} of {_gb(size)} free at {path}", errors, warnings)


def _outputs(path: str, probe: bool) -> Finding:
    if probe:  # write a file there, and take it away again
        try:
            if is_url(path):
                from common.object_store.paths import scratch_folder

                path = scratch_folder("outputs", path)
            path = local_output(path)
        except BadInput as error:
            return finding("outputs", "", [str(error)], [])
    return _room("outputs", path, [])


def _scratch(env: Mapping[str, str]) -> Finding:
    """Where a platform mounts fast scratch, else where temporary files go."""
    named = env.get("TMPDIR")
    lost = f"TMPDIR={named} is no folder that can be written"
    warnings = [lost] if named and not _writable(named) else []
    for path in filter(None, ("/cache", named, "/tmp")):
        if _writable(path):
            return _room("scratch", path, warnings)
    return finding("scratch", "", ["neither /cache nor TMPDIR nor /tmp can be written"], warnings)


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
    return finding(name, f"{_gb(free)} free at {path}", errors, [*little, *warnings])


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
    return finding("limits", " ".join(shown), errors, warnings)


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
    return finding("versions", facts, errors, warnings)


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
    return finding("packages", ", ".join(facts), errors, warnings)


def _presets(env: Mapping[str, str]) -> Finding:
    named = sorted(name for name in env if name.startswith(("NCCL_", "GLOO_")))
    return finding("presets", " ".join(f"{name}={env[name]}" for name in named) or "none", [], [])


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
