"""Select a backend by name, check whether it is available, and build a loader or an engine.

Every backend except synthetic delivers the same samples, labels and boxes.
"""

import importlib.util
import os
from typing import Any

import torch

from bootfile.ground import accelerator
from bootfile.ground.errors import BadInput
from bootfile.ground.numbers import count_in
from bootfile.loaders.loader import Engine
from bootfile.loaders.workers import WorkerEngine, Workers
from bootfile.machine.cores import available_cores
from bootfile.sampling.plan import Plan
from datasets.folders.resize import BILINEAR
from datasets.loaders.engines.crops import TorchvisionCrops
from datasets.loaders.engines.dali import Dali, missing
from datasets.loaders.engines.synthetic import Synthetic
from datasets.loaders.engines.threads import Threads
from datasets.loaders.image_loader import ImageLoader
from datasets.loaders.ray.pool import RAY

CACHED = {"kspeed": "threads", "dali-kspeed": "dali"}  # backend with a cache of samples -> its engine
BACKENDS = ("pytorch", "threads", "dali", "dali-gpu", "synthetic", *CACHED, "ray")
SPELLINGS = {"syntetic": "synthetic", "torchvision": "pytorch", "dali-cpu": "dali"}
# Threads of dali-gpu, each with buffers of 350 MB. nvJPEG decodes the Huffman code of images of less than a
# million pixels on the host, so a GPU with much memory (bytes) gets more threads.
_MIXED_THREADS = 4
_MORE_THREADS = 12
_MUCH_MEMORY = 40e9


def reasons(device: torch.device) -> dict[str, str | None]:
    """Return engine -> the reason why it is not available with this device; None if it is available."""
    dali = missing()
    dali_gpu = "it needs a GPU" if not dali and device.type != "cuda" else dali
    return {
        "pytorch": None,
        "threads": None,
        "dali": dali,
        "dali-gpu": dali_gpu,
        "synthetic": None,
    }


def resolve(backend: str, device: torch.device) -> str:
    """Return the backend's own name. Raises BadInput if it is unknown or not available.

    Jobs call it before they index the data, and engine() calls it again."""
    backend = SPELLINGS.get(backend, backend)
    known = reasons(device)
    known |= {name: known[engine] for name, engine in CACHED.items()}
    known["ray"] = None
    if not importlib.util.find_spec("ray"):
        known["ray"] = f"Ray is not installed: pip install {RAY}"
    reason = known.get(backend, "unknown backend")
    if reason is None:
        return backend
    here = ", ".join(name for name, why in known.items() if why is None)
    raise BadInput(f"data_backend {backend}: {reason}; available here: {here}")


def build(
    backend: str,
    store: Any,
    plan: Plan,
    device: torch.device,
    workers: int | None = None,
    interpolation: str = BILINEAR,
    **delivery: Any,
) -> ImageLoader:
    """Return a Loader of the plan's batches on `device`.

    delivery: mean, std and dtype of Loader. The others: see engine(). Every rank calls it, once a loader.
    """
    loader = ImageLoader(engine(backend, store, device, workers, interpolation), plan, device, **delivery)
    loader.backend = backend
    return loader


def engine(
    backend: str,
    store: Any,
    device: torch.device,
    workers: int | None = None,
    interpolation: str = BILINEAR,
) -> Engine:
    """Return an engine. Raises BadInput as resolve() does. Every rank calls it; "threads" and "dali" start
    their threads here, and "pytorch" its processes with the first batch.

    backend: one of BACKENDS or SPELLINGS.
    store: of datasets/stores. The caller closes it.
    workers: threads or processes (default: cores()).
    interpolation: BILINEAR or BICUBIC of datasets/folders/resize.py.
    """
    backend = resolve(backend, device)
    backend = CACHED.get(backend, backend)
    # each rank has its own: the cores of a node are divided by its processes
    workers = workers or cores()
    pinned = accelerator.has_streams(device)
    if backend == "synthetic":
        return Synthetic(device)
    if backend == "dali-gpu":
        # each thread has buffers on the GPU: more of them only if it has room
        memory = accelerator.of(device).get_device_properties(device).total_memory
        most = _MORE_THREADS if memory >= _MUCH_MEMORY else _MIXED_THREADS
        return Dali(store, min(workers, most), device, interpolation)
    if backend == "dali":
        return Dali(store, workers, None, interpolation)
    if backend == "ray":
        from datasets.loaders.ray.engine import CPUS, RayWorkers, RemoteCrops

        return WorkerEngine(RayWorkers(workers, cpus=CPUS), RemoteCrops(store, interpolation))
    if backend == "pytorch":
        return WorkerEngine(Workers(workers, pinned), TorchvisionCrops(store, interpolation))
    return Threads(store, workers, pinned, interpolation)


def cores() -> int:
    """Return the CPU cores for the loader of one process: the available cores divided among the node's
    processes."""
    return max(1, available_cores() // (count_in(os.environ, "LOCAL_WORLD_SIZE") or 1))
