"""The loader of a training loop: it turns a plan and an engine into batches on the device, with a receipt."""

import collections
import contextlib
import itertools
import time
from collections.abc import Generator, Iterator
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch.utils._pytree import tree_flatten, tree_map_only

from bootfile.ground import accelerator
from bootfile.ground.errors import BadInput, Unavailable
from bootfile.processes import ranks, waits
from bootfile.receipt.receipt import Receipt, sums_of_ids
from bootfile.sampling import generators
from bootfile.sampling.plan import Batch, Plan

Data = Generator[tuple[Batch, Any], None, None]  # yielded by Engine.run()
TARGETS = ("label", "labels", "target", "targets", "y")  # the first of these keys in a dictionary is used


class NotDelivered(BadInput):
    """Workers cannot deliver batches on this node. Another backend may."""


class Engine(Protocol):
    """A producer of a plan's batches. reuses_memory: whether the data of a batch are overwritten when run()
    is resumed."""

    reuses_memory: bool = False

    def run(self, plan: Plan) -> Data:
        """Yield the plan's batches in order, each with its data: uint8 images [n, H, W, C] on the host or a
        GPU for an ImageLoader, or a pair (inputs, targets) of nested tensors."""

    def close(self) -> None:
        """End threads and processes, and free memory, if the engine has any."""
        return  # mypy takes a method without a statement for an abstract one


class Copy(NamedTuple):
    """A batch that is on its way to the device: tensors, or nested tensors. ready: an event; None without
    streams."""

    images: Any
    labels: Any
    ready: Any = None


class Stage:
    """The last stage of a loader: it moves nested tensors of any Dataset to the device, on a stream of its
    own."""

    def __init__(self, device: torch.device):
        self.device = device
        self.stream = accelerator.of(device).Stream(device) if accelerator.has_streams(device) else None

    def begin(self, batch: Batch, data: Any) -> Copy:
        """Start moving (inputs, targets) to the device."""
        if self.stream is None:
            return Copy(*map(self._move_all, data))
        # a stream of its own: the copy runs while the device computes the step before
        with accelerator.of(self.device).stream(self.stream):
            inputs, targets = map(self._move_all, data)
            ready = accelerator.new_event(self.device)
            ready.record()
        return Copy(inputs, targets, ready)

    def end(self, copy: Copy) -> tuple[Any, Any]:
        """Return (inputs, targets) for use on the caller's stream."""
        # the caller's kernels wait for the copy on the device; the host does not
        if copy.ready:
            current = accelerator.of(self.device).current_stream(self.device)
            current.wait_event(copy.ready)
            # their memory is not reused while the caller's stream reads them
            for value in tree_flatten((copy.images, copy.labels))[0]:
                if isinstance(value, torch.Tensor):
                    value.record_stream(current)
        return copy.images, copy.labels

    def wait(self) -> None:
        """Wait until the memory of the last data given to begin() may be overwritten."""

    def _move_all(self, data: Any) -> Any:
        is_plain = isinstance(data, torch.Tensor)
        return self.move_tensor(data) if is_plain else tree_map_only(torch.Tensor, self.move_tensor, data)

    def move_tensor(self, tensor: torch.Tensor) -> torch.Tensor:
        """Start the copy of a tensor to the device."""
        return tensor.to(self.device, non_blocking=self.stream is not None)


