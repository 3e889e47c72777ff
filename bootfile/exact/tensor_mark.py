"""A few elements of a tensor, which tell that it has changed. torch's version counter misses some writes."""

import torch

_ELEMENTS = 16  # 16 to 31 elements of a tensor are read, at equal distances in memory
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # bytes -> type of equal size


def read_mark(tensor: torch.Tensor) -> str:
    """Return the mark of one tensor on any device, as text."""
    version = 0 if tensor.is_inference() else tensor._version
    if tensor.layout != torch.strided or tensor.is_meta:
        return str(version)
    return f"{version} {view(tensor).cpu().clone().numpy().tobytes().hex()}"


def view(tensor: torch.Tensor) -> torch.Tensor:
    """Return a few elements of a tensor, as integers of the same bits: a view of its memory if it is
    dense."""
    plain = tensor.detach()
    if plain.is_complex():
        plain = torch.view_as_real(plain.resolve_conj())
    plain = plain.view(_INTEGERS[plain.element_size()])
    step = max(1, plain.numel() // _ELEMENTS)
    # with its dimensions in the order of their strides, a dense tensor is contiguous, also in channels_last
    ordered = plain.permute(sorted(range(plain.dim()), key=plain.stride, reverse=True))
    if not ordered.is_contiguous():
        return plain.reshape(-1)[::step]
    return ordered.view(-1)[::step]
