"""Prompts that only teachers read: with a solution or feedback that the student does not have when it answers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from aligner.config.sections.distill import RIGHT_ANSWER
from aligner.data.dataset import PromptDataset
from aligner.data.formats import TEACHER_PROMPT, with_last
from aligner.data.messages import read_tools
from aligner.data.mixture import PromptMixture
from aligner.data.ragged import FlatRows
from aligner.data.row_reader import CHUNK
from aligner.data.templates import encode_prompts
from aligner.errors import DataError
from aligner.types import Prompt, TeacherRows, TrainBatch

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from aligner.data.text_spans import OtherTokenizer


class TeacherPrompts:
    """The tokens of the teacher's prompts.

    Raises DataError for one of more than `limit` tokens: a row, with its answer, must fit the teacher. Of prompts with
    a right answer, `room` of these are the answer's. `other`: the teacher's, if it is not the student's `tokenizer`.
    """

    def __init__(
        self,
        prompts: PromptDataset | PromptMixture,
        tokenizer: PreTrainedTokenizerBase,
        arguments: Mapping[str, Any],
        limit: int,
        room: int = 0,
        other: OtherTokenizer | None = None,
    ):
        self._tokens, self._row, self._other = FlatRows(np.int32), {}, other
        self._tokenizer = tokenizer if other is None else other.tokenizer
        self._arguments, self._limit = arguments, limit
        for start in range(0, len(prompts), CHUNK):
            chunk = [prompts[i] for i in range(start, min(start + CHUNK, len(prompts)))]
            for prompt, tokens in zip(chunk, self._encoded(chunk, [""] * len(chunk)), strict=True):
                if not 0 < len(tokens) <= limit - room:
                    less = "sampling.max_response_tokens" + ", twice: one is the right answer" * bool(room)
                    raise DataError(
                        f"{prompts.where(len(self._row))}: expected 1 to {limit - room} tokens in the teacher's "
                        f"prompt, found {len(tokens)}: its model.max_position less {less}. Change "
                        f"algorithm.distill.{TEACHER_PROMPT}, or leave out the row"
                    )
                self._row[prompt.id] = len(self._row)
                self._tokens.append(tokens)

    def rows(self, prompts: Sequence[Prompt], answers: TrainBatch, sampled: Tensor) -> TeacherRows:
        """Return the teacher's rows of the answers to these prompts, whose tokens have these logprobs [B, T]."""
        own = [torch.from_numpy(self._tokens[self._row[prompt.id]].astype(np.int64)) for prompt in prompts]
        return self._behind(own, answers, sampled)

    def with_right_answers(
        self, prompts: Sequence[Prompt], answers: TrainBatch, right: Sequence[str | None], sampled: Tensor
    ) -> TrainBatch:
        """Return the answers with the teacher's rows, whose prompts have these right answers. A row without one, or
        with one that does not fit the teacher, leaves the loss mask; the teacher then reads one token."""
        asked = [i for i, answer in enumerate(right) if answer is not None]
        encoded = self._encoded([prompts[i] for i in asked], [right[i] or "" for i in asked])
        own = {i: tokens for i, tokens in zip(asked, encoded, strict=True) if len(tokens) <= self._limit}
        taught = torch.tensor([i in own for i in range(len(prompts))])
        answers = replace(answers, loss_mask=answers.loss_mask * taught[:, None])
        tokens = [torch.tensor(own.get(i, [self._tokenizer.pad_token_id])) for i in range(len(prompts))]
        return answers.with_payloads(self._behind(tokens, answers, sampled))

    def _behind(self, prompts: Sequence[Tensor], answers: TrainBatch, sampled: Tensor) -> TeacherRows:
        if self._other is None:
            return behind(prompts, answers, self._tokenizer.pad_token_id)
        own = [x.tolist() for x in own_tokens(answers)]
        encoded = self._other.encoded(own, [len(x) for x in prompts])
        replies = [torch.tensor(each.tokens, dtype=torch.int64) for each in encoded]
        rows = behind(prompts, answers, self._tokenizer.pad_token_id, replies)
        numbers, spans = (
            torch.zeros_like(tokens).masked_scatter(mask.bool(), torch.from_numpy(np.concatenate(side)))
            for tokens, mask, side in (
                (rows.teacher_tokens, rows.teacher_mask, [each.teacher_spans for each in encoded]),
                (answers.tokens, answers.loss_mask, [each.spans for each in encoded]),
            )
        )
        return replace(rows, teacher_spans=numbers, spans=spans, sampled=sampled)

    def _encoded(self, prompts: Sequence[Prompt], right: Sequence[str]) -> list[list[int]]:
        texts, where = [], [f"prompt {prompt.id}" for prompt in prompts]
        for prompt, answer in zip(prompts, right, strict=True):
            text = prompt.fields[TEACHER_PROMPT]
            last = text if isinstance(text, str) else text[-1]["content"]
            texts.append(with_last(text, last.replace(RIGHT_ANSWER, answer)))
        tools = [read_tools(p.fields, *about) for p, *about in zip(prompts, texts, where, strict=True)]
        return encode_prompts(self._tokenizer, texts, where, tools, self._arguments)


def own_tokens(answers: TrainBatch) -> list[Tensor]:
    """Return the tokens in the loss mask of each row."""
    return [tokens[mask.bool()] for tokens, mask in zip(answers.tokens, answers.loss_mask, strict=True)]


def behind(
    prompts: Sequence[Tensor], answers: TrainBatch, pad_id: int, replies: Sequence[Tensor] | None = None
) -> TeacherRows:
    """Return the tokens in the loss mask of each row of `answers`, or its `replies` (int64 [n]), behind its prompt in
    `prompts` (int64 [n])."""
    whole = [torch.cat(both) for both in zip(prompts, replies or own_tokens(answers), strict=True)]
    tokens = pad_sequence(whole, batch_first=True, padding_value=pad_id)
    starts, lengths = (torch.tensor([len(row) for row in side]) for side in (prompts, whole))
    column = torch.arange(tokens.shape[1])
    mask = (column >= starts[:, None]) & (column < lengths[:, None])
    return TeacherRows(tokens, lengths, mask.float())
