"""Words that docs/contributing/style.md refuses are neither in pages nor in messages."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
STYLE = ROOT / "docs/contributing/style.md"
PAGES = [*(ROOT / f"{name}.md" for name in ("README", "CONTRIBUTING")), *sorted((ROOT / "docs").rglob("*.md"))]
SHELL = [*(ROOT / "launchers").iterdir(), *(path for path in (ROOT / "slurm").iterdir() if path.is_file())]
SAID = re.compile(r"(?:echo|aligner_say|aligner_error)\s+(.*)")


def refused() -> re.Pattern[str]:
    """Match the words of the page's last paragraph that are refused in every sense."""
    listed = STYLE.read_text().partition("\nRefused in documentation and messages: ")[2]
    words = re.findall(r"\*([\w ]+)\*(?!\s+in\s+the\s+sense)", listed)
    assert len(words) > 8
    return re.compile(rf"(?<![\w.])(?:{'|'.join(word.replace(' ', r'\s+') for word in words)})(?![\w.]*\w)", re.I)


def found(texts: Iterator[tuple[int, str]]) -> list[str]:
    pattern = refused()
    return [f"{line}: {match[0]}" for line, text in texts for match in pattern.finditer(text)]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_pages_have_no_refused_words(page):
    if page != STYLE:
        assert found(enumerate(page.read_text().splitlines(), 1)) == []


def messages(path: Path) -> Iterator[tuple[int, str]]:
    """Yield the texts of a module, without its docstrings."""
    tree = ast.parse(path.read_text())
    documents = {
        id(node.body[0].value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        and node.body
        and isinstance(node.body[0], ast.Expr)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in documents:
            yield node.lineno, node.value


def test_messages_have_no_refused_words():
    wrong = {path: found(messages(path)) for path in sorted((ROOT / "aligner").rglob("*.py"))}
    wrong |= {path: found((0, text) for text in SAID.findall(path.read_text())) for path in SHELL if path.is_file()}
    assert {str(path.relative_to(ROOT)): words for path, words in wrong.items() if words} == {}


def test_a_refused_word_is_seen():
    assert found(iter([(3, "It repeats Bit  by bit.")])) == ["3: Bit  by bit"]
    assert found(iter([(3, "aligner.cluster.nursery is a module, nursery_of a name")])) == []
