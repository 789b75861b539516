"""Items of datasets: tokens, and targets that a stage learns from them."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np


class SftItem(NamedTuple):
    tokens: np.ndarray  # int32 [T]
    loss_mask: np.ndarray  # uint8 [T]
    documents: np.ndarray | None = None  # int64 [T] numbers of the row's documents; None: only one
    # float32 logprobs, int32 ids, both [n, k]: of the n tokens in the loss mask, if a teacher's are stored
    teacher: tuple[np.ndarray, np.ndarray] | None = None
    teacher_index: int | None = None  # number of its teacher, if there are several
    source: int | None = None  # number of its dataset in a mixture

    @property
    def start(self) -> int:
        """Index of the first token with loss."""
        return int(self.loss_mask.argmax())


class PreferenceItem(NamedTuple):
    chosen: np.ndarray  # int32 [Tc]
    rejected: np.ndarray  # int32 [Tr]
    margin: float  # 0 if the row has none

    @property
    def lengths(self) -> tuple[int, int]:
        return len(self.chosen), len(self.rejected)


class PairItem(NamedTuple):
    """Two answers to one prompt, each behind it."""

    chosen: SftItem
    rejected: SftItem
    margin: float  # 0 if the row has none, as the rewards
    chosen_reward: float
    rejected_reward: float
    weight: float  # 1 if the row has none
    reference: tuple[np.ndarray, np.ndarray] | None = None  # float32 logprobs [T] of both, if stored

    @property
    def lengths(self) -> tuple[int, int]:
        return len(self.chosen.tokens), len(self.rejected.tokens)


class UnpairedItem(NamedTuple):
    """One answer behind its prompt, desirable or not."""

    answer: SftItem
    desirable: bool
    reference: np.ndarray | None = None  # float32 logprobs [T], if stored
    mismatched: SftItem | None = None  # another sample's answer behind this prompt

    @property
    def prompt(self) -> np.ndarray:
        return self.answer.tokens[: self.answer.start]


class StepsItem(NamedTuple):
    tokens: np.ndarray  # int32 [T]
    labels: np.ndarray  # float32 [T] of the step that ends there; NaN on other tokens


class ScoredItem(NamedTuple):
    tokens: np.ndarray  # int32 [T]
    scores: np.ndarray  # float32 [K]
