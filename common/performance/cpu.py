"""Make a training step on the CPU faster: convolutions as matrix products, and memory that is kept.

Here convolutions over small maps are one matrix product over all images and positions. oneDNN computes image
by image. If a map has few positions, each image is a short product, and reads and writes the whole weight
gradient. For 512 channels of 4x4 and 128 images in bfloat16, oneDNN takes 36 ms. One product takes 8 ms,
including the patches (torch 2.14, 2 cores with AMX). Other devices and larger maps use torch.nn.Conv2d.

Source: K. Chellapilla et al., "High Performance Convolutional Neural Networks for Document Processing", IWFHR
2006.
"""

import ctypes
import os
from typing import Any

import torch
from torch import Tensor, nn

# largest number of positions of the output map for which the weight gradient, or all three passes, are a
# product; at 8x8 the patches cost as much as the product gains
_GRADIENT, _ALL = 49, 4
_Pair = tuple[int, int]  # rows, columns
# Inductor needs many minutes for _spread(). torch 2.1 has no is_compiling().
_is_compiling = getattr(torch.compiler, "is_compiling", lambda: False)


class Conv2d(nn.Conv2d):
    """A torch.nn.Conv2d without bias, dilation or groups, with the same parameters and names. The results are
    the same up to rounding."""

    def forward(self, images: Tensor) -> Tensor:
        if images.device.type != "cpu" or images.dim() != 4 or not torch.is_grad_enabled():
            return super().forward(images)
        height, width = images.shape[2:]
        stride, padding = (self.stride[0], self.stride[1]), (int(self.padding[0]), int(self.padding[1]))
        rows = (height + 2 * padding[0] - self.kernel_size[0]) // stride[0] + 1
        columns = (width + 2 * padding[1] - self.kernel_size[1]) // stride[1] + 1
        if rows * columns > _GRADIENT or (rows * columns <= _ALL and _is_compiling()):
            return super().forward(images)
        return _SmallMap.apply(images, self.weight, stride, padding, (rows, columns))


def take_over(model: nn.Module) -> nn.Module:
    """Replace each supported convolution of the model by this module's Conv2d; parameters and names stay.
    Returns the model."""
    for module in model.modules():
        if type(module) is not nn.Conv2d or module.bias is not None or isinstance(module.padding, str):
            continue
        if (module.groups, module.dilation, module.padding_mode) == (1, (1, 1), "zeros"):
            module.__class__ = Conv2d
    return model


class _SmallMap(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, images: Tensor, weight: Tensor, stride: _Pair, padding: _Pair, size: _Pair
    ) -> Tensor:
        if size[0] * size[1] <= _ALL:
            product = _patches(images, weight, stride, padding) @ _rows(weight).t()
            output = product.view(len(images), *size, len(weight)).permute(0, 3, 1, 2)
        else:
            output = nn.functional.conv2d(images, weight, None, stride, padding)
        # Under autocast the type of the output is the precision of the computation.
        ctx.save_for_backward(images.to(output.dtype), weight)
        ctx.stride, ctx.padding, ctx.dtype = stride, padding, images.dtype
        return output

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        images, weight = ctx.saved_tensors
        of_images = of_weight = None
        if ctx.needs_input_grad[0]:
            arguments = gradient, images, weight.to(gradient.dtype), ctx.stride, ctx.padding
            small = gradient.shape[2] * gradient.shape[3] <= _ALL
            of_images = (_spread if small else _transposed)(*arguments).to(ctx.dtype)
        if ctx.needs_input_grad[1]:
            product = _places(gradient).t() @ _patches(images, weight, ctx.stride, ctx.padding)
            outputs, inputs, height, width = weight.shape
            of_weight = product.view(outputs, height, width, inputs).permute(0, 3, 1, 2).to(weight.dtype)
        return of_images, of_weight, None, None, None


