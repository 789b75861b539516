"""Options of the schema: dotted names, their types, the nearest name to a wrong one, and plain data <-> dataclass.

Everything is read from the dataclasses of `schema.py` and its sections, so a new field needs no entry here.
"""

from __future__ import annotations

import difflib
import functools
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import MISSING, dataclass, fields, is_dataclass
from typing import Any, get_args, get_origin, get_type_hints

from aligner.config.checks import Auto, Switch
from aligner.config.foreign_names import NAMES, known_elsewhere
from aligner.config.key import Facts, facts_of
from aligner.config.removed_keys import current
from aligner.config.schema import Config
from aligner.errors import ConfigError, UnknownKeyError

# The folders of conf/.
GROUPS = (
    "stage",
    "model",
    "parallel",
    "optim",
    "engine",
    "data",
    "reward",
    "logging",
    "experiment",
)
# sections that are used in a second place: `critic.optim`
REUSED = {"critic": ("optim",), "ptx": ("data",)}


@functools.cache
def hints(cls: type) -> dict[str, Any]:
    """Return field name -> resolved type of a schema dataclass, in field order."""
    return get_type_hints(cls)


@dataclass(frozen=True)
class Leaf:
    """A key that is no section."""

    kind: Any  # its resolved type
    default: Any
    facts: Facts  # with those of the sections around it


@functools.cache
def leaves(root: type = Config) -> dict[str, Leaf]:
    """Return dotted key -> its declaration in the schema, in order. Elements of a list are `name[].key`."""

    def walk(cls: type, prefix: str, around: Facts) -> Iterator[tuple[str, Leaf]]:
        for f in fields(cls):
            kind, name, facts = hints(cls)[f.name], prefix + f.name, facts_of(f).within(around)
            if is_dataclass(kind):
                yield from walk(kind, f"{name}.", facts)
                continue
            yield name, Leaf(kind, f.default if f.default_factory is MISSING else f.default_factory(), facts)
            if get_origin(kind) is list and is_dataclass(get_args(kind)[0]):
                yield from walk(get_args(kind)[0], f"{name}[].", facts)

    return dict(walk(root, "", Facts()))


@functools.cache
def all_keys(root: type = Config) -> tuple[str, ...]:
    """Return every dotted key of the schema `root`, sections included, in order. List elements are `name[].key`."""
    names = (
        ".".join(words[:n]) for key in leaves(root) for words in [key.split(".")] for n in range(1, len(words) + 1)
    )
    return tuple(dict.fromkeys(name for name in names if not name.endswith("[]")))


def key_type(key: str) -> Any | None:
    """Return the type of a dotted key, None if there is no such key.

    It goes through lists by number (`reward.functions.0.weight`) and through free dictionaries by any name.
    """
    kind: Any = Config
    for word in re.sub(r"\[(\d*)\]", lambda m: "." + (m[1] or "0"), key).split("."):
        if is_dataclass(kind):
            kind = hints(kind).get(word)
        elif get_origin(kind) is list:
            kind = get_args(kind)[0] if word.isdigit() else None
        elif get_origin(kind) is dict:
            kind = get_args(kind)[1]
        elif kind is not Any:
            return None
        if kind is None:
            return None
    return kind


def in_free_dict(key: str) -> bool:
    """Return whether the key is an entry of a free dictionary (`data.columns.prompt`), which may be new."""
    parts = key.split(".")
    return any(get_origin(key_type(".".join(parts[:n]))) is dict for n in range(1, len(parts)))


def type_name(kind: Any) -> str:
    """Return a type's name for users."""
    plain = {int: "an integer", float: "a number", bool: "true or false", str: "a string", Any: "any value"}
    plain |= {Auto: "an integer or auto", Switch: "true, false or auto"}
    if kind in plain:
        return plain[kind]
    if get_origin(kind) is list:
        return f"a list, each element {type_name(get_args(kind)[0])}"
    if get_origin(kind) is dict:
        return f"a mapping from string to {type_name(get_args(kind)[1])}"
    return f"a section with the keys {', '.join(hints(kind))}"


