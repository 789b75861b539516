"""The trap: a policy learns to emit one fixed two-byte string only if the engine gets its weights. With refit off, the
next refit must stop the run, and with the rewards shuffled nothing may be learned."""

import pytest

from aligner.errors import RefitError
from tests import stages

TASK = [
    "reward.functions=[{path: tests/assets/two_bytes.py:two_bytes}]",
    "run.steps=50",
    "run.export=false",
    "checkpoint.final=false",
    "batch.prompts=16",
    "batch.group=32",
    "batch.micro_batch_samples=512",
    "sampling.max_response_tokens=2",
    "optim.lr=1e-2",
]


def rewards(run_dir):
    return [record["reward/mean"] for record in stages.records(run_dir)]


@pytest.fixture
def trap(tiny_data, tmp_path):
    return lambda *more: stages.stage("grpo", tiny_data, tmp_path / "run", *TASK, *more)


@pytest.mark.slow
def test_two_bytes_are_learned_within_fifty_steps(trap):
    means = rewards(trap())
    assert means[0] < 0.05  # a random model guesses
    assert max(means) >= 0.9 and sum(means[-5:]) / 5 >= 0.9


@pytest.mark.slow
def test_shuffled_rewards_teach_nothing(trap):
    means = rewards(trap("debug.shuffle_rewards=true"))
    assert len(means) == 50 and max(means) < 0.05


@pytest.mark.parametrize("verify", ["checksum", "sentinel"])
def test_a_skipped_refit_stops_the_run_at_the_next_one(trap, tmp_path, verify):
    with pytest.raises(RefitError) as caught:
        trap("debug.skip_refit=true", f"refit.verify={verify}")
    message = str(caught.value)
    assert "weight version: engine 0, trainer 1" in message
    assert ("checksum of 20 tensors differs" in message) == (verify == "checksum")
    assert "nearer to the previous weights than to the current ones (progress" in message
    assert len(rewards(tmp_path / "run")) == 1  # only the rollout before the missed refit


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_sentinel_alone_catches_a_forged_version(trap, tmp_path, monkeypatch, dtype):
    """A small step, an engine that lies about its version, and no checksums: the mean difference stays within the
    tolerance, so only being nearer to the previous weights gives the engine away."""
    from aligner.refit.transfer import Refit

    refit = Refit.__call__

    def forge(self):
        metrics = refit(self)
        self.engine._ledger.version = self.model.step_count
        return metrics

    monkeypatch.setattr(Refit, "__call__", forge)
    with pytest.raises(RefitError) as caught:
        trap("debug.skip_refit=true", f"model.dtype={dtype}", "optim.lr=2e-4", "refit.tolerance=0.05")
    message = str(caught.value)
    assert "weight version" not in message and "checksum" not in message and "refit.tolerance" not in message
    assert "nearer to the previous weights than to the current ones" in message
    assert len(rewards(tmp_path / "run")) == 1
