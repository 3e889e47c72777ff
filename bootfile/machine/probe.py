"""Compute a few operators of torch, and return a digest of their bits.

Names of instruction sets say what a library may use. The digest says what it does: if two machines have other
kernels for the same instruction set, for example by the vendor of the CPU, their digests differ.
"""

import functools
import hashlib
from collections.abc import Iterator

import torch

_SEED = 7


@functools.cache
def digest() -> str:
    """Return the digest of the results on the CPU, with one thread. It takes some milliseconds, once in a
    process, and draws no random number of torch's global generator."""
    # with one, because their number changes the order of a sum, and is a fact of its own
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        hashed = hashlib.blake2b(digest_size=6)
        with torch.enable_grad():
            for result in _compute():
                hashed.update(result.detach().contiguous().numpy().tobytes())
        return hashed.hexdigest()
    finally:
        torch.set_num_threads(threads)


def _compute() -> Iterator[torch.Tensor]:
    generator = torch.Generator().manual_seed(_SEED)
    functional = torch.nn.functional
    # Philox and the Mersenne Twister give integers: the numbers depend on no kernel. randn does.
    yield torch.randn(64, generator=generator)
    values = torch.rand(64, 64, generator=generator) + 0.01
    for name in ("exp", "log", "sqrt", "rsqrt", "tanh", "erf", "sigmoid", "sin"):
        yield getattr(torch, name)(values)
    yield functional.gelu(values)
    yield functional.log_softmax(values, 1)
    yield torch.addcmul(values, values, values, value=0.3)
    yield values.sum()
    # a matrix product, a convolution and their gradients: those of MKL, oneDNN and ATen
    weight = (values - 0.5).requires_grad_(True)
    inputs = (values.t() - 0.5).contiguous().requires_grad_(True)
    outputs = functional.layer_norm(functional.linear(inputs, weight), (64,))
    yield outputs
    yield from torch.autograd.grad(outputs.square().sum(), (inputs, weight))
    images = torch.rand(2, 16, 16, 16, generator=generator).contiguous(memory_format=torch.channels_last)
    kernel = (torch.rand(32, 16, 3, 3, generator=generator) - 0.5).requires_grad_(True)
    maps = functional.batch_norm(functional.conv2d(images, kernel, padding=1), None, None, training=True)
    yield maps
    yield from torch.autograd.grad(maps.relu().sum(), kernel)
