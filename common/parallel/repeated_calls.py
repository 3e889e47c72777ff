"""Repeat calls of modules in a step of shards, and refuse a module whose results depend on the processes.

The sums of exact_shards.py are equal on any number of processes if a shard is a function of the weights, the
buffers, the inputs and the random numbers of the step. State between two calls is in buffers of the model,
the criterion and the other modules of the Checkpointer: each shard begins with them. Other state, as of a
model that counts its calls, is outside. In the first two steps the first call of each of these modules is
repeated at the end of the step, with other shards in between and on every process (Guards). What this does
not see, such as a variable of a criterion that is a function, shows in `launch prove` with more processes.

A recorded call (Recorder) has tensors, numbers and texts, which can be sent, in any nested containers. Other
calls are not recorded. A repetition that raises an error has no result. It changes neither random numbers nor
attributes of the module; the caller restores the buffers.
"""

import functools
import itertools
from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np
import torch
import torch.utils.checkpoint  # torch 2.1 does not import it
from torch.utils._pytree import tree_flatten, tree_map_only, tree_unflatten

from bootfile.ground.errors import BadInput
from bootfile.processes import ranks

T = TypeVar("T")

_CHECKED = 2  # steps of Guards: a repeated call takes as long as the first one
_PLAIN = (torch.Tensor, torch.nn.Parameter, bool, int, float, str, type(None))
# torch, its devices, its generators, `random` and NumPy name the methods differently
_GET = ("get_rng_state", "get_state", "getstate")
_SET = ("set_rng_state", "set_state", "setstate")


class Guards:
    """Repeats the first calls of modules in the first steps. Shards calls it on every rank.

    forward: the DistributedDataParallel.
    """

    def __init__(self, forward: Any):
        self._forward = forward
        self._steps = 0  # that have ended
        self._calls: dict[str, tuple[torch.nn.Module, Recorder]] = {}  # name -> module, its first call
        self._results: dict[str, dict[str, int]] = {}  # name -> digests of the first call in this step
        self._watch("the model", forward, forward.module)

    def watch(self, modules: dict[str, torch.nn.Module]) -> None:
        """Check these modules too, before the first step. modules: name -> module of the Checkpointer."""
        # a call of the model repeats its parts: only other modules need a record of their own
        parts_of_model = {self._forward, *self._forward.module.modules()}
        for name, module in modules.items():
            if module not in parts_of_model:
                self._watch(name, module, module)

    def _watch(self, name: str, hooked: torch.nn.Module, module: torch.nn.Module) -> None:
        """Record the first call of a module in each checked step; see Recorder for `hooked`."""

        def keep(output: Any) -> None:
            self._results[name] = digest_results(module, output)

        self._calls[name] = module, Recorder(hooked, module, keep)

    @property
    def is_checked(self) -> bool:
        """Return whether calls are recorded in this step, for repeat_calls()."""
        return self._steps < _CHECKED

    def begin_step(self, sources: list[Any]) -> None:
        """Begin a step before its first forward pass. sources: the generators of random numbers."""
        if self.is_checked:
            for _, recorder in self._calls.values():
                recorder.expect(sources)

    def end_step(self) -> None:
        """End a step when its gradients are complete on this rank."""
        self._steps += 1

    def repeat_calls(self, restore_buffers: Callable[[], None]) -> None:
        """Repeat rank 0's first call of each module. All ranks raise BadInput if a result differs on any.

        It is called on every rank in a checked step, after the backward pass of the rank's last shard and
        before the gradients are added over the ranks. The ranks wait for each other here.
        restore_buffers: sets the buffers to their values before the step.
        """
        sent = {name: (recorder.inputs, recorder.states) for name, (_, recorder) in self._calls.items()}
        sent_by_first, expected = ranks.broadcast_object((sent, self._results))
        differences: list[str] = []
        for name, (module, recorder) in self._calls.items():
            restore_buffers()
            inputs, states = sent_by_first[name]
            repeated = recorder.repeat(inputs, states, functools.partial(digest_results, module))
            recorder.forget()
            first = expected.get(name) or {}
            parts = repeated.items() if first and repeated else ()
            differences += [f"{name}: {part}" for part, digest in parts if digest != first.get(part)]
        self._results = {}
        # on all ranks: one that continued would wait for the others in the next collective
        if gathered := list(itertools.chain(*ranks.gather_objects(differences))):
            raise BadInput(
                f"--exact_shards: {gathered[0]} changes if a shard is computed again after others or on "
                "another process: expected state between two calls only in buffers (register_buffer) of "
                "the model, the criterion and other objects of the Checkpointer, with which each shard begins"
            )


