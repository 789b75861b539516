"""Inputs of the losses from a scored rollout: token rewards, loss mask, minibatches; and the KL coefficient."""

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
from aligner.ops.packing.documents import observed
from aligner.ops.packing.minibatches import minibatch_rows, places
from aligner.ops.rl.kl import adapt_kl_coef, kl_estimator
from aligner.ops.rl.shaping import shaped_rewards
from aligner.ops.rl.token_advantages import token_rewards
from aligner.ops.seeds import derive, scatter
from aligner.rewards.composite import Scores
from aligner.rollout.balance import Balancer
from aligner.run.sample_table import SampleRow
from aligner.types import PolicyTargets, RolloutBatch, ScalarMetrics, TensorBatch, TrainBatch, Trajectory, ValueTargets


@dataclass
class KLController:
    """The KL coefficient beta, fixed or adaptive (Ziegler et al. 2019): beta *= 1 + clip(KL/target - 1, -0.2, 0.2) x
    samples / horizon, with KL the rollout's `metric`."""

    config: KLConfig
    coef: float = field(init=False)

    @property
    def metric(self) -> str:
        """The name of the KL metric: mean over sequences of k1's mean, or of its sum, over a sequence's tokens."""
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
    """Fill `token_rewards`, `loss_mask` and, where configured, `positive` and `observed`. The rewards are those of the
    last response token, shaped, and the KL per token where it belongs in the reward. The mask has the response tokens
    of valid samples, less truncated ones where configured."""
    lengths = rollout.response_mask.sum(1)
    scores = shaped_rewards(rollout.rewards.nan_to_num(), lengths, rollout.finished, cfg, response_limit)
    kl = None
    if cfg.kl.placement == "reward" and rollout.ref_logprobs is not None:
        kl = kl_estimator(cfg)(rollout.old_logprobs, rollout.ref_logprobs)
    rollout.token_rewards = token_rewards(scores, rollout.response_mask, kl, kl_coef)
    keep = rollout.valid.clone()
    if cfg.overlong.mask_truncated:
        keep &= rollout.finished
    rollout.loss_mask = rollout.response_mask * keep[:, None]
    if cfg.positive.coef:
        rollout.positive = (rollout.rewards > cfg.positive.above).float()
    if cfg.observation_coef:
        rollout.observed = observed(rollout.response_mask, rollout.lengths, rollout.forks) * keep[:, None]


def shuffle_within_groups(rollout: RolloutBatch, scores: Scores, seed: int) -> None:
    """Run the control experiment (`debug.shuffle_rewards`): give the rewards, and their components in `scores`, to
    random samples of their group."""
    for slot in rollout.group.unique().tolist():
        rows = (rollout.group == slot).nonzero().flatten()
        generator = torch.Generator().manual_seed(derive(seed, "control", slot))
        shuffled = rows[torch.randperm(len(rows), generator=generator)]
        rollout.rewards[rows], rollout.valid[rows] = rollout.rewards[shuffled], rollout.valid[shuffled]
        for column in scores.components.values():
            values = [column[i] for i in shuffled.tolist()]
            for i, value in zip(rows.tolist(), values, strict=True):
                column[i] = value


def minibatches(
    rollout: RolloutBatch, batch: BatchConfig, seed: int, epoch: int, balancer: Balancer
) -> Iterator[TrainBatch]:
    """Yield this rank's rows of each minibatch of one epoch. The global minibatch has the same members for any
    number of data-parallel ranks (`ops/packing/minibatches.py`); `balancer` decides which rank computes which of
    them."""
    count = batch.prompts * batch.group // (batch.minibatch_samples or batch.prompts * batch.group)
    seed = derive(seed, "epoch", epoch)
    keys = row_keys(rollout, batch.group, seed)
    for rows in minibatch_rows(rollout.group, batch.group, count, seed):
        own = rollout.select(rows)
        payloads = _payloads(own, keys[rows])
        minibatch = TrainBatch(own.tokens, own.lengths, own.loss_mask, payloads, routing=own.routing, forks=own.forks)
        yield balancer(minibatch)


