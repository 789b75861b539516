"""Stages that train a layer for multi-token prediction: what they write, go on from and refuse."""

import json

import pytest
import torch
from safetensors.torch import load_file

from aligner.errors import ConfigError
from tests import stages
from tests.run import jobs
from tests.tools.test_convert import converted

SHAPE = [
    "model.family=glm4_moe",
    "model.tie_embeddings=false",
    "model.num_heads=4",
    "model.moe={num_experts: 4, top_k: 2, ffn_hidden_size: 20, shared_ffn_hidden_size: 20, dense_layers: [0]}",
]
QWEN = [
    "model.family=qwen3_5_moe_text",
    "model.qk_norm=true",
    "model.num_heads=4",
    "model.linear={key_heads: 2, value_heads: 4, key_head_dim: 8, value_head_dim: 8, conv: 4, attention_every: 2}",
    "model.moe={num_experts: 4, top_k: 2, ffn_hidden_size: 20, shared_ffn_hidden_size: 20}",
]
AHEAD = "model.mtp.layers=1"
ALIKE = ["run.steps=3", "optim.clip_grad=0.1", "batch.share_prompts=false"]  # which such a layer turns off


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return stages.make_data(tmp_path_factory.mktemp("mtp"))


@pytest.fixture(scope="module")
def taught(data, tmp_path_factory):
    return stages.stage("sft", data, tmp_path_factory.mktemp("sft"), *SHAPE, AHEAD, "run.steps=20")


def test_the_layer_learns_and_an_export_has_it(data, taught, tmp_path):
    records = stages.records(taught)
    assert records[-1]["mtp/loss"] < records[0]["mtp/loss"] - 0.5
    assert 0 <= records[-1]["mtp/acceptance"] <= 1
    weights = load_file(taught / "hf" / "model.safetensors")
    config = json.loads((taught / "hf" / "config.json").read_text())
    assert (config["num_hidden_layers"], config["num_nextn_predict_layers"]) == (2, 1)
    at = "model.layers.2."
    assert torch.equal(weights[f"{at}embed_tokens.weight"], weights["model.embed_tokens.weight"])
    assert torch.equal(weights[f"{at}shared_head.head.weight"], weights["lm_head.weight"])
    assert {f"{at}{name}.weight" for name in ("enorm", "hnorm", "eh_proj", "shared_head.norm", "self_attn.q_proj")} <= {
        *weights
    }
    # what it has learned is there at the next run's first step
    options = [f"model.init={taught / 'hf'}", AHEAD, "run.steps=2", "optim.lr=1e-9"]
    again = stages.records(stages.stage("sft", data, tmp_path / "again", *options))[0]
    assert again["mtp/loss"] < records[0]["mtp/loss"] - 0.5
    # a run without it exports it as it was
    plain = stages.stage("sft", data, tmp_path / "plain", f"model.init={taught / 'hf'}", "run.steps=1")
    kept = load_file(plain / "hf" / "model.safetensors")
    assert torch.equal(kept[f"{at}eh_proj.weight"], weights[f"{at}eh_proj.weight"])
    assert not torch.equal(kept["lm_head.weight"], weights["lm_head.weight"])


def test_what_is_detached_changes_nothing_else(data, tmp_path):
    runs = {
        name: stages.stage("sft", data, tmp_path / name, *SHAPE, *ALIKE, *options)
        for name, options in {"without": (), "detached": (AHEAD,), "joined": (AHEAD, "model.mtp.detach=false")}.items()
    }
    weights = {name: load_file(run / "hf" / "model.safetensors") for name, run in runs.items()}
    assert all(torch.equal(t, weights["detached"][name]) for name, t in weights["without"].items())
    assert not torch.equal(weights["joined"]["lm_head.weight"], weights["without"]["lm_head.weight"])
    norms = [[record["policy/grad_norm"] for record in stages.records(run)] for run in runs.values()]
    assert norms[0] == norms[1] != norms[2]


