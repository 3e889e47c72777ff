"""From bytes to batches on the device, by name.

build(...) makes a loader of folders of images; backends() says which there are here, and why others are not.
Every backend delivers the same samples, labels and boxes.
"""

import importlib.util
import os

from common.exits import BadInput

BACKENDS = ("pytorch", "threads", "dali", "dali-gpu", "synthetic")
_MIXED_THREADS = 4  # of dali-gpu: each has 350 MB of buffers, and the GPU does the work
SPELLINGS = {"syntetic": "synthetic", "torchvision": "pytorch", "dali-cpu": "dali"}


def backends(device) -> dict[str, str | None]:
    """Name -> None, or why this backend is not available with this torch.device."""
    dali = None
    if importlib.util.find_spec("nvidia") is None or importlib.util.find_spec("nvidia.dali") is None:
        dali = "DALI is not installed: pip install nvidia-dali-cuda120 (Linux on x86-64)"
    return {
        "pytorch": None,
        "threads": None,
        "dali": dali,
        "dali-gpu": dali or (None if device.type == "cuda" else "it needs a GPU"),
        "synthetic": None,
    }


def named(backend: str, device) -> str:
    """The backend's own name. Raises BadInput where there is none of that name, or not here."""
    backend = SPELLINGS.get(backend, backend)
    known = backends(device)
    if known.get(backend, "there is no such backend") is None:
        return backend
    here = ", ".join(name for name, reason in known.items() if reason is None)
    raise BadInput(
        f"data_backend {backend}: {known.get(backend, 'there is no such backend')}; available here: {here}"
    )


def build(backend: str, store, plan, device, workers: int | None = None, antialias: bool = True):
    """A FolderLoader of the plan's batches on `device`.

    backend: one of BACKENDS, or another spelling of one. store: of datasets/stores. workers: threads or
    processes, default cores(). Raises BadInput as named() does.
    """
    from datasets.loaders.folder import FolderLoader

    workers = workers or cores()
    backend, pinned = named(backend, device), device.type == "cuda"
    if backend == "synthetic":
        from datasets.loaders.synthetic import Synthetic

        return FolderLoader(Synthetic(device), plan, device)
    if backend.startswith("dali"):
        from datasets.loaders.dali import Dali

        gpu = backend == "dali-gpu"
        threads = min(workers, _MIXED_THREADS) if gpu else workers
        return FolderLoader(Dali(store, threads, device if gpu else None, antialias), plan, device)
    if backend == "threads":
        from datasets.loaders.threads import Threads

        return FolderLoader(Threads(store, workers, pinned, antialias), plan, device)
    from datasets.loaders.torchvision import Torchvision

    return FolderLoader(Torchvision(store, workers, pinned, antialias), plan, device)


def cores() -> int:
    """CPU cores for the loader of one process: those that it may use, divided among the node's processes."""
    available = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, available // int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
