"""Prompts that only teachers read: with a solution or feedback that the student does not have when it answers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from aligner.data.dataset import PromptDataset
from aligner.data.formats import TEACHER_PROMPT
from aligner.data.messages import read_tools
from aligner.data.mixture import PromptMixture
from aligner.data.ragged import FlatRows
from aligner.data.row_reader import CHUNK
from aligner.data.templates import encode_prompts
from aligner.errors import DataError
from aligner.types import Prompt, TeacherRows, TrainBatch

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class TeacherPrompts:
    """The tokens of the teacher's prompts.

    Raises DataError for one of more than `limit` tokens: a row, with its answer, must fit the teacher.
    """

    def __init__(
        self,
        prompts: PromptDataset | PromptMixture,
        tokenizer: PreTrainedTokenizerBase,
        arguments: Mapping[str, Any],
        limit: int,
    ):
        self._tokens, self._row, self._pad_id = FlatRows(np.int32), {}, tokenizer.pad_token_id
        for start in range(0, len(prompts), CHUNK):
            chunk = [prompts[i] for i in range(start, min(start + CHUNK, len(prompts)))]
            texts, where = [prompt.fields[TEACHER_PROMPT] for prompt in chunk], [f"prompt {p.id}" for p in chunk]
            tools = [read_tools(p.fields, *about) for p, *about in zip(chunk, texts, where, strict=True)]
            for prompt, tokens in zip(chunk, encode_prompts(tokenizer, texts, where, tools, arguments), strict=True):
                if not 0 < len(tokens) <= limit:
                    raise DataError(
                        f"{prompts.where(len(self._row))}: expected 1 to {limit} tokens in the teacher's prompt, found "
                        f"{len(tokens)}: its model.max_position less sampling.max_response_tokens. Change "
                        f"algorithm.distill.{TEACHER_PROMPT}, or leave out the row"
                    )
                self._row[prompt.id] = len(self._row)
                self._tokens.append(tokens)

    def rows(self, prompts: Sequence[Prompt], answers: TrainBatch) -> TeacherRows:
        """Return the teacher's rows of the answers to these prompts."""
        own = [torch.from_numpy(self._tokens[self._row[prompt.id]].astype(np.int64)) for prompt in prompts]
        return behind(own, answers, self._pad_id)


def behind(prompts: Sequence[Tensor], answers: TrainBatch, pad_id: int) -> TeacherRows:
    """Return the tokens in the loss mask of each row of `answers`, behind its prompt in `prompts` (int64 [n])."""
    parts = [tokens[mask.bool()] for tokens, mask in zip(answers.tokens, answers.loss_mask, strict=True)]
    whole = [torch.cat(both) for both in zip(prompts, parts, strict=True)]
    tokens = pad_sequence(whole, batch_first=True, padding_value=pad_id)
    starts, lengths = (torch.tensor([len(row) for row in side]) for side in (prompts, whole))
    column = torch.arange(tokens.shape[1])
    mask = (column >= starts[:, None]) & (column < lengths[:, None])
    return TeacherRows(tokens, lengths, mask.float())
