"""Several datasets as one: rows are numbered through them, one after the other, as `stream.MixedStream` counts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from aligner.data.dataset import PromptDataset
from aligner.data.reading import DataReport
from aligner.types import Prompt


class Mixture(Sequence):
    """The datasets of data.sources, by their names."""

    def __init__(self, parts: Mapping[str, Any], weights: Sequence[float]):
        self.parts, self.weights = dict(parts), list(weights)
        self._ends = np.cumsum([len(part) for part in parts.values()])

    def __len__(self) -> int:
        return int(self._ends[-1])

    def find(self, index: int) -> tuple[int, Any, int]:
        """(number of the part, the part, place in it) of row `index`."""
        number = int(np.searchsorted(self._ends, range(len(self))[index], side="right"))
        part = list(self.parts.values())[number]
        return number, part, range(len(self))[index] - int(self._ends[number]) + len(part)

    def __getitem__(self, index: int) -> Any:
        _, part, inside = self.find(index)
        return part[inside]

    @property
    def lengths(self) -> np.ndarray:
        """int64 [len(self)], as the parts count them."""
        return np.concatenate([part.lengths for part in self.parts.values()])


class PromptMixture(Mixture):
    """Of prompts: an id is the row number through all files, and a column that only other sources have is None."""

    def __init__(self, parts: Mapping[str, PromptDataset], weights: Sequence[float]):
        super().__init__(parts, weights)
        self.report = DataReport("data.sources", "")
        self._first = np.cumsum([0, *(part.report.rows for part in parts.values())])
        self._columns = {name: None for part in parts.values() for name in part[0].fields}

    def __getitem__(self, index: int) -> Prompt:
        number, part, inside = self.find(index)
        prompt = part[inside]
        return replace(prompt, id=prompt.id + int(self._first[number]), fields={**self._columns, **prompt.fields})

    def where(self, index: int) -> str:
        """`file, row n` of a prompt."""
        _, part, inside = self.find(index)
        return part.where(inside)
