"""Refuse user code whose results depend on the number of processes, in a step of shards."""

import collections
import inspect
import types
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.utils.checkpoint  # torch 2.1 does not import it
from torch.utils._pytree import tree_flatten, tree_map_only, tree_unflatten

from bootfile.ground.errors import BadInput
from bootfile.processes import ranks

# types of inputs with which a call is repeated: it may change other objects, and they cannot be sent
_PLAIN = (torch.Tensor, torch.nn.Parameter, bool, int, float, str, type(None))


class Call:
    """The first call of a module in a step. All ranks repeat that of rank 0 at the end of the step: a result
    differs if the module keeps state between its calls.

    hooked: the module, or the wrapper that calls it. `sources`: those of random numbers; if they are set,
    the next call is recorded. `inputs`, `states`: the tensors and numbers of the call, and the states of the
    sources before it. `results`: digests. `repeat`: returns the results with inputs and states of rank 0.
    Generators and attributes of the module are restored, buffers are not. No results if nothing was recorded.
    """

    def __init__(self, name: str, hooked: torch.nn.Module, module: torch.nn.Module):
        self.name, self.module = name, module
        self.forget()
        hooked.register_forward_pre_hook(self._record, with_kwargs=True)
        hooked.register_forward_hook(self._keep_results)

    def forget(self) -> None:
        self.sources: list[Any] = []
        self.inputs: list[Any] = []
        self.states: list[Any] = []
        self.results: dict[str, int] = {}
        self.repeat: Callable[[list[Any], list[Any]], dict[str, int]] = lambda inputs, states: {}

    def _record(self, _: Any, *given: Any) -> None:
        leaves, structure = tree_flatten(given)
        if not self.sources or not all(type(each) in _PLAIN for each in leaves):
            return
        modules, sources, self.sources = list(self.module.modules()), self.sources, []
        modes = [each.training for each in modules]
        has_grad, autocast = torch.is_grad_enabled(), _find_autocast(leaves)
        devices = [each.device if isinstance(each, torch.Tensor) else None for each in leaves]
        self.inputs, self.states = tree_map_only(torch.Tensor, _copy, leaves), _get_states(sources)

        def repeat(inputs: list[Any], states: list[Any]) -> dict[str, int]:
            own, attributes = _get_states(sources), [dict(vars(each)) for each in modules]
            for each, mode in zip(modules, modes, strict=True):
                each.training = mode
            _set_states(sources, states)
            # a module of the user may raise any error outside its loop: then it is not checked
            try:
                with torch.set_grad_enabled(has_grad), autocast:
                    moved = [
                        _copy(each, device) if device else each
                        for each, device in zip(inputs, devices, strict=True)
                    ]
                    args, kwargs = tree_unflatten(moved, structure)
                    return self._list_results(self.module(*args, **kwargs))
            except Exception:
                return {}
            finally:
                _set_states(sources, own)
                for each, old in zip(modules, attributes, strict=True):
                    vars(each).clear()
                    vars(each).update(old)

        self.repeat = repeat

    def _keep_results(self, _: Any, args: tuple, output: Any) -> None:
        if self.states and not self.results:
            self.results = self._list_results(output)

    def _list_results(self, output: Any) -> dict[str, int]:
        """Return the digests of the outputs, parameters and buffers."""
        named = [(f"output {place}", each) for place, each in enumerate(tree_flatten(output)[0])]
        named += [(f"parameter {name}", each) for name, each in self.module.named_parameters()]
        named += [(f"buffer {name}", each) for name, each in self.module.named_buffers()]
        tensors = {name: each for name, each in named if isinstance(each, torch.Tensor) and is_dense(each)}
        return {name: int(ranks.digest(each.detach())) for name, each in tensors.items()}


def list_variables(function: Any) -> dict[str, Any]:
    """Return the variables of a plain function that Python keeps between its calls, as values to compare."""
    if not inspect.isfunction(function):
        return {}
    try:
        outer = inspect.getclosurevars(function)
    except ValueError:  # a variable of the loop has no value yet
        return {}
    variables = {**outer.globals, **outer.nonlocals, **vars(function)}
    return {name: _freeze(each) for name, each in variables.items()}


def _freeze(value: Any, depth: int = 4) -> Any:
    if isinstance(value, torch.Tensor):
        return int(ranks.digest(value.detach())) if is_dense(value) else None
    if isinstance(value, np.ndarray | int | float | str):
        return repr(value)
    if isinstance(value, torch.nn.Module | type | types.ModuleType | types.FunctionType) or not depth:
        return None
    parts = value if isinstance(value, dict) else getattr(value, "__dict__", {})
    if isinstance(value, list | tuple | collections.deque):
        parts = dict(enumerate(value))
    return {name: _freeze(each, depth - 1) for name, each in parts.items()}


def _find_autocast(inputs: Any) -> Any:
    """Return the context of mixed precision that is active for inputs on a device."""
    devices = [each.device.type for each in tree_flatten(inputs)[0] if isinstance(each, torch.Tensor)]
    kind = next((each for each in devices if each != "cpu"), "cpu")
    own, of_cpu = torch.utils.checkpoint._get_autocast_kwargs(kind)  # its arguments differ between versions
    return torch.autocast(kind, **own) if own else torch.autocast("cpu", **of_cpu)


def is_dense(tensor: torch.Tensor) -> bool:
    return tensor.layout == torch.strided and not tensor.is_nested


def _copy(tensor: torch.Tensor, device: torch.device | str = "cpu") -> torch.Tensor:
    copy = tensor.detach().to(device, copy=True)
    return copy.requires_grad_(tensor.requires_grad)


def _get_states(sources: list[Any]) -> list[Any]:
    """Return the present states of generators as plain values and tensors."""
    states = []
    for source in sources:
        names = [name for name in ("get_rng_state", "get_state", "getstate") if hasattr(source, name)]
        states.append(getattr(source, names[0])() if names else source.bit_generator.state)  # of NumPy
    return tree_map_only(np.ndarray, np.ndarray.tolist, states)


def _set_states(sources: list[Any], states: list[Any]) -> None:
    for source, state in zip(sources, states, strict=True):
        names = [name for name in ("set_rng_state", "set_state", "setstate") if hasattr(source, name)]
        if names:
            getattr(source, names[0])(state)
        else:
            source.bit_generator.state = state


def check_settings() -> None:
    """Raise BadInput if a setting of torch on which sums depend is another one."""
    settings = {
        "torch.get_num_threads()": (torch.get_num_threads(), 1),
        "torch.backends.cudnn.benchmark": (torch.backends.cudnn.benchmark, False),
    }
    for name, (value, expected) in settings.items():
        if value != expected:
            raise BadInput(f"--exact_shards: {name} is {value}, expected {expected}")


def count_collectives() -> int:
    """Return the number of collectives so far; 0 if this version of torch does not count them."""
    group: Any = torch.distributed.distributed_c10d._get_default_group()
    try:
        return group._get_sequence_number_for_group()
    except RuntimeError:
        return 0
