"""The engine's routing in whole runs: what it removes, and that no kill, recording or layout changes it."""

from dataclasses import replace
from unittest.mock import patch

import pytest
import torch

from aligner.data.tool_calls import Call
from aligner.engines.native.engine import NativeEngine
from aligner.errors import DataError
from aligner.rollout.record import read_recording
from tests import stages
from tests.run import jobs

EXPERTS = [
    *("model.family=qwen3_moe", "model.qk_norm=true", "model.init_std=0.3", "logging.progress=false"),
    *("model.moe={num_experts: 8, top_k: 2, ffn_hidden_size: 24}", "run.steps=3", "checkpoint.every=2"),
]
REPLAY = [*EXPERTS, "mismatch.replay_routing=true", "engine.dtype=bfloat16", "batch.epochs=2"]


@pytest.fixture(scope="module")
def replayed(tiny_data, tmp_path_factory):
    return stages.stage("grpo", tiny_data, tmp_path_factory.mktemp("replay") / "run", *REPLAY, "debug.record=3")


@pytest.mark.slow
def test_replayed_routing_lowers_the_mismatch(tiny_data, tmp_path, replayed):
    """A bfloat16 engine and a float32 trainer, whose first rollout is the same with and without."""
    without = [text for text in REPLAY if "replay" not in text]
    plain = stages.records(stages.stage("grpo", tiny_data, tmp_path / "run", *without, "run.export=false"))
    records = stages.records(replayed)
    assert all(0.001 < record["moe/routing_differs"] < 0.3 for record in records)
    assert "moe/routing_differs" not in plain[0] and records[0]["reward/mean"] == plain[0]["reward/mean"]
    for metric in ("mismatch/logprob_abs_mean", "mismatch/gen_kl", "mismatch/logprob_abs_max"):
        assert records[0][metric] < 0.9 * plain[0][metric], metric


@pytest.mark.slow
def test_a_stored_rollout_has_its_routing(tiny_data, tmp_path, replayed, monkeypatch):
    """Killed in step 3; the checkpoint is of step 2. Step 3 is not generated again, and nothing differs."""
    from aligner.rollout.sample_generator import SampleGenerator

    run = tmp_path / "run"
    with stages.power_cut_in_update(3), pytest.raises(stages.PowerCut):
        stages.stage("grpo", tiny_data, run, *REPLAY, "debug.record=3")
    assert stages.checkpoints(run) == [2] and (run / "pending_rollouts" / "step-00000003").is_dir()
    monkeypatch.delattr(SampleGenerator, "advance")
    stages.stage("grpo", tiny_data, run, *REPLAY, "debug.record=3")
    assert stages.same_weights(run, replayed) and stages.differences(run, replayed) == []


@pytest.mark.slow
def test_recordings_train_the_same_and_without_routing_are_refused(tiny_data, tmp_path, replayed):
    overrides = [*REPLAY, f"debug.train_only={replayed}", "checkpoint.final=false"]
    again = stages.stage("grpo", tiny_data, tmp_path / "again", *overrides)
    assert stages.same_weights(again, replayed)
    other = stages.stage("grpo", tiny_data, tmp_path / "own", *overrides, "mismatch.replay_routing=false")
    assert not stages.same_weights(other, replayed)
    recording = read_recording(replayed / "rollouts" / "step-00000001.safetensors").rollout
    assert recording.routing.dtype == torch.uint8 and recording.routing.shape[2:] == (2, 2)
    wide = "model.moe={num_experts: 8, top_k: 3, ffn_hidden_size: 24}"
    with pytest.raises(DataError, match="routing: 2 layers x 2 experts: expected 2 layers x 3 experts"):
        stages.stage("grpo", tiny_data, tmp_path / "wide", *overrides, wide)
    few = "model.moe={num_experts: 5, top_k: 2, ffn_hidden_size: 24}"
    with pytest.raises(DataError, match="routing to expert 7: expected numbers from 0 and below 5"):
        stages.stage("grpo", tiny_data, tmp_path / "few", *overrides, few)
    bare = [*EXPERTS, "run.export=false", "run.steps=1", "debug.record=1"]
    bare = stages.stage("grpo", tiny_data, tmp_path / "bare", *bare)
    with pytest.raises(DataError, match="routing: none: expected"):
        stages.stage("grpo", tiny_data, tmp_path / "no", *REPLAY, f"debug.train_only={bare}", "run.steps=1")


