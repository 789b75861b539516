"""A teacher: a frozen language model of any shape whose distributions a student learns, and the student."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from aligner.config.sections.batch import BatchConfig
from aligner.config.sections.distill import DistillConfig
from aligner.config.sections.model.attention import ScalesConfig
from aligner.megatron.groups import Layout
from aligner.megatron.train import ShardedModel
from aligner.ops.kernels.divergence import Divergence, divergences
from aligner.ops.kernels.logprobs import token_logprobs
from aligner.ops.kernels.scored_attention import scaled_logits
from aligner.ops.kernels.top import bucketed, logprobs_at, top_logprobs
from aligner.ops.packing.documents import join_documents, split_documents
from aligner.ops.packing.needed import predicting
from aligner.ops.rl.accuracy import greedy_hits
from aligner.ops.rl.spans import last_of_spans, means_of_numbers, sums_to_here
from aligner.roles.batching import forward_rows
from aligner.roles.policy import Policy
from aligner.types import TeacherNumbers, TeacherRows, TeacherTargets, TextSpans, TrainBatch

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

HELD = 4.0  # nats of a log-ratio of spans that count in a gradient: a rare span of far more would decide a step
WIDE = 7  # float32 numbers of a logit in a divergence: logits, logprobs and terms of two models, a gradient


@dataclass
class Teacher:
    """Teacher model. Its logits are never stored, but what they are made of: hidden states, or the logprobs of the
    most likely tokens (`DistillConfig.top_k`). With another tokenizer these are logprobs of the text's tokens."""

    model: ShardedModel
    batch: BatchConfig
    cfg: DistillConfig
    vocab_size: int  # of the tokens that teacher and student share
    student: Layout | None = None  # that the rows are dealt to, where it is another layout
    tokenizer: PreTrainedTokenizerBase | None = None  # its own, if it is not the student's

    @property
    def width(self) -> int:
        """The numbers of each token in its targets."""
        return 1 if self.tokenizer is not None else self.cfg.top_k or self.model.cfg.hidden_size

    def add_targets(self, rows: TrainBatch) -> TrainBatch:
        """Return the rows with the teacher's targets for the tokens in their loss mask. Collective over the peers, or
        with another layout over the world."""
        if self.student is None:
            return self._with_targets(rows)
        everyone, first = gathered(rows, self.student)
        row_count, total, layout = len(rows.lengths), len(everyone.lengths), self.model.layout
        edges = [total * rank // layout.data for rank in range(layout.data + 1)]
        own = everyone.select(torch.arange(*edges[layout.dp_rank : layout.dp_rank + 2]))
        targets = self._with_targets(own).of(TeacherTargets)

        def spread(shard: Tensor) -> Tensor:
            blocks = []
            for rank in range(layout.data):
                low, high = edges[rank : rank + 2]
                own = rank == layout.dp_rank
                block = shard if own else shard.new_empty(high - low, *shard.shape[1:])
                block = block.to(self.model.device).contiguous()
                dist.broadcast(block, dist.get_global_rank(layout.pgs.dp, rank), group=layout.pgs.dp)
                start, end = (min(max(edge - low, 0), high - low) for edge in (first, first + row_count))
                blocks.append(block[start:end, : rows.tokens.shape[1]].cpu())
            return torch.cat(blocks)

        ids = None if targets.teacher_ids is None else spread(targets.teacher_ids)
        return rows.with_payloads(TeacherTargets(spread(targets.teacher), ids))

    def _with_targets(self, rows: TrainBatch) -> TrainBatch:
        parts = split_documents(rows)
        wanted = predicting(parts.loss_mask)
        if self.tokenizer is not None:
            outputs = forward_rows(self.model, parts, self.batch, self._likely, wanted=wanted, beyond=(1,))
            return rows.with_payloads(TeacherTargets(join_documents(outputs, rows)))
        if not self.cfg.top_k:
            shape, dtype = (self.model.cfg.hidden_size,), self.model.dtype
            outputs = forward_rows(
                self.model, parts, self.batch, self.model.over_hidden, wanted=wanted, beyond=shape, dtype=dtype
            )
            return rows.with_payloads(TeacherTargets(join_documents(outputs, rows)))
        outputs = forward_rows(self.model, parts, self.batch, self._top, wanted=wanted, beyond=(2, self.cfg.top_k))
        logprobs, ids = join_documents(outputs, rows).unbind(2)
        return rows.with_payloads(TeacherTargets(logprobs, ids.long()))

    def _top(self, hidden: Tensor, batch: TrainBatch) -> Tensor:
        """Return [B, T, 2, k]: logprobs and ids, which float32 holds exactly up to 16 M."""
        group = self.model.layout.pgs.tp if self.model.layout.tensor > 1 else None

        def read(logits: Tensor, targets: Tensor) -> Tensor:
            most_likely = top_logprobs(
                logits, self.cfg.top_k, temperature=self.cfg.temperature, vocab_size=self.vocab_size, group=group
            )
            return torch.stack([x.float() for x in most_likely], 1)

        return self.model.over_logits(hidden, batch, read, self.batch.logits_bytes)

    def _likely(self, hidden: Tensor, batch: TrainBatch) -> Tensor:
        """Return [B, T, 1]: the logprobs of the tokens."""
        logprobs = chosen_logprobs(self.model, hidden, batch, self.batch.logits_bytes, self.cfg.temperature)
        return logprobs[..., None].float()

    def head(self, student: ShardedModel) -> TeacherHead:
        """Return the rows of its output matrix for the student's share of the vocabulary. Collective over the world."""
        layout, theirs = student.layout, self.model.layout
        shard = torch.empty(
            -(-self.model.cfg.vocab_size // theirs.tensor),
            self.model.cfg.hidden_size,
            dtype=self.model.dtype,
            device=self.model.device,
        )
        width = -(-student.cfg.vocab_size // layout.tensor)
        first = layout.tp_rank * width
        last = min(first + width, self.vocab_size)
        shards = []
        for rank in range(theirs.tensor):  # fastest in the order of ranks, pipeline stages slowest
            if theirs.is_last_stage and theirs.tp_rank == rank:
                shard = self.model.head_weight.detach().clone()
            source = rank + dist.get_world_size() // theirs.pipeline * (theirs.pipeline - 1)
            dist.broadcast(shard, source)
            low, high = (min(max(edge - rank * len(shard), 0), len(shard)) for edge in (first, max(first, last)))
            shards.append(shard[low:high].clone())
        return TeacherHead(torch.cat(shards), self.model.cfg.scales)


def add_targets(teachers: Sequence[Teacher], rows: TrainBatch) -> TrainBatch:
    """Return the rows, each with its own teacher's targets. A teacher processes only its own rows; narrower hidden
    states are padded with zeros. Collective as `Teacher.add_targets`, also of ranks where a teacher has no rows."""
    own = rows.find(TeacherRows)
    if own is not None:
        return _behind_own_prompts(teachers, rows.without(TeacherRows), own)
    numbers = rows.find(TeacherNumbers)
    if numbers is None:
        return teachers[0].add_targets(rows)
    width, columns = max(teacher.width for teacher in teachers), {}
    for number, teacher in enumerate(teachers):
        own = (numbers.told_by == number).nonzero()[:, 0]
        targets = teacher.add_targets(rows.select(own)).of(TeacherTargets)
        for name in ("teacher", "teacher_ids")[: 1 + bool(teacher.cfg.top_k)]:
            tensor = getattr(targets, name)
            whole = columns.setdefault(name, tensor.new_zeros(*rows.tokens.shape, width))
            whole[own, :, : tensor.shape[2]] = tensor
    return rows.with_payloads(TeacherTargets(**columns))


def _behind_own_prompts(teachers: Sequence[Teacher], rows: TrainBatch, own: TeacherRows) -> TrainBatch:
    """Return the rows with the targets of the teacher's own rows, which have the same answers. Those of spans are sums
    over their tokens."""
    others = TrainBatch(own.teacher_tokens, own.teacher_lengths, own.teacher_mask, rows.payloads)
    targets = add_targets(teachers, others).of(TeacherTargets)
    there, here = own.teacher_mask.bool(), rows.loss_mask.bool()
    if own.teacher_spans is not None and own.spans is not None:
        there, here = last_of_spans(own.teacher_spans), last_of_spans(own.spans)
        targets = TeacherTargets(sums_to_here(targets.teacher[..., 0], own.teacher_spans)[..., None])

    def moved(name: str, target: Tensor) -> Tensor:
        return target.new_zeros(*here.shape, *target.shape[2:]).index_put_((here,), target[there])

    targets = targets.mapped(moved)
    if own.spans is not None:
        ratios = (sums_to_here(own.sampled, own.spans) - targets.teacher[..., 0]).clamp(-HELD, HELD) * here
        student = teachers[0].student or teachers[0].model.layout
        rows = rows.with_payloads(TextSpans(own.spans, means_of_numbers(ratios, own.spans * here, student.pgs.dp)))
    return rows.with_payloads(targets)


def chosen_logprobs(
    model: ShardedModel, hidden: Tensor, batch: TrainBatch, logits_bytes: int, temperature: float
) -> Tensor:
    """Return [B, T]: the logprobs of a micro-batch's tokens over all tokens of the model."""
    group = model.layout.pgs.tp if model.layout.tensor > 1 else None

    def read(logits: Tensor, targets: Tensor) -> Tensor:
        return token_logprobs(logits, targets, temperature=temperature, vocab_size=model.cfg.vocab_size, group=group)[0]

    return model.over_logits(hidden, batch, read, logits_bytes)


def gathered(rows: TrainBatch, layout: Layout) -> tuple[TrainBatch, int]:
    """Return the rows of all data-parallel ranks in their order, with what a forward pass needs of them, and the
    index of this rank's first row. Collective."""
    parts: list = [None] * layout.data
    names = ("tokens", "loss_mask", *(("documents",) if rows.documents is not None else ()))
    dist.all_gather_object(parts, (rows.lengths, [getattr(rows, name) for name in names]), group=layout.pgs.dp)
    width = max(tensors[0].shape[1] for _, tensors in parts)
    whole = [
        torch.cat([torch.nn.functional.pad(x, (0, width - x.shape[1])) for x in side])
        for side in zip(*(tensors for _, tensors in parts), strict=True)
    ]
    lengths = [lengths for lengths, _ in parts]
    first = sum(map(len, lengths[: layout.dp_rank]))
    return TrainBatch(lengths=torch.cat(lengths), **dict(zip(names, whole, strict=True))), first


class TeacherHead(NamedTuple):
    weight: Tensor  # [columns, H]
    scales: ScalesConfig

    def logits(self, hidden: Tensor) -> Tensor:
        """Compute hidden [n, H or more] -> [n, columns]."""
        hidden = hidden[:, : self.weight.shape[1]]
        return scaled_logits(torch.nn.functional.linear(hidden, self.weight), self.scales)


def logits_of(heads: Sequence[TeacherHead], hidden: Tensor, indices: Tensor | None = None) -> Tensor:
    """Compute hidden [n, H] -> [n, columns], by the head whose number is in `indices` [n]."""
    if indices is None:
        return heads[0].logits(hidden)
    own = [(indices == number).nonzero()[:, 0] for number in range(len(heads))]
    logits = torch.cat([head.logits(hidden[rows]) for head, rows in zip(heads, own, strict=True)])
    return torch.empty_like(logits).index_copy_(0, torch.cat(own), logits)


class StudentOutputs(NamedTuple):
    """Numbers per token, all [B, T]; index t belongs to tokens[:, t]. Divergence and logprobs have a gradient."""

    divergence: Tensor
    kl: Tensor | None = None  # KL(teacher, student); of spans of text it is not known, as the next two
    entropy: Tensor | None = None  # of the teacher
    agreement: Tensor | None = None  # 1 where the most likely token of the one is that of the other
    logprobs: Tensor | None = None  # with sft_coef
    mass: Tensor | None = None  # with top_k: the teacher's probability of its k tokens


@dataclass
class Student(Policy):
    """A policy that learns from teachers' targets for its rows: with `heads` from hidden states, else from their most
    likely tokens, or spans of text."""

    cfg: DistillConfig | None = None
    vocab_size: int = 0
    heads: Sequence[TeacherHead] = ()

    def _outputs(self, hidden: Tensor, batch: TrainBatch, update: bool):
        if not update:
            return super()._outputs(hidden, batch, update)
        cfg, group = self.cfg, self.model.layout.pgs.tp if self.model.layout.tensor > 1 else None
        divergence, known = Divergence(cfg.kind, cfg.beta), batch.of(TeacherTargets)
        shared = {"vocab_size": self.vocab_size, "group": group}
        tempered = shared | {"temperature": cfg.temperature}

        def likely(logits: Tensor, targets: Tensor) -> list[Tensor]:
            own = {"vocab_size": self.model.cfg.vocab_size, "group": group}
            return [token_logprobs(logits, targets, **own)[0]] if cfg.sft_coef else []

        def whole(logits: Tensor, targets: Tensor, hidden: Tensor, *indices: Tensor) -> Tensor:
            theirs = logits_of(self.heads, hidden, *indices)
            if theirs.shape[1] < logits.shape[1]:  # columns that no token has
                theirs = torch.nn.functional.pad(theirs, (0, logits.shape[1] - theirs.shape[1]))
            divergence_terms = divergences(logits, theirs, divergence, **tempered)
            best = top_logprobs(theirs, 1, **shared)[1]
            hits = greedy_hits(logits, best[:, 0], **shared)
            return torch.stack([*divergence_terms, hits, *likely(logits, targets)], 1)

        def top(logits: Tensor, targets: Tensor, logprobs: Tensor, ids: Tensor) -> Tensor:
            compared = bucketed(logprobs, logprobs_at(logits, ids, **tempered), cfg.outside)
            logp, logq = compared[0], compared[1].detach()
            kl, entropy = (logp.exp() * (logp - logq)).sum(-1), -(logp.exp() * logp).sum(-1)
            value, hits = divergence.terms(*compared).sum(-1), greedy_hits(logits, ids[:, 0], **shared)
            mass = logprobs.exp().sum(-1)
            return torch.stack([value, kl, entropy, hits, *likely(logits, targets), mass], 1)

        if (text := batch.find(TextSpans)) is not None:
            logprobs = chosen_logprobs(self.model, hidden, batch, self.batch.logits_bytes, cfg.temperature)
            own = sums_to_here(logprobs, text.spans)
            ratios = (own - known.teacher[..., 0]).detach()
            # a score has the mean 0, so that a baseline changes no gradient in expectation, but its variance
            return StudentOutputs(ratios + (own - own.detach()) * (ratios.clamp(-HELD, HELD) - text.baseline))
        numbers = batch.find(TeacherNumbers)
        if cfg.top_k:
            how = {"read": top, "beside": (known.teacher, known.teacher_ids)}
        else:
            indices = [] if numbers is None else [numbers.told_by[:, None].expand_as(batch.tokens)]
            how = {"read": whole, "beside": (known.teacher, *indices), "numbers": WIDE}
        outputs = list(self.model.over_logits(hidden, batch, budget_bytes=self.batch.logits_bytes, **how).unbind(-1))
        always, rest = outputs[:4], outputs[4:]
        return StudentOutputs(*always, rest.pop(0) if cfg.sft_coef else None, rest.pop(0) if cfg.top_k else None)