def _payloads(rows: RolloutBatch, keys: Tensor) -> list[TensorBatch]:
    """Return the inputs of the policy's and the critic's losses; a critic may learn before there are advantages."""
    payloads: list[TensorBatch] = []
    if rows.advantages is not None:
        policy = PolicyTargets(
            advantages=rows.advantages,
            old_logprobs=rows.old_logprobs,
            ref_logprobs=rows.ref_logprobs,
            token_weights=rows.token_weights,
            positive=rows.positive,
            observed=rows.observed,
            rollout_logprobs=rows.rollout_logprobs,
            response_mask=rows.response_mask if rows.old_logprobs is None else None,
            row_keys=keys,
            versions=rows.versions,
        )
        payloads.append(policy)
    if rows.values is not None and rows.returns is not None:
        payloads.append(ValueTargets(rows.returns, rows.values))
    return payloads


def row_keys(rollout: RolloutBatch, group: int, seed: int) -> Tensor:
    """Return int64 [B] >= 0: a hash of the seed, the row's prompt slot and its index in the group, on any rank the
    same."""
    numbers = rollout.group.numpy() * group + places(rollout.group, group)
    return torch.from_numpy((scatter(seed, numbers) >> np.uint64(1)).astype(np.int64))


def sample_rows(rollout: RolloutBatch, scores: Scores, n: int) -> list[SampleRow]:
    """Return n samples for people, two of a group, from groups over all rows of this rank; with the reward and the
    advantage of the last response token."""
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
        float(rollout.advantages[i, int(rollout.lengths[i]) - 1]) if rollout.advantages is not None else None,
        sample.finished,
        {name: values[i] for name, values in scores.components.items()},
        {name: value for name, value in sample.prompt.fields.items() if name not in ("messages", "tools")},
        _trajectory(sample.trajectory, rollout, i) if sample.trajectory is not None else None,
    )


def _trajectory(trajectory: Trajectory, rollout: RolloutBatch, i: int) -> dict[str, Any]:
    trained = rollout.loss_mask is None or bool(rollout.loss_mask[i].any())
    runs = [len(list(run)) for made, run in groupby(rollout.response_mask[i].tolist()) if made]
    return shown_turns(trajectory, runs if trained else [0] * len(runs))


def shown_turns(trajectory: Trajectory, counts: Sequence[int] = ()) -> dict[str, Any]:
    """Return the messages behind the prompt; `counts`: the number of each answer's tokens that are trained on."""
    tokens, rewards, seconds = iter(counts), iter(trajectory.turn_rewards), iter(trajectory.turn_seconds)
    turns: list[dict[str, Any]] = []
    for message in trajectory.messages:
        calls = [call["function"] for call in message.get("tool_calls", ())]
        texts = [message["content"], *(f"{call['name']}({json.dumps(call['arguments'])})" for call in calls)]
        turns.append({"role": message["role"], "text": "\n".join(filter(None, texts))})
        if message["role"] == "assistant":
            turns[-1]["tokens"] = next(tokens, None)
    for one, after in zip(turns, [*turns[1:], None], strict=True):  # a turn's are on the last result of its calls
        if "tokens" not in one and (after is None or "tokens" in after):
            one["reward"], one["seconds"] = next(rewards, None), next(seconds, None)
    return {"stop": trajectory.stop.value, "failure": trajectory.failure, "reward": trajectory.reward, "turns": turns}


def average(stats: Sequence[ScalarMetrics]) -> ScalarMetrics:
    """Average the metrics of several minibatches: the mean of those that have one (not NaN), or the largest of those
    named `*_max`."""
    averages = {}
    for name in stats[0] if stats else ():
        values = [s[name] for s in stats if not math.isnan(s[name])] or [math.nan]
        averages[name] = max(values) if name.endswith("_max") else sum(values) / len(values)
    return averages


def total_tokens(rollout: RolloutBatch, group: dist.ProcessGroup) -> float:
    """Return the number of response tokens over all data-parallel ranks."""
    count: Tensor = rollout.response_mask.sum()
    if group.size() > 1:
        dist.all_reduce(count, group=group)
    return float(count)
