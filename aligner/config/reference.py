"""Every key with its type, default and meaning, read off the dataclasses of the schema. Imports no torch.

The meaning of a key is the comment at its field: behind it, or on the lines above. `docs/keys.md` is this as a page.
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import importlib
import inspect
import io
import re
import tokenize
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass, is_dataclass
from typing import Any, get_args, get_origin

from aligner.config.checks import Auto, Switch
from aligner.config.options import all_keys, hints, nearest
from aligner.config.schema import Config
from aligner.errors import ConfigError, UnknownKeyError

HEAD = """# All keys

Type, default and meaning of every config key, as `python -m aligner keys [SECTION]` prints them. How keys are set, and
which matter first: [configuration](configuration.md).
"""


@dataclass(frozen=True)
class Key:
    name: str  # dotted; elements of a list are `name[].key`
    kind: str
    default: str
    meaning: str
    choices: tuple[str, ...] = ()  # of a text, or of the elements of a list of such; none: any


def keys(root: type = Config, prefix: str = "") -> Iterator[Key]:
    """In the schema's order, sections followed by their keys."""
    comments = _comments(root)
    for field in dataclasses.fields(root):
        kind, name = hints(root)[field.name], prefix + field.name
        meaning = comments.get(field.name, "")
        if is_dataclass(kind):
            yield from keys(kind, f"{name}.")
            continue
        yield Key(name, _kind(kind), _default(field), meaning, _choices(root, field.name))
        if get_origin(kind) is list and is_dataclass(get_args(kind)[0]):
            yield from keys(get_args(kind)[0], f"{name}[].")


def page() -> str:
    """`docs/keys.md`: a table for each top section."""
    out, section = [HEAD], None
    for key in keys():
        top = key.name.partition(".")[0] if "." in key.name else ""
        if top != section:
            title = f"`{top}`" if top else "At the top"
            out.append(f"\n## {title}\n\n| key | type | default | meaning |\n|---|---|---|---|\n")
            section = top
        cells = (f"`{key.name}`", key.kind, f"`{key.default}`" if key.default else "", key.meaning)
        out.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |\n")
    return "".join(out)


def listing(sections: Sequence[str]) -> str:
    """A line for each key of these sections, or of all. Raises UnknownKeyError."""
    every = list(keys())
    for section in sections:
        if section not in all_keys():
            raise UnknownKeyError(section, nearest(section))
    chosen = [k for k in every if not sections or any(f"{k.name}.".startswith(f"{s}.") for s in sections)]
    name, kind = (max(len(getattr(k, field)) for k in chosen) for field in ("name", "kind"))
    return "".join(f"{k.name:{name}}  {k.kind:{kind}}  {k.default or '-'}  # {k.meaning}\n" for k in chosen)


def _kind(kind: Any) -> str:
    if get_origin(kind) is list:
        inner = get_args(kind)[0]
        return "list of sections" if is_dataclass(inner) else f"list of {_kind(inner)}"
    if get_origin(kind) is dict:
        return "mapping"
    plain = {int: "integer", float: "number", bool: "true, false", str: "text", Any: "any"}
    return (plain | {Auto: "integer", Switch: "true, false"})[kind]


def _default(field: dataclasses.Field) -> str:
    value = field.default if field.default_factory is MISSING else field.default_factory()
    if value is MISSING:
        return ""
    return {True: "true", False: "false"}[value] if isinstance(value, bool) else str(value).replace("\n", "\\n")


@functools.cache
def _choices(cls: type, field: str) -> tuple[str, ...]:
    """What the section's own check names as expected where it refuses a text that nothing is called."""
    kind = hints(cls)[field]
    if kind not in (str, list[str]):
        return ()
    try:
        cls(**{field: "?" if kind is str else ["?"]})
    except ConfigError as error:
        listed = error.expected.removeprefix("one of ")
        return tuple(listed.split(", ")) if listed != error.expected else ()
    return ()


@functools.cache
def _comments(cls: type) -> dict[str, str]:
    """Field name -> the comment at it, there or in a class that it inherits; lists that it names by a constant of its
    module are written out."""
    found = {}
    for base in reversed([c for c in cls.__mro__ if is_dataclass(c)]):
        constants = vars(importlib.import_module(base.__module__))
        found |= {field: _spelled_out(text, constants) for field, text in _own_comments(base).items()}
    return found


def _spelled_out(text: str, constants: Mapping[str, Any]) -> str:
    def names(match: re.Match[str]) -> str:
        value = constants.get(match[0])
        return ", ".join(map(str, value)) if isinstance(value, tuple | dict) else match[0]

    return re.sub(r"\b[A-Z][A-Z_]+\b", names, text)


def _own_comments(cls: type) -> dict[str, str]:
    source = inspect.getsource(importlib.import_module(cls.__module__))
    lines, alone = {}, set()  # number of a line: its comment; those with nothing else
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            lines[token.start[0]] = token.string.lstrip("# ")
            if token.line.lstrip().startswith("#"):
                alone.add(token.start[0])
    found = {}
    nodes = [n for n in ast.parse(source).body if isinstance(n, ast.ClassDef) and n.name == cls.__name__]
    for field in (field for node in nodes for field in node.body):  # one that is put together has no text
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name):
            first = field.lineno
            while first - 1 in alone:
                first -= 1
            said = [lines[n] for n in range(first, (field.end_lineno or field.lineno) + 1) if n in lines]
            found[field.target.id] = " ".join(said)
    return found
