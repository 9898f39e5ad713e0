"""The C library's allocator, which tensors on a CPU use."""

from __future__ import annotations

import ctypes

MMAP_THRESHOLD = 32 * 2**20  # bytes; the largest value that glibc accepts
TRIM_THRESHOLD = 2 * MMAP_THRESHOLD
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # from malloc.h


def keep_freed_memory() -> bool:
    """Let glibc keep up to 64 MiB of freed memory for later blocks; return False if the C library is another.

    By default glibc starts with a limit of 128 KiB and raises it to twice the largest block that was freed. For a
    small model that is less than the tensors of a pass, so each pass returned its memory to the system and had it
    zeroed and mapped again, page by page.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    return bool(mallopt(_M_MMAP_THRESHOLD, MMAP_THRESHOLD)) and bool(mallopt(_M_TRIM_THRESHOLD, TRIM_THRESHOLD))
