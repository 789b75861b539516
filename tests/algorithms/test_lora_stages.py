"""Stages that train adapters: what they write and go on from, and what they refuse."""

import shutil

import pytest
import torch
from safetensors.torch import load_file

from aligner.errors import CheckpointError, ConfigError
from tests import stages

LORA = ["model.lora.rank=4", "model.lora.alpha=8", "optim.lr=1e-2", "run.samples_every=0"]


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return stages.make_data(tmp_path_factory.mktemp("lora"))


@pytest.fixture(scope="module")
def half(data, tmp_path_factory):
    """An SFT run after two of its steps."""
    return stages.stage("sft", data, tmp_path_factory.mktemp("half"), *LORA, "run.steps=2")


@pytest.mark.slow
def test_dropout_is_the_same_after_a_resume(data, tmp_path):
    overrides = [*LORA, "model.lora.dropout=0.2", "checkpoint.async_save=true", "checkpoint.every=1"]
    whole = stages.stage("sft", data, tmp_path / "whole", *overrides, "run.steps=3")
    for steps in (1, 3):
        parts = stages.stage("sft", data, tmp_path / "parts", *overrides, f"run.steps={steps}")
    assert stages.differences(parts, whole) == []
    assert stages.records(whole)[-1]["lora/b_norm"] > 0.1
    plain = stages.stage("sft", data, tmp_path / "plain", *LORA, "run.steps=3")
    assert stages.differences(plain, whole)  # something was dropped


def test_engines_get_merged_weights_and_prove_it(data, tmp_path, capsys):
    run = stages.stage("grpo", data, tmp_path, *LORA, "run.steps=3", "refit.verify=checksum")
    last = stages.records(run)[-1]
    assert last["refit/sentinel_error"] < 1e-5 and last["refit/sentinel_progress"] > 0.9
    assert "3,712 parameters are trained, 15.55% of the model's 23,872" in capsys.readouterr().out
    weights = load_file(run / "hf" / "model.safetensors")
    assert not [name for name in weights if "lora" in name]


@pytest.mark.slow
def test_an_engine_that_merges_is_one_that_gets_merged_weights(data, tmp_path):
    """Numbers and weights of the run, also over a resume."""
    overrides = [*LORA, "model.lora.dora=true", "refit.verify=checksum", "checkpoint.every=1"]
    merged = stages.stage("grpo", data, tmp_path / "merged", *overrides, "run.steps=3")
    for steps in (2, 3):
        parts = stages.stage(
            "grpo", data, tmp_path / "parts", *overrides, "refit.adapters=factors", f"run.steps={steps}"
        )
    assert stages.differences(parts, merged) == [] and stages.same_weights(parts, merged)
    first, second, again = [record["refit/bytes"] for record in stages.records(parts)]
    assert second < first / 3 and again == first  # a new engine has no frozen weights


@pytest.mark.slow
def test_ppo_learns_with_a_critic_on_the_policys_trunk(tiny_data, tiny_runs, tmp_path):
    """The frozen weights are in memory once; engines and exports know nothing of the critic's adapters; and a resumed
    run whose weights come and go has the same numbers."""
    sft, critic = tiny_runs["sft"], ["critic.trunk=policy", "critic.optim.lr=1e-2", "critic.pretrain_steps=30"]
    overrides = [*LORA, *critic, f"model.init={sft}", f"reward.model={tiny_runs['rm']}", "algorithm.kl.coef=0.01"]
    overrides += ["batch.prompts=32", "batch.minibatch_samples=32", "batch.micro_batch_samples=16"]
    overrides += ["refit.verify=checksum", "checkpoint.every=1"]
    whole = stages.stage("ppo", tiny_data, tmp_path / "whole", *overrides, "run.steps=16")
    parts = stages.stage("ppo", tiny_data, tmp_path / "parts", *overrides, "run.steps=1")  # the critic alone learns
    assert stages.records(parts)[0]["critic/lora/b_norm"] > 0 and stages.same_weights(parts, sft)
    offload = "memory.offload=[gradients,optimizer,weights]"
    parts = stages.stage("ppo", tiny_data, parts, *overrides, offload, "run.steps=16")
    assert stages.differences(parts, whole) == [] and stages.same_weights(parts, whole)
    records = stages.records(whole)
    means = [record["reward/model/mean"] for record in records]
    assert sum(means[-3:]) / 3 > sum(means[:2]) / 2 + 0.1
    assert records[0]["critic/pretrain_explained_variance_before"] == 0  # of a head that is new
    assert records[0]["critic/pretrain_explained_variance"] > 0.3


@pytest.mark.parametrize(
    "message, change",
    [
        ("lora.rank is 4 there, 2 here", ["model.lora.rank=2"]),
        ("lora.scale is 2.0 there, 4.0 here", ["model.lora.rslora=true"]),
        ("lora.targets is", ["model.lora.targets=[q_proj]"]),
        ("lora.frozen weights is", ["seed=7"]),
        ("lora is", ["model.lora.rank=0"]),
    ],
)
def test_adapters_of_another_base_rank_or_targets_are_refused(data, half, message, change):
    with pytest.raises(CheckpointError, match="belongs to another run") as error:
        stages.stage("sft", data, half, *LORA, "run.steps=3", "run.accept_changes=true", *change)
    assert message in str(error.value)


def test_whole_weights_do_not_go_on_with_adapters(data, tmp_path):
    run = stages.stage("sft", data, tmp_path, "run.steps=1")
    with pytest.raises(CheckpointError, match="lora is None there"):
        stages.stage("sft", data, run, *LORA, "run.steps=2")


@pytest.mark.parametrize(
    "key, change",
    [("targets", ["model.lora.targets=[c_attn]"]), ("dropout", ["model.lora.dropout=0.1"])],
)
def test_what_cannot_be_is_refused_before_the_first_step(data, tmp_path, key, change):
    with pytest.raises(ConfigError, match=rf"model\.lora\.{key}"):
        stages.stage("grpo", data, tmp_path, *LORA, *change, "run.steps=1")


def exported(run):
    return load_file(run / "hf" / "model.safetensors")


@pytest.mark.slow
def test_a_checkpoint_of_adapters_is_a_start(data, half, tmp_path):
    """The merged weights, as the run itself exported them; on top of them, and of adapters trained beside them."""
    step = half / "checkpoints" / "step-00000002"
    same = stages.stage("sft", data, tmp_path / "same", f"model.init={step}", "run.steps=0")
    assert all(torch.equal(t, exported(half)[name]) for name, t in exported(same).items())
    extra = stages.stage("sft", data, tmp_path / "more", *LORA, f"model.init={step}", "run.steps=1")
    again = f"model.init={extra / 'checkpoints' / 'step-00000001'}"
    same = stages.stage("sft", data, tmp_path / "again", again, "run.steps=0")
    assert all(torch.equal(t, exported(extra)[name]) for name, t in exported(same).items())
    assert any(not torch.equal(t, exported(extra)[name]) for name, t in exported(half).items())


def test_adapters_whose_base_has_changed_are_no_start(data, half, tmp_path):
    folder = tmp_path / "start"
    shutil.copytree(half / "hf", folder)
    run = stages.stage("sft", data, tmp_path / "run", *LORA, f"model.init={folder}", "run.steps=1", "run.export=false")
    config = folder / "config.json"
    config.write_text(config.read_text() + " ")
    with pytest.raises(CheckpointError, match=r"holds only adapters, and .* no longer has the weights they were"):
        stages.stage("sft", data, tmp_path / "next", f"model.init={run}", "run.steps=1")
