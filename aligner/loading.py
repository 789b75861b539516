"""Imports that stay to the end of the process, and settings that must be known before them."""

from __future__ import annotations

import gc
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from aligner.errors import ConfigError

TORCH = (2, 11)  # the lower bound of setup.py
kernels = "auto"  # `model.kernels` of this process: the first import of Megatron depends on it (aligner/megatron)


@contextmanager
def for_good() -> Iterator[None]:
    """Exempt modules imported within from garbage collection. Otherwise torch and Megatron, at each later full
    collection and at the exit, take a third of the CPU time of a process that starts and ends. If nothing is
    imported, nothing is exempted: a process that calls this again would keep all its garbage of the meantime."""
    loaded = len(sys.modules)
    gc.disable()
    try:
        yield
    finally:
        if len(sys.modules) > loaded:
            gc.freeze()
        gc.enable()


@contextmanager
def without(*names: str) -> Iterator[None]:
    """Let imports of these modules fail within, unless they are imported already. Packages import what they might need
    if it is installed, and some of it takes long."""
    hidden = set(names) - sys.modules.keys()
    sys.modules.update(dict.fromkeys(hidden))  # type: ignore[arg-type]  # None makes an import fail
    try:
        yield
    finally:
        for name in hidden:
            sys.modules.pop(name, None)


def new_enough(version: str) -> bool:
    """Return whether a version of torch is supported: 2.13.0+cu130, 2.12.0a0+5aff3928d8.nv26.05."""
    return tuple(int(number) for number in re.findall(r"\d+", version)[:2]) >= TORCH


def check_torch() -> None:
    """Raise ConfigError for a torch that is too old, before its slow import. A missing one fails at the import."""
    from importlib.metadata import PackageNotFoundError, version

    try:
        installed = version("torch")
    except PackageNotFoundError:
        return
    if not new_enough(installed):
        hint = "Images keep their own torch: the base of slurm/container/Dockerfile has one that fits."
        raise ConfigError("torch", installed, f"{TORCH[0]}.{TORCH[1]} or later", hint)
