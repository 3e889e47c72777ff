"""Memory that a CPU job frees stays with the process.

glibc gives large blocks back to the kernel at once, and every step's activations then come as fresh pages,
zeroed one fault at a time. Three of its settings (mallopt(3)) keep them: no mmap for large blocks, no
trimming of the heap, and a heap that grows in large pieces. The price is that the process keeps its peak.
BOOTFILE_KEEP_MEMORY=0 leaves glibc as it is.
"""

import ctypes
import os

_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_MAX = -1, -2, -4  # malloc.h
_PAD = 64 * 2**20  # bytes by which the heap grows


def keep_memory() -> bool:
    """Change the three settings of this process. False where they were left: another C library, or switched
    off."""
    if os.environ.get("BOOTFILE_KEEP_MEMORY", "1") == "0":
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if os.name == "posix" else None
    if mallopt is None:
        return False
    return all(mallopt(*pair) for pair in ((_M_MMAP_MAX, 0), (_M_TRIM_THRESHOLD, -1), (_M_TOP_PAD, _PAD)))
