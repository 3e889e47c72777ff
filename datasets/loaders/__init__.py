"""From bytes to batches on the device, by name.

build(...) makes a loader of folders of images; backends() says which there are here, and why others are not.
Every backend delivers the same samples, labels and boxes.
"""

import importlib.util
import os

from common import platforms
from common.exits import BadInput
from common.performance.cores import available

CACHED = {"kspeed": "threads", "dali-kspeed": "dali"}  # a cache of samples, and the engine that it feeds
BACKENDS = ("pytorch", "threads", "dali", "dali-gpu", "synthetic", *CACHED, "ray")
_MIXED_THREADS = 4  # of dali-gpu: each has 350 MB of buffers, and the GPU does the work
DALI, RAY = "nvidia-dali-cuda120", '"ray>=2.52"'  # as pip knows them; Ray 2.52 is the first with tokens
SPELLINGS = {"syntetic": "synthetic", "torchvision": "pytorch", "dali-cpu": "dali"}


def backends(device) -> dict[str, str | None]:
    """Engine -> None, or why it is not available with this torch.device."""
    dali = None
    if importlib.util.find_spec("nvidia") is None or importlib.util.find_spec("nvidia.dali") is None:
        dali = f"DALI is not installed: pip install {DALI} (Linux on x86-64)"
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
    known |= {name: known[engine] for name, engine in CACHED.items()}
    known["ray"] = None if importlib.util.find_spec("ray") else f"Ray is not installed: pip install {RAY}"
    if known.get(backend, "there is no such backend") is None:
        return backend
    here = ", ".join(name for name, reason in known.items() if reason is None)
    raise BadInput(
        f"data_backend {backend}: {known.get(backend, 'there is no such backend')}; available here: {here}"
    )


def chosen(names: str | None, device, say) -> list[str]:
    """The backends of a list separated by commas, or all that are available; say() hears of the others.

    Raises BadInput as named() does.
    """
    if names:
        return [named(name, device) for name in names.split(",")]
    for name, reason in backends(device).items():
        if reason:
            say(f"{name}: {reason}")
    return [name for name, reason in backends(device).items() if not reason]


def build(backend: str, store, plan, device, workers: int | None = None, antialias: bool = True, **delivery):
    """A FolderLoader of the plan's batches on `device`.

    backend: one of BACKENDS, or another spelling of one. store: of datasets/stores; who opened it closes it.
    workers: threads or processes, default cores(). delivery: mean, std, dtype and pinned of FolderLoader.
    Raises BadInput as named() does.
    """
    from datasets.loaders.loader import FolderLoader

    pinned = device.type == "cuda" and delivery.get("pinned", True)
    engine = _engine(named(backend, device), store, device, workers or cores(), antialias, pinned)
    return FolderLoader(engine, plan, device, **delivery)


def _engine(backend: str, store, device, workers: int, antialias: bool, pinned: bool):
    backend = CACHED.get(backend, backend)
    if backend == "synthetic":
        from datasets.loaders.engines.synthetic import Synthetic

        return Synthetic(device)
    if backend.startswith("dali"):
        from datasets.loaders.engines.dali import Dali

        gpu = backend == "dali-gpu"
        threads = min(workers, _MIXED_THREADS) if gpu else workers
        return Dali(store, threads, device if gpu else None, antialias)
    if backend == "ray":
        from datasets.loaders.ray.engine import RayEngine

        return RayEngine(store, workers, antialias)
    if backend == "threads":
        from datasets.loaders.engines.threads import Threads

        return Threads(store, workers, pinned, antialias)
    from datasets.loaders.engines.torchvision import Torchvision

    return Torchvision(store, workers, pinned, antialias)


def cores() -> int:
    """CPU cores for the loader of one process: those that it may use, divided among the node's processes.
    Raises BadInput for a LOCAL_WORLD_SIZE that is not a number of processes."""
    processes = platforms.whole(os.environ, "LOCAL_WORLD_SIZE", 1)
    if processes < 1:
        raise BadInput(f"LOCAL_WORLD_SIZE={processes} is not at least 1")
    return max(1, available() // processes)
