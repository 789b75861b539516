"""The model's shape beside `model.init`: what is shown, what is refused, what is told."""

from __future__ import annotations

import dataclasses
import re

import pytest
import yaml

from aligner.__main__ import main
from aligner.config.freeze import freeze, load_frozen
from aligner.config.resolve import compose, compose_over
from tests import stages

LINE = "has no effect: the shape is that of model.init="


def shown(capsys, *overrides: str) -> dict:
    assert main(["run", "--cfg", "data.train=.", *overrides]) == 0
    return yaml.safe_load(capsys.readouterr().out)["model"]


@pytest.mark.slow
def test_what_is_shown_is_what_the_folder_has(tiny_runs, capsys):
    """Of an export, of its run, and of a checkpoint, whatever preset is composed below."""
    run = tiny_runs["sft"]
    checkpoint = next((run / "checkpoints").glob("step-*"))
    for init in (run, run / "hf", checkpoint):
        output = shown(capsys, f"model.init={init}")
        assert (output["num_layers"], output["hidden_size"], output["num_kv_heads"]) == (2, 32, 2)
        assert output["max_position"] == 64 and output["vocab_size"] > 256 and output["init"] == str(init)
    assert shown(capsys, "model.num_layers=3", "model.init=random")["num_layers"] == 3


@pytest.mark.slow
@pytest.mark.parametrize(
    ("key", "value", "there"),
    [
        ("num_layers", "32", "2"),
        ("hidden_size", "64", "32"),
        ("vocab_size", "99", r"\d+"),
        ("family", "qwen2", "'llama'"),
        ("moe.num_experts", "4", "0"),
        ("attention.window", "5", "0"),
        ("rope_scaling.factor", "2.0", "1.0"),
    ],
)
def test_a_key_that_contradicts_the_folder_is_refused(key, value, there, tiny_runs, capsys):
    overrides = {"family": ["model.qkv_bias=true"], "attention.window": ["model.family=mistral"]}
    overrides |= {"moe.num_experts": ["model.family=mixtral", "model.moe.top_k=1"]}
    words = [f"model.init={tiny_runs['sft']}", "data.train=.", f"model.{key}={value}", *overrides.get(key, [])]
    assert main(["run", "--cfg", *words]) == 2
    error = capsys.readouterr().err
    assert f"model.{key}=" in error or "model.family=" in error
    assert re.search(r"model\.[\w.]+=.*: expected .*model\.init=.*, which decides the model's shape", error), error
    assert f"model.{key}={value}" in error.replace("'", "") and re.search(rf"expected {there}, as", error)


@pytest.mark.slow
def test_keys_that_agree_or_are_the_runs_pass(tiny_runs, capsys):
    words = ["model.num_layers=2", "model.head_dim=8", "model.vocab_size=0", "model.dtype=float32", "model.lora.rank=2"]
    output = shown(capsys, f"model.init={tiny_runs['sft']}", *words, "model.moe.aux_coef=0.5", "model.init_std=0.1")
    assert output["lora"]["rank"] == 2


@pytest.mark.slow
def test_a_preset_of_another_shape_is_reported_and_one_of_this_is_not(tiny_runs, tmp_path, capsys):
    init = f"model.init={tiny_runs['sft']}"
    assert main(["run", "--cfg", "data.train=.", init, "model=llama3_8b"]) == 0
    output = capsys.readouterr()
    assert f"WARNING: model=llama3_8b {LINE}" in output.err and "llama, 2 layers of 32, " in output.err
    assert yaml.safe_load(output.out)["model"]["num_layers"] == 2
    assert main(["run", "--cfg", "data.train=.", init, "experiment=quickstart_sft"]) == 0  # whose preset is ours
    assert LINE not in capsys.readouterr().err
    same = dataclasses.asdict(load_frozen(tiny_runs["sft"]).model)
    (tmp_path / "model").mkdir()
    (tmp_path / "model/same.yaml").write_text(yaml.safe_dump(same | {"init": "random", "dtype": "float32"}))
    assert main(["run", "-c", str(tmp_path), "--cfg", "data.train=.", "model=same", init]) == 0
    assert LINE not in capsys.readouterr().err
    (tmp_path / "model/other.yaml").write_text(yaml.safe_dump({"dtype": "float32", "num_layers": 6}))
    assert main(["run", "-c", str(tmp_path), "--cfg", "data.train=.", "model=other", init]) == 0
    assert f"model=other {LINE}" in capsys.readouterr().err  # a preset may be chosen for what else it has


@pytest.mark.slow
def test_a_runs_config_has_the_true_shape_and_resumes_as_it_is(tiny_data, tiny_runs, tmp_path):
    """Also where it begins from an earlier version's, with a default shape in it; to the bit."""
    overrides = ["run.export=false", "checkpoint.every=2", f"model.init={tiny_runs['sft']}", "checkpoint.rollouts=true"]
    overrides += ["model.num_layers=4", "model.hidden_size=64", "engine.max_batch=8"]  # what a default was
    whole = stages.stage("grpo", tiny_data, tmp_path / "whole", *overrides, "run.steps=4")
    kept = load_frozen(whole)
    assert (kept.model.num_layers, kept.model.hidden_size) == (2, 32) and kept.model.vocab_size > 256
    for name in ("old", "new"):  # a config.yaml as it was once, and as it is now
        folder = tmp_path / name
        stages.stage("grpo", tiny_data, folder, *overrides, "run.steps=4", "debug.until=3")
        cfg = compose(stages.overrides("grpo", tiny_data, folder, *overrides, "run.steps=4"))
        if name == "old":
            freeze(cfg, folder)
            assert load_frozen(folder).model.num_layers == 4
        stages.execute(compose_over(load_frozen(folder), ["debug.until=0"]))
        assert not stages.differences(whole, folder), name
        assert load_frozen(folder).model.num_layers == 2
    random = stages.stage("sft", tiny_data, tmp_path / "random", "run.steps=1", "run.export=false")
    assert load_frozen(random).model.vocab_size > 256


def test_a_folder_that_is_not_there_yet_decides_nothing(tmp_path, capsys):
    assert shown(capsys, f"model.init={tmp_path / 'later'}", "model.num_layers=7")["num_layers"] == 7
