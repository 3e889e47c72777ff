"""Describe what computed: what the bits of a run depend on, apart from its code and data.

The same description is in starts.jsonl, in state.jsonl, in each checkpoint and in proof.json. Two runs
with the same code, data, seed and description have the same bits on a CPU.
"""

import contextlib
import os
import re
from typing import Any

import numpy as np
import torch

from bootfile.ground import accelerator
from bootfile.machine import probe, processor
from bootfile.machine.differences import CPU, OPERATORS, THREADS

Facts = dict[str, str | int]

_ONEDNN_LEVELS = ("SSE41", "AVX", "AVX2", "AVX512")
_NONE = "none"


def describe() -> Facts:
    """Return the facts of this process now, in the order in which a difference is looked for.

    threads: of an operator on the CPU.
    ATen, oneDNN, MKL: the instruction set in use; for MKL also the vendor of the CPU.
    operators: a digest of what some operators compute (probe.py).
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
        OPERATORS: probe.digest(),
        CPU: processor.name(),
        "torch": str(torch.__version__),
        "libraries": _libraries(),
        "numpy": np.__version__,
        "OpenBLAS": _openblas(),
        "settings": _settings(),
    }
    module = accelerator.in_use()
    if module:
        facts |= _describe_accelerator(module)
    return facts


def aten_instructions() -> str:
    """Return the instruction set of ATen's kernels: "DEFAULT", "AVX2" or "AVX512"."""
    capability = torch.backends.cpu.get_cpu_capability()
    if capability.startswith("NO "):  # torch 2.1: "NO AVX"
        return "DEFAULT"
    return capability


def onednn_instructions() -> str:
    """Return the instruction set that oneDNN uses: what the CPU has, unless a variable limits it."""
    # without a name of x86-64 it is another architecture, which its own name describes
    widest = processor.widest()
    if not widest:
        return os.uname().machine
    limit = _onednn_limit()
    if limit and _ONEDNN_LEVELS.index(limit) < _ONEDNN_LEVELS.index(widest):
        return limit
    return " ".join((widest, *processor.extensions()))


def _onednn_limit() -> str:
    """Return the limit of the environment, one of _ONEDNN_LEVELS; "" without one. A finer limit, such as
    AVX512_CORE_VNNI, counts as its level."""
    text = os.environ.get("ONEDNN_MAX_CPU_ISA") or os.environ.get("DNNL_MAX_CPU_ISA") or ""
    text = text.upper()
    for level in reversed(_ONEDNN_LEVELS):
        if text.startswith(level):
            return level
    return ""


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
    versions = []
    for name, pattern in (("oneDNN", r"MKL-DNN v([\d.]+)"), ("MKL", r"Math Kernel Library Version ([\d.]+)")):
        match = re.search(pattern, shown)
        if match:
            versions.append(f"{name} {match[1]}")
    return ", ".join(versions) or _NONE


def _openblas() -> str:
    """Return the version of NumPy's OpenBLAS, and the kernel that it uses."""
    try:
        import threadpoolctl  # scikit-learn needs it, too
    except ImportError:
        return _NONE
    for library in threadpoolctl.threadpool_info():
        if library["internal_api"] == "openblas" and "numpy" in library["filepath"]:
            return f"{library['version']} {library.get('architecture', '')}".strip()
    return _NONE


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
    if not torch.backends.mkldnn.enabled:
        words.append("without oneDNN")
    return " ".join(words) or "defaults"


def _describe_accelerator(module: Any) -> Facts:
    facts: Facts = {"GPU": accelerator.kind()}
    with contextlib.suppress(RuntimeError, AttributeError):  # it has no name, or the driver does not answer
        facts["GPU"] = module.get_device_name()
    if accelerator.kind() != "cuda":
        return facts
    # each of these settings chooses another algorithm, and so other bits
    cudnn = torch.backends.cudnn
    words = []
    for name, is_on in (
        ("benchmark", cudnn.benchmark),
        ("deterministic", cudnn.deterministic),
        ("TF32", _uses_tf32(cudnn, getattr(cudnn, "conv", None))),
    ):
        if is_on:
            words.append(name)
    facts["CUDA"] = torch.version.cuda or _NONE
    facts["cuDNN"] = f"{cudnn.version()} {' '.join(words)}".strip()
    matmul = torch.backends.cuda.matmul
    facts["TF32 of matmul"] = str(_uses_tf32(matmul, matmul))
    facts["cuBLAS workspace"] = os.environ.get("CUBLAS_WORKSPACE_CONFIG", "default")
    return facts


def _uses_tf32(legacy: Any, operator: Any) -> bool:
    """Return whether operators use TF32. legacy: has allow_tf32, which torch refuses to read if the setting
    was chosen by fp32_precision (torch 2.9), which `operator` has."""
    try:
        return bool(legacy.allow_tf32)
    except RuntimeError:
        return bool(operator.fp32_precision == "tf32")
