"""Pages of memory that this process keeps."""

from __future__ import annotations

import ctypes


def keep_freed_memory() -> None:
    """Let glibc keep what is freed instead of returning it to the system: a training step, and a step of decoding,
    free and ask for the same large tensors again and again, and touching new pages takes longer than the arithmetic
    (14,500 page faults a training step of the quick start's model, 660 with this; benchmarks/RESULTS.md). Other C
    libraries are left alone."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(-3, 32 << 20)  # M_MMAP_THRESHOLD, at its largest
        mallopt(-1, 2**31 - 1)  # M_TRIM_THRESHOLD: never


def give_back_freed_memory() -> None:
    """What is kept so far; what is freed from now on is kept again."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