def test_a_policys_layer_learns_from_its_answers(data, taught, tmp_path):
    """The engine gets it only if it drafts with it, which changes no answer. A model that drafts comes first."""
    options, runs = [f"model.init={taught / 'hf'}", AHEAD, "run.steps=2", "refit.verify=checksum"], {}
    options += ["sampling.temperature=0.5", "sampling.max_response_tokens=10"]
    model = ["engine.draft_tokens=2", f"engine.draft_model={taught}"]
    for name, drafts in {"model": model, "none": [], "layer": ["engine.draft_tokens=2"]}.items():
        run = stages.stage("grpo", data, tmp_path / name, *options, *drafts)
        runs[name] = stages.records(run)
    for first, plain, record in zip(*runs.values(), strict=True):
        assert first["reward/mean"] == pytest.approx(plain["reward/mean"], rel=1e-4)
        assert first["refit/bytes"] == plain["refit/bytes"]
        assert record["refit/sentinel_error"] < 1e-5 and record["mtp/loss"] > 0
        for name in ("reward/mean", "response/tokens_mean", "mtp/loss"):
            assert record[name] == pytest.approx(plain[name], rel=1e-4), name
        assert record["engine/draft_acceptance_rate"] > 0 and "engine/decode_passes" not in plain
        assert record["refit/bytes"] > plain["refit/bytes"]
    first, second = (runs[name][0]["engine/draft_acceptance_rate"] for name in ("model", "layer"))
    assert first > 2 * second  # the same model: its drafts are wrong behind the ends of rows alone
    before, after = (load_file(folder / "hf" / "model.safetensors") for folder in (taught, run))
    changed = {name for name, t in after.items() if not torch.equal(t, before[name])}
    assert {"model.layers.2.eh_proj.weight", "model.layers.2.embed_tokens.weight"} <= changed


@pytest.mark.multirank
def test_stages_of_a_pipeline_learn_and_refit_it(ranks, data, taught, tmp_path):
    """As one rank does, through a stop and a start from its checkpoint. The first stage has the embedding."""
    options = [f"model.init={taught / 'hf'}", AHEAD, "refit.verify=checksum", "engine.draft_tokens=2"]
    options += ["batch.share_prompts=false", "checkpoint.every=1", "sampling.temperature=0.5"]
    one = stages.records(stages.stage("grpo", data, tmp_path / "one", *options, "run.steps=2"))
    for steps in (1, 2):
        own = [*options, "parallel.pipeline=2", f"run.steps={steps}"]
        arguments = stages.overrides("grpo", data, tmp_path / "two", *own)
        assert ranks.run(jobs.run_stage, world=2, arguments=arguments) == [0, 0]
    for wanted, record in zip(one, stages.records(tmp_path / "two"), strict=True):
        assert record["refit/sentinel_error"] < 1e-5 and record["engine/draft_acceptance_rate"] > 0
        for name in ("mtp/loss", "mtp/acceptance", "policy/grad_norm", "refit/bytes"):
            assert record[name] == pytest.approx(wanted[name], rel=1e-3), name
    left, right = stages.weights(tmp_path / "one"), stages.weights(tmp_path / "two")
    assert left.keys() == right.keys() and all((left[name] - right[name]).abs().max() < 1e-4 for name in left)


def test_a_checkpoint_without_the_layer_is_no_start_for_it(data, tmp_path):
    run = stages.stage("sft", data, tmp_path / "run", *SHAPE, "run.steps=1", "checkpoint.every=1")
    for init in (run / "hf", run / "checkpoints" / "step-00000001"):
        with pytest.raises(ConfigError, match=r"model.mtp.layers=1: expected 0 with .*"):
            stages.stage("sft", data, tmp_path / "again", f"model.init={init}", AHEAD, "run.steps=1")


@pytest.mark.slow
def test_a_student_learns_it_beside_its_teacher(data, taught, tmp_path):
    options = [f"model.init={taught / 'hf'}", AHEAD, f"algorithm.distill.teacher={taught / 'hf'}", "run.steps=2"]
    run = stages.stage("distill", data, tmp_path, *options)
    records = stages.records(run)
    assert records[0]["distill/divergence"] == pytest.approx(0, abs=1e-6) and records[0]["mtp/loss"] > 0.01
    before, after = (load_file(folder / "hf" / "model.safetensors") for folder in (taught, run))
    assert not torch.equal(before["model.layers.2.eh_proj.weight"], after["model.layers.2.eh_proj.weight"])


@pytest.mark.parametrize("shape, key", [(SHAPE, "num_nextn_predict_layers"), (QWEN, "mtp_num_hidden_layers")])
def test_a_run_goes_on_with_it_and_its_checkpoint_is_exported_with_it(ranks, data, tmp_path, shape, key):
    whole = stages.stage("sft", data, tmp_path / "whole", *shape, AHEAD, "run.steps=3")
    for steps in (2, 3):
        parts = stages.stage("sft", data, tmp_path / "parts", *shape, AHEAD, "checkpoint.every=1", f"run.steps={steps}")
    assert stages.differences(parts, whole) == [] and stages.same_weights(parts, whole)
    ranks.run(converted, what="export", source=parts, goal=tmp_path / "out", file_bytes=1e9)
    exported, weights = (load_file(path / "model.safetensors") for path in (tmp_path / "out", whole / "hf"))
    assert exported.keys() == weights.keys() and all(torch.equal(t, weights[name]) for name, t in exported.items())
    assert json.loads((tmp_path / "out" / "config.json").read_text())[key] == 1
