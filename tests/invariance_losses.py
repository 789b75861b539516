"""The losses and advantages that `tests.invariance` replays beside the plain ones, a stage of the table for each."""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor

from aligner.algorithms.advantages import critic_advantages, group_advantages
from aligner.config.schema import Config
from aligner.config.sections.algorithm import AlgorithmConfig, CovConfig, KLConfig, PositiveConfig
from aligner.config.sections.preference import PreferenceConfig
from aligner.config.sections.rewards import RewardConfig, RewardFunctionConfig
from aligner.rewards.composite import Scores
from aligner.rollout.loss_inputs import row_keys, set_token_rewards
from aligner.types import LabelTargets, PolicyTargets, RolloutBatch, TrainBatch, ValueTargets

BY_ROW = "seq_mean_token_mean"
# a policy loss and an advantage each; the reference is the policy as it was, as at a run's start
POLICY = {
    "gspo+rloo": AlgorithmConfig("rloo", policy_loss="gspo", clip_low=0.1, clip_high=0.1, aggregation=BY_ROW),
    "cispo+opo": AlgorithmConfig("opo", policy_loss="cispo", ratio_cap=1.1),
    "sapo+gpg": AlgorithmConfig("gpg", policy_loss="sapo", aggregation=BY_ROW),
    "gmpo+pass_at_k": AlgorithmConfig("pass_at_k", policy_loss="gmpo", aggregation=BY_ROW),
    "dppo+dr_grpo": AlgorithmConfig("dr_grpo", policy_loss="dppo"),
    "gpg+reinforce_pp_baseline": AlgorithmConfig("reinforce_pp_baseline", policy_loss="gpg"),
    "reinforce+gdpo": AlgorithmConfig("gdpo", policy_loss="reinforce"),
    "clip_cov+reinforce_pp": AlgorithmConfig(
        "reinforce_pp", policy_loss="clip_cov", cov=CovConfig(fraction=0.2, low=0.01, high=9.0)
    ),
    "kl_cov+remax": AlgorithmConfig("remax", policy_loss="kl_cov", cov=CovConfig(fraction=0.2)),
    "kl_abs": AlgorithmConfig("grpo", kl=KLConfig(coef=0.5, estimator="abs", placement="loss")),
    "reinforce+maxrl": AlgorithmConfig("maxrl", policy_loss="reinforce"),
    "own": AlgorithmConfig("examples/own_loss.py:over_median", policy_loss="examples/own_loss.py:capped_sequence"),
    "ppo+gae": AlgorithmConfig("gae", whiten=True, dual_clip=3.0),
    "echo": AlgorithmConfig("rloo", observation_coef=0.3),  # with every third response token another's
    "vapo": AlgorithmConfig("gae", lam_alpha=0.2, clip_high=0.28, positive=PositiveConfig(0.1, above=0.2)),
}
# what "dpo" and "dpo_by_rank" leave, added up; and a reference that follows after every second of three steps
PAIRS = {
    "dpo_others": PreferenceConfig(
        [
            *("robust", "hinge", "exo_pair", "discopop", "rpo_fwd_kl", "rpo_sq", "nca_pair", "bco_pair", "sppo_hard"),
            *("apo_zero", "apo_down", "orpo", "alphapo"),
        ],
        weights=[0.05] * 13,  # steps of gradient descent with 13 whole gradients would leave all bounds
        beta=0.5,
        label_smoothing=0.1,
        nll_coef=0.3,
    ),
    "dpo_sync": PreferenceConfig(sync_every=2, sync_alpha=0.7),
}


def with_advantages(
    name: str, rollout: RolloutBatch, rows: TrainBatch, at: range, group: dist.ProcessGroup
) -> TrainBatch:
    """This rank's rows `at`, of all, with the advantages of the row `name` of POLICY. Collective."""
    cfg = Config(algorithm=POLICY[name], reward=RewardConfig(functions=FUNCTIONS))
    rewards, before = rows.of(LabelTargets).labels, rows.of(ValueTargets)
    second = (before.returns[:, 1] * 3).round()  # a component of its own, that some samples lack
    components = {"a": rewards.tolist(), "b": [None if i % 5 == 3 else float(x) for i, x in enumerate(second)]}
    whole = replace(rollout, rewards=rewards, old_logprobs=rows.of(PolicyTargets).old_logprobs, values=before.values)
    if cfg.algorithm.observation_coef:
        whole.response_mask = whole.response_mask * (torch.arange(whole.tokens.shape[1]) % 3 > 0)
    whole.greedy_rewards = rewards.view(-1, 4)[:, 0].repeat_interleave(4) - 0.1  # one number for a prompt
    own_rows = whole.select(torch.tensor(at))
    total = own_rows.rewards.tolist()
    columns = {key: column[at.start : at.stop] for key, column in components.items()}
    set_token_rewards(own_rows, cfg.algorithm, 0.0, own_rows.tokens.shape[1])
    if cfg.algorithm.advantage == "gae":
        advantages, _ = critic_advantages(own_rows, cfg.algorithm, group)
    else:
        scores = Scores(total, total, columns, [True] * len(at), [False] * len(at))
        advantages = group_advantages(own_rows, scores, cfg, group)
    piece = rows.select(torch.tensor(at))
    targets = piece.of(PolicyTargets)
    own = {
        "advantages": advantages,
        "positive": own_rows.positive,
        "observed": own_rows.observed,
        "rollout_logprobs": targets.old_logprobs,
        "row_keys": keys(rollout, at),
    }
    return piece.with_payloads(replace(targets, **own)).trim()


FUNCTIONS = [RewardFunctionConfig(path="module:a"), RewardFunctionConfig(path="module:b", weight=0.5)]


def keys(rollout: RolloutBatch, at: range) -> Tensor:
    return row_keys(rollout, 4, 3)[at.start : at.stop]
