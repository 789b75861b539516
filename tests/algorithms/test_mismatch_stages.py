"""Engine against trainer in whole runs: what is injected is seen where it belongs, corrections reach the loss, the gate
loses nothing."""

import dataclasses
import math

import pytest
import torch
import torch.distributed as dist

from aligner.config.sections.mismatch import MismatchConfig
from aligner.errors import MismatchError
from aligner.run.mismatch import check_mismatch
from aligner.types import PolicyTargets, RolloutBatch
from tests import stages

QUIET = ["run.export=false", "checkpoint.final=false"]


def worst_of_two() -> dict[str, str]:
    """What the gate says of two ranks' rollouts: two prompts x two samples each, one wrong token on rank 1; then a NaN
    on rank 0."""
    rank = dist.get_rank()
    tokens = torch.arange(10, 15).repeat(4, 1)
    mask = (torch.arange(5) >= 2).float().repeat(4, 1)
    rollout = RolloutBatch(
        tokens=tokens,
        lengths=torch.full((4,), 5),
        response_mask=mask,
        rollout_logprobs=torch.full((4, 5), -0.5),
        rewards=torch.zeros(4),
        valid=torch.ones(4, dtype=torch.bool),
        group=torch.tensor([0, 0, 1, 1]) + 2 * rank,
        finished=torch.ones(4, dtype=torch.bool),
        weight_version=0,
        old_logprobs=torch.full((4, 5), -0.6),
    )
    rollout.old_logprobs[:, :2] = 100.0  # what is no response counts nowhere
    if rank == 1:
        rollout.old_logprobs[3, 4] = -3.0
    reports = {"gate": refused(rollout)}
    if rank == 0:
        rollout.response_mask[0, 1], rollout.old_logprobs[0, 1] = 1.0, float("nan")
    return reports | {"nan": refused(rollout)}


def refused(rollout: RolloutBatch) -> str:
    with pytest.raises(MismatchError) as caught:
        check_mismatch({"mismatch/token_mult_prob_error": 1.5}, rollout, MismatchConfig(stop_above=1.2))
    return str(caught.value)


@pytest.fixture
def grpo(tiny_data, tiny_runs, tmp_path):
    """A toy run of a trained model; its records."""

    def run(*more, steps=2):
        more = [f"model.init={tiny_runs['sft']}", f"run.steps={steps}", *QUIET, *more]
        return stages.records(stages.stage("grpo", tiny_data, tmp_path / "run", *more))

    return run


def deaf(monkeypatch):
    """Without the proof after each refit, which would stop these runs; its numbers stay."""
    from aligner.refit import verify

    monkeypatch.setattr(verify, "fail_together", lambda cause: None)


def injected(monkeypatch, what: str) -> list[str]:
    import aligner.builders.engines

    deaf(monkeypatch)
    if what == "stale weights":
        return ["debug.skip_refit=true"]
    if what == "rope base":
        build = aligner.builders.engines._engine
        wrong = lambda job, model: build(job, dataclasses.replace(model, rope_base=50.0))  # noqa: E731
        monkeypatch.setattr(aligner.builders.engines, "_engine", wrong)
        return []
    return ["engine.dtype=bfloat16"] if what == "bfloat16" else []


@pytest.mark.slow
def test_each_injection_shows_in_its_metric(grpo, monkeypatch):
    results = {}
    for what in ("clean", "stale weights", "rope base", "bfloat16"):
        with monkeypatch.context() as patch:
            results[what] = grpo(*injected(patch, what), "run.resume=never")
    size = {what: [r["mismatch/logprob_abs_mean"] for r in records] for what, records in results.items()}
    factor = {what: [r["mismatch/token_mult_prob_error"] for r in records] for what, records in results.items()}
    lag = {what: [r["staleness/max"] for r in records] for what, records in results.items()}
    sentinel = {what: [r["refit/sentinel_error"] for r in records] for what, records in results.items()}
    # a clean float32 pair differs by rounding
    assert max(size["clean"]) < 1e-5 and max(factor["clean"]) < 1 + 1e-5
    assert all(r["mismatch/prob_correlation"] > 1 - 1e-6 and r["mismatch/gen_kl"] < 1e-8 for r in results["clean"])
    # stale weights: nothing before the first update, then a lag that says so, and logprobs beside the new weights
    assert lag["stale weights"] == [0, 1] and size["stale weights"][0] < 1e-5 and size["stale weights"][1] > 1e-2
    assert abs(results["stale weights"][1]["refit/sentinel_progress"]) < 0.05
    # a wrong model: from the first step on, with no lag, and the sentinel says so as well
    assert lag["rope base"] == [0, 0] and min(size["rope base"]) > 1e-2 and min(sentinel["rope base"]) > 1e-3
    assert min(factor["rope base"]) > 1.01 and results["rope base"][0]["mismatch/prob_correlation"] < 0.9999
    # a coarser engine: a small error from the first step on, hundreds of times the clean one, below the alarm
    assert lag["bfloat16"] == [0, 0] and all(1e-4 < x < 2e-2 for x in size["bfloat16"])
    assert all(100 * c < x for x, c in zip(size["bfloat16"], size["clean"], strict=True))
    assert all(factor["clean"][0] < x < 1.05 for x in factor["bfloat16"])
    assert all(r["mismatch/gen_kl"] < 1e-3 and r["mismatch/prob_correlation"] > 0.999 for r in results["bfloat16"])
    assert all(r["staleness/logprob_abs_mean"] == 0 for records in results.values() for r in records)


