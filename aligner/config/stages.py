"""The stages, each a file of `aligner/stages`, found by its name. The configuration imports it as
`aligner.config.stages.NAME`, without a run's dependencies (such as torch); a run imports it as `aligner.stages.NAME`.
"""

from __future__ import annotations

from importlib import import_module
from pkgutil import iter_modules

from aligner.config.stage import Stage

__path__ = import_module("aligner.stages").__path__  # where Python looks for the modules of this one

_MODULES = {name: import_module(f"{__name__}.{name}") for _, name, _ in iter_modules(__path__)}
STAGES: dict[str, Stage] = {name: module.STAGE for name, module in _MODULES.items() if hasattr(module, "STAGE")}
