"""The notebook, cell by cell, as a reader executes it."""

import json
from pathlib import Path

import pytest

NOTEBOOK = Path(__file__).parents[2] / "examples/notebook.ipynb"


@pytest.mark.slow
def test_the_cells_of_the_notebook_train_a_model(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {}
    for cell in json.loads(NOTEBOOK.read_text())["cells"]:
        assert cell.get("outputs", []) == [], "a notebook without outputs"
        if cell["cell_type"] == "code":
            exec(compile("".join(cell["source"]), f"{NOTEBOOK}, {cell['id']}", "exec"), names)
    assert names["sft"].ended == names["grpo"].ended == "done"
    assert sorted(names["losses"]) == [*range(1, 41)] and names["losses"][40] < names["losses"][1]
    assert len(names["rewards"]) == 4 and names["grpo"].model == Path("runs/notebook/grpo/hf")
    assert "unknown config key `optim.learning_rate`. Did you mean `optim.lr`?" in capsys.readouterr().out
