"""Compare the names of tensors in our families with the tables of Megatron-Bridge or mbridge.

    python -m tests.conversion_tables FOLDER

FOLDER is a checkout of either, whose sources are read as text, not imported. Printed for each family of both: names
that only one side has, and matrices that it joins in another order (gate and up; queries, keys and values). Exits 1 if
a name of ours is not there, or in another order.
"""

from __future__ import annotations

import argparse
import ast
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from aligner.families import FAMILIES
from aligner.families.family import Family
from aligner.models.fused import STACKED

MEGATRONS = re.compile(r"(\*|module\.)?(embedding|decoder|output_layer|mtp|mlp|self_attention|shared_experts|pre_mlp)")
DOTTED = re.compile(r"[\w*]+(\.[\w*-]+)+")
# the output layer, which ties, and what is beside the language model
BESIDE = re.compile(r"lm_head|visual|vision|mtp|audio|projector|enorm|hnorm|eh_proj|shared_head|inv_freq")


@dataclass
class Table:
    """What a source says of a family: names in Hugging Face's files, and those that one of Megatron's tensors joins."""

    names: set[str] = field(default_factory=set)
    joined: set[tuple[str, ...]] = field(default_factory=set)


def read_tables(folder: Path) -> dict[str, Table]:
    """Return the tables of the families of ours that the sources in `folder` register, by `model_type`."""
    defined: dict[str, ast.AST] = {}
    registered: dict[str, ast.ClassDef] = {}
    for path in sorted(folder.rglob("*.py")):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ClassDef | ast.FunctionDef):
                defined.setdefault(node.name, node)
            if isinstance(node, ast.ClassDef):
                words = {word for decorator in node.decorator_list for word in _words(decorator)}
                for name, family in FAMILIES.items():
                    if words & {name, family.architecture + "ForCausalLM"}:
                        registered.setdefault(name, node)
    return {name: _table(node, defined) for name, node in registered.items()}


def _words(node: ast.AST) -> Iterator[str]:
    for piece in ast.walk(node):
        if isinstance(piece, ast.Name):
            yield piece.id
        elif isinstance(piece, ast.Constant) and isinstance(piece.value, str):
            yield piece.value


def _table(start: ast.AST, defined: dict[str, ast.AST]) -> Table:
    """Collect from a class, and from the classes and functions that it names."""
    table, seen, todo = Table(), set(), [start]
    while todo:
        node = todo.pop()
        if id(node) in seen:
            continue
        seen.add(id(node))
        for piece in ast.walk(node):
            if isinstance(piece, ast.Name | ast.Attribute):
                name = piece.id if isinstance(piece, ast.Name) else piece.attr
                todo += [defined[name]] if name in defined else []
            elif isinstance(piece, ast.Call):
                _add(table, [keyword.value for keyword in piece.keywords])
                _add(table, piece.args)
            elif isinstance(piece, ast.Assign):  # of what a call is then given
                table.names.update(text for text in [_text(piece.value)] if _published(text))
            elif isinstance(piece, ast.Dict):
                for key, value in zip(piece.keys, piece.values, strict=True):
                    _add(table, [key, *(value.elts if isinstance(value, ast.List) else [value])])
    return table


def _add(table: Table, nodes: list[ast.AST | None]) -> None:
    """Add an entry: one of Megatron's names and the names of files."""
    texts = [text for text in map(_text, nodes) if text]
    published = [text for text in texts if _published(text)]
    if any(MEGATRONS.match(text) for text in texts):
        table.names.update(published)
        table.joined.add(tuple(published))


def _published(text: str) -> bool:
    return bool(DOTTED.fullmatch(text)) and not MEGATRONS.match(text)


def _text(node: ast.AST | None) -> str:
    """Return a string with `*` for what stands in braces, empty for other nodes."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return re.sub(r"\{\w*\}", "*", node.value)
    if isinstance(node, ast.JoinedStr):
        return "".join(_text(value) or "*" for value in node.values)
    return ""


def differences(family: Family, table: Table) -> tuple[list[str], list[str]]:
    """Return what is wrong, and names that only the table has. Rows that only some models have may be absent there."""
    wrong, met = [], set[str]()
    for row in family.table:
        theirs = [_same(family, re.sub(r"\{\w+\}", "*", name), table.names) for name in row.hf]
        met.update(*theirs)
        optional = row.when or (family.moe and row.kind == "dense")
        wrong += [f"{name}: not there" for name, same in zip(row.hf, theirs, strict=True) if not (same or optional)]
        entries = [entry for entry in table.joined if len(entry) == len(theirs) and set(entry) <= set().union(*theirs)]
        for entry in entries:
            if any(name not in same for name, same in zip(entry, theirs, strict=True)):
                wrong.append(f"{row.canonical}: joined there as {entry}")
    return wrong, sorted(name for name in table.names - met if not BESIDE.search(name))


def _same(family: Family, name: str, names: set[str]) -> set[str]:
    """Return the names that mean the tensor, or the matrix that files join or stack it into."""
    ways = {name}
    for whole, matrices in family.fused:
        ways |= {name.replace(f".{matrix}.", f".{whole}.") for matrix in matrices}
    for whole, matrices in (*family.stacked, *(STACKED if family.experts_stacked else ())):
        ways |= {re.sub(rf"\.\*\.{re.escape(matrix)}$", f".{whole}", name) for matrix in matrices}
    ways |= {way.replace("model.", f"{family.stored}.", 1) for way in ways if family.stored}
    return {other for other in names if any(re.fullmatch(re.escape(other).replace(r"\*", ".*"), way) for way in ways)}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="a checkout of Megatron-Bridge or mbridge")
    folder = parser.parse_args(arguments).folder
    tables, failed = read_tables(folder), False
    if not tables:
        print(f"{folder}: expected a checkout of Megatron-Bridge or mbridge, found no table", file=sys.stderr)
        return 1
    for name, table in sorted(tables.items()):
        wrong, only_theirs = differences(FAMILIES[name], table)
        failed |= bool(wrong)
        print(f"{name}: {len(table.names)} names; {'; '.join(wrong) or 'all of ours are there'}")
        for theirs in only_theirs:
            print(f"    only there: {theirs}")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
