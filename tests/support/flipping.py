"""Flip a bit of a job, as an error of the hardware does. A copy of a job runs this file (LINES) after its
imports:

    BOOTFILE_FLIP=FOLDER:RANK,STEP,TENSOR,BIT;RANK,STEP,TENSOR,BIT ...

TENSOR: "weights" (and buffers), "gradients", "optimizer" or "batch", all tensors of them in a row; or one of
them, such as "weights.fc.weight". Their bits are counted from 0; a number beyond the last one begins again.
A file in the folder notes that a bit was flipped: a restart does not flip it again.

It replaces methods of Exact and Loader.
"""

import functools
import os
import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

_LOOP = "bootfile.exact.loop"
LINES = f"""if os.environ.get("BOOTFILE_FLIP"):
    import runpy
    import bootfile.exact.loop
    runpy.run_path({os.path.abspath(__file__)!r})
"""
_FOLDER, _, _TEXT = os.environ.get("BOOTFILE_FLIP", "").rpartition(":")
_INTEGERS = {1: "uint8", 2: "int16", 4: "int32", 8: "int64"}  # bytes of an element -> a type with its bits


class _Flip:
    """A bit that is flipped once. number: of the flip, for its file."""

    def __init__(self, number: int, text: str):
        rank, step, tensor, bit = text.split(",")
        self._path = os.path.join(_FOLDER, f"flip-{number}")
        self._rank = int(rank)
        self._step = int(step)
        self.kind, _, self._name = tensor.partition(".")
        self._bit = int(bit)

    def is_due(self, kind: str, step: int) -> bool:
        """Return whether to flip a bit of this kind of tensors now."""
        if (kind, step, int(os.environ.get("RANK", "0"))) != (self.kind, self._step, self._rank):
            return False
        return not os.path.exists(self._path)

    def do(self, tensors: list[tuple[str, Any]]) -> None:
        """Flip the bit of these tensors, and print which one it is."""
        if self._name:
            tensors = [(name, tensor) for name, tensor in tensors if name == self._name]
        # the number counts the bits of all tensors in a row: find the tensor that has this one
        bit = self._bit % (sum(_count_bits(tensor) for _, tensor in tensors) or 1)
        for name, tensor in tensors:
            if bit < _count_bits(tensor):
                self._change(name, tensor, bit)
                return
            bit -= _count_bits(tensor)

    def _change(self, name: str, tensor: Any, bit: int) -> None:
        import torch

        element, bit = divmod(bit, 8 * tensor.element_size())
        # by index: the elements may be in any order in memory
        place: tuple[int, ...] = ()
        if tensor.ndim:
            place = tuple(int(index) for index in torch.unravel_index(torch.tensor(element), tensor.shape))
        values = tensor.data
        before = values[place].clone()
        # XOR needs an integer: the same bits as one
        whole = before.reshape(1).view(getattr(torch, _INTEGERS[tensor.element_size()]))
        mask = torch.ones_like(whole) << bit
        after = (whole ^ mask).view(tensor.dtype).reshape(())
        values[place] = after
        # before the line is printed: a restart must not flip the bit again
        with open(self._path, "w", encoding="ascii"):
            pass
        print(
            f"flip: rank {self._rank}, step {self._step}: bit {bit} of element {element} of {self.kind} "
            f"{name}: {before.item():.8g} -> {after.item():.8g}",
            flush=True,
        )


def _count_bits(tensor: Any) -> int:
    bits: int = 8 * tensor.element_size() * tensor.numel()
    return bits


class _Methods:
    """The methods of Exact and Loader that flip bits. loop: the module of Exact."""

    def __init__(self, loop: ModuleType, loader: ModuleType):
        self._flips = [_Flip(number, text) for number, text in enumerate(_TEXT.split(";"))]
        self._begin = loop.Exact.begin
        self._accepts = loop.Exact.accepts
        self._end_step = loop.Exact.end_step
        self._iterate = loader.Loader.__iter__
        self._leading: list[Any] = []  # the loader of the training

    def _flip(self, kind: str, step: int, tensors: list[tuple[str, Any]]) -> None:
        for flip in self._flips:
            if flip.is_due(kind, step):
                flip.do(tensors)

    def begin(self, run: Any, *arguments: Any, **options: Any) -> None:
        """Begin a run, and remember its loader."""
        self._begin(run, *arguments, **options)
        self._leading.append(run.loader)
        shards = run.parts.shards
        if shards:  # before the gradients of the ranks are added
            add = shards.add

            def add_shard(loss: Any) -> Any:
                self._flip("gradients", run.loader.step, _list_gradients(run))
                return add(loss)

            shards.add = add_shard

    def accepts(self, run: Any, loss: Any) -> Any:
        """Flip gradients before the optimizer takes them."""
        self._flip("gradients", run.loader.step, _list_gradients(run))
        return self._accepts(run, loss)

    def end_step(self, run: Any) -> Any:
        """Flip weights and the state of the optimizer before a state is saved."""
        self._flip("weights", run.loader.step, list(run.model.state_dict().items()))
        self._flip("optimizer", run.loader.step, _list_state(run.state.objects["optimizer"]))
        return self._end_step(run)

    def iterate(self, loader: Any) -> Iterator[Any]:
        """Flip the inputs of a step before the loop gets them."""
        from torch.utils._pytree import tree_flatten

        for delivered in self._iterate(loader):
            if loader in self._leading:
                inputs = enumerate(tree_flatten(delivered[0])[0])
                self._flip("batch", loader.step, [(str(place), value) for place, value in inputs])
            yield delivered


def _list_gradients(run: Any) -> list[tuple[str, Any]]:
    named = run.model.named_parameters()
    return [(name, value.grad) for name, value in named if value.grad is not None]


def _list_state(optimizer: Any) -> list[tuple[str, Any]]:
    tensors = []
    for number, values in optimizer.state_dict()["state"].items():
        for name, value in values.items():
            if hasattr(value, "element_size"):
                tensors.append((f"{number}.{name}", value))
    return tensors


def install(loop: ModuleType) -> None:
    """Replace methods of Exact and Loader by those that flip the bits. loop: the module of Exact."""
    from bootfile.loaders import loader

    methods = _Methods(loop, loader)
    # a method of another object would not get the run
    loop.Exact.begin = functools.partialmethod(_call, methods.begin)
    loop.Exact.accepts = functools.partialmethod(_call, methods.accepts)
    loop.Exact.end_step = functools.partialmethod(_call, methods.end_step)
    kind: Any = loader.Loader
    kind.__iter__ = functools.partialmethod(_call, methods.iterate)


def _call(self: Any, method: Any, *arguments: Any, **options: Any) -> Any:
    return method(self, *arguments, **options)


if _TEXT:
    install(sys.modules[_LOOP])
