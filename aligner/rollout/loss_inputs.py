"""From a scored rollout to what the losses need: token rewards, loss mask, minibatches; and the KL coefficient."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from aligner.config.sections.algorithm import AlgorithmConfig, KLConfig
from aligner.config.sections.batch import BatchConfig
from aligner.ops.packing.minibatches import minibatch_rows, places
from aligner.ops.rl.kl import adapt_kl_coef, kl_estimate
from aligner.ops.rl.shaping import shaped_rewards
from aligner.ops.rl.token_advantages import token_rewards
from aligner.ops.seeds import derive, scatter
from aligner.rewards.composite import Scores
from aligner.rollout.balance import Balancer
from aligner.run.sample_table import SampleRow
from aligner.types import PolicyTargets, RolloutBatch, ScalarMetrics, TensorBatch, TrainBatch, Trajectory, ValueTargets


@dataclass
class KLController:
    """beta, fixed or adaptive (Ziegler et al. 2019): beta *= 1 + clip(KL/target - 1, -0.2, 0.2) x samples /
    horizon, with KL the rollout's `metric`."""

    config: KLConfig
    coef: float = field(init=False)

    @property
    def metric(self) -> str:
        """Mean over sequences of k1's mean, or of its sum, over a sequence's tokens."""
        return f"kl/ref_k1_{self.config.controller.measure}"

    def __post_init__(self) -> None:
        self.coef = self.config.coef

    def update(self, kl: float, samples: int) -> None:
        rule = self.config.controller
        # a rollout in which no token counts has no KL (NaN); beta then stays as it is
        if rule.kind == "adaptive" and math.isfinite(kl):
            self.coef = adapt_kl_coef(self.coef, kl, rule.target, samples, rule.horizon)

    def state_dict(self) -> dict[str, Any]:
        return {"coef": self.coef}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.coef = float(state["coef"])


def set_token_rewards(rollout: RolloutBatch, cfg: AlgorithmConfig, kl_coef: float, response_limit: int) -> None:
    """Fill `token_rewards` (reward at the last response token, overlong shaping, KL per token where it belongs in the
    reward) and `loss_mask` (response tokens of valid samples, less truncated ones where configured)."""
    lengths = rollout.response_mask.sum(1)
    scores = shaped_rewards(rollout.rewards.nan_to_num(), lengths, rollout.finished, cfg.overlong, response_limit)
    kl = None
    if cfg.kl.placement == "reward" and rollout.ref_logprobs is not None:
        kl = kl_estimate(rollout.old_logprobs, rollout.ref_logprobs, cfg.kl.estimator)
    rollout.token_rewards = token_rewards(scores, rollout.response_mask, kl, kl_coef)
    keep = rollout.valid.clone()
    if cfg.overlong.mask_truncated:
        keep &= rollout.finished
    rollout.loss_mask = rollout.response_mask * keep[:, None]


def shuffle_within_groups(rollout: RolloutBatch, scores: Scores, seed: int) -> None:
    """The control experiment (`debug.shuffle_rewards`): the same rewards, and their components in `scores`, given to
    random samples of their group."""
    for slot in rollout.group.unique().tolist():
        rows = (rollout.group == slot).nonzero().flatten()
        generator = torch.Generator().manual_seed(derive(seed, "control", slot))
        given = rows[torch.randperm(len(rows), generator=generator)]
        rollout.rewards[rows], rollout.valid[rows] = rollout.rewards[given], rollout.valid[given]
        for column in scores.components.values():
            values = [column[i] for i in given.tolist()]
            for i, value in zip(rows.tolist(), values, strict=True):
                column[i] = value


def minibatches(
    rollout: RolloutBatch, batch: BatchConfig, seed: int, epoch: int, balancer: Balancer
) -> Iterator[TrainBatch]:
    """This rank's rows of each minibatch of one epoch. The global minibatch has the same members for any number of
    data-parallel ranks (`ops/packing/minibatches.py`); `balancer` decides which rank computes which of them."""
    count = batch.prompts * batch.group // (batch.minibatch_samples or batch.prompts * batch.group)
    seed = derive(seed, "epoch", epoch)
    keys = row_keys(rollout, batch.group, seed)
    for rows in minibatch_rows(rollout.group, batch.group, count, seed):
        part = rollout.select(rows)
        payloads = _payloads(part, keys[rows])
        mine = TrainBatch(part.tokens, part.lengths, part.loss_mask, payloads, routing=part.routing, forks=part.forks)
        yield balancer(mine)


