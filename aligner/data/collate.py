"""Items -> one right-padded TrainBatch of CPU tensors."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from aligner.data.items import PairItem, PreferenceItem, ScoredItem, SftItem, StepsItem, UnpairedItem
from aligner.types import LabelTargets, SourceNumbers, StepTargets, TeacherNumbers, TeacherTargets, TrainBatch


def collate_sft(items: Sequence[SftItem], pad_id: int) -> TrainBatch:
    """Collate B items: tokens [B, T], loss_mask [B, T], and documents [B, T] if any item has several.

    Also teacher and teacher_ids [B, T, k], told_by [B] and source [B], if the items have them.
    """
    tokens, lengths = _pad([item.tokens for item in items], pad_id, np.int64)
    mask, _ = _pad([item.loss_mask for item in items], 0, np.float32)
    documents = None
    if any(item.documents is not None for item in items):
        numbers = [np.zeros(len(item.tokens)) if item.documents is None else item.documents for item in items]
        documents, _ = _pad(numbers, 0, np.int64)
    batch = TrainBatch(tokens, lengths, mask, documents=documents)
    if items[0].teacher_index is not None:
        batch = batch.with_payloads(TeacherNumbers(torch.tensor([item.teacher_index for item in items])))
    if items[0].source is not None:
        batch = batch.with_payloads(SourceNumbers(torch.tensor([item.source for item in items])))
    targets = [item.teacher for item in items if item.teacher is not None]
    if targets:
        logprobs, ids = (torch.from_numpy(np.concatenate(side)) for side in zip(*targets, strict=True))
        all_logprobs = torch.zeros(*mask.shape, logprobs.shape[1])
        all_ids = torch.zeros(all_logprobs.shape, dtype=torch.int64)
        all_logprobs[mask.bool()], all_ids[mask.bool()] = logprobs, ids.long()
        batch = batch.with_payloads(TeacherTargets(all_logprobs, all_ids))
    return batch


def collate_preference(items: Sequence[PreferenceItem], pad_id: int) -> TrainBatch:
    """Collate B pairs to 2B rows: chosen in rows 0, 2, 4.., rejected in rows 1, 3, 5...

    `labels` [2B] is the pair's margin (twice). loss_mask is 1 at each row's last token, where the reward is read.
    """
    texts = [text for item in items for text in (item.chosen, item.rejected)]
    labels = torch.tensor([item.margin for item in items], dtype=torch.float32).repeat_interleave(2)
    return _at_last(texts, labels, pad_id)


def collate_pairs(items: Sequence[PairItem], pad_id: int) -> TrainBatch:
    """Collate B pairs to 2B rows: chosen in rows 0, 2, 4.., rejected in rows 1, 3, 5...

    loss_mask [2B, T] is 1 on the answers. labels [2B, 3] are the pair's margin, the answer's reward, the pair's weight.
    ref_logprobs [2B, T] if the items have them.
    """
    batch = collate_sft([answer for item in items for answer in (item.chosen, item.rejected)], pad_id)
    numbers = [(i.margin, reward, i.weight) for i in items for reward in (i.chosen_reward, i.rejected_reward)]
    stored = [row for item in items if item.reference is not None for row in item.reference]
    reference = _pad(stored, 0.0, np.float32)[0] if stored else None
    return batch.with_payloads(LabelTargets(torch.tensor(numbers, dtype=torch.float32), reference))


def collate_unpaired(items: Sequence[UnpairedItem], pad_id: int) -> TrainBatch:
    """Collate B items to B rows, or to 2B if they have mismatched answers: those in rows 1, 3, 5...

    labels [rows, 2]: whether the answer is desirable, and whether the row is mismatched. ref_logprobs [rows, T] if the
    items have them, 0 in mismatched rows.
    """
    rows = [(item, answer) for item in items for answer in (item.answer, item.mismatched) if answer is not None]
    batch = collate_sft([answer for _, answer in rows], pad_id)
    labels = torch.tensor([(item.desirable, answer is item.mismatched) for item, answer in rows], dtype=torch.float32)
    reference = None
    if items[0].reference is not None:
        none = [item.reference if answer is item.answer else np.zeros(len(answer.tokens)) for item, answer in rows]
        reference = _pad(none, 0.0, np.float32)[0]
    return batch.with_payloads(LabelTargets(labels, reference))


def collate_scored(items: Sequence[ScoredItem], pad_id: int) -> TrainBatch:
    """Collate B items: tokens [B, T], labels [B, K], loss_mask 1 at each row's last token."""
    labels = torch.from_numpy(np.stack([np.asarray(item.scores, dtype=np.float32) for item in items]))
    return _at_last([item.tokens for item in items], labels, pad_id)


def collate_steps(items: Sequence[StepsItem], pad_id: int) -> TrainBatch:
    """Collate B items: tokens [B, T], loss_mask [B, T] 1 at ends of labelled steps, and their labels `step_labels` [B,
    T]."""
    tokens, lengths = _pad([item.tokens for item in items], pad_id, np.int64)
    labels, _ = _pad([item.labels for item in items], np.nan, np.float32)
    return TrainBatch(tokens, lengths, (~labels.isnan()).float(), [StepTargets(labels.nan_to_num())])


def _at_last(texts: Sequence, labels: torch.Tensor, pad_id: int) -> TrainBatch:
    tokens, lengths = _pad(texts, pad_id, np.int64)
    mask = torch.zeros(tokens.shape, dtype=torch.float32)
    mask[torch.arange(len(texts)), lengths - 1] = 1.0
    return TrainBatch(tokens, lengths, mask, [LabelTargets(labels)])


def _pad(rows: Sequence, fill: float, dtype: type) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (padded [B, T], lengths int64 [B])."""
    lengths = np.fromiter((len(row) for row in rows), dtype=np.int64, count=len(rows))
    assert len(rows) and lengths.min() > 0, f"expected rows with at least one token, found lengths {lengths.tolist()}"
    width = int(lengths.max())
    out = np.full((len(rows), width), fill, dtype=dtype)
    out[np.arange(width) < lengths[:, None]] = np.concatenate([np.asarray(row, dtype=dtype) for row in rows])
    return torch.from_numpy(out), torch.from_numpy(lengths)
