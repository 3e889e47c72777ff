"""Refuse user code whose results depend on the number of processes, in a step of shards.

The sums of exact_shards.py are equal on any number of processes only if a shard is a function of the weights,
the buffers, the inputs and the random numbers of the step. A model that counts its calls, for example, gives
other outputs if a process computes two shards and not one. So in some steps the first call of each module is
recorded and repeated at the end of the step, with other shards in between and on every process: FirstCall.
"""

import collections
import contextlib
import inspect
import os
import types
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
import torch.utils.checkpoint  # torch 2.1 does not import it
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils._pytree import tree_flatten, tree_map_only, tree_unflatten

from bootfile.ground.errors import BadInput
from bootfile.machine import convolution
from bootfile.processes import ranks

T = TypeVar("T")

_CHECK_EVERY = 32  # steps between two with repeated calls: a repeated call takes as long as the first one
_DEPTH = 4  # levels of lists, dictionaries and attributes that are compared in a variable
# types of inputs with which a call is repeated: a call may change other objects, and they cannot be sent
_PLAIN = (torch.Tensor, torch.nn.Parameter, bool, int, float, str, type(None))


def _is_not_compiling() -> bool:
    return False


# whether torch.compile() traces the caller (not in torch 2.1)
_is_compiling: Callable[[], bool] = getattr(torch.compiler, "is_compiling", _is_not_compiling)


