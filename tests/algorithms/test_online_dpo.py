"""Stage online_dpo: ties leave the loss, the reward rises, and it is the same run on two ranks and after a restart."""

import pytest
import torch
import torch.distributed as dist

from aligner.config.freeze import load_frozen
from aligner.config.sections.preference import PreferenceConfig
from aligner.ops.rl.by_rank import with_partners
from aligner.roles.policy import TokenOutputs
from aligner.stages.dpo import dpo_loss, losses_at_start
from aligner.types import LabelTargets, TrainBatch
from tests import stages

PAIRS, T = 5, 6


@pytest.fixture
def alone():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


@pytest.mark.parametrize("loss", [["sigmoid", "ipo", "rpo_sq"], ["aot", "aot_unpaired"]])
def test_what_is_no_pair_is_in_no_sum_and_no_denominator(alone, loss):
    """As if its rows were not there."""
    g = torch.Generator().manual_seed(0)
    mask = (torch.rand(2 * PAIRS, T, generator=g) < 0.6).float()
    mask[:, -1] = 1
    counts = torch.tensor([1.0, 0.0, 1.0, 0.0, 1.0]).repeat_interleave(2)
    labels = torch.cat([torch.rand(2 * PAIRS, 3, generator=g), counts[:, None]], 1)
    logprobs = -torch.rand(2 * PAIRS, T, generator=g)
    reference = logprobs + torch.randn(2 * PAIRS, T, generator=g)
    tokens, lengths = torch.randint(0, 9, (2 * PAIRS, T), generator=g), torch.full((2 * PAIRS,), T)
    batch = TrainBatch(tokens, lengths, mask, [LabelTargets(labels, reference)])
    cfg = PreferenceConfig(loss=loss, nll_coef=0.3, nll_aggregation="seq_mean_token_mean")
    results = []
    for rows in (torch.arange(2 * PAIRS), counts.nonzero().flatten()):
        piece, own = batch.select(rows), logprobs[rows].requires_grad_()
        if cfg.by_rank:
            piece.of(LabelTargets).labels = with_partners(piece, own.detach(), cfg, alone)
        out = dpo_loss(piece, cfg, alone)(TokenOutputs(own, None, None), piece)
        gradient = torch.zeros(2 * PAIRS, T)
        gradient[rows] = torch.autograd.grad(out.loss, own)[0]
        means = {name: top / bottom for name, (top, bottom) in out.means.items()}
        results.append((out.loss.detach(), gradient, means, losses_at_start(piece, cfg, alone)))
    torch.testing.assert_close(results[0], results[1])
    assert not results[0][1][counts == 0].any() and results[0][1].any()
    none = batch.select(torch.tensor([2, 3, 6, 7]))
    if cfg.by_rank:
        none.of(LabelTargets).labels = with_partners(none, logprobs[[2, 3, 6, 7]], cfg, alone)
    assert losses_at_start(none, cfg, alone) == {}
    assert float(dpo_loss(none, cfg, alone)(TokenOutputs(logprobs[[2, 3, 6, 7]], None, None), none).loss) == 0


@pytest.mark.slow
def test_a_policy_with_adapters_is_its_own_reference(tiny_data, tiny_runs, tmp_path):
    """As in stage dpo; the bits are those of a second model."""
    overrides = [f"model.init={tiny_runs['sft']}", "run.steps=2", "model.lora.rank=2", "checkpoint.final=false"]
    own = stages.stage("online_dpo", tiny_data, tmp_path / "own", *overrides)
    other = stages.stage(
        "online_dpo", tiny_data, tmp_path / "other", *overrides, "algorithm.preference.reference=model"
    )
    assert load_frozen(own).algorithm.preference.reference == "adapter"
    assert stages.same_weights(own, other) and not stages.differences(own, other)


@pytest.mark.slow
def test_the_reward_rises(tiny_data, tiny_runs, tmp_path):
    overrides = [f"model.init={tiny_runs['sft']}", "run.steps=24", "sampling.temperature=1.3"]
    overrides.append("batch.micro_batch_samples=16")
    run = stages.stage("online_dpo", tiny_data, tmp_path / "run", *overrides, "debug.first_step_checks=true")
    means = [record["reward/mean"] for record in stages.records(run)]
    assert sum(means[-4:]) > sum(means[:4]) + 0.4
    first, *_, last = stages.records(run)
    assert 0 < first["preference/pairs"] < 1 and last["rewards/margins"] > 0.5 > first["rewards/margins"]
    assert last["dpo/loss"] < 0.6 < first["dpo/loss"]


@pytest.mark.slow
@pytest.mark.multirank
@pytest.mark.parametrize("layout", [[], ["parallel.tensor=2"]])
def test_two_ranks_learn_from_the_same_pairs(ranks, tiny_data, tiny_runs, tmp_path, layout):
    """Ranks that make different numbers of pairs among them."""
    overrides = [
        f"model.init={tiny_runs['sft']}",
        "run.steps=2",
        "batch.micro_batch_samples=2",
        "logging.progress=false",
    ]
    one = stages.stage("online_dpo", tiny_data, tmp_path / "one", *overrides)
    line = stages.overrides("online_dpo", tiny_data, tmp_path / "two", *overrides, *layout)
    assert ranks.run("tests.run.jobs:run_stage", world=2, arguments=line) == [0, 0]
    for a, b in zip(stages.records(one), stages.records(tmp_path / "two"), strict=True):
        assert a["reward/mean"] == b["reward/mean"] and a["preference/pairs"] == b["preference/pairs"] < 1
        names = ("dpo/loss", "logps/chosen", "rewards/margins", "policy/grad_norm")
        assert [b[name] for name in names] == pytest.approx([a[name] for name in names], rel=1e-4, abs=1e-5)
