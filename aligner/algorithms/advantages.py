"""Advantages from a rollout's token rewards, by `algorithm.advantage`. Formulas are in `ops/rl/advantages.py` and
`ops/rl/token_advantages.py`."""

from __future__ import annotations

from functools import partial

import torch.distributed as dist
from torch import Tensor

from aligner.config.on_demand import on_demand
from aligner.config.schema import Config
from aligner.config.sections.algorithm import WHITENED, AlgorithmConfig
from aligner.config.sections.rewards import RewardConfig
from aligner.errors import ConfigError
from aligner.ops.rl import advantages as ops
from aligner.ops.rl.token_advantages import broadcast, gae, length_adaptive_lambda, return_to_go, whiten
from aligner.rewards.composite import Component, Scores
from aligner.rollout.statistics import compared
from aligner.types import RolloutBatch
from aligner.user_code import is_path


def group_advantages(rollout: RolloutBatch, scores: Scores, cfg: Config, ranks: dist.ProcessGroup) -> Tensor:
    """Return the advantages of stage grpo, float32 [B, T]. They are exactly 0 on tokens of invalid samples and, where
    samples of a prompt are compared, of groups without gradient, also after whitening. Needs token_rewards.
    Collective over the data-parallel `ranks`."""
    algorithm, mask = cfg.algorithm, _valid_tokens(rollout)
    if is_path(algorithm.advantage):
        tokens, learns = on_demand("algorithm.advantage")(rollout, mask, algorithm), rollout.valid
    elif algorithm.advantage == "reinforce_pp":
        tokens, learns = return_to_go(rollout.token_rewards, mask, algorithm.gamma), rollout.valid
    else:
        outcome = rollout.token_rewards.sum(1)
        tokens = broadcast(_per_sample(rollout, outcome, scores, cfg, ranks), mask)
        if algorithm.advantage == "remax":
            learns = rollout.valid & ~rollout.greedy_rewards.isnan()
        else:
            learns = ops.learnable(outcome, rollout.group, rollout.valid)
    if algorithm.whiten or algorithm.advantage in WHITENED:
        tokens = _whitened(tokens, mask, algorithm, ranks) * learns[:, None]
    return tokens


def critic_advantages(
    rollout: RolloutBatch, algorithm: AlgorithmConfig, ranks: dist.ProcessGroup
) -> tuple[Tensor, Tensor]:
    """Return (advantages, returns) of stage ppo, each float32 [B, T]; the returns are from the advantages before
    whitening, and from those by `lam` where each response has a lambda of its own. Needs token_rewards and values.
    Collective over the data-parallel `ranks`."""
    mask = _valid_tokens(rollout)
    estimate = partial(gae, rollout.token_rewards, rollout.values, mask, algorithm.gamma)
    advantages, returns = estimate(algorithm.lam)
    if algorithm.lam_alpha:
        advantages, _ = estimate(length_adaptive_lambda(mask, algorithm.lam_alpha))
    return (_whitened(advantages, mask, algorithm, ranks) if algorithm.whiten else advantages), returns


def _valid_tokens(rollout: RolloutBatch) -> Tensor:
    """Return the mask for whitening: with loss-masked (overlong) samples, as in group statistics, without invalid
    ones."""
    return rollout.response_mask * rollout.valid[:, None]


def _whitened(tokens: Tensor, mask: Tensor, algorithm: AlgorithmConfig, ranks: dist.ProcessGroup) -> Tensor:
    return whiten(tokens, mask, ranks, algorithm.whiten_shift, algorithm.whiten_ddof)


def _per_sample(
    rollout: RolloutBatch, outcome: Tensor, scores: Scores, cfg: Config, ranks: dist.ProcessGroup
) -> Tensor:
    algorithm, group, valid = cfg.algorithm, rollout.group, rollout.valid
    match algorithm.advantage:
        case "grpo":
            return ops.grpo(outcome, group, valid, algorithm.group_eps)
        case "dr_grpo" | "reinforce_pp_baseline":
            return ops.dr_grpo(outcome, group, valid)
        case "rloo":
            return ops.rloo(outcome, group, valid)
        case "maxrl":
            return ops.maxrl(outcome, group, valid)
        case "opo":
            return ops.opo(outcome, group, valid, rollout.response_mask.sum(1))
        case "gpg":
            return ops.gpg(outcome, group, valid, ranks)
        case "pass_at_k":
            return ops.pass_at_k(outcome, group, valid, algorithm.pass_at_k_std, algorithm.group_eps)
        case "gdpo":
            weights = reward_weights(scores.components, cfg.reward, cfg.environment.weight)
            return ops.gdpo(compared(rollout, scores, algorithm), weights, group, valid, algorithm.group_eps, ranks)
        case "remax":
            if rollout.greedy_rewards is None:
                expected = "recordings of a run with algorithm.advantage=remax: this one has no greedy responses"
                raise ConfigError("debug.train_only", cfg.debug.train_only, expected)
            return ops.remax(outcome, rollout.greedy_rewards, valid)
    raise AssertionError(f"advantage {algorithm.advantage!r}")


def reward_weights(components: dict[str, Component], cfg: RewardConfig, environment: float = 1.0) -> list[float]:
    """Return the weights of the reward functions."""
    known = {f.name or f.path.rpartition(":")[2]: f.weight for f in cfg.functions} | {"model": cfg.model_weight}
    known |= {judge.name: judge.weight for judge in cfg.judges} | {"environment": environment}
    for name in components:
        if name not in known:  # a function whose own name is not the configured one
            raise ConfigError("reward.functions[].name", "", f"a name ({name!r}) for the function, with gdpo")
    return [known[name] for name in components]