class Guards:
    """Watches the modules, the optimizers and the criterion of a loop that trains with Shards.

    Shards calls the methods on every rank: begin_step() before the first forward pass of a step,
    before_forward() and after_forward() around each forward pass, check_criterion() and check_collectives()
    after the backward pass of each shard, repeat_calls() after that of the last one, and end_step() when the
    gradients of the step are complete.

    forward: the DistributedDataParallel. list_trained: returns the parameters whose gradients are added.
    `is_checked`: whether calls are recorded in this step, for repeat_calls().
    `is_repeating`: whether repeat_calls() calls a module at this moment.
    """

    def __init__(self, forward: Any, list_trained: Callable[[], list[torch.Tensor]]):
        self.is_checked = False
        self.is_repeating = False
        self._forward = forward
        self._list_trained = list_trained
        self._calls = [FirstCall("the model", forward, forward.module)]
        self._known: set[torch.nn.Module] = set()  # modules that are part of a FirstCall
        self._sources: list[Any] = []  # of random numbers, in this step
        self._criterion: Any = None
        # the criterion's variables, from a forward pass to the end of its shard
        self._variables: dict[str, Any] | None = None
        self._steps = 0  # that have ended
        self._is_in_step = False
        self._collectives = 0  # of torch.distributed, when the shard began
        self._module_hook: Any = None  # from a forward pass to the end of its shard
        self._optimizer_hook: Any = None

    def watch(self, modules: dict[str, torch.nn.Module], criterion: Any) -> None:
        """Check these modules, besides the model, and the variables of this criterion. Shards calls it before
        the first step, with the objects of the Checkpointer. modules: name -> module."""
        self._remove_module_hook()
        self._variables = None
        self._criterion = criterion
        self._is_in_step = False
        # a call of the model repeats its parts: only other modules need a record of their own
        parts_of_model = {self._forward, *self._forward.module.modules()}
        for name, module in modules.items():
            if module not in parts_of_model:
                self._calls.append(FirstCall(name, module, module))
        self._known = parts_of_model
        for module in modules.values():
            self._known.update(module.modules())

    def install(self) -> None:
        """Check each step of an optimizer from now on. Shards.attach() calls it on every rank before the
        first step. torch has one list of hooks for all optimizers of the process: those of an earlier run, as
        in a notebook, are removed."""
        global _installed
        uninstall()
        self._optimizer_hook = register_optimizer_step_pre_hook(self._check_optimizer)
        _installed = self

    def remove_hooks(self) -> None:
        """Remove the hooks that torch calls for all modules and all optimizers of the process, at the end of
        a run or before another one in this process."""
        global _installed
        self._remove_module_hook()
        if self._optimizer_hook:
            self._optimizer_hook.remove()
            self._optimizer_hook = None
        if _installed is self:
            _installed = None

    def _remove_module_hook(self) -> None:
        """Stop the watch of after_forward(). It ends with the shard, or with the run."""
        if self._module_hook:
            self._module_hook.remove()
            self._module_hook = None

    def begin_step(self, sources: list[Any]) -> None:
        """Begin a step before its first forward pass. sources: the generators from which modules draw random
        numbers. The first two steps are checked, and then every 32nd one."""
        self._is_in_step = True
        self._sources = sources
        self.is_checked = self._steps < 2 or self._steps % _CHECK_EVERY == 0
        self.count_collectives()
        if self.is_checked:
            for call in self._calls:
                call.expect(sources)

    def end_step(self) -> None:
        """End a step when its gradients are complete on this rank. A step of an optimizer is right from now
        on, until begin_step()."""
        self._is_in_step = False
        self._steps += 1

    def before_forward(self) -> None:
        """End the watch of the loop while the model runs: torch.compile() would trace the hook with it, in
        the second forward pass of a shard."""
        self._remove_module_hook()

    def after_forward(self) -> None:
        """Watch what the loop does between the forward pass of a shard and the end of the shard: which other
        modules it calls, and whether the criterion changes its variables. Only in a checked step."""
        if not self.is_checked:
            return
        if self._variables is None:
            self._variables = list_variables(self._criterion)
        if not self._module_hook:
            self._module_hook = register_module_forward_pre_hook(self._add_module)

    def _add_module(self, module: torch.nn.Module, _: Any) -> None:
        """Check a module that is not in the Checkpointer, from its next call on. torch calls it before the
        forward pass of each module."""
        if _is_compiling() or not torch.is_grad_enabled() or module in self._known:
            return
        self._known.update(module.modules())
        call = FirstCall(type(module).__name__, module, module)
        call.expect(self._sources)
        self._calls.append(call)

    def check_criterion(self) -> None:
        """Raise BadInput if the criterion, a plain function, has changed a variable since the forward pass
        of this shard. A step may have ended with an error in between: then nothing is compared."""
        self._remove_module_hook()
        before = self._variables
        self._variables = None
        if before is None:
            return
        for name, value in list_variables(self._criterion).items():
            if value != before.get(name):
                raise BadInput(
                    f"--exact_shards: the criterion changes its variable {name} in a shard: expected a "
                    "module with its state in buffers (register_buffer), with which each shard begins"
                )

    def count_collectives(self) -> None:
        """Remember the number of collectives of this process when a shard begins, for check_collectives()."""
        self._collectives = _count_collectives()

    def check_collectives(self) -> None:
        """Raise BadInput if there was a collective since the shard began: a process with fewer shards would
        not take part, and the others would wait."""
        if self._collectives != _count_collectives():
            raise BadInput("--exact_shards: the model or the criterion communicates with other processes")

    def repeat_calls(self, restore_buffers: Callable[[], None]) -> None:
        """Repeat rank 0's first call of each module on every rank. All ranks raise BadInput if a result
        differs on any rank.

        Shards.add() calls it on every rank in a checked step (the first two, and then every 32nd one), after
        the backward pass of the rank's last shard and before the gradients are added over the ranks. The
        ranks wait for each other here. After it nothing is recorded until the next checked step.

        restore_buffers: sets the buffers to their values before the step.
        """
        sent = [(call.name, call.inputs, call.states, call.results) for call in self._calls]
        of_rank_0 = ranks.broadcast_object(sent)
        differences: list[str] = []
        # a rank may have found fewer modules than rank 0, and then compares fewer calls
        for call, (name, inputs, states, results) in zip(self._calls, of_rank_0, strict=False):
            restore_buffers()
            # a rank that calls other modules than rank 0 has nothing to compare
            if call.name == name and results:
                with self.repeating():
                    repeated = call.repeat(inputs, states)
                different = [part for part, digest in repeated.items() if digest != results.get(part)]
                differences += [f"{name}: {part}" for part in different]
            call.forget()
        # on all ranks: one that continued would wait for the others in the next collective
        for of_rank in ranks.gather_objects(differences):
            if of_rank:
                raise BadInput(
                    f"--exact_shards: {of_rank[0]} changes if a shard is computed again after others or on "
                    "another process: expected state between two calls only in buffers (register_buffer) of "
                    "the model, the criterion and other objects of the Checkpointer, with which each shard "
                    "begins"
                )

    @contextlib.contextmanager
    def repeating(self) -> Iterator[None]:
        """Let is_repeating() be true in a block, for the hooks of others: calls are only compared there."""
        self.is_repeating = True
        try:
            yield
        finally:
            self.is_repeating = False

    def _check_optimizer(self, optimizer: torch.optim.Optimizer, args: tuple, kwargs: dict) -> None:
        """Raise BadInput for a step with a closure, or between two shards. torch calls it before the step of
        each optimizer of the process, with the arguments of step(); the first one is the optimizer."""
        # an optimizer that sees one shard would change the weights before the gradients are complete
        trained = set(self._list_trained())
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        if trained.isdisjoint(parameters):
            return  # it trains the input, for example
        name = f"--exact_shards: {type(optimizer).__name__}.step()"
        # step(closure): args[0] is the optimizer
        closures = [*args[1:2], kwargs.get("closure")]
        if any(closure is not None for closure in closures):
            raise BadInput(f"{name} got a closure, which sees one shard: expected an optimizer without one")
        if self._is_in_step:
            raise BadInput(f"{name} between two shards: expected it after shards.add() has returned a loss")