class Recorder:
    """Records the next call of a module after expect(). repeat() computes it again, until forget().

    hooked: the module, or the wrapper that the loop calls in its place. module: what is called again.
    keep: gets the output of the recorded call.
    `inputs`: the tensors and numbers of the call, on the CPU. `states`: those of the generators before it.
    Another process repeats the call with these two. Both are empty if nothing was recorded.
    """

    def __init__(self, hooked: torch.nn.Module, module: torch.nn.Module, keep: Callable[[Any], object]):
        self._module = module
        self._keep = keep
        self._sources: list[Any] = []  # generators of random numbers
        self._is_expected = False
        self._is_open = False  # the recorded call has not returned
        self._form: Any = None  # of the recorded call: structure, devices, precision
        self.inputs: list[Any] = []
        self.states: list[Any] = []
        hooked.register_forward_pre_hook(self._record, with_kwargs=True)
        hooked.register_forward_hook(self._end)

    def expect(self, sources: list[Any]) -> None:
        """Record the next call. sources: the generators from which it may draw random numbers."""
        self.forget()
        self._sources = sources
        self._is_expected = True

    def forget(self) -> None:
        """Free what was recorded, and record no call until expect()."""
        self._is_expected = False
        self._form = None
        self.inputs = []
        self.states = []

    def _record(self, _: Any, args: tuple, kwargs: dict) -> None:
        """Keep the inputs of an expected call. torch calls it before each forward pass of the module."""
        if not self._is_expected:
            return
        inputs, structure = tree_flatten((args, kwargs))
        if not all(type(value) in _PLAIN for value in inputs):
            return
        devices = [getattr(value, "device", None) for value in inputs]
        self._form = structure, devices, _find_autocast(devices)
        # on the CPU: it may be sent, and the loop may change its own tensors
        self.inputs = tree_map_only(torch.Tensor, _copy, inputs)
        self.states = _get_states(self._sources)
        self._is_expected = False
        self._is_open = True

    def _end(self, _: Any, args: tuple, output: Any) -> None:
        """Pass the output of the recorded call to keep(). torch calls it after each forward pass."""
        if self._is_open:
            self._is_open = False
            self._keep(output)

    def repeat(self, inputs: list[Any], states: list[Any], read: Callable[[Any], T]) -> T | None:
        """Return read(the output of the call with these inputs and states, which may be those of another
        process); None if this process has recorded no call, or if the module raises an error."""
        if not self._form:
            return None
        structure, devices, autocast = self._form
        modules = list(self._module.modules())
        # a module that counts its calls must not count this one: the step would depend on it
        attributes_before = [dict(vars(module)) for module in modules]
        states_before = _get_states(self._sources)
        try:  # a module of the user may raise any error outside of its loop
            _set_states(self._sources, states)
            moved = []
            for value, device in zip(inputs, devices, strict=True):
                moved.append(value if device is None else _copy(value, device))
            args, kwargs = tree_unflatten(moved, structure)
            with torch.enable_grad(), autocast:
                return read(self._module(*args, **kwargs))
        except Exception:
            return None
        finally:
            _set_states(self._sources, states_before)
            for module, attributes in zip(modules, attributes_before, strict=True):
                vars(module).clear()
                vars(module).update(attributes)


def digest_results(module: torch.nn.Module, output: Any) -> dict[str, int]:
    """Return the digests of the outputs of a call, and of the parameters and buffers after it: a call may
    change a weight, or a buffer by what it has kept."""
    values = {f"output {place}": value for place, value in enumerate(tree_flatten(output)[0])}
    values |= {f"parameter {name}": parameter for name, parameter in module.named_parameters()}
    values |= {f"buffer {name}": buffer for name, buffer in module.named_buffers()}
    return {
        name: int(ranks.digest(value.detach()))
        for name, value in values.items()
        if isinstance(value, torch.Tensor) and is_dense(value)
    }


def is_dense(tensor: torch.Tensor) -> bool:
    """Return whether a tensor can be copied and has a digest: it is neither sparse nor nested."""
    return tensor.layout == torch.strided and not tensor.is_nested


def _copy(tensor: torch.Tensor, device: torch.device | str = "cpu") -> torch.Tensor:
    """Return a copy of an input on a device, of which a gradient can be computed if it could before."""
    copy = tensor.detach().to(device, copy=True)
    return copy.requires_grad_(tensor.requires_grad)


def _find_autocast(devices: list[torch.device | None]) -> Any:
    """Return the context of mixed precision that is active for inputs on these devices."""
    kind = next((device.type for device in devices if device and device.type != "cpu"), "cpu")
    # checkpoint() has the same need: the arguments of autocast differ between versions of torch
    of_accelerator, of_cpu = torch.utils.checkpoint._get_autocast_kwargs(kind)
    return torch.autocast(kind, **of_accelerator) if of_accelerator else torch.autocast("cpu", **of_cpu)


def _find_method(source: Any, names: tuple[str, ...]) -> Any:
    """Return the first of these methods that a generator has; None for a generator of NumPy."""
    return next((getattr(source, name) for name in names if hasattr(source, name)), None)


def _get_states(sources: list[Any]) -> list[Any]:
    """Return the present states of generators as plain values and tensors, which can be sent."""
    states = []
    for source in sources:
        get = _find_method(source, _GET)
        states.append(get() if get else source.bit_generator.state)
    return tree_map_only(np.ndarray, np.ndarray.tolist, states)


def _set_states(sources: list[Any], states: list[Any]) -> None:
    """Set generators to states of _get_states()."""
    for source, state in zip(sources, states, strict=True):
        if set_state := _find_method(source, _SET):
            set_state(state)
        else:
            source.bit_generator.state = state
