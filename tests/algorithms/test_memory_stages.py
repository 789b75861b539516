"""Whole toy runs whose phases take turns on the device: the same numbers bit by bit, and what was promised held."""

import json

import pytest
import torch

from aligner.engines.native.engine import NativeEngine
from aligner.engines.native.scratch import Scratch
from aligner.errors import ConfigError, MemoryLimitError, OutOfMemoryError
from aligner.roles.policy import Policy
from aligner.rollout.evaluate import Evaluator
from aligner.run.phases import PhaseMemory
from tests import stages

ALL = "memory.offload=[gradients,optimizer,weights]"
MORE = ["run.steps=4", "checkpoint.every=2", "logging.progress=false"]


def arguments(stage: str, data, runs) -> list[str]:
    kl = "algorithm.kl={coef: 0.1, placement: %s}"
    overrides = {
        "sft": ["batch.sequences=8"],
        "grpo": [kl % "loss", "batch.minibatch_samples=16", "algorithm.advantage=remax"],
        "ppo": [kl % "reward", f"reward.model={runs['rm']}"],
    }[stage]
    evaluation = [f"data.eval={data / 'eval.jsonl'}", "run.eval_every=2", "eval.prompts=4"]
    if stage == "sft":
        evaluation += ["eval.functions=[{path: tests/assets/tiny_rewards.py:vowels}]", "eval.max_response_tokens=4"]
    return [*MORE, f"model.init={runs['sft']}", *evaluation, *overrides]


@pytest.mark.slow
@pytest.mark.parametrize("stage, dtype", [("sft", "float32"), ("grpo", "bfloat16"), ("ppo", "float32")])
def test_offloading_changes_no_bit(tiny_data, tiny_runs, tmp_path, monkeypatch, stage, dtype):
    """With evaluation during training, checkpoints written while training goes on, and a resumed run."""
    overrides = [*arguments(stage, tiny_data, tiny_runs), f"model.dtype={dtype}"]
    plain = stages.stage(stage, tiny_data, tmp_path / "plain", *overrides, "memory.sleep=never")
    order, enter, away = [], PhaseMemory._enter, set()

    def entered(self, leaf, rule):
        enter(self, leaf, rule)
        order.append(leaf)
        away.update((role, kind) for role, m in self.models.items() for kind in m.away)
        if self.engine is not None:
            assert not self.engine.held_bytes()["cache"] or leaf in ("verify", "generate", "score")
            assert not self.engine.held_bytes()["weights"] or leaf not in ("logprobs", "update")

    monkeypatch.setattr(PhaseMemory, "_enter", entered)
    moved = stages.stage(stage, tiny_data, tmp_path / "moved", *overrides, ALL, "checkpoint.async_save=true")
    assert not stages.differences(plain, moved) and stages.same_weights(plain, moved)
    assert {("policy", kind) for kind in ("gradients", "optimizer", "weights")} <= away
    if stage == "sft":
        assert order[:4] == ["record", "eval", "refit", "generate"] and order[5] == "update"
    else:
        again = ["generate", "score"] * (2 if stage == "grpo" else 1)  # remax: the greedy answers
        step = ["refit", "verify", *again, "logprobs"]
        start = order.index("verify") - 1
        assert order[start : start + len(step) + 1] == [*step, "update"]
        assert ("reference", "weights") in away
    record = stages.records(moved)[1]
    for phase in ("update", *(() if stage == "sft" else ("refit", "generate", "score", "logprobs"))):
        assert record[f"memory/{phase}_peak_bytes"] > 0
    resumed = [*overrides, "run.steps=2", ALL]
    stages.stage(stage, tiny_data, tmp_path / "resumed", *resumed)
    stages.stage(stage, tiny_data, tmp_path / "resumed", *overrides, ALL)
    assert stages.same_weights(plain, tmp_path / "resumed")


