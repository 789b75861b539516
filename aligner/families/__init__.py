"""Model families as data, each in a file of `known/`, found by its name. Nothing here imports torch."""

from __future__ import annotations

from importlib import import_module
from pkgutil import iter_modules

from aligner.families import known
from aligner.families.family import Family

FAMILIES: dict[str, Family] = {
    family.model_type: family
    for module in iter_modules(known.__path__)
    for family in import_module(f"{known.__name__}.{module.name}").FAMILIES
}
# other values of model_type -> the family that they are read as: kimi_k2 as deepseek_v3
SAME = {other: name for name, family in FAMILIES.items() for other in family.also}


def served_by(engine: str) -> list[str]:
    return [name for name, family in FAMILIES.items() if engine in family.served_by]
