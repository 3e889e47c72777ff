"""Describe what computed: what the bits of a run depend on, apart from its code and data.

The same description is in starts.jsonl, in state.jsonl, in each checkpoint and in proof.json. Two runs
with the same code, data, seed and description have the same bits on a CPU.

Names of instruction sets say what a library may use. The digest of some operators says what it does: if two
machines have other kernels for the same instruction set, as by the vendor of the CPU, their digests differ.
"""

import functools
import hashlib
import os
import re
from collections.abc import Iterator

import numpy as np
import torch

from bootfile.ground import accelerator
from bootfile.machine import processor
from bootfile.machine.differences import CPU, NONE, OPERATORS, THREADS, Facts

_ONEDNN_LEVELS = ("SSE41", "AVX", "AVX2", "AVX512")
_SEED = 7  # of the operators


def describe() -> Facts:
    """Return the facts of this process now, in the order in which a difference is looked for.

    threads: of an operator on the CPU.
    ATen, oneDNN, MKL: the instruction set in use; for MKL also the vendor of the CPU.
    operators: a digest of what some operators compute.
    CPU: its name.
    torch, numpy, libraries: versions.
    OpenBLAS: version and kernel in use by NumPy.
    settings: those of torch that choose an algorithm.
    On a GPU also its name, CUDA, cuDNN and their settings.
    """
    facts: Facts = {
        THREADS: torch.get_num_threads(),
        "ATen": aten_instructions(),
        "oneDNN": onednn_instructions(),
        "MKL": _mkl_instructions(),
        OPERATORS: _digest_operators(),
        CPU: processor.name(),
        "torch": str(torch.__version__),
        "libraries": _libraries(),
        "numpy": np.__version__,
        "OpenBLAS": _openblas(),
        "settings": _settings(),
    }
    module = accelerator.in_use()
    if module:
        from bootfile.machine import gpu_facts  # a run on the CPU has none

        facts |= gpu_facts.describe(module)
    return facts


def aten_instructions() -> str:
    """Return the instruction set of ATen's kernels: "DEFAULT", "AVX2" or "AVX512"."""
    capability = torch.backends.cpu.get_cpu_capability()
    return "DEFAULT" if capability.startswith("NO ") else capability  # torch 2.1: "NO AVX"


def onednn_instructions() -> str:
    """Return the instruction set that oneDNN uses: what the CPU has, unless a variable limits it."""
    widest = processor.widest()
    if not widest:  # another architecture, which its own name describes
        return os.uname().machine
    text = os.environ.get("ONEDNN_MAX_CPU_ISA") or os.environ.get("DNNL_MAX_CPU_ISA") or ""
    # a finer limit, such as AVX512_CORE_VNNI, counts as its level
    limit = next((level for level in _ONEDNN_LEVELS[::-1] if text.upper().startswith(level)), widest)
    is_limited = _ONEDNN_LEVELS.index(limit) < _ONEDNN_LEVELS.index(widest)
    return limit if is_limited else " ".join((widest, *processor.extensions()))


def _mkl_instructions() -> str:
    """Return what MKL chooses its kernels by: MKL_CBWR, or the vendor and the instruction set of the CPU."""
    branch = os.environ.get("MKL_CBWR", "")
    # the same kernels on every CPU: its vendor and its instruction set do not count then
    if branch.upper().startswith("COMPATIBLE"):
        return "COMPATIBLE"
    limit = os.environ.get("MKL_ENABLE_INSTRUCTIONS", "")
    words = (processor.vendor(), processor.widest(), branch, limit)
    return " ".join(word for word in words if word)


def _libraries() -> str:
    """Return the versions of oneDNN and MKL in torch's build, as torch.__config__.show() has them."""
    shown = torch.__config__.show()
    patterns = {"oneDNN": r"MKL-DNN v([\d.]+)", "MKL": r"Math Kernel Library Version ([\d.]+)"}
    matches = {name: re.search(pattern, shown) for name, pattern in patterns.items()}
    return ", ".join(f"{name} {match[1]}" for name, match in matches.items() if match) or NONE


@functools.cache  # it looks at each library of the process
def _openblas() -> str:
    """Return the version of NumPy's OpenBLAS, and the kernel that it uses."""
    try:
        import threadpoolctl  # scikit-learn needs it, too
    except ImportError:
        return NONE
    for library in threadpoolctl.threadpool_info():
        if library["internal_api"] == "openblas" and "numpy" in library["filepath"]:
            return f"{library['version']} {library.get('architecture', '')}".strip()
    return NONE


def _settings() -> str:
    """Return the settings of torch that choose an algorithm, as words that differ from the defaults."""
    words = []
    if torch.are_deterministic_algorithms_enabled():
        words.append("deterministic")
    try:
        precision = torch.get_float32_matmul_precision()
    except RuntimeError:  # it was chosen by fp32_precision (torch 2.9), which torch refuses to mix with this
        backends = (torch.backends.cuda, torch.backends.mkldnn)
        precision = "/".join(backend.matmul.fp32_precision for backend in backends)
    if precision != "highest":
        words.append(f"matmul={precision}")
    for name in ("conv", "rnn"):  # oneDNN's other operators, each with a setting of its own (torch 2.9)
        operator = getattr(torch.backends.mkldnn, name, None)
        precision = getattr(operator, "fp32_precision", "none")
        if precision not in ("none", "ieee"):
            words.append(f"{name}={precision}")
    if not torch.backends.mkldnn.enabled:
        words.append("without oneDNN")
    return " ".join(words) or "defaults"


@functools.cache
def _digest_operators() -> str:
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