_installed: Guards | None = None  # those of this process whose hooks are in torch's lists


def uninstall() -> None:
    """Remove the hooks of the last Guards of this process that were installed, if there are any."""
    if _installed:
        _installed.remove_hooks()


def is_repeating() -> bool:
    """Return whether a module is called at this moment only to compare its results. A hook that counts the
    calls of a module, as in common/run/sample_losses.py, ignores such a call."""
    return _installed is not None and _installed.is_repeating


class _Repetition(NamedTuple):
    """What a process needs to repeat a call, besides the inputs and the states that rank 0 sends.

    structure: how the inputs are nested in (args, kwargs). devices: of each input; None for a number.
    sources: those of random numbers. modules: the module and its parts. modes: whether each one trained.
    has_grad, autocast: whether gradients were computed, and the context of mixed precision.
    """

    structure: Any
    devices: list[torch.device | None]
    sources: list[Any]
    modules: list[torch.nn.Module]
    modes: list[bool]
    has_grad: bool
    autocast: Any


class FirstCall:
    """The first call of a module in a checked step, and its results.

    Each rank records the call of its own first shard. At the end of the step all ranks repeat the call of
    rank 0: each with its own module, which has computed other shards since. The results are those of rank 0,
    unless the module keeps state between its calls that is not in a buffer.

    The guards make one for each module that they watch, for the whole run. In a checked step, on every rank:

        expect()           before the first forward pass of the step
        _record()          before the module's first call, by a hook of torch
        _keep_results()    after that call, by a hook of torch
        repeat()           after the backward pass of the rank's last shard
        forget()           directly after repeat()

    name: of the module in messages. hooked: the module, or the wrapper that the loop calls in its place.
    `inputs`: the tensors and numbers of the call, on the CPU. `states`: those of the generators before it.
    `results`: digests of its outputs, and of the parameters and buffers after it. These three are what rank 0
    sends. They are empty if nothing was recorded: the call had inputs of other types, or there was none.
    """

    def __init__(self, name: str, hooked: torch.nn.Module, module: torch.nn.Module):
        self.name = name
        self.module = module
        self._sources: list[Any] = []  # set while the next call is expected
        self._repetition: _Repetition | None = None
        self.inputs: list[Any] = []
        self.states: list[Any] = []
        self.results: dict[str, int] = {}
        hooked.register_forward_pre_hook(self._record, with_kwargs=True)
        hooked.register_forward_hook(self._keep_results)

    def expect(self, sources: list[Any]) -> None:
        """Record the next call. Guards.begin_step() calls it before the first forward pass of a checked step,
        or Guards._add_module() when the loop calls a module for the first time. sources: generators of random
        numbers, whose states are recorded, too."""
        self._sources = sources

    def forget(self) -> None:
        """Delete what was recorded, and record no call until expect(). Guards.repeat_calls() calls it on
        every rank, as soon as the call was repeated. Otherwise the inputs would take memory, and the next
        checked step would be compared with the results of this one, and refused."""
        self._sources = []
        self._repetition = None
        self.inputs = []
        self.states = []
        self.results = {}

    def _record(self, _: Any, args: tuple, kwargs: dict) -> None:
        """Record a call that is expected. torch calls it before each forward pass of the module."""
        inputs, structure = tree_flatten((args, kwargs))
        if not self._sources or not all(type(value) in _PLAIN for value in inputs):
            return
        modules = list(self.module.modules())
        devices: list[torch.device | None] = []
        for value in inputs:
            is_tensor = isinstance(value, torch.Tensor)
            devices.append(value.device if is_tensor else None)
        self._repetition = _Repetition(
            structure,
            devices,
            self._sources,
            modules,
            [module.training for module in modules],
            torch.is_grad_enabled(),
            _find_autocast(inputs),
        )
        # on the CPU: rank 0 sends them to all, and the loop may change its own tensors
        self.inputs = tree_map_only(torch.Tensor, _copy, inputs)
        self.states = _get_states(self._sources)
        self._sources = []  # later calls of the step are not recorded

    def _keep_results(self, _: Any, args: tuple, output: Any) -> None:
        """Keep the results of the recorded call. torch calls it after each forward pass of the module."""
        if self._repetition and not self.results:
            self.results = self._list_results(output)

    def repeat(self, inputs: list[Any], states: list[Any]) -> dict[str, int]:
        """Call the module with the inputs and the states of rank 0, and return the results as in `results`;
        {} if this rank has recorded no call, or if the module raises an error. Guards.repeat_calls() calls it
        on every rank in a checked step, after the backward pass of the rank's last shard."""
        return self.call(inputs, states, self._list_results) or {}

    def call(self, inputs: list[Any], states: list[Any], read: Callable[[Any], T]) -> T | None:
        """Call the module with the inputs and the states of another rank, and return read(its output); None
        if this rank has recorded no call, or if the module raises an error.

        Generators and attributes of the module are restored. The caller restores the buffers.
        """
        repetition = self._repetition
        if not repetition:
            return None
        states_before = _get_states(repetition.sources)
        # a module that counts its calls must not count this one: the step would depend on the check
        attributes_before = [dict(vars(module)) for module in repetition.modules]
        for module, mode in zip(repetition.modules, repetition.modes, strict=True):
            module.training = mode
        _set_states(repetition.sources, states)
        # a module of the user may raise any error outside its loop: then it is not checked
        try:
            with torch.set_grad_enabled(repetition.has_grad), repetition.autocast:
                args, kwargs = self._nest(repetition, inputs)
                return read(self.module(*args, **kwargs))
        except Exception:
            return None
        finally:
            _set_states(repetition.sources, states_before)
            for module, attributes in zip(repetition.modules, attributes_before, strict=True):
                vars(module).clear()
                vars(module).update(attributes)

    def _nest(self, repetition: _Repetition, inputs: list[Any]) -> Any:
        """Return the inputs of rank 0 as (args, kwargs), on the devices of this process."""
        moved = []
        for value, device in zip(inputs, repetition.devices, strict=True):
            if device:
                moved.append(_copy(value, device))
            else:
                moved.append(value)
        return tree_unflatten(moved, repetition.structure)

    def _list_results(self, output: Any) -> dict[str, int]:
        """Return the digests of the outputs, parameters and buffers: directly after the first call, and after
        the repeated one."""
        # not only the outputs: a call may change a weight, or a buffer by what it has kept
        values: dict[str, Any] = {}
        for place, value in enumerate(tree_flatten(output)[0]):
            values[f"output {place}"] = value
        for name, parameter in self.module.named_parameters():
            values[f"parameter {name}"] = parameter
        for name, buffer in self.module.named_buffers():
            values[f"buffer {name}"] = buffer
        digests = {}
        for name, value in values.items():
            if isinstance(value, torch.Tensor) and is_dense(value):
                digests[name] = int(ranks.digest(value.detach()))
        return digests


