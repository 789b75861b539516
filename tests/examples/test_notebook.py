"""The notebook, cell by cell, as Jupyter executes it: in its own folder of a clone, whose packages are elsewhere."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
NOTEBOOK = ROOT / "examples/notebook.ipynb"
FEWER = {'"run.steps=4"': '"run.steps=2"', '"run.steps=40"': '"run.steps=4"', "run.eval_every=20": "run.eval_every=2"}
AFTER = """
assert sft.ended == grpo.ended == "done"
assert sorted(losses) == [1, 2, 3, 4] and losses[4] < losses[1]
assert len(rewards) == 2 and grpo.model == Path("runs/notebook/grpo/hf") and grpo.model.is_dir()
"""


@pytest.mark.slow
def test_the_cells_of_the_notebook_train_a_model(tmp_path):
    shutil.copytree(ROOT / "examples", tmp_path / "examples")
    (tmp_path / "packages").mkdir()
    (tmp_path / "packages/aligner").symlink_to(ROOT / "aligner")
    cells = json.loads(NOTEBOOK.read_text())["cells"]
    assert all(cell.get("outputs", []) == [] for cell in cells), "a notebook without outputs"
    code = "\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "code")
    for steps, fewer in FEWER.items():
        assert code.count(steps) == 1
        code = code.replace(steps, fewer)
    env = os.environ | {"PYTHONPATH": str(tmp_path / "packages")}
    command = [sys.executable, "-c", code + AFTER]
    done = subprocess.run(command, cwd=tmp_path / "examples", env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "unknown config key `optim.learning_rate`. Did you mean `optim.lr`?" in done.stdout
    assert (tmp_path / "runs/notebook/sft/hf").is_dir()