def test_the_cache_keeps_its_budget_and_engines_are_empty_in_training(tiny_data, tiny_runs, tmp_path, monkeypatch):
    budget, most, taken = 40_000, [0], Scratch.take

    def take(self, name, *shape):
        out = taken(self, name, *shape)
        if name in ("slots", "staged"):
            most[0] = max(most[0], self.held_bytes)
        return out

    seen = []
    update = Policy.update

    def updated(self, minibatch, loss):
        seen.append(engine[0].held_bytes())
        return update(self, minibatch, loss)

    engine, build = [], NativeEngine.__init__

    def built(self, *args, **kwargs):
        build(self, *args, **kwargs)
        engine.append(self)

    monkeypatch.setattr(Scratch, "take", take)
    monkeypatch.setattr(Policy, "update", updated)
    monkeypatch.setattr(NativeEngine, "__init__", built)
    overrides = [*arguments("grpo", tiny_data, tiny_runs), f"engine.kv_cache_bytes={budget}", "memory.sleep=always"]
    stages.stage("grpo", tiny_data, tmp_path / "run", *overrides)
    assert budget / 2 < most[0] <= budget
    assert len(seen) == 8 and not any(size for held in seen for size in held.values())


def test_a_broken_contract_stops_after_a_saved_step(tiny_data, tiny_runs, tmp_path):
    overrides = [f"model.init={tiny_runs['sft']}", "run.steps=3", "memory.limit.update_bytes=2000000"]
    with pytest.raises(MemoryLimitError, match=r"phase update .*memory.limit.update_bytes=2000000"):
        stages.stage("grpo", tiny_data, tmp_path / "run", *overrides)
    assert stages.checkpoints(tmp_path / "run") == [1]
    assert [r["step"] for r in stages.records(tmp_path / "run")][:1] == [1]
    with pytest.raises(ConfigError, match=r"memory.limit.generate_bytes.*engine.kv_cache_bytes"):
        stages.stage("grpo", tiny_data, tmp_path / "two", *overrides, "memory.limit.generate_bytes=2000000")
    with pytest.raises(ConfigError, match=r"engine.kv_cache_bytes=100: expected at least \d+ bytes .* phase generate"):
        stages.stage("grpo", tiny_data, tmp_path / "three", *overrides, "engine.kv_cache_bytes=100")
    state = json.loads((tmp_path / "run/checkpoints/step-00000001/state.json").read_text())
    assert state["step"] == 1


def test_running_out_in_a_phase_names_it(tiny_data, tiny_runs, tmp_path, monkeypatch):
    monkeypatch.setattr(NativeEngine, "step", lambda *args: torch.empty(1 << 60, dtype=torch.uint8))
    with pytest.raises(OutOfMemoryError, match=r"phase generate on rank 0.*engine.kv_cache_bytes=1073741824.*policy w"):
        stages.stage("grpo", tiny_data, tmp_path / "run", f"model.init={tiny_runs['sft']}", "run.steps=1")


def test_what_a_rank_meets_alone_ends_it_at_once(tiny_data, tiny_runs, tmp_path, monkeypatch):
    """In an evaluation: the others do not come to what is measured with them behind it."""
    measured, take = [], PhaseMemory.take
    monkeypatch.setattr(PhaseMemory, "take", lambda self: measured.append(self) or take(self))

    evaluations = iter([{}])  # before the first step; there is none behind it

    def run_out(self):
        if (actual := next(evaluations, None)) is None:
            raise OutOfMemoryError("one rank of several")
        return actual

    monkeypatch.setattr(Evaluator, "__call__", run_out)
    overrides = [f"model.init={tiny_runs['sft']}", "run.steps=1", "run.eval_every=1"]
    overrides += [f"data.eval={tiny_data / 'eval.jsonl'}"]
    with pytest.raises(OutOfMemoryError, match="one rank of several"):
        stages.stage("grpo", tiny_data, tmp_path / "run", *overrides)
    assert not measured


@pytest.mark.slow
@pytest.mark.multirank
def test_ranks_take_their_turns_together(ranks, tiny_data, tiny_runs, tmp_path):
    """Two tensor ranks that refit and generate together: the same numbers, and the largest peak of both."""
    overrides = [f"model.init={tiny_runs['sft']}", "run.steps=2", "parallel.tensor=2", "refit.verify=checksum"]
    for name, own in {"plain": [], "moved": [ALL]}.items():
        line = stages.overrides("grpo", tiny_data, tmp_path / name, *overrides, *own)
        assert ranks.run("tests.run.jobs:run_stage", world=2, arguments=line) == [0, 0]
    assert not stages.differences(tmp_path / "plain", tmp_path / "moved")
    assert stages.same_weights(tmp_path / "plain", tmp_path / "moved")
    assert stages.records(tmp_path / "moved")[0]["memory/update_peak_bytes"] > 0
