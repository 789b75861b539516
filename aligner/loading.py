"""Imports that stay to the end of the process, and what they must be told before."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager

kernels = "auto"  # `model.kernels` of this process: the first import of Megatron goes by it (aligner/megatron)


@contextmanager
def for_good() -> Iterator[None]:
    """What is made within is never looked through for garbage: while torch and Megatron load, at each later full
    collection, and at the exit, that took a third of the CPU time of a process that starts and ends. Where nothing is
    imported nothing stays: a process that comes by again would keep all its garbage of the meantime."""
    loaded = len(sys.modules)
    gc.disable()
    try:
        yield
    finally:
        if len(sys.modules) > loaded:
            gc.freeze()
        gc.enable()
