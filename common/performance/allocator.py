"""Keep the memory that a CPU job frees in the process.

glibc returns large blocks to the kernel at once. The activations of the next step are then new pages, which
the kernel zeroes one fault at a time. Three settings of glibc (mallopt(3)) keep the memory: no mmap for large
blocks, no trimming of the heap, and a heap that grows in large pieces. The process keeps its peak memory.
BOOTFILE_KEEP_MEMORY=0 leaves glibc's defaults.
"""

import ctypes
import os

_SETTINGS = (  # (number in malloc.h, value)
    (-4, 0),  # M_MMAP_MAX
    (-1, -1),  # M_TRIM_THRESHOLD
    # M_TOP_PAD: bytes by which the heap grows
    (-2, 64 * 2**20),
)


def keep_memory() -> bool:
    """Change the three settings for this process. Measured by tests/benchmarks/allocator.py.

    Returns False if they were not changed: another C library, or BOOTFILE_KEEP_MEMORY=0.
    """
    if os.environ.get("BOOTFILE_KEEP_MEMORY", "1") == "0":
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if os.name == "posix" else None
    if mallopt is None:
        return False
    return all(mallopt(*setting) for setting in _SETTINGS)
