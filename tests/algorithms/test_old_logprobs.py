"""Logprobs before the update from its own forward pass: the same run as with a pass for them, on every layout."""

import pytest

from aligner.config.derived import old_logprobs_in_update
from aligner.config.resolve import compose
from tests import stages

REFERENCE = ["algorithm.kl.coef=0.05", "algorithm.kl.placement=loss", "algorithm.kl.estimator=k3"]
# some samples are invalid or cut, so that the tokens of the loss are not all tokens of the responses
SETTINGS = [
    *REFERENCE,
    "run.steps=3",
    "algorithm.overlong.mask_truncated=true",
    "sampling.top_p=0.95",
    "run.export=true",
]


def same(recomputed, actual):
    left, right = stages.records(recomputed), stages.records(actual)
    assert [r.keys() - {"time/logprobs_s"} for r in left] == [r.keys() - {"time/logprobs_s"} for r in right]
    for one, two in zip(left, right, strict=True):
        for name, value in one.items():
            if value is None or name.startswith(("reward/", "response/", "advantage/")):
                assert two[name] == value, name  # sampled tokens, and what follows from them
            elif name.startswith(("policy/", "kl/", "mismatch/", "staleness/")):
                assert two[name] == pytest.approx(value, abs=2e-5, rel=1e-4, nan_ok=True), name
        assert two["policy/ratio_max"] == two["policy/ratio_mean"] == 1.0 and two["policy/approx_kl"] == 0.0
        assert two["mismatch/token_mult_prob_error"] > 1 and two["kl/ref_k3"] >= 0
    assert all(
        (a - b).abs().max() < 1e-4
        for a, b in zip(*(stages.weights(x).values() for x in (recomputed, actual)), strict=True)
    )


# an engine that differs; its rounding would make later steps differ by more than the last bits of the weights
WEIGHED = ["mismatch.correction=tis_token", "mismatch.cap=1", "engine.dtype=bfloat16", "run.steps=1"]


@pytest.mark.slow
@pytest.mark.parametrize("correction", [[], WEIGHED])
def test_the_run_is_the_same_without_the_pass(correction, tiny_data, tiny_runs, tmp_path, monkeypatch):
    from aligner.roles.policy import Policy, Reference
    from aligner.types import RolloutBatch

    settings = [*SETTINGS, *correction, f"model.init={tiny_runs['sft']}"]
    recomputed = stages.stage("grpo", tiny_data, tmp_path / "a", *settings, "algorithm.old_logprobs=recompute")
    logprobs, asked = Policy.logprobs, []

    def counted(self, rows, mask=None):
        if isinstance(rows, RolloutBatch):  # the sentinel asks too
            asked.append(type(self))
        return logprobs(self, rows, mask)

    monkeypatch.setattr(Policy, "logprobs", counted)
    run = stages.stage("grpo", tiny_data, tmp_path / "b", *settings)
    same(recomputed, run)
    assert all((r["mismatch/weight_mean"] < 1 - 1e-4) == bool(correction) for r in stages.records(run))
    assert len(asked) == len(stages.records(run)) and set(asked) == {Reference}


@pytest.mark.slow
def test_a_proxy_with_one_update_a_rollout_is_the_policy_itself(tiny_data, tmp_path):
    """Its anchor is what auto has: bit by bit. With two it moves towards the engine, and the ratio with it."""
    ways = {"auto": "a", "proxy": "b", "engine": "c"}
    for way, name in ways.items():
        stages.stage("grpo", tiny_data, tmp_path / name, "run.steps=2", f"algorithm.old_logprobs={way}")
    assert stages.differences(tmp_path / "a", tmp_path / "b") == []
    assert stages.same_weights(tmp_path / "a", tmp_path / "b")
    assert [r["policy/ratio_max"] for r in stages.records(tmp_path / "a")] == [1.0, 1.0]
    assert all(0 < abs(r["policy/ratio_max"] - 1) < 1e-4 for r in stages.records(tmp_path / "c"))  # other kernels
    for way in ("engine", "proxy"):
        overrides = ["batch.epochs=2", "run.steps=1", f"algorithm.old_logprobs={way}"]
        stages.stage("grpo", tiny_data, tmp_path / way, *overrides)
    # the second update: (before - version) / (now - version) = 0, which is the engine's
    one, two = (stages.records(tmp_path / way)[0]["policy/ratio_max"] for way in ("engine", "proxy"))
    assert one == pytest.approx(two, rel=1e-6) and one > 1.001


@pytest.mark.slow
@pytest.mark.multirank
@pytest.mark.parametrize("layout", ["data", "parallel.pipeline=2", "parallel.tensor=2", "parallel.context=2"])
def test_recomputed_and_automatic_old_logprobs_agree_on_two_ranks(ranks, layout, tiny_data, tiny_runs, tmp_path):
    runs = []
    for way in ("recompute", "auto"):
        own = [
            f"algorithm.old_logprobs={way}",
            f"model.init={tiny_runs['sft']}",
            *([] if layout == "data" else [layout]),
        ]
        settings = stages.overrides("grpo", tiny_data, tmp_path / way, *SETTINGS, "batch.micro_batch_samples=4", *own)
        assert ranks.run("tests.run.jobs:run_stage", world=2, arguments=settings) == [0, 0]
        runs.append(tmp_path / way)
    same(*runs)


def test_a_mismatch_is_still_warned_of(tiny_data, tmp_path, capsys):
    stages.stage("grpo", tiny_data, tmp_path / "a", "run.steps=1", "mismatch.warn_above=1")
    assert "mismatch/token_mult_prob_error" in capsys.readouterr().err


@pytest.mark.parametrize(
    "wish",
    [
        ["batch.epochs=2"],
        ["batch.minibatch_samples=16"],
        ["mismatch.correction=veto"],
        ["mismatch.stop_above=1.5"],
        ["algorithm.kl.coef=0.1", "algorithm.kl.placement=reward"],
        ["algorithm.policy_loss=clip_cov"],
        ["debug.first_step_checks=true"],
        ["algorithm.old_logprobs=recompute"],
        ["stage=ppo"],
    ],
)
def test_what_needs_them_earlier_brings_the_pass_back(wish, tiny_data, tmp_path):
    settings = stages.overrides("grpo", tiny_data, tmp_path)
    assert old_logprobs_in_update(compose(settings))
    assert not old_logprobs_in_update(compose([*settings, *wish]))
