"""A model family in a user's file."""

from __future__ import annotations

from itertools import chain

from aligner.errors import FamilyCodeError
from aligner.families import FAMILIES, SAME
from aligner.families.family import Family
from aligner.user_code import load_instance


def read(path: str) -> Family:
    """Import the family at this path. Raises FamilyCodeError."""
    family = load_instance(path, "model.family", Family, FamilyCodeError)
    _check(path, family)
    return family


def _check(path: str, family: Family) -> None:
    """Check a family of a user's file: it consists of what families of the project have. Raises FamilyCodeError."""
    others = FAMILIES.values()
    rows = [row for its in others for row in its.table]

    def refuse(what: str, expected: str) -> None:
        raise FamilyCodeError(f"model.family={path!r}: it has {what}: expected {expected}")

    if absent := set.intersection(*(set(its.names) for its in others)) - family.names:
        refuse(f"no row {min(absent)!r}", "those that all families have")
    for name in (family.model_type, *family.also):
        if name in FAMILIES or name in SAME:
            refuse(f"model_type {name!r}", f"another one than {SAME.get(name, 'of this project')} has")
    for row in family.table:
        like = [one for one in rows if one.canonical == row.canonical]
        if not like:
            refuse(f"a row {row.canonical!r}", "rows of aligner/families/rows.py: nothing computes another")
        for field in ("transform", "tp_axis", "shape", "units", "when", "kind"):
            if getattr(row, field) not in (allowed := {getattr(one, field) for one in like}):
                texts = " or ".join(sorted(map(repr, allowed)))
                refuse(f"{field}={getattr(row, field)!r} in the row {row.canonical!r}", texts)
    keys = set(chain.from_iterable((key for key, _, _ in its.keys) for its in others))
    for key, theirs, _ in family.keys:
        if key not in keys:
            refuse(f"the key {key!r} for {theirs}", f"one of {', '.join(sorted(keys))}")
    for engine in set(family.served_by) - {"vllm"}:
        refuse(f"served_by with {engine!r}", "vllm: native needs no entry, and TensorRT engines have layouts")
