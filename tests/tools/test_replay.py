"""A step executed again is the one that was recorded, on the same layout bit-for-bit; any difference is reported."""

import shutil
from pathlib import Path

import pytest
import torch

from aligner.__main__ import main
from aligner.errors import ConfigError, DataError
from aligner.run.chain import Chain, StepHashes, read_chain
from aligner.tools.replay import compare, prepare
from tests import stages

BARE = ["run.export=false", "checkpoint.keep_last=9", "run.steps=5", "checkpoint.every=2"]
GRPO = ["debug.record=2", "reward.normalize=true", "batch.epochs=2", "batch.minibatch_samples=8"]
GRPO += ["algorithm.kl={coef: 0.1, controller: {kind: adaptive, target: 0.01, horizon: 100}}"]


@pytest.fixture(scope="module")
def runs(tiny_data, tmp_path_factory):
    """Of each stage a run of 5 steps with checkpoints of 2, 4 and 5. Rollouts of the last two are recorded."""
    root = tmp_path_factory.mktemp("replay")
    sft = stages.stage("sft", tiny_data, root / "sft", *BARE, "optim.schedule=cosine")
    return {"sft": sft, "grpo": stages.stage("grpo", tiny_data, root / "grpo", *BARE, *GRPO)}


@pytest.fixture
def run(runs, tmp_path):
    return lambda stage: Path(shutil.copytree(runs[stage], tmp_path / stage))


def steps(folder, *range_):
    """The records of these steps, without their chain."""
    hashes = (f for f in read_chain(folder) if "start" not in f and f["step"] in range(*range_))
    return [{name: value for name, value in f.items() if name != "chain"} for f in hashes]


@pytest.mark.slow
@pytest.mark.parametrize(
    "stage, step, before, recorded", [("sft", 4, 2, 0), ("sft", 1, 0, 0), ("grpo", 5, 4, 1), ("grpo", 4, 2, 1)]
)
def test_a_step_is_the_one_that_was_written(run, capsys, monkeypatch, stage, step, before, recorded):
    from aligner.rollout.source import RolloutSource

    folder, made = run(stage), []
    take = RolloutSource.next
    monkeypatch.setattr(RolloutSource, "next", lambda self, number: made.append(number) or take(self, number))
    untouched = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    actual = prepare(folder, step)
    assert (actual.before, actual.ranks) == (before, 1)
    again = stages.execute(actual.cfg)
    assert compare(folder, again, step) == 0
    shown = capsys.readouterr().out
    assert f"step {step} is the same as recorded" in shown and "weights" in shown and "DIFFERS" not in shown
    assert {path: path.read_bytes() for path in untouched} == untouched
    assert steps(again, before + 1, step + 1) == steps(folder, before + 1, step + 1) != []
    assert stages.checkpoints(again) == ([before] if before else [])
    if stage == "grpo":  # of those behind the checkpoint some had to be generated again, and are recorded now
        assert made == list(range(before + 1, step + 1 - recorded))
        names = [f"step-{number:08d}.safetensors" for number in range(before + 1, step + 1)]
        assert sorted(path.name for path in (again / "rollouts").iterdir()) == names
        there = folder / "rollouts" / names[-1]
        assert (again / "rollouts" / names[-1]).read_bytes() == there.read_bytes()


def test_a_step_that_is_another_one_is_reported(run, capsys):
    folder = run("sft")
    again = stages.execute(prepare(folder, 3, ["optim.lr=1e-4"]).cfg)
    assert compare(folder, again, 3) == 1
    shown = capsys.readouterr().out
    assert "step 3 is DIFFERENT" in shown and "DIFFERS: 14 of 14 tensors, first policy/embedding" in shown
    assert "also different: optim.lr 0.003 | 0.0001" in shown


def test_the_config_of_then_counts(run, tiny_data, capsys):
    folder = run("sft")
    other = ["run.steps=6", "optim.lr=1e-4", "optim.betas=[0.8,0.9]"]
    stages.stage("sft", tiny_data, folder, *BARE, "optim.schedule=cosine", *other)
    again = stages.execute(prepare(folder, 3).cfg)
    assert compare(folder, again, 3) == 0
    assert steps(again, 3, 4) == steps(folder, 3, 4)


