"""Functions of the user's own, and those that come with the package."""

import ast
from pathlib import Path

import pytest

from aligner.config.freeze import outside_code, reward_code
from aligner.config.resolve import compose
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


def test_the_code_of_a_run_is_the_file_and_what_it_imports_from_beside_it(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine/more").mkdir(parents=True)
    (tmp_path / "mine/loss.py").write_text("import json, helper\nfrom more import deep\ndef main(job): ...\n")
    (tmp_path / "mine/helper.py").write_text("import loss  # A\n")
    (tmp_path / "mine/more/deep.py").write_text("broken(  # B\n")
    (tmp_path / "mine/other.py").write_text("# C\n")
    (code,) = outside_code(compose(["stage=grpo", "algorithm.policy_loss=mine/loss.py:main"])).values()
    assert code.startswith(b"import json, helper") and b"# A" in code and b"# B" in code and b"# C" not in code
    assert code.count(b"# A") == 1
    # also those that come with the package, from any folder
    shipped = compose(["stage=grpo", "reward.functions=[{path: examples/sums.py:score}]"])
    assert reward_code(shipped) == (ROOT / "examples/sums.py").read_bytes()


def test_an_installation_has_the_examples():
    assert '("share/aligner/examples", sorted(glob("examples/*.py")' in (ROOT / "setup.py").read_text()
    known = {path.stem for path in (ROOT / "examples").glob("*.py")}
    for path in (ROOT / "examples").glob("*.py"):  # alone beside each other, none shadows a package
        names = {n.module.split(".")[0] for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, ast.ImportFrom)}
        assert not known & names - {"examples"}, path
