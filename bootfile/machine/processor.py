"""The CPU of this process: its name, its vendor, and the instruction sets that it has.

Under an emulator, /proc/cpuinfo is that of the host. So the facts come from the instruction CPUID, which
NumPy and newer versions of torch have asked, and from /proc/cpuinfo only where these do not know them.
"""

import functools
import platform
import re
from collections.abc import Callable
from pathlib import Path

import numpy as np

# Names of NumPy 2.4 and of versions before it, from the widest set to the narrowest.
_WIDTHS = {
    "AVX512": ("AVX512_SKX", "X86_V4"),
    "AVX2": ("AVX2", "X86_V3"),
    "AVX": ("AVX",),
    "SSE41": ("SSE41", "X86_V2"),
}
_EXTENSIONS = {  # function of torch.cpu, which versions before 2.6 lack
    "VNNI": "_is_vnni_supported",
    "BF16": "_is_avx512_bf16_supported",
    "AMX": "_is_amx_tile_supported",
}


@functools.cache
def widest() -> str:
    """Return the widest instruction set of this CPU: "AVX512", "AVX2", "AVX" or "SSE41"; on other
    architectures "", and the machine's name decides."""
    core = getattr(np, "_core", None) or np.core  # NumPy 2, and versions before it
    features: dict[str, bool] = core._multiarray_umath.__cpu_features__
    sets = (name for name, marks in _WIDTHS.items() if any(features.get(mark) for mark in marks))
    return next(sets, "")


@functools.cache
def extensions() -> tuple[str, ...]:
    """Return the extensions of AVX-512 that this CPU has, for which oneDNN has kernels of their own."""
    import torch

    if widest() != "AVX512":
        return ()
    functions = {name: getattr(torch.cpu, function, bool) for name, function in _EXTENSIONS.items()}
    return tuple(name for name, is_supported in functions.items() if is_supported())


@functools.cache
def name() -> str:
    """Return the name of this CPU, such as "AMD EPYC 9354"."""
    import torch

    get_capabilities: Callable[[], dict[str, object]] = getattr(torch.cpu, "get_capabilities", dict)  # 2.10
    listed = read_cpuinfo("model name") or platform.machine()
    known = str(get_capabilities().get("cpu_name", ""))
    # the short name of CPUID is the beginning of the long one, unless an emulator shows its host's
    return listed if all(word in listed for word in known.split()) else known


@functools.cache
def vendor() -> str:
    """Return "Intel", "AMD" or the vendor's own name: MKL chooses its kernels by it."""
    known = next((vendor for vendor in ("Intel", "AMD") if vendor in name()), "")
    return known or read_cpuinfo("vendor_id") or platform.machine()


def read_cpuinfo(field: str) -> str:
    """Return a field of the first CPU in /proc/cpuinfo; "" without one."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:  # not Linux
        return ""
    match = re.search(rf"^{field}\s*:(.*)$", text, re.MULTILINE)
    return match[1].strip() if match else ""
