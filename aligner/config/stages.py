"""The stages, each a file of `aligner/stages`, found by its name. The configuration imports it as
`aligner.config.stages.NAME`, without a run's dependencies (such as torch); a run imports it as `aligner.stages.NAME`.

A user's stage is a file anywhere, named by its path, my_grpo.py, or a module of a package, my_lab.my_grpo.
Configuration and run import it once.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from importlib import import_module
from pkgutil import iter_modules
from typing import Any

from aligner.config.stage import OWN, Stage
from aligner.errors import StageCodeError
from aligner.user_code import is_source, load_module

__path__ = import_module("aligner.stages").__path__  # where Python looks for the modules of this one

_MODULES = {name: import_module(f"{__name__}.{name}") for _, name, _ in iter_modules(__path__)}


class _Stages(dict[str, Stage]):
    """The project's stages by name; the path of a file, or a module, gives the stage in it."""

    def __missing__(self, name: str) -> Stage:
        if not is_source(name):
            raise KeyError(name)
        return _own(name)[0]


STAGES = _Stages({name: module.STAGE for name, module in _MODULES.items() if hasattr(module, "STAGE")})


def entry_point(name: str) -> Callable[[Any], None]:
    """Return `main(job)` of a stage. Imports what its run needs."""
    return _own(name)[1] if is_source(name) else import_module(f"aligner.stages.{name}").main


@cache
def _own(path: str) -> tuple[Stage, Callable[[Any], None]]:
    """Import the stage in a user's file or module. Raises StageCodeError."""
    early = "megatron.core" not in sys.modules
    module = load_module(path, "stage", StageCodeError)
    if early and "megatron.core" in sys.modules:
        raise StageCodeError(
            f"stage={path!r}: expected a file that does not import Megatron before a run has set it up. "
            "Write `from aligner import api`, and api.NAME within functions"
        )
    stage, main = getattr(module, "STAGE", None), getattr(module, "main", None)
    if not isinstance(stage, Stage):
        raise StageCodeError(f"stage={path!r}: expected STAGE = api.Stage(...) in the file")
    if not inspect.isfunction(main) or len(inspect.signature(main).parameters) != 1:
        raise StageCodeError(f"stage={path!r}: expected a function main(job) in the file")
    return replace(stage, reads=(*stage.reads, OWN)), main