def list_variables(function: Any) -> dict[str, Any]:
    """Return name -> value of the variables that a plain function keeps between its calls: those of the
    module and of the functions around it, and its own attributes. {} for another object, such as a module.

    The guards compare two such results to find a criterion that counts or averages in a variable. A value is
    as in _comparable().
    """
    if not inspect.isfunction(function):
        return {}
    try:
        used = inspect.getclosurevars(function)
    except ValueError:  # a variable of the loop has no value yet
        return {}
    variables = {**used.globals, **used.nonlocals, **vars(function)}
    return {name: _comparable(value) for name, value in variables.items()}


def _comparable(value: Any, depth: int = _DEPTH) -> Any:
    """Return a value in a form that `==` compares and that does not change later: a digest, a text, or a
    dictionary of them. None for what is not compared: modules, whose calls are repeated, classes, functions,
    and what is deeper than `depth` levels."""
    if isinstance(value, torch.Tensor):
        return int(ranks.digest(value.detach())) if is_dense(value) else None
    if isinstance(value, np.ndarray | int | float | str):
        return repr(value)
    if isinstance(value, torch.nn.Module | type | types.ModuleType | types.FunctionType) or depth == 0:
        return None
    # level by level: a count may be in a list, or in an attribute of an object
    if isinstance(value, dict):
        parts = value
    elif isinstance(value, list | tuple | collections.deque):
        parts = dict(enumerate(value))
    else:
        parts = getattr(value, "__dict__", {})
    return {name: _comparable(part, depth - 1) for name, part in parts.items()}


