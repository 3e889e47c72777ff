"""The loader of every job: it turns a plan and an engine into batches on the device, with a receipt."""

import collections
import contextlib
import functools
import itertools
import sys
import threading
import time
import weakref
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Any, ClassVar, NamedTuple, Protocol

import numpy as np
import torch
from torch.utils._pytree import tree_map_only

from common.distributed import preemption, ranks
from common.ground import accelerator, exits
from common.ground.exits import BadInput
from datasets.sampling import generators
from datasets.sampling.receipt import Receipt
from datasets.sampling.sampler import Batch, Plan

# (images uint8 [n, C, H, W], labels) -> the same in new memory
Change = Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
Images = Generator[tuple[Batch, torch.Tensor], None, None]  # yielded by Engine.run()
_KEPT = 4  # batches whose memory is reused
_BLOCK = 2**19  # numbers that are normalised together: 2 MB of float32
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # of ImageNet's pixels / 255


class Engine(Protocol):
    """A producer of a plan's images: decoded, cropped and resized, not normalised.

    reuses_memory: whether the images of a batch are overwritten when run() is resumed.
    """

    reuses_memory: bool = False

    def run(self, plan: Plan) -> Images:
        """Yield the plan's batches in order, each with uint8 images [n, H, W, C] on the host or a GPU."""

    def close(self) -> None:
        """End threads and processes, and free memory, if the engine has any."""
        return  # mypy takes a method without a statement for an abstract one


def _references(arrays: list[np.ndarray]) -> list[int]:
    return [sys.getrefcount(array) for array in arrays]


_OURS = _references([np.empty(0)])[0]  # count for an array that only the list refers to

_working = threading.Lock()  # held by the thread of the job while it does not wait for data
_when_stopped: Callable[[], object] | None = None  # of the last call_when_stopped()
_SOON = 2.0  # seconds


class _Waiting:
    """The time in which the job waits for data. It does not end while call_when_stopped() saves."""

    def __enter__(self) -> None:
        self._held = _working.locked()
        if self._held:
            _working.release()

    def __exit__(self, *_: object) -> None:
        if self._held:
            _working.acquire()


def _save_when_stopped() -> None:
    preemption.wait()
    time.sleep(_SOON)  # usually the next batch comes soon, and the job saves by itself
    with _working:
        if _when_stopped:
            _when_stopped()


class Copy(NamedTuple):
    """A batch that is on its way to the device: tensors, or nested tensors. ready: an event; None without
    streams."""

    images: Any
    labels: Any
    ready: Any = None


class Stage:
    """The last stage of a loader, which moves batches to the device on a separate stream."""

    def __init__(self, device: torch.device):
        self.device = device
        self._stream = accelerator.of(device).Stream(device) if accelerator.has_streams(device) else None

    def end(self, copy: Copy) -> tuple[Any, Any]:
        """Return (images, labels) for use on the caller's stream."""
        if copy.ready:
            current = accelerator.of(self.device).current_stream(self.device)
            current.wait_event(copy.ready)
            # their memory is not reused while the caller's stream reads them
            tree_map_only(torch.Tensor, lambda tensor: tensor.record_stream(current), copy[:2])
        return copy.images, copy.labels

    def wait(self) -> None:
        """Wait until the memory of the last images given to begin() may be overwritten."""


