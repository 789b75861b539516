"""A run that goes on with other settings, data or weights: refused, told, or nobody's business."""

import json
import shutil

import pytest

from aligner.config.freeze import FILE_NAME, PENDING_NAME
from aligner.config.identity import Change
from aligner.config.key import REFUSE, REPORT
from aligner.errors import AlignerError, CheckpointError
from aligner.megatron.checkpoint_files import write_manifest
from aligner.run.changes import reordered
from aligner.run.metrics import read_jsonl
from tests import stages

MORE = ["run.steps=2", "checkpoint.every=2", "logging.progress=false", "run.export=false"]


@pytest.fixture(scope="module")
def half(tiny_data, tiny_runs, tmp_path_factory):
    """Two steps of sft; from a folder of weights and a data file that a test may change."""
    root = tmp_path_factory.mktemp("changes")
    shutil.copytree(tiny_runs["sft"] / "hf", root / "init")
    shutil.copy(tiny_data / "train.jsonl", root / "train.jsonl")
    stages.stage("sft", tiny_data, root / "run", *MORE, *at(root))
    return root


@pytest.fixture
def again(half, tmp_path):
    return shutil.copytree(half, tmp_path / "again")


def at(root):
    return [f"data.train={root / 'train.jsonl'}", f"model.init={root / 'init'}"]


def go_on(data, root, *more):
    return stages.stage("sft", data, root / "run", *MORE, *at(root), *more)


@pytest.mark.slow
def test_a_lower_learning_rate_after_a_gradient_that_is_not_finite(tiny_data, again, capsys):
    """What the message advises. Steps 3 and 4 at a learning rate that ruins the weights, and once more at another."""
    with pytest.raises(AlignerError, match=r"Resume from the last checkpoint with a lower optim\.lr"):
        go_on(tiny_data, again, "run.steps=6", "optim.lr=1e30")
    assert stages.checkpoints(again / "run") == [2]
    capsys.readouterr()
    overrides = ["optim.lr=1e-4", "optim.betas=[0.8,0.9]", "optim.eps=1e-7", "optim.clip_grad=0.5"]
    run = go_on(tiny_data, again, "run.steps=4", *overrides)
    message = (
        "run.steps 2 -> 4, optim.lr 0.003 -> 0.0001, optim.betas [0.9, 0.95] -> [0.8, 0.9], optim.eps 1e-08 -> 1e-07"
    )
    assert f"changed from step 2 on: {message}, optim.clip_grad 1.0 -> 0.5\n" in capsys.readouterr().out
    records = stages.records(run)
    assert [r["step"] for r in records] == [1, 2, 3, 4] and {r["policy/lr"] for r in records[2:]} == {1e-4}
    assert (run / "DONE").exists()
    *_, last = read_jsonl(run / "changes.jsonl")
    assert last["accepted"] == [] and {"key": "optim.lr", "was": 0.003, "now": 1e-4} in last["told"]
    lines = (run / "changes.jsonl").read_text()
    go_on(tiny_data, again, "run.steps=4", *overrides)  # of the checkpoint of step 4, nothing is another
    assert "changed" not in capsys.readouterr().out and (run / "changes.jsonl").read_text() == lines


def other_row(root):
    path = root / "train.jsonl"
    path.write_text(path.read_text().replace("say a", "say A", 1))


def other_weight(root):
    path = root / "init" / "model.safetensors"
    content = bytearray(path.read_bytes())
    content[-9] ^= 1
    path.write_bytes(content)


CHANGES = {
    "seed": (["seed=3"], None, "seed is 0 there, 3 here"),
    "batch": (["batch.sequences=8"], None, "batch.sequences is 16 there, 8 here"),
    "data": ([], other_row, "content of data.train is '"),
    "weights": ([], other_weight, "content of model.init is '"),
}


@pytest.mark.slow
@pytest.mark.parametrize("what", CHANGES)
def test_what_defines_a_run_is_refused_unless_it_is_accepted(tiny_data, again, capsys, what):
    overrides, change, message = CHANGES[what]
    if change is not None:
        change(again)
    pending = shutil.copy(again / "run" / FILE_NAME, again / "run" / PENDING_NAME)
    with pytest.raises(CheckpointError) as caught:
        go_on(tiny_data, again, "run.steps=3", *overrides)
    assert not pending.exists()  # or a requeued job of this run would take it
    assert message in str(caught.value) and "run.accept_changes=true" in str(caught.value)
    assert stages.checkpoints(again / "run") == [2] and len(stages.records(again / "run")) == 2
    if what == "data":
        (again / "train.jsonl").write_text("".join((again / "train.jsonl").open().readlines()[:20]))  # fewer rows, too
    capsys.readouterr()
    run = go_on(tiny_data, again, "run.steps=3", *overrides, "run.accept_changes=true")
    out = capsys.readouterr().out
    key = message.split(" is ")[0]
    assert f"run.accept_changes: from step 2 on {key} " in out and "changed from step 2 on: run.steps 2 -> 3" in out
    assert ("start again with the first" in out) == (what == "data")
    (record,) = read_jsonl(run / "changes.jsonl")
    assert record["step"] == 2 and [c["key"] for c in record["accepted"]] == [key]
    state = json.loads((run / "checkpoints" / "step-00000003" / "state.json").read_text())["state"]
    assert state["data"]["cursor"] == {"data": 16, "batch": 40}.get(what, 48)
    go_on(tiny_data, again, "run.steps=4", *overrides)  # the new checkpoint is of the new definition


def test_data_and_weights_may_move(tiny_data, again, capsys):
    (again / "train.jsonl").rename(again / "moved.jsonl")
    (again / "init").rename(again / "elsewhere")
    moved = [f"data.train={again / 'moved.jsonl'}", f"model.init={again / 'elsewhere'}"]
    stages.stage("sft", tiny_data, again / "run", *MORE, *moved, "run.name=other")
    out = capsys.readouterr().out
    assert "resumed at step 2" in out and "changed" not in out and not (again / "run" / "changes.jsonl").exists()


def test_a_checkpoint_of_an_earlier_version_is_resumed(tiny_data, again, capsys):
    checkpoint = again / "run" / "checkpoints" / "step-00000002"
    content = json.loads((checkpoint / "state.json").read_text())
    del content["definition"]
    (checkpoint / "state.json").write_text(json.dumps(content))
    write_manifest(checkpoint)
    go_on(tiny_data, again, "run.steps=3", "seed=3")
    out = capsys.readouterr().out
    assert out.count("changes are not detected") == 1 and "resumed at step 2 of 3" in out


def test_a_stream_whose_rows_may_be_others_begins_anew_and_no_other():
    def found(*keys, effect=REFUSE):
        return reordered([Change(key, 1, 2, effect) for key in keys])

    for key in ("content of data.train", "data.max_tokens", "content of data.sources.a"):
        assert found(key) == ["data", "clock"]
    assert found("content of ptx.data.train") == found("ptx.data.loss_on") == ["ptx"]
    assert found("data.sources", "ptx.data.sources") == ["data", "clock", "ptx"]
    assert found("ptx.coef", "seed", "content of data.eval") == found("data.train", effect=REPORT) == []
