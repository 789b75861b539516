"""Every key with its type, default and meaning, as the schema declares them. It is the page
docs/reference/keys.md. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, is_dataclass
from itertools import groupby
from typing import Any, get_args, get_origin

from aligner.config.checks import Auto, Switch
from aligner.config.key import Facts
from aligner.config.options import Leaf, all_keys, leaves, nearest
from aligner.config.schema import Config
from aligner.config.sections.model.config import RUNS
from aligner.errors import UnknownKeyError

HEAD = """# Keys

Type, default and meaning of every config key, as `python -m aligner keys [SECTION]` prints them. How keys are set, and
which matter first: [configuration](../how-to/configure.md).
"""


@dataclass(frozen=True)
class Key:
    name: str  # dotted; elements of a list are `name[].key`
    kind: str
    default: str
    meaning: str
    choices: tuple[str, ...] = ()  # of a text, or of the elements of a list of such; none: any
    range: str = ""  # of a number, or of the elements of a list of such

    @property
    def values(self) -> str:
        """Allowed values."""
        choices = ", ".join(choice or '""' for choice in self.choices)
        kind = choices if self.kind == "text" and choices else f"{self.kind}: {choices}" if choices else self.kind
        return f"{kind} {self.range}".rstrip()


def keys(root: type = Config, whole: bool = False) -> Iterator[Key]:
    """Yield keys in the schema's order, sections followed by their keys. Sections that are like others, or of the
    model's shape, are one entry, `section.*`, unless `whole`."""
    for meaning, group in groupby(leaves(root).items(), lambda item: "" if whole else _in_short(*item)):
        if meaning:
            yield Key(f"{next(group)[0].rpartition('.')[0]}.*", "section", "", meaning)
        else:
            yield from (_key(name, leaf) for name, leaf in group)


def _in_short(name: str, leaf: Leaf) -> str:
    """Return the one text for all keys of its section; "" if each is an entry."""
    if leaf.facts.like and ("[]" in name or not leaf.facts.like.endswith("[]")):  # else the list of what is like others
        return f"The keys of `{leaf.facts.like}`, with the same defaults."
    if not name.startswith("model.") or f"{name}.".startswith(tuple(f"model.{key}." for key in RUNS)):
        return ""
    section = name.rpartition(".")[0]
    return f"Model's shape: from config.json or a file of conf/model. List: `python -m aligner keys {section}`."


def _key(name: str, leaf: Leaf) -> Key:
    facts = leaf.facts
    kind, default, choices = _kind(leaf.kind, facts), _shown(leaf.default), tuple(map(str, facts.choices))
    return Key(name, kind, default, facts.meaning, choices, facts.range)


def page() -> str:
    """Return `docs/reference/keys.md`: a table for each top section."""
    out, section = [HEAD], None
    for key in keys():
        top = key.name.partition(".")[0] if "." in key.name else ""
        if top != section:
            title = f"`{top}`" if top else "At the top"
            out.append(f"\n## {title}\n\n| key | values | default | meaning |\n|---|---|---|---|\n")
            section = top
        cells = (f"`{key.name}`", key.values, f"`{key.default}`" if key.default else "", key.meaning)
        out.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |\n")
    return "".join(out)


def listing(sections: Sequence[str]) -> str:
    """Return a line for each key of these sections, or of all. Raises UnknownKeyError."""
    every = list(keys(whole=bool(sections)))
    for section in sections:
        if section not in all_keys():
            raise UnknownKeyError(section, nearest(section))
    chosen = [k for k in every if not sections or any(f"{k.name}.".startswith(f"{s}.") for s in sections)]
    name, kind = (max(len(getattr(k, field)) for k in chosen) for field in ("name", "kind"))
    return "".join(f"{k.name:{name}}  {k.kind:{kind}}  {k.default or '-'}  # {_explained(k)}\n" for k in chosen)


def _explained(key: Key) -> str:
    return key.meaning if key.values == key.kind else f"{key.meaning} [{key.values}]"


def _kind(kind: Any, facts: Facts) -> str:
    if get_origin(kind) is list:
        inner = get_args(kind)[0]
        return "list of sections" if is_dataclass(inner) else f"list of {_kind(inner, facts)}"
    if get_origin(kind) is dict:
        return "mapping"
    if facts.joined:
        return f"texts joined by {facts.joined}"
    plain = {int: "integer", float: "number", bool: "true, false", str: "text", Any: "any"}
    return (plain | {Auto: "integer or auto", Switch: "true, false or auto"})[kind]


def _shown(value: Any) -> str:
    return {True: "true", False: "false"}[value] if isinstance(value, bool) else str(value).replace("\n", "\\n")
