"""Functions of the user's own, and those that come with the package."""

import ast
from pathlib import Path

import pytest

from aligner.errors import ConfigError
from aligner.user_code import load

ROOT = Path(__file__).parents[1]


def test_examples_are_found_from_any_folder_and_ones_own_come_first(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert load("examples/sums.py:score", "key", "function", ConfigError).__name__ == "score"
    (tmp_path / "examples").mkdir()
    (tmp_path / "examples/sums.py").write_text("def score(samples): return 'mine'")
    assert load("examples/sums.py:score", "key", "function", ConfigError)([]) == "mine"


def test_a_file_that_is_nowhere_is_named_as_it_was_looked_for(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=r"no file .*examples/none.py"):
        load("examples/none.py:score", "key", "function", ValueError)


def test_an_installation_has_the_examples():
    assert '("share/aligner/examples", sorted(glob("examples/*.py")))' in (ROOT / "setup.py").read_text()
    known = {path.stem for path in (ROOT / "examples").glob("*.py")}
    for path in (ROOT / "examples").glob("*.py"):  # alone beside each other, none shadows a package
        names = {n.module.split(".")[0] for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, ast.ImportFrom)}
        assert not known & names - {"examples"}, path