@pytest.mark.parametrize(
    "sampling, cut",
    [
        ("{temperature: 0.7}", False),
        ("{temperature: 1.3, top_p: 0.8}", True),
        ("{top_k: 5}", True),
        ("{temperature: 0.8, top_p: 0.95, top_k: 20, min_p: 0.05}", True),
    ],
)
def test_a_cut_distribution_is_no_mismatch(grpo, sampling, cut):
    (record,) = grpo(f"sampling={sampling}", "sampling.max_response_tokens=4", steps=1)
    assert record["mismatch/logprob_abs_max"] < 1e-4
    assert ("mismatch/cut_logprob_mean" in record) == cut
    if cut:  # -log of the probability that was kept
        assert 1e-3 < record["mismatch/cut_logprob_mean"] < 3


def reported(monkeypatch, grpo, *overrides) -> tuple:
    """(the rollout that the first update sees, its minibatch, the records)."""
    import aligner.stages.grpo as recipe

    seen = {}
    before, minibatches = recipe.check_mismatch, recipe.minibatches

    def spy(metrics, rollout, *rest):
        before(metrics, rollout, *rest)
        seen["rollout"] = rollout

    def spy_minibatches(*arguments):
        for minibatch in minibatches(*arguments):
            seen["minibatch"] = minibatch
            yield minibatch

    monkeypatch.setattr(recipe, "check_mismatch", spy)
    monkeypatch.setattr(recipe, "minibatches", spy_minibatches)
    records = grpo(*overrides, steps=1)
    return seen["rollout"], seen["minibatch"], records[0]


def test_weights_reach_the_minibatch(grpo, monkeypatch):
    overrides = [*injected(monkeypatch, "rope base"), "algorithm.old_logprobs=recompute"]
    rollout, minibatch, record = reported(
        monkeypatch, grpo, *overrides, "mismatch.correction=icepop", "mismatch.high=1.02"
    )
    r = torch.exp(rollout.old_logprobs - rollout.rollout_logprobs)
    on = rollout.response_mask.bool()
    wanted = torch.where((r >= 0.5) & (r <= 1.02), r, 0.0)
    torch.testing.assert_close(rollout.token_weights[on], wanted[on])
    assert record["mismatch/weight_mean"] == pytest.approx(float(wanted[on].mean()), rel=1e-5)
    assert 0 < record["mismatch/weight_zero_fraction"] < 1 and record["mismatch/rejected_fraction"] == 0
    assert sorted(minibatch.of(PolicyTargets).token_weights.sum(1).tolist()) == pytest.approx(
        sorted(rollout.token_weights.sum(1).tolist())
    )


def test_rejected_samples_are_in_no_baseline_and_no_loss(grpo, monkeypatch):
    overrides = [
        *injected(monkeypatch, "rope base"),
        "mismatch.correction=geometric_mask",
        "mismatch={low: 0.97, high: 1.03}",
    ]
    rollout, minibatch, record = reported(monkeypatch, grpo, *overrides)
    rejected = rollout.rejected
    assert 0 < int(rejected.sum()) < len(rejected)
    assert record["mismatch/rejected_fraction"] == pytest.approx(float(rejected.float().mean()))
    assert not rollout.valid[rejected].any() and not rollout.loss_mask[rejected].any()
    assert (rollout.advantages[rejected] == 0).all() and float(minibatch.loss_mask.sum()) == float(
        rollout.response_mask[~rejected].sum()
    )
    for slot in rollout.group.unique().tolist():
        rows = [i for i in range(len(rejected)) if int(rollout.group[i]) == slot and not rejected[i]]
        scores = rollout.rewards[rows].double()
        known = len(rows) > 1 and float(scores.std()) > 0
        for i in rows:
            value = float((rollout.rewards[i] - scores.mean()) / (scores.std() + 1e-6)) if known else 0.0
            assert float(rollout.advantages[i, rollout.lengths[i] - 1]) == pytest.approx(value, abs=1e-4)


