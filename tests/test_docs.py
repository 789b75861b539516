"""What pages of the documentation name of the tests is there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
NAMED = re.compile(r"`(tests/[\w/]+\.py)(?:::(\w+))?`")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_tests_that_a_page_names_exist(page):
    for file, name in NAMED.findall(page.read_text()):
        path = ROOT / file
        assert path.is_file(), file
        assert not name or re.search(rf"^ *def {name}\(", path.read_text(), re.MULTILINE), (file, name)


def test_every_threat_has_a_test():
    rows = [line for line in (ROOT / "docs/security.md").read_text().splitlines() if line.startswith("|")][2:]
    assert len(rows) > 10
    for row in rows:
        assert re.search(r"`tests/[\w/]+\.py::\w+`", row), row
