"""Pages of memory that this process keeps."""

from __future__ import annotations

import ctypes
from pathlib import Path

SETTING = Path("/sys/kernel/mm/transparent_hugepage/enabled")
KEPT = 32 << 20  # bytes up to which a freed block stays with a process that keeps them: the most that glibc allows
_LARGE = 2 << 20  # bytes of a large page
_HUGEPAGE, _COLLAPSE = 14, 25  # Linux' advice: of pages that come, and of those that are there (since 6.1)


def keep_freed_memory() -> None:
    """Let glibc keep what is freed instead of returning it to the system: a training step, and a step of decoding,
    free and ask for the same large tensors again and again, and touching new pages takes longer than the arithmetic
    (14,500 page faults a training step of the quick start's model, 660 with this; benchmarks/log.md). Other C
    libraries are left alone."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(-3, KEPT)  # M_MMAP_THRESHOLD
        mallopt(-1, 2**31 - 1)  # M_TRIM_THRESHOLD: never


def give_back_freed_memory() -> None:
    """What is kept so far; what is freed from now on is kept again."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def ask_for_large_pages(start: int, stop: int) -> None:
    """For addresses [start, stop) of this process: what is read from one end to the other, such as weights in a decode
    step, is waited for less. A system that gives them only where it is asked, if at all, is asked; elsewhere nothing is
    done. What is there stays."""
    start, stop = -(-start // _LARGE) * _LARGE, stop // _LARGE * _LARGE
    if start >= stop or not SETTING.exists() or "[never]" in SETTING.read_text():  # which _COLLAPSE would not heed
        return
    madvise = ctypes.CDLL(None).madvise
    for advice in (_HUGEPAGE, _COLLAPSE):
        madvise(ctypes.c_void_p(start), ctypes.c_size_t(stop - start), advice)
