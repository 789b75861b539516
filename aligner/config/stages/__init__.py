"""The stages, each a file here, found by its name."""

from __future__ import annotations

from importlib import import_module
from pkgutil import iter_modules

from aligner.config.stage import Stage

STAGES: dict[str, Stage] = {
    module.name: import_module(f"{__name__}.{module.name}").STAGE for module in iter_modules(__path__)
}
