"""Imports that stay to the end of the process."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def for_good() -> Iterator[None]:
    """What is made within is never looked through for garbage: while torch and Megatron load, at each later full
    collection, and at the exit, that took a third of the CPU time of a process that starts and ends."""
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()
