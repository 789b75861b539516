"""Model families as data, each in a file of `known/`, found by its name; or a user's, by its path. Nothing here
imports torch."""

from __future__ import annotations

from importlib import import_module
from pkgutil import iter_modules
from typing import Any

from aligner.errors import ConfigError
from aligner.families import known
from aligner.families.family import Family
from aligner.user_code import is_path

FAMILIES: dict[str, Family] = {
    family.model_type: family
    for module in iter_modules(known.__path__)
    for family in import_module(f"{known.__name__}.{module.name}").FAMILIES
}
# other values of model_type -> the family that they are read as: kimi_k2 as deepseek_v3
SAME = {other: name for name, family in FAMILIES.items() for other in family.also}
OUTSIDE: dict[str, Family] = {}  # those of users' files that were imported, by path


def find(name: str) -> Family | None:
    """Return a family by the name of the project's, or by the path of a user's that was imported."""
    return FAMILIES.get(name) or OUTSIDE.get(name)


def load_family(name: str) -> Family:
    """Return a family. A user's is imported; folders of its model_type are read as it from then on. Raises
    FamilyCodeError."""
    if family := find(name):
        return family
    family = import_module(f"{__name__}.outside").read(name)
    OUTSIDE[name] = family
    SAME.update(dict.fromkeys((family.model_type, *family.also), name))
    return family


def refuse_foreign(name: Any, where: Any) -> None:
    """Refuse a user's family that a folder names, and no command line: its import would execute code."""
    if isinstance(name, str) and is_path(name) and name not in OUTSIDE:
        expected = f"a family that the command line names too: it is only in {where}"
        raise ConfigError("model.family", name, expected, f"Add model.family={name}, or --family {name}.")


def served_by(engine: str) -> list[str]:
    return [name for name, family in (FAMILIES | OUTSIDE).items() if engine in family.served_by]
