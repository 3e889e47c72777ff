"""Compute some functions with the same bits on every CPU, for runs that move between kinds of CPUs.

torch calls MKL's vector library for them, which has other kernels on an AMD CPU with AVX-512 than on a CPU
without, whatever MKL_CBWR says: there its square root is not the nearest float in 15 % of the cases. Of 67
functions these differ between an AMD EPYC (Zen 4) and an emulated Haswell (torch 2.14.1, MKL 2024.2):

    float32    sqrt, acos, asin, atan
    float64    sqrt, acos, asin, tan, log, logit

The square root is that of NumPy: the processor rounds it correctly. The others are composed of functions
for which torch has kernels of its own. pow(0.5) is a square root, too. Variants with `out=` are torch's.
"""

import functools
import math
import warnings
from collections.abc import Callable, Sequence

import numpy as np
import torch

# It computes the result of a function by the variant with `out=`, which is not replaced.
_KERNEL_OF_TORCH = torch._C.DispatchKey.CompositeExplicitAutogradNonFunctional
_SINGLE = torch.float32
_DOUBLE = torch.float64
_libraries: list[torch.library.Library] = []  # torch forgets what they define when they are deleted


@functools.cache
def protect() -> None:
    """Compute these functions on the CPU as above, from now on in this process."""
    library = torch.library.Library("aten", "IMPL")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns that it had a kernel before
        for name, (dtypes, function) in _FUNCTIONS.items():
            operator = getattr(torch.ops.aten, name).default
            replaced = functools.partial(_compute, operator, dtypes, function)
            library.impl(name, replaced, "CPU")
            library.impl(f"{name}_", functools.partial(_compute_in_place, replaced), "CPU")
        # a square root, too, and a function with an argument of its own: they do not fit the table
        library.impl("pow.Tensor_Scalar", _power, "CPU")
        library.impl("pow_.Scalar", functools.partial(_compute_in_place, _power), "CPU")
        library.impl("logit", _logit, "CPU")
        library.impl("logit_", functools.partial(_compute_in_place, _logit), "CPU")
    _libraries.append(library)


def _compute(
    operator: torch._ops.OpOverload,
    dtypes: Sequence[torch.dtype],
    function: Callable[[torch.Tensor], torch.Tensor],
    inputs: torch.Tensor,
) -> torch.Tensor:
    """Return a function of each element. autograd calls this, below its own record of the operator."""
    # detached: autograd has recorded the operator already, and must not record what it is composed of
    if inputs.dtype in dtypes:
        return function(inputs.detach())
    result: torch.Tensor = operator._op_dk(_KERNEL_OF_TORCH, inputs)
    return result


def _compute_in_place(
    function: Callable[..., torch.Tensor], inputs: torch.Tensor, *others: float | None
) -> torch.Tensor:
    result = function(inputs, *others)
    if not torch.can_cast(result.dtype, inputs.dtype):  # copy_() would cut the fractions off
        raise RuntimeError(f"result type {result.dtype} can't be cast to {inputs.dtype}")
    return inputs.copy_(result)


def _power(inputs: torch.Tensor, exponent: float) -> torch.Tensor:
    if exponent == 0.5 and inputs.dtype in (_SINGLE, _DOUBLE):
        return _square_root(inputs.detach())
    power: torch.Tensor = torch.ops.aten.pow.Tensor_Scalar._op_dk(_KERNEL_OF_TORCH, inputs, exponent)
    return power


def _logit(inputs: torch.Tensor, eps: float | None = None) -> torch.Tensor:
    if inputs.dtype != _DOUBLE:
        # torch computes integers in the default type
        kind = inputs.dtype if inputs.is_floating_point() else torch.get_default_dtype()
        result: torch.Tensor = torch.ops.aten.logit.out(inputs, eps, out=torch.empty(0, dtype=kind))
        return result
    values = inputs.detach()
    if eps is not None:
        values = values.clamp(eps, 1 - eps)
    return _logarithm(values / (1 - values))


def _logarithm(inputs: torch.Tensor) -> torch.Tensor:
    return torch.log2(inputs) * math.log(2)


def _square_root(inputs: torch.Tensor) -> torch.Tensor:
    roots = torch.empty_like(inputs)
    with np.errstate(invalid="ignore"):  # that of a negative number is NaN, as in torch
        np.sqrt(inputs.numpy(), out=roots.numpy())
    return roots


_FUNCTIONS: dict[str, tuple[Sequence[torch.dtype], Callable[[torch.Tensor], torch.Tensor]]] = {
    "sqrt": ((_SINGLE, _DOUBLE), _square_root),
    "acos": ((_SINGLE, _DOUBLE), lambda x: torch.atan2(_square_root((1 - x) * (1 + x)), x)),
    "asin": ((_SINGLE, _DOUBLE), lambda x: torch.atan2(x, _square_root((1 - x) * (1 + x)))),
    "atan": ((_SINGLE,), lambda x: torch.atan2(x, torch.ones_like(x))),
    "tan": ((_DOUBLE,), lambda x: torch.sin(x) / torch.cos(x)),
    "log": ((_DOUBLE,), _logarithm),
}
