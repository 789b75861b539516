"""What pages of the documentation name of the tests is there."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
LINKED = re.compile(r"\]\(([^)#:\s]+)(?:#[\w-]+)?\)")
FUNCTION = re.compile(r"\[`([\w.]+)`\]\((\.\./aligner/[\w/]+\.py)\)")
NAMED = re.compile(r"`(tests/[\w/]+\.py)(?:::(\w+))?`")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_tests_that_a_page_names_exist(page):
    for file, name in NAMED.findall(page.read_text()):
        path = ROOT / file
        assert path.is_file(), file
        assert not name or re.search(rf"^ *def {name}\(", path.read_text(), re.MULTILINE), (file, name)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page):
    assert [link for link in LINKED.findall(page.read_text()) if not (page.parent / link).exists()] == []


def test_the_functions_of_the_architecture_are_where_it_says():
    page = ROOT / "docs/architecture.md"
    found = FUNCTION.findall(page.read_text())
    assert len(found) > 40
    for name, file in found:
        body = ast.parse((page.parent / file).read_text()).body
        for part in name.split("."):
            (body,) = [_body(node) for node in body if part in _names(node)] or [None]
            assert body is not None, (name, file)


def _names(node: ast.stmt) -> list[str]:
    targets = getattr(node, "targets", [getattr(node, "target", None)])
    return [getattr(node, "name", ""), *(target.id for target in targets if isinstance(target, ast.Name))]


def _body(node: ast.stmt) -> list[ast.stmt]:
    return getattr(node, "body", [])


def test_every_page_is_in_the_index():
    index = (ROOT / "docs/README.md").read_text()
    assert [page.name for page in (ROOT / "docs").glob("*.md") if f"]({page.name})" not in index] == ["README.md"]


def test_every_threat_has_a_test():
    rows = [line for line in (ROOT / "docs/security.md").read_text().splitlines() if line.startswith("|")][2:]
    assert len(rows) > 10
    for row in rows:
        assert re.search(r"`tests/[\w/]+\.py::\w+`", row), row
