"""Postpone the import of torch._dynamo, the compiler's front end, until something is compiled.

torch.optim imports it in the first call of any of its methods, only to tell the compiler to skip the method.
The import takes longer than that of torch.
"""

import functools
import sys
from collections.abc import Callable
from typing import Any

import torch

_METHODS = ("add_param_group", "zero_grad", "state_dict", "load_state_dict")


def postpone_import() -> None:
    """Let SGD, Adam and AdamW work without torch._dynamo until it is imported. May be called twice.

    From then on, for example after torch.compile(), torch's own methods run. Call it before the first
    optimizer is built. If a future torch wraps these methods in another way, nothing is changed.
    """
    base = torch.optim.Optimizer
    for name in _METHODS:
        method: Any = base.__dict__.get(name)
        if _code(method) == "inner":  # of torch._compile._disable_dynamo
            setattr(base, name, _replace(method, method.__wrapped__))
    for kind in (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW):
        step: Any = kind.__dict__.get("step")
        if _code(step) == "_use_grad":  # of torch.optim.optimizer._use_grad_for_differentiable
            kind.step = _replace(step, _without_graph_breaks(step.__wrapped__))  # type: ignore[method-assign]


def _code(method: Any) -> str:
    """Return the name of the function that wraps a method; "" if none does."""
    return method.__code__.co_name if hasattr(method, "__wrapped__") else ""


def _replace(method: Callable, plain: Callable) -> Callable:
    @functools.wraps(method)
    def call(*args: Any, **options: Any) -> Any:
        return (method if "torch._dynamo" in sys.modules else plain)(*args, **options)

    return call


def _without_graph_breaks(step: Callable) -> Callable:
    """Return a step that differs from torch's only in the breaks for the compiler."""

    def call(self: torch.optim.Optimizer, *args: Any, **options: Any) -> Any:
        with torch.set_grad_enabled(self.defaults["differentiable"]):
            return step(self, *args, **options)

    return call