def _payloads(part: RolloutBatch, keys: Tensor) -> list[TensorBatch]:
    """What the losses of policy and critic need; a critic may learn before there are advantages."""
    found: list[TensorBatch] = []
    if part.advantages is not None:
        policy = PolicyTargets(
            advantages=part.advantages,
            old_logprobs=part.old_logprobs,
            ref_logprobs=part.ref_logprobs,
            token_weights=part.token_weights,
            rollout_logprobs=part.rollout_logprobs,
            response_mask=part.response_mask if part.old_logprobs is None else None,
            row_keys=keys,
            versions=part.versions,
        )
        found.append(policy)
    if part.values is not None and part.returns is not None:
        found.append(ValueTargets(part.returns, part.values))
    return found


def row_keys(rollout: RolloutBatch, group: int, seed: int) -> Tensor:
    """int64 [B] >= 0: a hash of the seed, the row's prompt slot and its place in the group, whatever rank it is on."""
    numbers = rollout.group.numpy() * group + places(rollout.group, group)
    return torch.from_numpy((scatter(seed, numbers) >> np.uint64(1)).astype(np.int64))


def sample_rows(rollout: RolloutBatch, scores: Scores, n: int) -> list[SampleRow]:
    """n samples for people, two of a group, from groups over all of this rank's part; with the reward and the advantage
    of the last response token."""
    groups: dict[int, list[int]] = {}
    for i, slot in enumerate(rollout.group.tolist()):
        groups.setdefault(slot, []).append(i)
    pairs = [rows[:2] for rows in groups.values()]
    count = min(len(pairs), -(-n // max(map(len, pairs), default=1)))
    picked = [i for k in range(count) for i in pairs[len(pairs) * k // count]][:n]
    return [_sample_row(rollout, scores, i) for i in picked]


def _sample_row(rollout: RolloutBatch, scores: Scores, i: int) -> SampleRow:
    sample = rollout.samples[i]
    return SampleRow(
        sample.prompt.text,
        sample.response,
        float(rollout.rewards[i]),
        float(rollout.advantages[i, int(rollout.lengths[i]) - 1]) if rollout.advantages is not None else 0.0,
        sample.finished,
        {name: values[i] for name, values in scores.components.items()},
        {name: value for name, value in sample.prompt.fields.items() if name not in ("messages", "tools")},
        _trajectory(sample.trajectory, rollout, i) if sample.trajectory is not None else None,
    )


def _trajectory(found: Trajectory, rollout: RolloutBatch, i: int) -> dict[str, Any]:
    trained = rollout.loss_mask is None or bool(rollout.loss_mask[i].any())
    runs = [len(list(run)) for made, run in groupby(rollout.response_mask[i].tolist()) if made]
    return shown_turns(found, runs if trained else [0] * len(runs))


def shown_turns(found: Trajectory, counts: Sequence[int] = ()) -> dict[str, Any]:
    """What was said and answered behind the prompt; `counts`: of each answer the tokens that are trained on."""
    tokens, rewards = iter(counts), iter(found.turn_rewards)
    told: list[dict[str, Any]] = []
    for message in found.messages:
        calls = [call["function"] for call in message.get("tool_calls", ())]
        texts = [message["content"], *(f"{call['name']}({json.dumps(call['arguments'])})" for call in calls)]
        told.append({"role": message["role"], "text": "\n".join(filter(None, texts))})
        if message["role"] == "assistant":
            told[-1]["tokens"] = next(tokens, None)
    for one, after in zip(told, [*told[1:], None], strict=True):  # a turn's reward stands behind what its calls gave
        if "tokens" not in one and (after is None or "tokens" in after):
            one["reward"] = next(rewards, None)
    return {"stop": found.stop.value, "failure": found.failure, "reward": found.reward, "turns": told}


def average(stats: Sequence[ScalarMetrics]) -> ScalarMetrics:
    """Metrics of several minibatches as one: the mean of those that have one (not NaN), or the largest of those named
    `*_max`."""
    found = {}
    for name in stats[0] if stats else ():
        values = [s[name] for s in stats if not math.isnan(s[name])] or [math.nan]
        found[name] = max(values) if name.endswith("_max") else sum(values) / len(values)
    return found


def total_tokens(rollout: RolloutBatch, group: dist.ProcessGroup) -> float:
    """Response tokens over all data-parallel ranks."""
    count: Tensor = rollout.response_mask.sum()
    if group.size() > 1:
        dist.all_reduce(count, group=group)
    return float(count)
