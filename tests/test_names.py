"""Names and docstrings follow docs/contributing/style.md, as far as a program can tell."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
CODE, TESTS = (sorted((ROOT / folder).rglob("*.py")) for folder in ("aligner", "tests"))

# they could stand for anything
VAGUE = {"found", "told", "given", "mine", "said", "part", "more", "place"}
SHORT = 3  # lines of a function in which they do no harm
STORED = {("aligner/rollout", "told")}  # names of fields in files that earlier versions wrote

# what a function's docstring does not begin with either, besides the words that ruff's D401 refuses
NO_VERB = re.compile(
    "All|Any|As|At|Both|By|Each|Every|For|From|He|Her|His|How|If|In|Its|Of|On|One|She|Such|Their|They|Those|To|When|Where|"
    "Whether|Who|Whose|Why|With|Without"
)
Function = ast.FunctionDef | ast.AsyncFunctionDef


def vague(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """(line, name) of bindings outside short functions."""
    todo: list[tuple[ast.AST, bool]] = [(tree, False)]
    while todo:
        node, short = todo.pop()
        if isinstance(node, Function):
            short = node.body[-1].end_lineno - node.lineno < SHORT
        names = []
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names = [node.id]
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            names = [node.attr]
        elif isinstance(node, ast.arg):
            names = [node.arg]
        elif isinstance(node, Function | ast.ClassDef):
            names = [node.name.strip("_")]
        if not short:
            yield from ((node.lineno, name) for name in names if name in VAGUE)
        todo += [(child, short) for child in ast.iter_child_nodes(node)]


def verbless(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """(line, first words) of docstrings of functions, but for properties, which are read as nouns."""
    for node in ast.walk(tree):
        if isinstance(node, Function) and (text := ast.get_docstring(node)):
            decorators = [ast.unparse(decorator) for decorator in node.decorator_list]
            if not any("property" in name for name in decorators) and NO_VERB.fullmatch(text.split()[0].strip("`,:")):
                yield node.lineno, text[:60]


def listed(find, files: list[Path]) -> list[str]:
    named = ((path.relative_to(ROOT), *each) for path in files for each in find(ast.parse(path.read_text())))
    return [f"{path}:{line}: {what}" for path, line, what in named if (str(path.parent), what) not in STORED]


def test_no_name_could_stand_for_anything():
    assert not listed(vague, CODE + TESTS)


def test_docstrings_of_functions_begin_with_a_verb():
    assert not listed(verbless, CODE)


@pytest.mark.parametrize(
    ("code", "find", "count"),
    [
        ("def f(x):\n    a = 1\n    b = 2\n    found = x\n    return found", vague, 1),
        ("def f(x):\n    found = x\n    return found", vague, 0),
        ("def f(part):\n    a = 1\n    b = 2\n    return part", vague, 1),
        ("class C:\n    told: int = 0", vague, 1),
        ('def f():\n    """With an answer."""', verbless, 1),
        ('def f():\n    """Return it."""', verbless, 0),
        ('@property\ndef f():\n    """One answer."""', verbless, 0),
    ],
)
def test_a_name_or_docstring_against_the_rules_is_seen(code, find, count):
    assert len(list(find(ast.parse(code)))) == count
