"""From a scored rollout to advantages per token: what counts where, for every estimator."""

import math
from statistics import fmean, pvariance, variance

import pytest
import torch
import torch.distributed as dist

from aligner.algorithms.advantages import critic_advantages, group_advantages, reward_weights
from aligner.config.schema import Config
from aligner.config.sections.algorithm import (
    GROUP_BASELINES,
    OTHER_BASELINES,
    AlgorithmConfig,
    KLConfig,
    OverlongConfig,
)
from aligner.config.sections.rewards import RewardConfig, RewardFunctionConfig
from aligner.errors import ConfigError
from aligner.rewards.composite import Scores
from aligner.rollout.loss_inputs import set_token_rewards
from aligner.types import RolloutBatch

pytestmark = pytest.mark.usefixtures("world")

B, T, GROUP = 12, 7, 4  # group 0 is degenerate; in group 2 one sample is left
REWARDS = [1.0, 1.0, 1.0, 1.0, 0.0, 1.0, 2.0, math.nan, 5.0, math.nan, math.nan, math.nan]
SECOND = [0.5, 0.5, 0.5, 0.5, None, 3.0, 1.0, None, 1.0, None, None, None]
ESTIMATORS = (*GROUP_BASELINES, *OTHER_BASELINES)


def make_rollout() -> RolloutBatch:
    g = torch.Generator().manual_seed(0)
    lengths = torch.tensor([3, 4, 5, 6, 7, 4, 3, 5, 6, 7, 4, 3])
    column = torch.arange(T)[None]
    mask = ((column >= 1) & (column < lengths[:, None])).float()
    rewards = torch.tensor(REWARDS)
    old = -torch.rand(B, T, generator=g) * mask
    return RolloutBatch(
        tokens=torch.zeros(B, T, dtype=torch.int64),
        lengths=lengths,
        response_mask=mask,
        rollout_logprobs=old,
        rewards=rewards,
        valid=~rewards.isnan(),
        group=torch.arange(3).repeat_interleave(GROUP),
        finished=lengths < T,
        weight_version=0,
        old_logprobs=old,
        ref_logprobs=old - 0.2 * torch.randn(B, T, generator=g),
        values=torch.randn(B, T, generator=g),
        greedy_rewards=torch.tensor([0.5] * 4 + [1.0] * 4 + [math.nan] * 4),
    )


def scores() -> Scores:
    first = [None if math.isnan(r) else r for r in REWARDS]
    return Scores(REWARDS, REWARDS, {"a": first, "b": SECOND}, [r is not None for r in first], [False] * B)


FUNCTIONS = [RewardFunctionConfig(path="module:a"), RewardFunctionConfig(path="x.py:f", name="b", weight=0.5)]


def estimate(rollout: RolloutBatch, scored: Scores | None = None, **algorithm) -> torch.Tensor:
    cfg = Config(algorithm=AlgorithmConfig(**algorithm), reward=RewardConfig(functions=FUNCTIONS))
    set_token_rewards(rollout, cfg.algorithm, cfg.algorithm.kl.coef, T - 1)
    return group_advantages(rollout, scored or scores(), cfg, dist.group.WORLD)


WAYS = [(n, w) for n in ESTIMATORS for w in (False, True) if not w or n not in ("gdpo", "pass_at_k")]


def shares() -> dict[tuple[str, bool], torch.Tensor]:
    """The job of a rank: the advantages of its groups, the first one or the other two, by every estimator."""
    rows = [range(B), range(GROUP), range(GROUP, B)][dist.get_rank() + dist.get_world_size() - 1]
    results = {}
    for name, whiten in WAYS:
        whole = scores()
        columns = {key: [column[i] for i in rows] for key, column in whole.components.items()}
        lists = ([x[i] for i in rows] for x in (whole.total, whole.raw, whole.valid, whole.clipped))
        total, raw, valid, clipped = lists
        own_scores = Scores(total, raw, columns, valid, clipped)
        results[name, whiten] = estimate(
            make_rollout().select(torch.tensor(rows)), own_scores, advantage=name, whiten=whiten
        )
    return results


@pytest.mark.multirank
def test_the_advantages_of_two_ranks_are_those_of_one(ranks):
    """What is taken over the rollout is taken over all ranks: gdpo's and whitening's statistics, gpg's counts."""
    alone = shares()
    pair = ranks.run("tests.algorithms.test_group_advantages:shares", world=2)
    for way, want in alone.items():
        actual = torch.cat([torch.nn.functional.pad(rank[way], (0, T - rank[way].shape[1])) for rank in pair])
        torch.testing.assert_close(actual, want, rtol=1e-5, atol=1e-6, msg=lambda text, way=way: f"{way}: {text}")
        assert want.abs().max() > 0.1, way


