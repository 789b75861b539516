"""run.epochs: how many steps it is, of what was kept, and where it is refused."""

from __future__ import annotations

import json
from fractions import Fraction
from math import ceil

import pytest

from aligner.config.freeze import load_frozen
from aligner.config.resolve import compose, compose_over
from aligner.config.unread import compose_run, refuse_unread
from aligner.errors import ConfigError
from tests import stages

QUICK = ["run.export=false", "checkpoint.final=false"]


def last_step(folder) -> int:
    return stages.records(folder)[-1]["step"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "epochs", "batch", "rows"),
    [
        ("sft", "2", "batch.sequences=8", 32),
        ("sft", "0.1", "batch.sequences=8", 32),
        ("rm", "1.5", "batch.sequences=8", 32),
        ("dpo", "1", "batch.sequences=12", 32),
        ("kto", "1", "batch.sequences=16", 64),
        ("distill", "1", "batch.sequences=16", 32),
        ("distill", "1", "algorithm.distill.on_policy=1", 32),
        ("grpo", "1", "batch.prompts=8", 32),
        ("ppo", "0.5", "batch.prompts=16", 32),
        ("online_dpo", "1", "batch.prompts=8", 32),
    ],
)
def test_steps_follow_from_the_rows(name, epochs, batch, rows, tiny_data, tiny_runs, tmp_path):
    overrides = [f"run.epochs={epochs}", batch, "batch.micro_batch_samples=4", *QUICK]
    overrides += [f"algorithm.distill.teacher={tiny_runs['sft']}", "batch.sequences=16"] if name == "distill" else []
    overrides += ["critic.warmup_steps=0", f"reward.model={tiny_runs['rm']}"] if name == "ppo" else []
    run = stages.stage(name, tiny_data, tmp_path, *overrides)
    cfg = compose(stages.overrides(name, tiny_data, tmp_path, *overrides))
    taken = cfg.batch.prompts if name in ("grpo", "ppo", "online_dpo") else cfg.batch.sequences
    assert last_step(run) == ceil(Fraction(epochs) * rows / taken)
    assert json.loads((run / "progress.json").read_text())["steps"] == last_step(run)


@pytest.mark.slow
def test_rows_that_were_dropped_or_mixed_count_as_they_are(tiny_data, tmp_path):
    long = {"prompt": "x" * 60, "completion": "y"}
    rows = [{"prompt": f"say {c}:", "completion": c} for c in "abcdefghij"]
    a = stages.write_jsonl(tmp_path / "a.jsonl", [*rows, long, long])
    b = stages.write_jsonl(tmp_path / "b.jsonl", rows[:6])
    overrides = [*QUICK, "run.epochs=2", "batch.sequences=4"]
    assert last_step(stages.stage("sft", tiny_data, tmp_path / "one", f"data.train={a}", *overrides)) == 5
    both = ["data.train=''", f"data.sources=[{{path: '{a}'}}, {{path: '{b}'}}]"]
    assert last_step(stages.stage("sft", tiny_data, tmp_path / "two", *both, *overrides)) == 8
    text = stages.write_jsonl(tmp_path / "t.jsonl", [{"text": "abcdefgh" * 8}] * 4)
    packed = [f"data.train={text}", "data.format=text", *overrides, "batch.sequences=1", "batch.micro_batch_samples=1"]
    steps = last_step(stages.stage("sft", tiny_data, tmp_path / "three", *packed))
    assert steps == 2 * ceil(4 * 65 / 32) or steps == 2 * (4 * 65 // 32)  # rows of data.max_tokens=32, not documents


@pytest.mark.slow
def test_a_run_resumes_to_the_same_step_with_the_same_numbers(tiny_data, tmp_path):
    overrides = ["run.epochs=3", "batch.sequences=8", "optim.schedule=linear", "checkpoint.every=5", "run.export=false"]
    whole = stages.stage("sft", tiny_data, tmp_path / "whole", *overrides)
    cut = tmp_path / "cut"
    stages.stage("sft", tiny_data, cut, *overrides, "run.epochs=3", "debug.until=7")
    stages.stage("sft", tiny_data, cut, *overrides)
    assert last_step(cut) == 12 and not stages.differences(whole, cut)
    frozen = load_frozen(whole)
    assert frozen.run.epochs == 3
    again = compose_over(frozen, [f"run.dir={tmp_path / 'again'}"])
    assert not stages.differences(whole, stages.execute(again))


@pytest.mark.parametrize(
    ("overrides", "refused"),
    [
        (["run.epochs=2", "run.steps=10"], True),
        (["run.steps=10", "run.epochs=0"], False),
        (["experiment=quickstart_sft", "run.epochs=2"], False),
        (["stage=grpo", "run.epochs=0.5"], False),
    ],
)
def test_one_of_steps_and_epochs(overrides, refused):
    if refused:
        with pytest.raises(ConfigError, match=r"run\.steps=10: expected no value with run\.epochs=2.*run\.epochs=0"):
            compose_run(overrides)
    else:
        assert compose_run(overrides).run.epochs in (0, 0.5, 2)


def test_steps_of_a_users_file_give_way_to_epochs_and_not_the_reverse(tmp_path):
    file = tmp_path / "experiment/mine.yaml"
    file.parent.mkdir()
    file.write_text("# @package _global_\nrun: {steps: 7}\n")
    for typed in ("run.epochs=2", "?run.epochs=2"):
        assert compose_run(["experiment=mine", typed], config_dir=str(tmp_path)).run.epochs == 2
    file.write_text("# @package _global_\nrun: {epochs: 7}\n")
    with pytest.raises(ConfigError, match=r"run\.steps=7"):
        compose_run(["experiment=mine", "run.steps=7"], config_dir=str(tmp_path))
    frozen = compose(["run.epochs=2"])
    with pytest.raises(ConfigError, match=r"run\.steps=7"):
        refuse_unread(compose_over(frozen, ["run.steps=7"]), ["run.steps=7"])


@pytest.mark.parametrize("value", ["-1", "nan", "inf"])
def test_epochs_are_a_number_of_passes(value):
    with pytest.raises(ConfigError, match=r"run\.epochs"):
        compose([f"run.epochs={value}"])


def test_stage_sample_reads_all_rows_once():
    with pytest.raises(ConfigError, match=r"run\.epochs.*stage sample"):
        compose_run(["stage=sample", "run.epochs=2"])
