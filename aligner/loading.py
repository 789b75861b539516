"""Imports that stay to the end of the process, what must be known before them, and what is imported only where the
configuration asks for it."""

from __future__ import annotations

import gc
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import TYPE_CHECKING, Any

from aligner.errors import ConfigError

if TYPE_CHECKING:
    from aligner.config.schema import Config

TORCH = (2, 11)  # the lower bound of setup.py
# what the configuration asks for -> module:name
ON_DEMAND = {
    "engine.name=vllm": "aligner.engines.vllm.engine:VllmEngine",
    "engine.name=vllm on ranks": "aligner.engines.vllm.placed:PlacedVllmEngine",
    "engine.name=trtllm": "aligner.engines.trtllm.torch_backend:TrtllmEngine",
    "engine.name=trtllm_engine": "aligner.engines.trtllm.built:TrtllmBuiltEngine",
    "engine.ranks": "aligner.builders.engines:serve",
    "auto": "aligner.builders.sizes:decide",
    "eval.generate": "aligner.builders.engines:make_answer_evaluator",
}
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


def new_enough(version: str) -> bool:
    """Whether a version of torch will do: 2.13.0+cu130, 2.12.0a0+5aff3928d8.nv26.05."""
    return tuple(int(number) for number in re.findall(r"\d+", version)[:2]) >= TORCH


def check_torch() -> None:
    """Raise ConfigError for a torch that is too old, before its slow import. A missing one fails there by itself."""
    from importlib.metadata import PackageNotFoundError, version

    try:
        found = version("torch")
    except PackageNotFoundError:
        return
    if not new_enough(found):
        hint = "Images keep their own torch: the base of slurm/container/Dockerfile has one that fits."
        raise ConfigError("torch", found, f"{TORCH[0]}.{TORCH[1]} or later", hint)


def on_demand(asked: str) -> Any:
    """What `ON_DEMAND` has for this."""
    module, _, name = ON_DEMAND[asked].partition(":")
    return getattr(import_module(module), name)


def demanded(cfg: Config) -> list[str]:
    """Modules of `ON_DEMAND` that every rank of this run needs."""
    from aligner.config.derived import evaluation_functions, undecided

    asked = {
        f"engine.name={cfg.engine.name}": cfg.engine.child is not None,
        "engine.ranks": cfg.engine.ranks > 0,
        "auto": undecided(cfg),
        "eval.generate": bool(cfg.data.eval and evaluation_functions(cfg)),
    }
    return [ON_DEMAND[name].partition(":")[0] for name, wanted in asked.items() if wanted]