@pytest.mark.parametrize(("name", "whiten"), WAYS)
def test_what_must_be_exactly_zero(name, whiten):
    rollout = make_rollout()
    got = estimate(rollout, advantage=name, whiten=whiten)
    assert got.dtype == torch.float32 and got.shape == (B, T) and got.isfinite().all()
    assert (got[rollout.response_mask == 0] == 0).all() and (got[~rollout.valid] == 0).all()
    assert got[4:7].abs().sum() > 0
    if name in GROUP_BASELINES:
        assert (got[:4] == 0).all() and (got[8:] == 0).all()
    elif name == "remax":  # compares with another response: groups play no part; no greedy score, no gradient
        assert (got[:4][rollout.response_mask[:4] > 0] != 0).all() and (got[8] == 0).all()


@pytest.mark.parametrize("name", [n for n in ESTIMATORS if n != "reinforce_pp"])
def test_an_advantage_of_a_sample_is_on_each_of_its_tokens(name):
    rollout = make_rollout()
    got = estimate(rollout, advantage=name)
    for row, mask in zip(got, rollout.response_mask.bool(), strict=True):
        assert len(set(row[mask].tolist())) == 1


@pytest.mark.parametrize("shift", [True, False])
@pytest.mark.parametrize("ddof", [0, 1])
@pytest.mark.parametrize("name", ["reinforce_pp_baseline", "reinforce_pp"])
def test_whitening_is_over_the_tokens_of_valid_samples_also_overlong_ones(name, ddof, shift):
    kl = KLConfig(0.3, "k1", "reward")
    overlong = OverlongConfig(mask_truncated=True)
    settings = {"kl": kl, "overlong": overlong, "gamma": 0.9, "whiten_ddof": ddof, "whiten_shift": shift}
    rollout = make_rollout()
    got = estimate(rollout, advantage=name, **settings)
    assert not rollout.loss_mask[4].any() and rollout.valid[4]  # a truncated sample: in the statistics, not in the loss
    raw = {}
    for i in range(B):
        at = rollout.response_mask[i].nonzero().flatten().tolist()
        d = [float(rollout.old_logprobs[i, t] - rollout.ref_logprobs[i, t]) for t in at]
        r = [-0.3 * x + (REWARDS[i] if t == at[-1] else 0.0) for t, x in zip(at, d, strict=True)]
        if not rollout.valid[i]:
            continue
        for k, t in enumerate(at):
            raw[i, t] = sum(0.9 ** (j - k) * r[j] for j in range(k, len(at)))
            if name == "reinforce_pp_baseline":
                raw[i, t] = sum(r)
    if name == "reinforce_pp_baseline":
        first = {i: raw[i, t] for i, t in raw}
        groups = [[i for i in first if i // GROUP == g] for g in range(3)]
        raw = {
            (i, t): x - fmean(first[j] for j in groups[i // GROUP]) if len(groups[i // GROUP]) > 1 else 0.0
            for (i, t), x in raw.items()
        }
    mean, var = fmean(raw.values()), (variance if ddof else pvariance)(raw.values())
    for (i, t), x in raw.items():
        want = (x - mean) / math.sqrt(var + 1e-8) + (0.0 if shift else mean)
        want = 0.0 if name == "reinforce_pp_baseline" and i == 8 else want
        assert float(got[i, t]) == pytest.approx(want, abs=1e-5)


def test_the_kl_in_the_reward_is_part_of_a_samples_score():
    rollout = make_rollout()
    got = estimate(rollout, advantage="dr_grpo", kl=KLConfig(0.3, "k1", "reward"))
    d = ((rollout.old_logprobs - rollout.ref_logprobs) * rollout.response_mask).sum(1)
    s = [REWARDS[i] - 0.3 * float(d[i]) for i in range(4, 7)]
    assert [float(got[i, 1]) for i in range(4, 7)] == pytest.approx([x - fmean(s) for x in s], abs=1e-5)


def test_reward_weights_are_found_by_name():
    cfg = RewardConfig(functions=FUNCTIONS, model_weight=3.0)
    assert reward_weights({"b": [1.0, None], "a": [None, 2.0], "model": [0.5, 0.5]}, cfg) == [0.5, 1.0, 3.0]
    with pytest.raises(ConfigError, match=r"reward\.functions\[\]\.name.*'other'"):
        reward_weights({"other": [1.0]}, cfg)


def test_remax_needs_greedy_responses():
    rollout = make_rollout()
    rollout.greedy_rewards = None
    with pytest.raises(ConfigError, match=r"debug\.train_only"):
        estimate(rollout, advantage="remax")


@pytest.mark.parametrize("whiten", [False, True])
def test_a_critics_advantages_are_rewards_less_values(whiten):
    rollout = make_rollout()
    cfg = AlgorithmConfig(advantage="gae", whiten=whiten)
    set_token_rewards(rollout, cfg, 0.0, T - 1)
    advantages, returns = critic_advantages(rollout, cfg, dist.group.WORLD)
    on = (rollout.response_mask * rollout.valid[:, None]).bool()
    reward = rollout.rewards.nan_to_num()[:, None].expand(B, T)
    torch.testing.assert_close(returns, torch.where(on, reward, 0.0))
    plain = torch.where(on, reward - rollout.values, 0.0)
    want = torch.where(on, (plain - plain[on].mean()) / plain[on].std(unbiased=False), 0.0) if whiten else plain
    torch.testing.assert_close(advantages, want, atol=1e-5, rtol=1e-5)