def nearest(key: str, root: type = Config, stage: str = "", reads: Callable[[str], bool] | None = None) -> str | None:
    """Return the valid dotted name (of a Config also group) that a wrong one most likely meant, or a setting of it.
    It tries a typing error, the end of a longer name, another trainer's name for `stage`, the same last part, and
    similar spelling. `reads` says which keys may be suggested."""
    names = [n for n in dict.fromkeys((*all_keys(root), *(GROUPS if root is Config else ()))) if not reads or reads(n)]
    slip = difflib.get_close_matches(key, names, n=1, cutoff=0.9)
    parts = key.split(".")
    ends = [end for n in range(1, len(parts)) if (end := ".".join(parts[n:])) in names]
    matches = [*slip, *ends] or _elsewhere(key, names, stage)
    if matches:
        return matches[0]
    leaf = parts[-1]
    same_leaf = [n for n in names if n.rsplit(".", 1)[-1] == leaf]
    same_leaf = [n for n in same_leaf if (owner := n.partition(".")[0]) not in REUSED or owner in parts] or same_leaf
    matches = difflib.get_close_matches(key, same_leaf, n=1, cutoff=0.0) or difflib.get_close_matches(
        key, names, n=1, cutoff=0.5
    )
    if matches:
        return matches[0]
    leaves = {n.rsplit(".", 1)[-1]: n for n in reversed(names)}  # the first of equal leaves wins
    close = difflib.get_close_matches(leaf, leaves, n=1, cutoff=0.6)
    return leaves[close[0]] if close else None


def _elsewhere(key: str, names: Sequence[str], stage: str) -> list[str]:
    """Return the meaning of another trainer's name, in the same owner's section if there is one."""
    *above, leaf = key.split(".")
    alike = difflib.get_close_matches(leaf, NAMES, n=1, cutoff=0.9)
    setting = known_elsewhere(key, stage) or known_elsewhere(".".join([*above, *alike]) if alike else "", stage)
    owned = f"{key.partition('.')[0]}.{setting}"
    wanted = owned if owned in names else setting
    name = re.sub(r"=.*", "", wanted)
    return [wanted] if name in names or in_free_dict(name) else []


def rekeyed(error: ConfigError, prefix: str) -> ConfigError:
    """Return the error of a section that is used in a second place (`critic.optim`), with that place in its key."""
    return type(error)(f"{prefix}.{error.key}", error.value, error.expected)


def from_plain(kind: Any, data: Any, key: str = "", root: type = Config) -> Any:
    """Convert plain data (of a YAML file) to `kind`. It checks types exactly, refuses unknown keys, and fills in
    defaults. `root` is the schema whose names are suggested.

    Raises UnknownKeyError, or ConfigError naming key, value and expected type.
    """
    if is_dataclass(kind):
        data = current(data) if kind is Config and isinstance(data, dict) else data
        return _section(kind, data, key, root)
    wrong = ConfigError(key, data, type_name(kind))
    if kind is Any or (kind in (Auto, Switch) and type(data) in get_args(kind)):
        return data
    if get_origin(kind) is list:
        if not isinstance(data, list):
            raise wrong
        return [from_plain(get_args(kind)[0], item, f"{key}[{i}]", root) for i, item in enumerate(data)]
    if get_origin(kind) is dict:
        if not isinstance(data, dict) or not all(isinstance(k, str) for k in data):
            raise wrong
        return {k: from_plain(get_args(kind)[1], v, f"{key}.{k}", root) for k, v in data.items()}
    if kind is float and type(data) is int:
        return float(data)
    if type(data) is not kind:  # a bool is no int here
        raise wrong
    return data


def _section(kind: type, data: Any, key: str, root: type) -> Any:
    if not isinstance(data, dict):
        raise ConfigError(key, data, type_name(kind))
    prefix = f"{key}." if key else ""
    known = hints(kind)
    for name in data:
        if name not in known:
            raise UnknownKeyError(f"{prefix}{name}", nearest(f"{prefix}{name}", root))
    values = {name: from_plain(known[name], value, prefix + name, root) for name, value in data.items()}
    try:
        return kind(**values)
    except ConfigError as error:
        owner = key.partition(".")[0]
        if owner in REUSED and not error.key.startswith(f"{owner}."):
            raise rekeyed(error, owner) from None
        raise