@pytest.mark.multirank
@pytest.mark.parametrize(
    ("world", "overrides"),
    [
        pytest.param(2, ["parallel.expert=2"], id="ep2"),
        pytest.param(3, ["parallel.tensor=2", "engine.ranks=1"], id="tp2, an engine apart", marks=pytest.mark.slow),
    ],
)
def test_layouts_replay_what_one_rank_does(ranks, tiny_data, tmp_path, replayed, world, overrides):
    """Within rounding: a token that a bfloat16 engine on other batches samples otherwise would show in the rewards."""
    arguments = stages.overrides("grpo", tiny_data, tmp_path / "run", *REPLAY, *overrides, "run.steps=1")
    ranks.run("tests.run.jobs:run_stage", world=world, arguments=arguments)
    (records,), wanted = stages.records(tmp_path / "run"), stages.records(replayed)[0]
    assert records["reward/mean"] == wanted["reward/mean"]
    for metric in ("mismatch/logprob_abs_mean", "policy/loss", "policy/grad_norm", "moe/routing_differs"):
        assert records[metric] == pytest.approx(wanted[metric], rel=1e-3, abs=1e-6), metric


# of weights that stay; whatever the model says until one of its letters is a call
TURNS = [*EXPERTS, *stages.DICE, "reward.functions=[]", "mismatch.replay_routing=true", "optim.lr=1e-12"]
TURNS += ["run.steps=3", f"sampling.stop=[{','.join(stages.LETTERS[:26])}]", "run.export=false"]
WINDOWS = ["engine.ranks=1", "engine.lag=1", "engine.window=4"]


def rolling(arguments: list[str]) -> int:
    """A stage whose model rolls dice with every answer that ends."""
    with patch("aligner.data.dialogue.read_calls", lambda text, *_: (text, [Call("roll", {})])):
        return jobs.run_stage(arguments)


@pytest.mark.multirank
@pytest.mark.parametrize(
    ("world", "overrides"),
    [
        (2, WINDOWS),
        pytest.param(3, ["parallel.tensor=2", *WINDOWS], id="tp2", marks=pytest.mark.slow),
        pytest.param(4, ["engine.ranks=2", *WINDOWS[1:]], id="dp2, two engines", marks=pytest.mark.slow),
    ],
)
def test_turns_in_windows_are_replayed_token_by_token(ranks, tmp_path, world, overrides):
    """Of the same weights in the same precision, each token has the experts that the trainer would choose: beside
    another token's they would differ by half."""
    data = stages.make_dice(tmp_path, trained=False)
    arguments = stages.overrides("grpo", data, tmp_path / "run", *TURNS, *overrides)
    ranks.run(rolling, world=world, arguments=arguments)
    records = stages.records(tmp_path / "run")
    assert all(record["moe/routing_differs"] < 0.003 for record in records)
    assert all(record["environment/turns_mean"] > 1.5 for record in records)
    assert any(record["window/samples_paused"] for record in records)


@pytest.mark.slow
@pytest.mark.parametrize("serves", [True, False])
def test_an_agents_requests_are_replayed_token_by_token(tmp_path, monkeypatch, serves):
    """Admitted between decode steps, or in rounds."""
    pytest.importorskip("uvicorn")
    pytest.importorskip("openai")
    monkeypatch.setattr("aligner.data.dialogue.read_calls", lambda text, *_: (text, [Call("roll", {})]))
    monkeypatch.setattr(NativeEngine, "can", replace(NativeEngine.can, serves=serves))
    data = stages.make_dice(tmp_path, trained=False)
    agent = ["environment.agent=tests/assets/agents.py:seeded", "environment.path=''", "environment.workers=1"]
    run = stages.stage("grpo", data, tmp_path / "run", *TURNS, *agent, "run.steps=1")
    (record,) = stages.records(run)
    assert record["moe/routing_differs"] < 0.003 and record["environment/turns_mean"] > 1.2