def test_a_run_without_checkpoints_before_begins_anew(run):
    folder = run("sft")
    shutil.rmtree(folder / "checkpoints")
    again = stages.execute(prepare(folder, 2).cfg)
    assert compare(folder, again, 2) == 0


@pytest.mark.slow
def test_a_recording_with_a_gap_behind_it_is_generated_again(run, tmp_path):
    """Else the prompts behind it would be its own once more. And a run that can only be read is repeated elsewhere."""
    folder = run("grpo")
    shutil.rmtree(folder / "checkpoints" / "step-00000004")
    (folder / "rollouts" / "step-00000005.safetensors").unlink()
    again = stages.execute(prepare(folder, 5, [f"run.dir={tmp_path / 'elsewhere'}"]).cfg)
    assert compare(folder, again, 5) == 0 and not (folder / "replays").exists()


@pytest.mark.multirank
def test_another_layout_is_close(run, ranks, capsys):
    folder = run("grpo")
    actual = prepare(folder, 5, ["batch.micro_batch_samples=4"], ranks=2)
    ranks.run("tests.run.jobs:run_config", world=2, cfg=actual.cfg)
    assert compare(folder, Path(actual.cfg.run.dir), 5) == 0
    shown = capsys.readouterr().out
    assert "another layout rounds differently" in shown and "close" in shown


def test_bfloat16_rounds_more_on_another_layout(run, tmp_path):
    """What docs/explanation/layouts.md allows a layout, and what it does not."""
    cases = [("float32", 1e-6, 0.0, 0), ("float32", 1e-4, 0.0, 1), ("float32", 0.0, 1e-4, 1)]
    cases += [("bfloat16", 3e-3, 3e-2, 0), ("bfloat16", 1e-2, 0.0, 1), ("bfloat16", 0.0, 0.1, 1)]
    start, step = ({k: v for k, v in steps.items() if k != "chain"} for steps in read_chain(run("sft"))[:2])
    for number, (dtype, loss, norm, code) in enumerate(cases):
        folders = [tmp_path / f"{number}{name}" for name in "ab"]
        for folder, times in zip(folders, (0, 1), strict=True):
            chain = Chain(folder, 0, {}, StepHashes(), torch.device("cpu"))
            chain._write(start | {"start": start["start"] | {"dtype": dtype, "ranks": 1 + times}})
            chain._write(step | {"numbers": {"sft/loss": 1 + times * loss, "sft/grad_norm": 1 + times * norm}})
        assert compare(*folders, 1) == code


def test_what_cannot_be_executed_again(run, tmp_path):
    folder = run("sft")
    with pytest.raises(ConfigError, match=r"--step=6: expected a step of .*: 1 to 5"):
        prepare(folder, 6)
    with pytest.raises(ConfigError, match=r"--step=0: expected a step of .*: 1 to 5"):
        prepare(folder, 0)
    with pytest.raises(DataError, match=r"steps.jsonl: expected a file with a record per step"):
        prepare(tmp_path, 1)
    with pytest.raises(ConfigError, match=r"parallel"):
        prepare(folder, 3, ["parallel.tensor=2"])
    with pytest.raises(ConfigError, match=r"run.dir=.*: expected a folder that does not exist yet"):
        prepare(folder, 3, [f"run.dir={folder}"])
    assert not (folder / "replays").exists()
    (folder / "replays").write_text("in the way")
    with pytest.raises(ConfigError, match=r"run.dir=.*step-00000003': expected a folder that can be written"):
        prepare(folder, 3)
    own = stages.write_jsonl(tmp_path / "later" / "steps.jsonl", [{"step": 0, "start": {"version": 2}, "chain": ""}])
    with pytest.raises(DataError, match=r"format version 2: expected 1"):
        prepare(own.parent, 1)


@pytest.mark.slow
def test_the_command_line_replays_a_step(run, capfd):
    folder = run("sft")
    assert main(["replay", str(folder), "--step", "3"]) == 0
    shown = capfd.readouterr().out
    assert f"steps 3 to 3 of {folder}" in shown and "step 3 is the same as recorded" in shown
    assert main(["replay", str(folder), "--step", "9"]) == 2
    assert "error: --step=9: expected a step" in capfd.readouterr().err