class ToDevice(Stage):
    """A stage: images uint8 [n, C, H, W] -> `dtype` [n, C, H, W], channels_last, (pixel / 255 - mean) / std.

    dtype: default torch.get_default_dtype(). The error of float16 is up to 4e-3.
    A GPU receives uint8, a quarter of the bytes of float32, on a separate stream. The caller's stream waits
    for the copy; the caller does not.
    """

    def __init__(
        self,
        device: torch.device,
        mean: tuple[float, ...],
        std: tuple[float, ...],
        dtype: torch.dtype | None = None,
    ):
        super().__init__(device)
        self.dtype = dtype or torch.get_default_dtype()
        # these copies block the host, because another stream reads them: that of the batches
        shift, scale = 255 * torch.tensor(mean), 1 / (255 * torch.tensor(std))
        self._shift, self._scale = (each.to(device, self.dtype).view(1, -1, 1, 1) for each in (shift, scale))
        self._copied: Any = None  # an event
        self._results: list[np.ndarray] = []
        self._numpy = torch.empty(0, dtype=self.dtype).numpy().dtype

    def __call__(self, images: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.end(self.move(images, labels))

    def begin(self, batch: Batch, images: torch.Tensor, change: Change | None = None) -> Copy:
        """Start moving a batch with its images [n, H, W, C] to the device, as move() does."""
        labels = torch.tensor(batch.labels)  # a copy: the caller may change it
        return self.move(images.permute(0, 3, 1, 2), labels, change)

    def move(self, images: torch.Tensor, labels: torch.Tensor, change: Change | None = None) -> Copy:
        """Start moving images and labels to the device. The images must not change until wait() returns.

        change: applied on the device before the images are normalised.
        """
        if self._stream is None:
            images, labels = self._move(images), self._move(labels)
            if change:
                images, labels = change(images, labels)
            is_host = self.device.type == "cpu"
            return Copy(self._on_host(images) if is_host else self._normalised(images), labels)
        device = accelerator.of(self.device)
        if images.device.type != "cpu":  # from an engine on the GPU
            self._stream.wait_stream(device.current_stream(self.device))
            images.record_stream(self._stream)  # torch does not reuse its memory while the stream reads it
        with device.stream(self._stream):
            on_host, self._copied = images.device.type == "cpu", accelerator.new_event(self.device)
            images, labels = self._move(images), self._move(labels)
            if on_host:
                self._copied.record()
            if change:
                images, labels = change(images, labels)
            images = self._normalised(images)
            ready = accelerator.new_event(self.device)
            ready.record()
            if not on_host:  # an engine's own memory is read until here
                self._copied = ready
        return Copy(images, labels, ready)

    def wait(self) -> None:
        if self._copied:
            self._copied.synchronize()
            self._copied = None

    def _move(self, tensor: torch.Tensor) -> torch.Tensor:
        if self._stream and tensor.device.type == "cpu" and not tensor.is_pinned():
            tensor = tensor.pin_memory()
        return tensor.to(self.device, non_blocking=bool(self._stream))

    def _normalised(self, images: torch.Tensor) -> torch.Tensor:
        images = torch.sub(images, self._shift).mul_(self._scale)  # reads uint8: two kernels
        return images.contiguous(memory_format=torch.channels_last)

    def _on_host(self, images: torch.Tensor) -> torch.Tensor:
        """Return what _normalised() returns, in reused memory. It computes whole rows of pixels, because
        three channels are too few for the processor's vectors, and blocks that fit into its cache."""
        rows = images.permute(0, 2, 3, 1)
        if not rows.is_contiguous() or not len(rows):
            return self._normalised(images)
        *_, width, channels = rows.shape
        shift, scale = self._shift.flatten().repeat(width), self._scale.flatten().repeat(width)
        memory, pixels = self._memory(rows.shape), rows.view(-1, width * channels)
        numbers, block = memory.reshape(pixels.shape), max(1, _BLOCK // (width * channels))

        def normalise(first: int, step: int) -> None:
            for place in range(first, len(pixels), step):
                own = torch.from_numpy(numbers[place : place + block])  # writable without inference_mode()
                own.copy_(pixels[place : place + block]).sub_(shift).mul_(scale)

        threads = min(torch.get_num_threads(), -(-len(pixels) // block))
        if threads == 1:
            normalise(0, block)
        else:
            step = threads * block
            list(self._pool.map(normalise, range(0, step, block), itertools.repeat(step)))
        return torch.from_numpy(memory).permute(0, 3, 1, 2)

    @functools.cached_property
    def _pool(self) -> ThreadPoolExecutor:
        return start_pool(torch.get_num_threads(), "normalise")

    def _memory(self, shape: tuple[int, ...]) -> np.ndarray:
        """Return memory for a batch: that of an earlier batch if it is free. The page faults of new memory
        would cost more than writing the batch.

        A tensor on the array and all its views hold a reference to the array. Torch's own memory is not used:
        glibc before 2.38 cannot put an aligned block into the space of a freed one.
        """
        for count, result in zip(_references(self._results), self._results, strict=True):
            if count == _OURS and result.shape == shape:
                return result
        result = np.empty(shape, self._numpy)
        self._results = [*self._results[-_KEPT + 1 :], result]
        return result


def start_pool(workers: int, name: str) -> ThreadPoolExecutor:
    """Return a pool in whose threads torch starts none of its own: for few images they do not pay."""
    threads = torch.get_num_threads()
    begun = threading.Barrier(workers)

    def begin() -> None:
        torch.set_num_threads(1)
        torch.get_num_threads()  # a thread takes torch's common number at its first look: now it is 1
        begun.wait(60)

    pool = ThreadPoolExecutor(workers, name, initializer=begin)
    wait([pool.submit(int) for _ in range(workers)])
    torch.set_num_threads(threads)  # begin() also changed the default of later threads
    return pool


class Loader:
    """An iterable of (images [n, C, H, W] channels_last and normalised, labels int64 [n]) on `device`.

    On a GPU the next batch is copied and normalised while a batch is used. len: steps of an epoch. When a
    batch is handed out, all generators of random numbers are seeded (datasets/sampling/generators.py).

    plan: may be replaced between two epochs.
    mean, std: of pixels / 255.
    dtype: see ToDevice.
    to_device: another last stage, for an engine without images (map_style.MoveToDevice).
    `effects`: an Effects (datasets/sampling/effects.py), applied after the engine; None by default.
    `transform`: your own function, applied before the effects; None by default. It receives (images uint8
        [n, C, H, W], labels int64 [n]) on the device and returns the same in new memory. Torch's random
        numbers in it are a function of (seed, epoch, id of the first sample).
    `generators`: your own generators; each step seeds them too.
    `step`: the number of the step whose batch was handed out last, from 1; 0 before the first.
    `waited`: seconds that the caller has waited for batches so far.
    `receipt`: the digest of the yielded batches (datasets/sampling/receipt.py).
    """

    _leader: ClassVar[Callable[[], Any]] = staticmethod(lambda: None)  # the loader of the training, weakly
    _latest: ClassVar[Callable[[], Any]] = staticmethod(lambda: None)  # that of the last batch, weakly

    def __init__(
        self,
        engine: Engine,
        plan: Plan,
        device: torch.device,
        mean: tuple[float, ...] = MEAN,
        std: tuple[float, ...] = STD,
        dtype: torch.dtype | None = None,
        to_device: Any = None,
    ):
        self.engine, self.plan = engine, plan
        self.to_device = to_device or ToDevice(device, mean, std, dtype)
        self._shards = getattr(plan.sampler, "shards", 1)  # batches a step, each with its own random numbers
        self.waited, self.receipt = 0.0, Receipt(plan.fingerprint, self._shards)
        self._mean, self.step = mean, 0
        self._is_whole = True  # all shards of the step were handed out
        self.batch: Any = None  # the last Batch that was handed out
        self.generators: list[generators.Generator] = []
        self.effects: Any = None
        self.backend = ""  # the name of the engine, set by backends.build()
        self.transform: Change | None = None
        self._ahead = 1 if device.type != "cpu" else 0  # on the CPU a batch ahead would only use memory

    def seek(self, step: int) -> None:
        """Set the position: the next batch is that of global step `step`, counted from 0."""
        self.plan.seek(step)

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint of another trainer needs: the step, and the receipt up to commit()."""
        seed, data = self.plan.sampler.seed, self.receipt.fingerprint
        return {"step": self.step, "seed": seed, "data": data, "receipt": self.receipt.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Set the position, so that epochs_from(loader.step) yields the rest. The world size may differ.

        Raises BadInput if the state is that of another seed or of other data.
        """
        for name, ours in {"seed": self.plan.sampler.seed, "data": self.receipt.fingerprint}.items():
            if state[name] != ours:
                raise BadInput(f"the loader's state is of {name} {state[name]}, not {ours}")
        self.seek(state["step"])
        self.step = state["step"]
        self.receipt.load_state_dict(state["receipt"])

    def epochs_from(self, step: int) -> Iterator[int]:
        """Yield the remaining epochs, each with the position set (BatchSampler.epochs_from)."""
        for epoch in self.plan.sampler.epochs_from(step):
            self._seed(epoch, generators.EPOCH_START)
            yield epoch

    @property
    def total_steps(self) -> int | Any:
        """Return the steps of the whole training; None if it has no limit."""
        return self.plan.sampler.total_steps

    @property
    def collate_fn(self) -> Any:
        """Return the collate function of a loader of any Dataset; None if it is torch's."""
        return getattr(self.engine, "collate_fn", None)

    @property
    def sampling(self) -> dict[str, Any]:
        """Return the values that determine the ids of each step."""
        sampler = self.plan.sampler
        return {
            "sampler": type(sampler).__name__,
            "samples": sampler.size,
            "global batch": sampler.global_batch,
            "seed": sampler.seed,
            "epoch steps": getattr(sampler, "epoch_steps", None),
            "shuffle": getattr(sampler, "shuffle", True),
            "views": self.plan.views,
            "weighted": getattr(sampler, "shares", None) is not None,
        }

    def lead(self, step: int, part: int = 0) -> None:
        """Make this the loader of the training, at `step`: other loaders no longer seed this process. part:
        of an epoch, in steps, see BatchSampler."""
        Loader._leader, self.step = weakref.ref(self), step
        self.plan.sampler.part = part

    def call_when_stopped(self, save: Callable[[], object]) -> None:
        """Call save() in a thread if the job is asked to stop while it waits for data between two steps. The
        job continues when save() returns. Call it in the thread of the job. A process may do it again, as in
        a notebook: the last call counts."""
        global _when_stopped
        is_first, _when_stopped = _when_stopped is None, lambda: self._is_whole and save()
        if is_first:
            _working.acquire()
            threading.Thread(target=_save_when_stopped, name="stop while waiting", daemon=True).start()

    def add_generator(self, value: Any) -> bool:
        """Seed a generator of your own for each step, too. Return whether the value is a generator."""
        if is_generator := generators.seed_function(value) is not None:
            self.generators += generators.find_generators(value)
        return is_generator

    def find_unknown_generators(self, parts: dict[str, Any], saved: dict[str, Any]) -> list[str]:
        """Return the paths of generators that parts hold, and that are neither seeded nor saved.

        parts: name -> model, criterion or the like. saved: name -> object in a checkpoint.
        """
        others = [own for own in saved.values() if not any(own is part for part in parts.values())]
        known = [each.value for each in (*self.generators, *generators.find_generators(others))]
        return [
            each.path
            for name, part in parts.items()
            for each in generators.find_generators(part, name)
            if not any(each.value is other for other in known)
        ]

    def commit(self, step: int, folder: str) -> None:
        """Chain the receipt up to step `step`, on all ranks; rank 0 appends it to FOLDER/receipt.bin."""
        sums = torch.from_numpy(self.receipt.take())
        if self.receipt.shared is None:
            sums = ranks.total(sums, self.to_device.device)
        else:
            sums, self.receipt.shared = torch.cat([*self.receipt.shared, sums]), []
        self.receipt.chain(step, len(self), sums.cpu().numpy(), folder if ranks.is_first() else None)

    def share(self) -> None:
        """Send the receipt's sums of this step to all ranks: one that is lost takes nothing along."""
        if self.receipt.shared is not None:
            sums = torch.from_numpy(self.receipt.take())
            self.receipt.shared.append(ranks.total(sums, self.to_device.device))

    def example(self, count: int, size: int | None = None) -> Any:
        """Return the inputs of `count` samples as a step gets them. Images are zeros: no data are read. Their
        side is `size` pixels (default: that of this epoch)."""
        if example := getattr(self.engine, "example", None):
            return example(count)
        size = size or self.plan.size
        channels, height, width = getattr(self.plan.index, "image_shape", (3, size, size))
        images = torch.zeros(count, height, width, channels, device=self.to_device.device)
        return images.permute(0, 3, 1, 2)  # channels_last

    def __len__(self) -> int:
        return len(self.plan)

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        start, sampler = time.perf_counter(), self.plan.sampler
        step, epoch, missing = sampler.step, sampler.epoch, sampler.remaining
        if Loader._leader() is self and missing and step != self.step:
            raise BadInput(
                f"the training loader is at step {step} after {self.step} batches: do not leave an epoch "
                "early or iterate it a second time; open another loader for that"
            )
        shards = itertools.cycle(range(self._shards))
        with contextlib.closing(self._copies()) as copies:
            while following := self._next(copies):
                batch, copy = following
                self.receipt.add(batch.ids, batch.labels, batch.crops)
                delivered = self.to_device.end(copy)
                shard = next(shards)
                self._seed(step, generators.BATCH, shard)  # after the loading, which may draw in this process
                self._is_whole = shard == self._shards - 1
                self.step, self.batch, Loader._latest = step + 1, batch, weakref.ref(self)
                if self._is_whole:
                    step, missing = step + 1, missing - 1
                following = None
                self.waited += time.perf_counter() - start
                yield delivered
                del copy, delivered  # its memory may be reused
                start = time.perf_counter()
        if missing > 0:
            raise RuntimeError(f"the data of epoch {epoch} ended at step {step}, {missing} steps too early")
        self._seed(epoch, generators.EPOCH_END)

    def _next(self, copies: Iterator) -> tuple[Batch, Copy] | None:
        """Return the next batch and its copy; None at the end. If another loader leads, the random numbers of
        its step continue afterwards."""
        is_follower = Loader._leader() not in (None, self)
        with generators.restored() if is_follower else contextlib.nullcontext(), _Waiting():
            return next(copies, None)

    def _seed(self, step: int, moment: int, shard: int = 0) -> None:
        """Seed all generators for a step (or an epoch) of this rank, or for one of its shards, unless another
        loader leads."""
        sampler = self.plan.sampler
        if Loader._leader() not in (None, self):
            return
        part = sampler.first_shard + shard  # the same on any number of processes
        seed = generators.derive_seed(sampler.seed, part, step, moment)
        generators.seed_all(seed, self.to_device.device)
        for place, each in enumerate(self.generators, 1):
            each.seed((seed + place) % 2**64)

    def _copies(self) -> Generator[tuple[Batch, Copy], None, None]:
        """Yield batches with their started copies, on a GPU one batch ahead."""
        begun: collections.deque[tuple[Batch, Copy]] = collections.deque()
        with contextlib.closing(self.engine.run(self.plan)) as batches:
            for batch, images in batches:
                try:
                    change: list[Change] = []
                    if self.effects or self.transform:
                        from datasets.loaders import pixels  # most jobs do not need it

                        own = self.effects, self.transform, self._mean
                        batch, *change = pixels.plan_change(self.plan, batch, *own)
                    begun.append((batch, self.to_device.begin(batch, images, *change)))
                    del images
                    if len(begun) > self._ahead:
                        yield begun.popleft()
                finally:  # also if the caller leaves the epoch: the engine then frees or reuses its memory
                    if self.engine.reuses_memory:
                        self.to_device.wait()
            while begun:
                yield begun.popleft()

    def close(self) -> None:
        """End the engine's threads and processes."""
        self.engine.close()

    def __enter__(self) -> "Loader":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _explain(error: Exception) -> str:
    """Return one line for an error of torch that a worker or an item of the last batch causes; else ""."""
    text, loader = next(iter(str(error).splitlines()), ""), Loader._latest()
    if text.startswith("DataLoader worker (pid"):
        return (
            f"{text} `Bus error`: /dev/shm is full, give the container more with --shm-size, or use "
            "--data_backend threads; `Killed`: the memory is full, use fewer --workers or a smaller batch; "
            "else the code of an item ended it: --workers 0 shows where"
        )
    explain = getattr(loader and loader.engine, "explain", None)
    with contextlib.suppress(Exception):  # the item cannot be read again
        return explain(text, loader.batch) if explain else ""
    return ""


exits.explanations.append(_explain)