def test_token_weights_multiply_the_policy_loss_alone():
    """A weight is a factor of the token's term; denominators, KL in the loss and entropy do not know it."""
    from aligner.algorithms.losses import policy_loss
    from aligner.config.sections.algorithm import AlgorithmConfig, KLConfig
    from aligner.roles.policy import TokenOutputs
    from aligner.types import TrainBatch

    g = torch.Generator().manual_seed(0)
    shape = (4, 6)
    old, ref, advantage = (torch.randn(shape, generator=g) for _ in range(3))
    weights, mask = torch.rand(shape, generator=g), (torch.rand(shape, generator=g) < 0.7).float()
    logprobs, entropy = old + 0.05 * torch.randn(shape, generator=g), torch.rand(shape, generator=g)
    algorithm = AlgorithmConfig(kl=KLConfig(0.1, "k3", "loss"), entropy_coef=0.01)

    def value(**fields):
        fields = {"advantages": advantage} | fields
        targets = PolicyTargets(old_logprobs=old, ref_logprobs=ref, **fields)
        batch = TrainBatch(torch.zeros(shape), torch.full((4,), 6), mask, [targets])
        loss = policy_loss(batch, algorithm, 0.1, 6, None)
        return float(loss(TokenOutputs(logprobs, entropy, None), batch).loss)

    rest = value(advantages=torch.zeros(shape))
    r = torch.exp(logprobs - old)
    term = torch.maximum(-advantage * r, -advantage * r.clamp(0.8, 1.2))
    for w in (weights, torch.zeros(shape), torch.ones(shape)):
        wanted = rest + float((term * w * mask).sum() / mask.sum())
        assert value(token_weights=w) == pytest.approx(wanted, rel=1e-5, abs=1e-6)
    assert value(token_weights=torch.ones(shape)) == value()


def test_a_correction_without_mismatch_changes_almost_nothing(tiny_data, tiny_runs, tmp_path):
    overrides = [f"model.init={tiny_runs['sft']}", "run.steps=2", "checkpoint.final=false"]
    plain = stages.stage("grpo", tiny_data, tmp_path / "plain", *overrides)
    corrected = stages.stage("grpo", tiny_data, tmp_path / "tis", *overrides, "mismatch.correction=tis_sequence+veto")
    a, b, start = (stages.weights(run) for run in (plain, corrected, tiny_runs["sft"]))
    gap = math.sqrt(sum(float((a[n] - b[n]).double().square().sum()) for n in a))
    moved = math.sqrt(sum(float((a[n] - start[n]).double().square().sum()) for n in a))
    assert gap < 1e-3 * moved
    assert stages.records(corrected)[0]["mismatch/weight_mean"] == pytest.approx(1, abs=1e-4)


@pytest.mark.slow
def test_the_gate_names_the_worst_sample_and_loses_nothing(tiny_data, tiny_runs, tmp_path, monkeypatch):
    """The engine goes stale after the first refit: the second rollout is over the gate, the step before it is saved."""
    deaf(monkeypatch)
    overrides = [f"model.init={tiny_runs['sft']}", "run.steps=4", "mismatch.stop_above=1.005", "debug.skip_refit=true"]
    with pytest.raises(MismatchError) as caught:
        stages.stage("grpo", tiny_data, tmp_path / "run", *overrides, "run.export=false")
    message = str(caught.value)
    assert "mismatch/token_mult_prob_error=" in message and "> mismatch.stop_above=1.005" in message
    assert "Worst sample of all ranks: prompt slot" in message and "; tokens [" in message
    assert stages.checkpoints(tmp_path / "run") == [1]
    # with an engine that follows, the run goes on from there as if nothing had been
    monkeypatch.undo()
    again = [*overrides[:2], "mismatch.stop_above=1.005"]
    resumed = stages.stage("grpo", tiny_data, tmp_path / "run", *again)
    straight = stages.stage("grpo", tiny_data, tmp_path / "straight", *again)
    assert stages.same_weights(resumed, straight)


@pytest.mark.multirank
def test_the_worst_sample_may_be_on_any_rank(ranks):
    for results in ranks.run(worst_of_two, world=2):
        assert results["gate"].count("prompt slot 3, sample 1 (rank 1), token 4 (id 14)") == 1
        assert "engine -0.5, trainer -3 nats; tokens [10, 11, 12, 13, 14]" in results["gate"]
        assert "prompt slot 0, sample 0 (rank 0), token 1" in results["nan"]  # not a number is worse than any number
