"""Keep torch from a backward pass that writes beyond its memory, on CPUs with AVX2 and without AVX-512.

There, oneDNN writes beyond its workspace in the gradient of the weights of a 1x1 convolution, if it has a
stride, fewer than 8 input channels and the memory format channels_last: the process aborts, hangs, or ends
with gradients that are wrong by 46 to 119 %. The contiguous layout has another kernel, which is right.
Source: https://github.com/uxlfoundation/oneDNN/issues/6035 (open; seen with oneDNN 3.12 in torch 2.14.1).

It concerns any code that torch.autograd runs: modules, functions of torch, compiled and parallel models. So
the operator itself is replaced, and not the layers of a model.
"""

import functools
from typing import Any

import torch
from torch._prims_common import suggest_memory_format

from bootfile.machine.facts import onednn_instructions

_BLOCK = 8  # channels that the AVX2 kernel computes at once
_AFFECTED = ("AVX2", "AVX")
_KERNEL_OF_TORCH = torch._C.DispatchKey.CompositeExplicitAutograd
_libraries: list[torch.library.Library] = []  # torch forgets what they define when they are deleted


@functools.cache
def protect() -> None:
    """Compute such a backward pass in the contiguous layout, from now on in this process. On a CPU that is
    not affected, nothing changes."""
    if onednn_instructions() not in _AFFECTED:
        return
    library = torch.library.Library("aten", "IMPL")
    library.impl("convolution_backward", _convolution_backward, "CPU")
    _libraries.append(library)


def is_affected(weight: torch.Tensor, stride: Any, transposed: bool) -> bool:
    """Return whether oneDNN may damage memory in the backward pass of a convolution.

    weight: [output channels, input channels of a group, *kernel]. stride: of each dimension of the kernel.
    """
    is_strided = any(step != 1 for step in stride)
    is_pointwise = all(size == 1 for size in weight.shape[2:])
    return is_strided and is_pointwise and not transposed and weight.shape[1] < _BLOCK


def _convolution_backward(
    grad_output: torch.Tensor,
    inputs: torch.Tensor,
    weight: torch.Tensor,
    bias_sizes: Any,
    stride: Any,
    padding: Any,
    dilation: Any,
    transposed: bool,
    *others: Any,
) -> Any:
    """Call torch's own kernel of aten::convolution_backward. autograd calls this on the CPU for each
    convolution of a backward pass; it costs some microseconds."""
    operator: Any = torch.ops.aten.convolution_backward.default
    kernel = functools.partial(operator._op_dk, _KERNEL_OF_TORCH)
    rest = (bias_sizes, stride, padding, dilation, transposed, *others)
    if not is_affected(weight, stride, transposed):
        return kernel(grad_output, inputs, weight, *rest)
    # A clone, because contiguous() leaves the strides of dimensions of size 1, by which torch would choose
    # channels_last again.
    copies = [tensor.clone(memory_format=torch.contiguous_format) for tensor in (grad_output, inputs, weight)]
    of_inputs, of_weight, of_bias = kernel(*copies, *rest)
    # Compiled code expects the memory format that torch's own kernel returns, and buckets of
    # DistributedDataParallel the strides of the weight.
    if of_inputs is not None:
        memory_format = suggest_memory_format(inputs)
        if memory_format == torch.contiguous_format:
            memory_format = suggest_memory_format(weight)
        of_inputs = of_inputs.contiguous(memory_format=memory_format)
    if of_weight is not None:
        of_weight = torch.empty_like(weight).copy_(of_weight)
    return of_inputs, of_weight, of_bias
