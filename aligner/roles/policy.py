"""The policy and its frozen reference, which give an algorithm logprobs and updates."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from aligner.config.sections.batch import BatchConfig
from aligner.megatron.train import ShardedModel
from aligner.ops.kernels.concentration import log_square_sum
from aligner.ops.kernels.logprobs import logit_numbers, token_logprobs
from aligner.ops.packing.documents import split_forks
from aligner.ops.packing.needed import predicting
from aligner.ops.rl.accuracy import greedy_hits
from aligner.roles.batching import batch_metrics, forward_rows, micro_batches
from aligner.roles.ptx import Ptx
from aligner.types import LossOutput, PolicyTargets, PtxRows, RolloutBatch, ScalarMetrics, TrainBatch


class TokenOutputs(NamedTuple):
    """Numbers per token of the model's output, for a loss. All [B, T]; index t belongs to tokens[:, t]."""

    logprobs: Tensor
    entropy: Tensor | None
    hits: Tensor | None  # 1 where the most likely token is the actual one
    log_squares: Tensor | None = None  # log sum_v p_v^2, without gradient


PolicyLoss = Callable[[TokenOutputs, TrainBatch], LossOutput]  # micro-batch -> its share of the minibatch loss


@dataclass
class Policy:
    """A language model at a temperature; `model.step_count` is the weight version."""

    model: ShardedModel
    batch: BatchConfig
    temperature: float = 1.0
    entropy: bool = True  # of every token, for the metric and the bonus
    hits: bool = False
    log_squares: bool = False
    ptx: Ptx | None = None  # rows that every update learns in addition to its own
    # (tokens, how many of them are its prompt) -> the layer in which an engine computes other bits
    first_layer: Callable[[list[int], int], str] | None = None
    replays: ClassVar[bool] = True  # sends tokens to the engine's choice of experts, where rows have it

    def _outputs(self, hidden: Tensor, batch: TrainBatch, update: bool) -> TokenOutputs:
        """Return [B, T] tensors from the last hidden states of this rank's stream; only logprobs unless it is an
        `update`."""
        entropy, hits, log_squares = (update and on for on in (self.entropy, self.hits, self.log_squares))
        where = {
            "vocab_size": self.model.cfg.vocab_size,
            "group": self.model.layout.pgs.tp if self.model.layout.tensor > 1 else None,
        }

        def read(logits: Tensor, targets: Tensor) -> Tensor:
            lp, h = token_logprobs(logits, targets, temperature=self.temperature, entropy=entropy, **where)
            outputs = [lp, h, greedy_hits(logits, targets, **where) if hits else None]
            outputs += [log_square_sum(logits, temperature=self.temperature, **where)] if log_squares else []
            return torch.stack([x for x in outputs if x is not None], 1)

        numbers = 3 if log_squares else logit_numbers(hidden)
        outputs = self.model.over_logits(hidden, batch, read, self.batch.logits_bytes, numbers=numbers)
        logprobs, *others = outputs.unbind(-1)
        return TokenOutputs(logprobs, *(others.pop(0) if on else None for on in (entropy, hits, log_squares)))

    def logprobs(self, rows: RolloutBatch | TrainBatch, mask: Tensor | None = None, unit: int = 1) -> Tensor:
        """Return float32 [B, T] logprobs under the current weights, on the CPU of every rank: of the tokens in `mask`
        [B, T], the rest may be 0; None: of every token. Index 0 is 0. `unit` consecutive rows stay together, so that
        a common beginning may be computed once."""
        if rows.forks is not None:
            parts = split_forks(rows, torch.ones(rows.tokens.shape) if mask is None else mask)
            # parts, unlike the rows of a unit, begin with different tokens
            return parts.whole.join(self.logprobs(parts, parts.loss_mask))
        wanted = None if mask is None else predicting(mask)
        routing = rows.routing if self.replays else None
        read = lambda hidden, b: self._outputs(hidden, b, update=False).logprobs  # noqa: E731
        return forward_rows(self.model, rows, self.batch, read, wanted=wanted, routing=routing, unit=unit)

    def update(self, minibatch: TrainBatch, loss: PolicyLoss, unit: int = 1) -> ScalarMetrics:
        """Take one optimizer step over this rank's rows of a minibatch; `unit` consecutive ones (2: a pair) stay in
        one micro-batch. `ptx` adds micro-batches of its rows, which `loss` and its numbers do not see."""
        ptx, plain = self.ptx, replace(self, temperature=1.0)

        def from_hidden(hidden: Tensor, batch: TrainBatch) -> LossOutput:
            if ptx is not None and batch.find(PtxRows) is not None:
                return ptx.loss(plain._outputs(hidden, batch, update=False).logprobs, batch)
            outputs = self._outputs(hidden, batch, update=True)
            if batch.whole is None:
                return loss(outputs, batch)
            return loss(TokenOutputs(*(None if x is None else batch.whole.join(x) for x in outputs)), batch.whole.rows)

        targets = minibatch.find(PolicyTargets)
        compared = None if targets is None else targets.response_mask
        read = minibatch.loss_mask if compared is None else compared
        if targets is not None and targets.observed is not None:
            read = read + targets.observed
        minibatch = replace(minibatch, wanted=predicting(read))
        parts = micro_batches(minibatch, self.batch, unit, self.model.layout.pgs.dp)
        if ptx is not None:
            parts += micro_batches(ptx.next(), self.batch, group=self.model.layout.pgs.dp)
        stats = self.model.step(parts, from_hidden)
        stats = stats if ptx is None else ptx.with_stage_loss(stats)
        return {f"policy/{name}" if name in ("loss", "grad_norm", "lr") else name: v for name, v in stats.items()} | (
            batch_metrics(parts, self.batch, self.model.layout.context)
        )


class Reference(Policy):
    """A frozen copy: no gradients, no optimizer. No engine generates with its weights, so its routers choose."""

    replays = False

    @torch.no_grad()
    def follow(self, policy: Policy, share: float) -> None:
        """Update weights <- share * the policy's + (1 - share) * own, in float32, rounded once. Both have the same
        layout."""
        theirs = dict(policy.model.module.named_parameters()) | dict(policy.model.module.named_buffers())
        owned = dict(self.model.module.named_parameters()) | dict(self.model.module.named_buffers())
        for name, own in owned.items():
            if own.is_floating_point():  # tables of token ids stay
                own.copy_(torch.lerp(own.float(), theirs[name].float(), share))

    def update(self, minibatch: TrainBatch, loss: PolicyLoss, unit: int = 1) -> ScalarMetrics:
        raise AssertionError("the reference is frozen")


class AdapterReference(Reference):
    """The policy's own model at the start of training: its weights are frozen, and its adapters can be left out."""

    def logprobs(self, rows: RolloutBatch | TrainBatch, mask: Tensor | None = None, unit: int = 1) -> Tensor:
        assert self.model.adapted is not None, "a model whose weights are all trained"
        with self.model.adapted.as_at_start():
            return super().logprobs(rows, mask, unit)