def _find_autocast(inputs: list[Any]) -> Any:
    """Return the context of mixed precision that is active for inputs on a device."""
    kind = "cpu"
    for value in inputs:
        if isinstance(value, torch.Tensor) and value.device.type != "cpu":
            kind = value.device.type
            break
    # checkpoint() has the same need: the arguments of autocast differ between versions of torch
    of_accelerator, of_cpu = torch.utils.checkpoint._get_autocast_kwargs(kind)
    if of_accelerator:
        return torch.autocast(kind, **of_accelerator)
    return torch.autocast("cpu", **of_cpu)


def is_dense(tensor: torch.Tensor) -> bool:
    """Return whether a tensor can be copied and has a digest: it is neither sparse nor nested."""
    return tensor.layout == torch.strided and not tensor.is_nested


def _copy(tensor: torch.Tensor, device: torch.device | str = "cpu") -> torch.Tensor:
    """Return a copy of an input on a device, of which a gradient can be computed if it could before."""
    copy = tensor.detach().to(device, copy=True)
    return copy.requires_grad_(tensor.requires_grad)


def _get_states(sources: list[Any]) -> list[Any]:
    """Return the present states of generators as plain values and tensors, which can be sent."""
    states = [_get_state(source) for source in sources]
    return tree_map_only(np.ndarray, np.ndarray.tolist, states)


def _get_state(source: Any) -> Any:
    """Return the present state of one generator."""
    name = _find_method(source, "get_rng_state", "get_state", "getstate")
    if name:
        return getattr(source, name)()
    return source.bit_generator.state  # of a generator of NumPy


def _set_states(sources: list[Any], states: list[Any]) -> None:
    """Set generators to states of _get_states(): those of rank 0 before a repeated call, and those of this
    process after it."""
    for source, state in zip(sources, states, strict=True):
        name = _find_method(source, "set_rng_state", "set_state", "setstate")
        if name:
            getattr(source, name)(state)
        else:
            source.bit_generator.state = state


def _find_method(source: Any, *names: str) -> str:
    """Return the first of these names that a generator has, "" if it has none: torch, its devices, its
    generators, `random` and NumPy name them differently."""
    for name in names:
        if hasattr(source, name):
            return name
    return ""


def fix_settings(device: torch.device) -> None:
    """Set what the sums inside an operator depend on, for this process: one thread on the CPU, deterministic
    algorithms on a GPU. Shards calls it before the model is built. device: that of the model."""
    convolution.protect()
    torch.set_num_threads(1)
    if device.type != "cpu":
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # before the first call of cuBLAS
        torch.use_deterministic_algorithms(True)


def check_settings() -> None:
    """Raise BadInput if the job has changed a setting since fix_settings(). Shards calls it before each
    forward pass."""
    settings = {
        "torch.get_num_threads()": (torch.get_num_threads(), 1),
        "torch.backends.cudnn.benchmark": (torch.backends.cudnn.benchmark, False),
    }
    for name, (value, expected) in settings.items():
        if value != expected:
            raise BadInput(f"--exact_shards: {name} is {value}, expected {expected}")


def _count_collectives() -> int:
    """Return the number of collectives so far; 0 if this version of torch does not count them."""
    group: Any = torch.distributed.distributed_c10d._get_default_group()
    try:
        return group._get_sequence_number_for_group()
    except RuntimeError:
        return 0
