"""Run a script, and write what each step of its optimizers begins with.

`python traced.py FILE SCRIPT [OPTION ...]` runs the script as `__main__`. `prove` runs it so if a restart
differs: the first step that differs shows the cause (causes.py). FILE gets a line of JSON for each step:

    {"optimizer": 0, "weights": "9f3c...", "options": {"0.lr": 0.1, ...}, "state": "" or "1d22...",
     "batches": ["c0ab...", ...], "buffers": ["e5f1...", ...], "gradients": "77e1...",
     "scale": null or 1024.0,
     "random": {"torch": "52aa...", "numpy": "0c19...", "random": "d3b7..."}}

optimizer: the number of the optimizer, in the order of their first steps.
options: the numbers in its parameter groups.
state: a digest of its tensors, such as momentum; "" if it has none.
batches: digests of the inputs of the models since the step before: of calls that will have a gradient.
buffers: digests of the buffers of the models, before each of these calls.
scale: of the last GradScaler that was used.
random: digests of the states of the random numbers.
"""

import functools
import hashlib
import json
import os
import runpy
import sys
from collections.abc import Callable, Iterable
from typing import Any

del sys.path[0]  # this folder: its modules have general names
import torch  # noqa: E402
from torch.optim.optimizer import register_optimizer_step_pre_hook  # noqa: E402
from torch.utils._pytree import tree_flatten  # noqa: E402

_MOST = 2**14  # elements of a tensor that are hashed
_ACCELERATORS = ("cuda", "npu", "xpu")
_NOT_OPTIONS = {"params", "fused", "foreach", "capturable", "differentiable"}


class _Trace:
    """Writes the lines of FILE while the script trains."""

    def __init__(self, path: str):
        self._path = path
        self._process = os.getpid()  # the workers of a DataLoader are forks: they write nothing
        self._optimizers: list[int] = []  # ids, in the order of their first steps
        self._batches: list[str] = []
        self._buffers: list[str] = []
        self._depth = 0  # of calls of modules in calls of modules
        self._scale: float | None = None

    def install(self) -> None:
        """Watch the steps of all optimizers, the calls of all modules, and GradScaler."""
        register_optimizer_step_pre_hook(self._before_step)
        torch.nn.Module.__call__ = self._watch_calls(torch.nn.Module.__call__)  # type: ignore[method-assign]
        # torch.amp has it since torch 2.3; those of accelerators are its subclasses, or stand alone
        places = [torch.amp, *(getattr(module, "amp", None) for _, module in _find_accelerators())]
        for scaler in (getattr(place, "GradScaler", None) for place in places):
            if scaler and "step" in vars(scaler):  # else it inherits the step that is watched
                scaler.step = self._watch_scale(scaler.step)

    def _before_step(self, optimizer: Any, args: object, kwargs: object) -> None:
        """Write a line. torch calls it before each step of an optimizer."""
        if os.getpid() != self._process:
            return
        if id(optimizer) not in self._optimizers:
            self._optimizers.append(id(optimizer))
        # before the step: the gradients are whole, and the weights are those that they were computed with
        weights = [weight for group in optimizer.param_groups for weight in group["params"]]
        values = [value for weight in weights for value in optimizer.state.get(weight, {}).values()]
        states = [value for value in values if isinstance(value, torch.Tensor)]
        gradients = [weight.grad for weight in weights if weight.grad is not None]
        line = {
            "optimizer": self._optimizers.index(id(optimizer)),
            "weights": _digest(weights),
            "options": _read_options(optimizer),
            "state": _digest(states) if states else "",
            "batches": self._batches,
            "buffers": self._buffers,
            "gradients": _digest(gradients),
            "scale": self._scale,
            "random": _digest_random(),
        }
        with open(self._path, "a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
        self._batches = []
        self._buffers = []

    def _watch_calls(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """Return Module.__call__ with a record of the inputs. Only the outermost module has a batch."""

        @functools.wraps(call)
        def watched(module: Any, *args: Any, **kwargs: Any) -> Any:
            # the outermost module, and not in an evaluation: only such a batch belongs to a step
            if self._depth == 0 and torch.is_grad_enabled():
                leaves, _ = tree_flatten([args, kwargs])
                tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
                # a criterion, or a second model, gets what a model has computed: not a batch
                if tensors and not any(tensor.grad_fn for tensor in tensors):
                    self._batches.append(_digest(tensors))
                    self._buffers.append(_digest(module.buffers()))
            self._depth += 1
            try:
                return call(module, *args, **kwargs)
            finally:
                self._depth -= 1

        return watched

    def _watch_scale(self, step: Callable[..., Any]) -> Callable[..., Any]:
        """Return GradScaler.step with a record of the scale."""

        @functools.wraps(step)
        def watched(scaler: Any, *args: Any, **kwargs: Any) -> Any:
            self._scale = float(scaler.get_scale())
            return step(scaler, *args, **kwargs)

        return watched


def main() -> None:
    """Run the script in this process, as `python SCRIPT [OPTION ...]` would."""
    path, *words = sys.argv[1:]
    _Trace(path).install()
    sys.argv = words
    sys.orig_argv = [sys.executable, *words]
    sys.path.insert(0, os.path.dirname(os.path.realpath(words[0])))
    runpy.run_path(words[0], run_name="__main__")


def _read_options(optimizer: Any) -> dict[str, Any]:
    """Return the numbers in the parameter groups of an optimizer: "0.lr" -> 0.1."""
    options: dict[str, Any] = {}
    for number, group in enumerate(optimizer.param_groups):
        for name, value in group.items():
            if name in _NOT_OPTIONS:
                continue
            if isinstance(value, torch.Tensor):  # a learning rate, if the step is compiled
                options[f"{number}.{name}"] = value.tolist()
            elif isinstance(value, bool | int | float | list | tuple):
                options[f"{number}.{name}"] = value
    return options


def _digest_random() -> dict[str, str]:
    """Return digests of the states of the random numbers that the script has loaded."""
    states: dict[str, Any] = {"torch": torch.get_rng_state().numpy().tobytes()}
    for name, module in _find_accelerators():
        if module.is_available() and module.is_initialized():  # else the script does not use it
            states[name] = module.get_rng_state().numpy().tobytes()
    if "numpy" in sys.modules:
        _, key, place, *_ = sys.modules["numpy"].random.get_state()
        states["numpy"] = key.tobytes() + str(place).encode()
    if "random" in sys.modules:
        states["random"] = repr(sys.modules["random"].getstate()).encode()
    return {name: hashlib.blake2b(state, digest_size=8).hexdigest() for name, state in states.items()}


def _find_accelerators() -> list[tuple[str, Any]]:
    """Return the names and the modules of the kinds of accelerators that torch knows."""
    modules = [(name, getattr(torch, name, None)) for name in _ACCELERATORS]
    return [(name, module) for name, module in modules if hasattr(module, "is_initialized")]


def _digest(tensors: Iterable[Any]) -> str:
    """Return a digest of tensors. Of a large one it has some elements: a difference reaches most of them."""
    whole = hashlib.blake2b(digest_size=8)
    for tensor in tensors:
        dense = tensor.detach()
        if dense.layout != torch.strided:
            dense = dense.to_dense()
        flat = dense.reshape(-1)
        few = flat[:: max(1, flat.numel() // _MOST)].contiguous().cpu()
        whole.update(f"{tensor.dtype} {list(tensor.shape)}".encode())
        whole.update(few.view(torch.uint8).numpy().tobytes())
    return whole.hexdigest()


if __name__ == "__main__":
    main()
