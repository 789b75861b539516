"""Several datasets as one: rows are numbered through all of them in order, as `stream.MixedStream` counts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from aligner.data.dataset import PromptDataset
from aligner.data.items import SftItem
from aligner.data.row_reader import DataReport
from aligner.types import Prompt


class Mixture(Sequence):
    """The datasets of data.sources, by their names."""

    def __init__(self, parts: Mapping[str, Any], weights: Sequence[float]):
        self.parts, self.weights = dict(parts), list(weights)
        self._ends = np.cumsum([len(dataset) for dataset in parts.values()])
        self.report = DataReport("data.sources", "")
        for dataset, end in zip(parts.values(), self._ends.tolist(), strict=True):
            self.report.cut.extend(end - len(dataset) + item for item in dataset.report.cut)

    def __len__(self) -> int:
        return int(self._ends[-1])

    def find(self, index: int) -> tuple[int, Any, int]:
        """Return (number of the dataset, the dataset, index in it) of row `index`."""
        number = int(np.searchsorted(self._ends, range(len(self))[index], side="right"))
        dataset = list(self.parts.values())[number]
        return number, dataset, range(len(self))[index] - int(self._ends[number]) + len(dataset)

    def __getitem__(self, index: int) -> Any:
        number, dataset, inside = self.find(index)
        item = dataset[inside]
        return item._replace(source=number) if isinstance(item, SftItem) else item

    @property
    def lengths(self) -> np.ndarray:
        """int64 [len(self)] tokens per row, as the datasets count them."""
        return np.concatenate([dataset.lengths for dataset in self.parts.values()])


class PromptMixture(Mixture):
    """A mixture of prompts.

    An id is the row number through all files, and a column that only other sources have is None.
    """

    def __init__(self, parts: Mapping[str, PromptDataset], weights: Sequence[float]):
        super().__init__(parts, weights)
        self._first = np.cumsum([0, *(dataset.report.rows for dataset in parts.values())])
        self._columns = {name: None for dataset in parts.values() for name in dataset[0].fields}

    def __getitem__(self, index: int) -> Prompt:
        number, dataset, inside = self.find(index)
        prompt = dataset[inside]
        return replace(prompt, id=prompt.id + int(self._first[number]), fields={**self._columns, **prompt.fields})

    def origin(self, prompt: Prompt) -> tuple[str, int]:
        """Return the name of the source that a prompt is from, and its id there."""
        number = int(np.searchsorted(self._first, prompt.id, side="right")) - 1
        return list(self.parts)[number], prompt.id - int(self._first[number])

    def where(self, index: int) -> str:
        """Return `file, row n` of a prompt."""
        _, dataset, inside = self.find(index)
        return dataset.where(inside)
