"""The rank of a process, and values that all ranks agree on. host_names.py has the nodes of the ranks.

All functions also work in a job of one process that has not initialised torch.distributed. Every rank calls
those that communicate, at the same point: a rank that does not keeps the others waiting.
"""

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, cast

import torch

from bootfile.ground import accelerator
from bootfile.ground.errors import BadInput
from bootfile.ground.numbers import find_ranges

if TYPE_CHECKING:  # a build of torch may have no torch.distributed
    from torch._C._distributed_c10d import Store

T = TypeVar("T")
ELASTIC = "elastic"  # the backend of common/elastic/group.py, which is gloo
OWN = 0  # a part of a step: this rank computes
WAITING = 1  # it waits for others


class Clock(Protocol):
    """What measures the parts of a step (exact/pace.py)."""

    def cut(self, part: int) -> None:
        """End a part, which began at the last cut."""


clock: Clock | None = None  # measures the training in this process


@contextlib.contextmanager
def waiting() -> Iterator[None]:
    """Wait for other ranks in this block. A module that calls a collective in its forward or backward pass
    uses it on each rank: else the seconds would count as computing."""
    measures = clock
    if measures is None:
        yield
        return
    measures.cut(OWN)  # what came before the block was computing
    try:
        yield
    finally:
        measures.cut(WAITING)


def is_initialized() -> bool:
    """Return whether this process has initialised torch.distributed."""
    return torch.distributed.is_available() and torch.distributed.is_initialized()


def rank() -> int:
    """Return the global rank of this process."""
    return torch.distributed.get_rank() if is_initialized() else 0


def world_size() -> int:
    """Return the number of processes of the job."""
    return torch.distributed.get_world_size() if is_initialized() else 1


def is_first() -> bool:
    """Return whether this process is rank 0, which prints and writes for the job."""
    return rank() == 0


def uses_gloo() -> bool:
    """Return whether the processes communicate with gloo: on the CPU, or if several share a GPU."""
    return torch.distributed.get_backend() in ("gloo", ELASTIC)


def store() -> "Store | None":
    """Return the store of the default group, which all processes share; None in a job of one process."""
    return torch.distributed.distributed_c10d._get_default_store() if world_size() > 1 else None


def _load_messages() -> Any:
    """Return the module that sends values: the first one of several ranks loads it, before the first step."""
    from bootfile.processes import messages

    return messages


def _device() -> torch.device:
    """Return the device whose tensors the backend sends: NCCL and the like send those of the GPU only."""
    if uses_gloo():
        return torch.device("cpu")
    kind = accelerator.kind()
    return torch.device(kind, accelerator.of(kind).current_device())


def broadcast_object(value: T, source: int = 0, is_known: bool = False) -> T:
    """Return the value of one rank on every rank.

    value: of tensors and plain types, whose reading runs no code. Other ranks get tensors on the CPU.
    is_known: this rank has an equal value, and gets its own back.
    """
    if world_size() == 1:
        return value
    sent = _load_messages().broadcast(value, source, _device())
    return value if rank() == source or is_known else cast(T, sent())


def call_on_first(function: Callable[[], T]) -> T:
    """Return function() of rank 0 on every rank. If it raises BadInput, every rank does."""
    value = error = None
    try:
        value = function() if is_first() else None
    except BadInput as refusal:
        error = refusal
    raise_on_all(error)
    return cast(T, broadcast_object(value))


def raise_on_all(error: BadInput | None) -> None:
    """Raise an error of rank 0 on every rank, with the same exit code. Return if it has none.

    Without it the others would wait for rank 0, which has ended with an error.
    """
    if told := broadcast_object((str(error), error.code) if error else None):
        text, code = told
        refusal = error or BadInput(text)
        refusal.code = code
        raise refusal


def gather_objects(value: T) -> list[T]:
    """Return the values of all ranks on every rank. The types are those of broadcast_object()."""
    if world_size() == 1:
        return [value]
    gathered: list[T] = _load_messages().gather(value, _device())
    return gathered


def assert_equal_across_ranks(name: str, value: object) -> None:
    """Raise BadInput on every rank, with both values, if a rank has another value than rank 0."""
    values = gather_objects(value)
    for other_rank, other in enumerate(values):
        if other != values[0]:
            raise BadInput(f"{name}: rank 0 has {values[0]}, rank {other_rank} has {other}")


def broadcast_buffers(model: torch.nn.Module) -> None:
    """Copy the buffers of rank 0 (BatchNorm's statistics) to every rank, before an evaluation: each rank has
    computed its own, and rank 0 saves its own."""
    if world_size() > 1:
        for buffer in model.buffers():
            torch.distributed.broadcast(buffer, 0)


def maximum(value: float, device: torch.device) -> float:
    """Return on every rank the largest value of all ranks. device: a device that the backend supports."""
    return maxima(torch.tensor([float(value)], device=device))[0]


def maxima(values: torch.Tensor) -> list[float]:
    """Return on every rank the largest of each value [n] over all ranks. The values are overwritten."""
    if world_size() > 1:
        torch.distributed.all_reduce(values, torch.distributed.ReduceOp.MAX)
    return values.tolist()


def total(values: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return on every rank the sum of the values over all ranks. device: one that the backend supports."""
    if is_initialized():
        values = values.to(device)
        torch.distributed.all_reduce(values)
    return values


def digest(tensor: torch.Tensor) -> torch.Tensor:
    """Return the digest of a tensor's bits, int64 []; the order of the elements does not change it. Needs no
    other rank."""
    tensor = tensor.resolve_conj().resolve_neg()  # views that are computed when they are read
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    integers = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    bits = tensor.view(integers[tensor.element_size()])
    # each element has an odd factor of its upper half: two changes that cancel in a plain sum do not here. A
    # smaller shift would not notice one sign in 2^shift: the changes of the bits and of the factor cancel
    upper_half = bits >> 4 * tensor.element_size()
    return (bits * (upper_half * 2 + 1)).sum(dtype=torch.int64)


def show(members: Iterable[int]) -> str:
    """Return ranks in words: "rank 3", or "ranks 0-2, 4"."""
    numbers = sorted(members)
    noun = "ranks" if len(numbers) > 1 else "rank"
    return f"{noun} {', '.join(find_ranges(numbers))}"