class Loader:
    """An iterable of (inputs, targets) on the device: the batches of a plan, which an engine reads.

    On a GPU the next batch is copied while a batch is used. len: steps of an epoch. When a batch is handed
    out, all generators of random numbers are seeded (bootfile/sampling/generators.py).

    plan: may be replaced between two epochs.
    to_device: the last stage (default: a Stage).
    """

    reads_again = True  # a restart adds the samples of steps that the receipt lacks, see lead()

    def __init__(self, engine: Engine, plan: Plan, device: torch.device, to_device: Any = None):
        self.engine = engine
        self.plan = plan
        self.to_device = to_device or Stage(device)
        self._shards = getattr(plan.sampler, "shards", 1)  # batches a step, each with its own random numbers
        self.waited = 0.0  # seconds that the caller has waited for batches so far
        self.asked_at = 0.0  # when it asked for the first batch of its step, by time.perf_counter()
        self.receipt = Receipt(plan.fingerprint, self._shards)  # the digest of the yielded batches
        self.receipt.further = getattr(plan.index, "further", {})
        self.step = 0  # the number of the step whose batch was handed out last, from 1
        self._lacking: int | None = None  # see lead(): the step before the first that the receipt lacks
        self.is_whole = True  # all shards of its step were handed out
        self.is_in_epoch = False  # the caller iterates it, and its batches have not ended
        self.has_left_epoch = False  # since the last batch it has asked epochs_from() for the next epoch
        self.leaves_out_ended = False  # epochs_from() leaves out an epoch that its step ends
        self.batch: Batch | None = None  # the last one that was handed out
        self._targets: Any = None  # of this batch, as long as the caller has it
        self.generators: list[generators.Generator] = []  # your own; each step seeds them too
        self.backend = ""  # the name of the engine, if it was chosen by name
        self.removal: Any = None  # a Removal, whose samples no batch has
        # it takes all samples of the last batch, which was handed out with them: its result does not count
        self.is_removed = False
        self.loop_attributes: Any = None  # what the loop changes in a data set of the user
        data_set = getattr(engine, "data_set", None)
        if data_set is not None:
            from bootfile.loaders.loop_attributes import LoopAttributes  # images of ours do not change

            self.loop_attributes = LoopAttributes(data_set)
        self.shares_data = True  # all ranks read one data set
        self.has_stable_items = True  # an item is the same when it is read again
        self._ahead = 1 if device.type != "cpu" else 0  # on the CPU a batch ahead would only use memory

    @property
    def compared_data(self) -> dict[str, Any]:
        """Return what must be the same on all ranks, name -> plain value. Ranks with data of their own need
        equally many batches: the last step would wait for a rank without one."""
        if not self.shares_data:
            return {"number of batches": len(self)}
        compared = dict(self.receipt.further)  # lists and labels first: they tell more than the digest of all
        if self.has_stable_items:
            compared["digest"] = self.receipt.fingerprint
        return compared | self.sampling

    def seek(self, step: int) -> None:
        """Set the position: the next batch is that of global step `step`, counted from 0."""
        self.plan.seek(self._find_begin(step))

    def _find_begin(self, step: int) -> int:
        """Return the step after which the engine begins to read: earlier ones, if the receipt lacks them."""
        return self._lacking if self._lacking is not None and step == self.step else step

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint of another trainer needs: the step, and the receipt up to commit()."""
        return {"step": self.step, **self._identity(), "receipt": self.receipt.state_dict()}

    def _identity(self) -> dict[str, Any]:
        return {"seed": self.plan.sampler.seed, "data": self.receipt.fingerprint}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Set the position, so that epochs_from(loader.step) yields the rest. The world size may differ.
        Raises BadInput if the state is that of another seed or of other data."""
        for name, value in self._identity().items():
            if state[name] != value:
                raise BadInput(f"the loader's state is of {name} {state[name]}, not {value}")
        self.seek(state["step"])
        self.step = state["step"]
        self.receipt.load_state_dict(state["receipt"])

    def epochs_from(self, step: int) -> Iterator[int]:
        """Yield the remaining epochs, each with the position set (BatchSampler.epochs_from)."""
        begin = self._find_begin(step)
        sampler = self.plan.sampler
        for epoch in sampler.epochs_from(begin):
            # it has ended before the steps that are read again, or its code was run before the checkpoint
            if not sampler.remaining and (begin < step or self.leaves_out_ended):
                continue
            self._seed(epoch, generators.EPOCH_START)
            if self.loop_attributes:
                self.loop_attributes.enter_epoch()
            yield epoch
            self.has_left_epoch = True  # the code after its batches has run
            if self.loop_attributes:
                self.loop_attributes.leave_epoch()

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
        """Return the values that determine the ids of each step. A checkpoint holds these, and a restart
        refuses one with other values (exact/state.py)."""
        sampler = self.plan.sampler
        processes = getattr(sampler, "processes", None)  # only if the batches depend on their number
        known = {"processes": processes} if processes else {}
        known |= getattr(sampler, "choices", {})  # a DataLoader has some
        return known | {
            "sampler": getattr(sampler, "name", type(sampler).__name__),
            "samples": sampler.size,
            "global batch": sampler.global_batch,
            "seed": sampler.seed,
            "epoch steps": getattr(sampler, "epoch_steps", None),
            "shuffle": getattr(sampler, "shuffle", True),
            "views": self.plan.views,
            "weighted": getattr(sampler, "shares", None) is not None,
        }

    def lead(self, step: int, part: int = 0) -> None:
        """Make this the loader of the training, at `step`: other loaders no longer seed this process.

        Exact calls it on each rank before the first step. part: of an epoch, in steps, see BatchSampler. If
        the receipt ends before `step`, because a rank was lost (exact/survivor.py), the batches of the steps
        between are read first: they are added to the receipt, and not handed out.
        """
        # from here on the batches of this loader seed the process; those of others restore what they draw
        generators.lead(self)
        self.step = step
        lacks_steps = self.receipt.is_restored and self.receipt.step < step
        # with `shared` all ranks have the sums of each step: then a lost rank has taken nothing along
        if lacks_steps and self.receipt.shared is None:
            self._lacking = self.receipt.step
        self.plan.sampler.part = part

    def add_generator(self, value: Any) -> bool:
        """Seed a generator of your own for each step, too. Return whether the value is a generator."""
        if generators.seed_function(value) is None:
            return False
        self.generators += generators.find_generators(value)
        return True

    def find_unknown_generators(self, parts: dict[str, Any], saved: dict[str, Any]) -> list[str]:
        """Return the paths of generators that parts hold, and that are neither seeded nor saved. parts: name
        -> model, criterion or the like. saved: name -> object in a checkpoint."""
        # the state of a part does not have the generators inside it: only other saved objects count
        ids_of_parts = set(map(id, parts.values()))
        saved_alone = [value for value in saved.values() if id(value) not in ids_of_parts]
        known = [generator.value for generator in self.generators]
        known += [generator.value for generator in generators.find_generators(saved_alone)]
        held = [each for name, part in parts.items() for each in generators.find_generators(part, name)]
        return [each.path for each in held if not any(each.value is value for value in known)]

    def commit(self, step: int, folder: str) -> None:
        """Chain the receipt up to step `step`, on all ranks; rank 0 appends it to FOLDER/receipt.bin."""
        if getattr(self.engine, "repeated", []):
            self._compare_repeated(folder, self.engine)
        # the sums of the steps since the last commit, of this rank's samples
        sums = torch.from_numpy(self.receipt.take())
        if self.receipt.shared is None:
            sums = ranks.total(sums, self.to_device.device)
        else:  # share() has sent the sums of each step already
            sums = torch.cat([*self.receipt.shared, sums])
            self.receipt.shared = []
        # every rank has the whole receipt, so any of them could continue it; rank 0 writes the file
        written = folder if ranks.is_first() else None
        self.receipt.chain(step, len(self), sums.cpu().numpy(), written)

    def _compare_repeated(self, folder: str, engine: Any) -> None:
        """Compare the steps that a restart has read again with the receipt, once, on all ranks. engine: a
        TorchBatches. Raises BadInput if a step was given other samples before."""
        # each rank has read its own part again; the receipt has the sums of all
        sums = torch.from_numpy(np.concatenate([sums_of_ids(ids) for ids in engine.repeated]))
        engine.repeated.clear()
        found = ranks.total(sums, self.to_device.device).cpu().numpy()
        # rank 0 has the file; each rank has to raise, or the others wait for those that did
        first = ranks.is_first()
        step = self.receipt.find_other(engine.first_repeated, found, folder) if first else 0
        step = ranks.broadcast_object(step)
        if step:
            raise BadInput(
                f"step {step} was read again after the restart, and its samples are not those that it was "
                "given before: the data, their transform, weights of the sampler or the number of workers "
                "have changed, or an item depends on something that is not seeded. Restore them (run.add() "
                "saves what the loop changes), or begin a new run in another folder"
            )

    def share(self) -> None:
        """Send the receipt's sums of this step to all ranks: one that is lost takes nothing along."""
        if self.receipt.shared is not None:
            sums = torch.from_numpy(self.receipt.take())
            self.receipt.shared.append(ranks.total(sums, self.to_device.device))

    def begin(self, batch: Batch, data: Any) -> tuple[Batch, Copy]:
        """Start moving a batch to the device. Return it, as the receipt covers it, and its copy."""
        return batch, self.to_device.begin(batch, data)

    def example(self, count: int) -> Any:
        """Return the inputs of `count` samples as a step gets them."""
        return self.engine.example(count)  # type: ignore[attr-defined]  # those that need none have none

    def explain(self, error: Exception) -> str:
        """Return one line for an error of torch that a worker or a target of the last batch has caused; ""
        for another one. torch raises the error of a worker in whatever the job does when the worker ends."""
        from bootfile.loaders import causes  # only after an error

        return causes.explain(error, self.batch, self._targets, getattr(self.engine, "data_set", None))

    def __len__(self) -> int:
        return len(self.plan)

    def __iter__(self) -> Iterator[tuple[Any, Any]]:
        is_leading = generators.leads(self)
        if is_leading:
            waits.call_before_next()
        self.asked_at = start = time.perf_counter()  # the caller waits for a batch from here on
        sampler = self.plan.sampler
        step = sampler.step
        epoch = sampler.epoch
        missing = sampler.remaining
        lacking = self._take_lacking(step, missing)
        # before a batch is read: only the training loader has one position for the whole run
        if is_leading and missing > lacking and step + lacking != self.step:
            raise BadInput(
                f"the training loader is at step {step} after {self.step} batches: do not leave an epoch "
                "early or iterate it a second time; open another loader for that"
            )
        self.is_in_epoch = True
        watches = self.loop_attributes if is_leading else None
        if watches:
            watches.begin_epoch()
        shards = itertools.cycle(range(self._shards))
        # if the caller leaves the epoch early, the engine ends its work here
        with contextlib.closing(self._copies()) as copies:
            while True:
                following = self._next(copies)
                if following is None:
                    break
                batch, copy = following
                # the receipt gets a batch when it is handed out: one that was read ahead belongs to no step
                if self.removal:
                    self.is_removed = self.removal.takes_all(batch.ids % sampler.size)
                self.receipt.add(batch.ids, batch.labels, batch.crops, self.is_removed)
                # a step that the loop did before the restart: its samples only complete the receipt
                if lacking:
                    if next(shards) == self._shards - 1:
                        lacking -= 1
                        step += 1
                        missing -= 1
                    continue
                delivered = self.to_device.end(copy)
                shard = next(shards)
                self._seed(step, generators.BATCH, shard)  # after the loading, which may draw in this process
                self.is_whole = shard == self._shards - 1
                # before the caller computes: a signal in this step finds the right number
                self.step = step + 1
                self.has_left_epoch = False
                self.batch = batch
                self._targets = delivered[1]
                if self.is_whole:
                    step += 1
                    missing -= 1
                self.waited += time.perf_counter() - start
                yield delivered
                self._targets = None
                # the caller asks for the next batch: the memory of this one may be reused
                del following, copy, delivered
                if is_leading:
                    waits.call_before_next()
                start = time.perf_counter()
                if self.is_whole:  # else it asks for another shard of the same step
                    self.asked_at = start
        # an epoch that is too short would shift all later steps: the run would not be repeatable
        if missing > 0:
            raise RuntimeError(f"the data of epoch {epoch} ended at step {step}, {missing} steps too early")
        self.is_in_epoch = False
        if watches:
            watches.end_epoch()
        # what the loop draws before the next epoch, as in an evaluation, is the same after a restart
        self._seed(epoch, generators.EPOCH_END)

    def _take_lacking(self, step: int, most: int) -> int:
        """Return how many of the next `most` steps are only added to the receipt because it lacks them, and
        count these as added."""
        if self._lacking is None or self._lacking != step:
            return 0
        count = min(most, self.step - step)
        self._lacking = step + count if step + count < self.step else None
        return count

    def _next(self, copies: Iterator[tuple[Batch, Copy]]) -> tuple[Batch, Copy] | None:
        """Return the next batch and its copy; None at the end. If another loader leads, the random numbers of
        its step continue afterwards. Raises NotDelivered if a worker has died, and Unavailable after the last
        step was saved."""
        # without workers, the engine reads items in this process, and they may draw
        is_training = generators.may_seed(self)
        random_numbers = contextlib.nullcontext() if is_training else generators.restored()
        try:
            # the thread of the loop waits here; a request to stop may be served meanwhile (waits.py)
            with random_numbers, waits.waiting(is_training):
                return next(copies, None)
        except (RuntimeError, OSError, Unavailable) as error:
            line = "" if isinstance(error, Unavailable) else self.explain(error)
            if line:
                raise NotDelivered(line) from error
            if not isinstance(error, RuntimeError):  # of a file: a DataLoader of the user raises it
                waits.call_before_end(is_training)
            raise

    def _seed(self, step: int, moment: int, shard: int = 0) -> None:
        """Seed all generators for a step (or an epoch) of this rank, or for one of its shards, unless another
        loader leads."""
        if not generators.may_seed(self):
            return
        sampler = self.plan.sampler
        part = sampler.first_shard + shard  # the same on any number of processes
        seed = generators.derive_seed(sampler.seed, part, step, moment)
        generators.seed_all(seed, self.to_device.device)
        # each with a seed of its own: with one seed they would all draw the same numbers
        for place, generator in enumerate(self.generators, 1):
            generator.seed((seed + place) % 2**64)

    def _copies(self) -> Generator[tuple[Batch, Copy], None, None]:
        """Yield batches with their started copies, on a GPU one batch ahead."""
        begun: collections.deque[tuple[Batch, Copy]] = collections.deque()  # at most self._ahead + 1
        self.plan.removal = self.removal
        # the engine works in other threads or processes; this generator runs in the thread of the loop
        with contextlib.closing(self.engine.run(self.plan)) as batches:
            for batch, data in batches:
                try:
                    begun.append(self.begin(batch, data))
                    del data  # before the caller's step: the engine may reuse its memory
                    if len(begun) > self._ahead:
                        yield begun.popleft()
                finally:  # also if the caller leaves the epoch: the engine then frees or reuses its memory
                    if self.engine.reuses_memory:
                        self.to_device.wait()
            # the engine has no more: the batches that are on the device already follow
            while begun:
                yield begun.popleft()

    def close(self) -> None:
        """End the engine's threads and processes."""
        self.engine.close()

    def __enter__(self) -> "Loader":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Index:
    """The index of a Plan for any Dataset. All labels are 0, because they are known only after reading.
    further: name -> digest of what else identifies the data."""

    def __init__(
        self,
        size: int,
        fingerprint: str = "",
        class_names: tuple[str, ...] = (),
        further: dict[str, str] | None = None,
    ):
        self.labels = np.broadcast_to(np.int64(0), size)
        self.fingerprint = fingerprint
        self.class_names = class_names
        self.further = further or {}

    def __len__(self) -> int:
        return len(self.labels)


def pair_of(batch: Any) -> tuple[Any, Any]:
    """Return (inputs, targets) of a collated batch. Raises BadInput."""
    pair = split(batch)
    if pair is not None:
        return pair
    kind = type(batch).__name__
    if isinstance(batch, dict):
        kind = f"a dictionary of {', '.join(map(str, batch))}"
    elif hasattr(batch, "__len__"):
        kind = f"{kind} of {len(batch)}"
    raise BadInput(
        f"a batch of this dataset is {kind}: let an item be (input, target), or a dictionary with one of "
        f"{', '.join(TARGETS)}, or give the loader a collate_fn that returns (inputs, targets)"
    )


def split(value: Any) -> tuple[Any, Any] | None:
    """Return (inputs, targets) of an item or a batch; None if it has no separate target."""
    if isinstance(value, dict):
        for key in TARGETS:
            if key in value:
                inputs = {name: part for name, part in value.items() if name != key}
                return inputs, value[key]
    elif isinstance(value, list | tuple) and len(value) == 2:
        return value[0], value[1]
    return None