def _rows(weight: Tensor) -> Tensor:
    """Reshape [O, C, H, W] to [O, H * W * C]: a view if it is channels_last."""
    return weight.permute(0, 2, 3, 1).reshape(len(weight), -1)


def _places(maps: Tensor) -> Tensor:
    """Reshape [N, C, H, W] to [N * H * W, C]: a view if it is channels_last."""
    return maps.permute(0, 2, 3, 1).reshape(-1, maps.shape[1])


def _patches(images: Tensor, weight: Tensor, stride: _Pair, padding: _Pair) -> Tensor:
    """Return the input of each output position: [N * positions, kernel height * width * C]."""
    _, channels, height, width = weight.shape
    down, across = padding
    padded = nn.functional.pad(images.permute(0, 2, 3, 1), (0, 0, across, across, down, down))
    patches = padded.unfold(1, height, stride[0]).unfold(2, width, stride[1])
    return patches.permute(0, 1, 2, 4, 5, 3).reshape(-1, height * width * channels)


def _spread(gradient: Tensor, images: Tensor, weight: Tensor, stride: _Pair, padding: _Pair) -> Tensor:
    """Return the gradient of the images: the gradient of each output position is added to its inputs."""
    count, channels, rows, columns = images.shape
    _, _, height, width = weight.shape
    _, _, down, across = gradient.shape
    seen = (_places(gradient) @ _rows(weight)).view(count, down, across, height, width, channels)
    result = seen.new_zeros(count, rows + 2 * padding[0], columns + 2 * padding[1], channels)
    for row in range(height):
        for column in range(width):
            below, right = row + stride[0] * (down - 1) + 1, column + stride[1] * (across - 1) + 1
            result[:, row : below : stride[0], column : right : stride[1]] += seen[:, :, :, row, column]
    result = result[:, padding[0] : padding[0] + rows, padding[1] : padding[1] + columns]
    return result.permute(0, 3, 1, 2)


def _transposed(gradient: Tensor, images: Tensor, weight: Tensor, stride: _Pair, padding: _Pair) -> Tensor:
    return torch.ops.aten.convolution_backward(
        gradient, images, weight, None, stride, padding, (1, 1), False, (0, 0), 1, (True, False, False)
    )[0]


_SETTINGS = (  # (number in malloc.h, value, glibc's default)
    (-4, 0, 65536),  # M_MMAP_MAX
    (-1, -1, 128 * 2**10),  # M_TRIM_THRESHOLD
    # M_TOP_PAD: bytes by which the heap grows
    (-2, 64 * 2**20, 0),
)
SHORT = 20  # steps: keeping memory makes a shorter training hardly faster


def keep_memory() -> bool:
    """Keep the memory that this process frees. Measured by tests/benchmarks/allocator.py.

    glibc returns large blocks to the kernel at once. The activations of the next step are then new pages,
    which the kernel zeroes one fault at a time. Three settings of glibc (mallopt(3)) keep the memory: no mmap
    for large blocks, no trimming of the heap, and a heap that grows in large pieces. The process keeps its
    peak memory. BOOTFILE_KEEP_MEMORY=0 leaves glibc's defaults.

    Returns False if the settings were not changed: another C library, or BOOTFILE_KEEP_MEMORY=0.
    """
    if os.environ.get("BOOTFILE_KEEP_MEMORY", "1") == "0":
        return False
    return _set_glibc({number: value for number, value, _ in _SETTINGS})


def return_memory() -> bool:
    """Undo keep_memory() for what is allocated from now on, so a few steps need less memory.

    Returns False if the settings were not changed: another C library, or BOOTFILE_KEEP_MEMORY is set.
    """
    if "BOOTFILE_KEEP_MEMORY" in os.environ:
        return False
    return _set_glibc({number: default for number, _, default in _SETTINGS})


def _set_glibc(settings: dict[int, int]) -> bool:
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if os.name == "posix" else None
    return mallopt is not None and all(mallopt(*setting) for setting in settings.items())
