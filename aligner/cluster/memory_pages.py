"""Memory pages that this process keeps."""

from __future__ import annotations

import ctypes
from pathlib import Path

SETTING = Path("/sys/kernel/mm/transparent_hugepage/enabled")
KEPT = 32 << 20  # bytes up to which a freed block stays with a process that keeps them: the most that glibc allows
_LARGE = 2 << 20  # bytes of a large page
_HUGEPAGE, _COLLAPSE = 14, 25  # Linux' advice: of pages that come, and of those that are there (since 6.1)


def keep_freed_memory() -> None:
    """Let glibc keep freed memory instead of returning it to the system. Steps of training and of decoding free and
    request the same large tensors repeatedly. Touching new pages takes longer than the arithmetic: 14,500 page faults a
    training step of the quick start's model, 660 with this (benchmarks/log.md). Other C libraries are left
    alone."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(-3, KEPT)  # M_MMAP_THRESHOLD
        mallopt(-1, 2**31 - 1)  # M_TRIM_THRESHOLD: never


def give_back_freed_memory() -> None:
    """Return the memory kept so far to the system. Memory freed from now on is kept again."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def ask_for_large_pages(start: int, stop: int) -> None:
    """Ask for large pages for addresses [start, stop) of this process. They shorten waits for memory that is read from
    end to end, such as weights in a decode step. Nothing is done on systems that give them always or never. The content
    stays."""
    start, stop = -(-start // _LARGE) * _LARGE, stop // _LARGE * _LARGE
    if start >= stop or not SETTING.exists() or "[never]" in SETTING.read_text():  # _COLLAPSE would ignore it
        return
    madvise = ctypes.CDLL(None).madvise
    for advice in (_HUGEPAGE, _COLLAPSE):
        madvise(ctypes.c_void_p(start), ctypes.c_size_t(stop - start), advice)
