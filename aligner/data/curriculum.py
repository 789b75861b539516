"""Choice of the prompts that rollouts take: by a column of the rows, and by the pass rates of earlier samples."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import Any

import numpy as np

from aligner.config.sections.curriculum import CurriculumConfig
from aligner.data.columns import lookup
from aligner.data.dataset import PromptDataset
from aligner.data.formats import PromptRow
from aligner.data.stream import IndexStream
from aligner.errors import DataError
from aligner.types import ScalarMetrics

DUE = 1 - 1e-9  # a credit of 1, as a sum of rounded weights


def column_values(rows: Sequence[PromptRow], key: str, config: CurriculumConfig) -> np.ndarray:
    """Return float64 [rows]: their curriculum.column, NaN where it is outside of curriculum.bounds. Raises DataError
    for a row without a number, and where no row is left."""
    values = np.array([_number(row, key, config.column) for row in rows], dtype=np.float64)
    if not config.bounds or not len(values):
        return values
    low, high = config.bounds
    inside = (values >= low) & (values <= high)
    if not inside.any():
        raise DataError(
            f"{key}: expected rows with {config.column} within curriculum.bounds=[{low:g}, {high:g}], but all "
            f"{len(values)} rows have values from {values.min():g} to {values.max():g}. Widen the bounds"
        )
    return np.where(inside, values, np.nan)


def _number(row: PromptRow, key: str, column: str) -> float:
    try:
        value = lookup(row.fields, column)
    except LookupError as error:
        columns = ", ".join(map(str, row.fields))
        raise DataError(
            f"{row.where}: curriculum.column={column!r}: expected one of the columns {columns} ({error.args[0]}; {key})"
        ) from None
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise DataError(f"{row.where}: expected a number in curriculum.column={column!r}, found {value!r:.80} ({key})")
    return float(value)


class CurriculumStream(IndexStream):
    """A stream that passes over some rows of each epoch's order.

    In step s of the first `steps`, the first s / steps of the rows are open, by their column; at least as many as a
    step takes. Steps are counted by rows taken.

    Each time that the order comes to an open row, the row's credit grows by its weight. With a credit of 1 it is taken,
    and its credit falls by 1. The weight is 1; by the pass rate p of its latest samples it is 1 / (skip_epochs + 1)
    where p is at an end of `pass_rates`, else with `learnability` 4p(1 - p), if that is more. So a row that is skipped
    comes again: no row is lost, and no draw is needed. Visits in proportion to p(1 - p): arXiv:2502.12272.
    """

    def __init__(
        self,
        config: CurriculumConfig,
        order: tuple[int, int, bool, int, str],
        rows: PromptDataset,
        share: Fraction,
        prefix: str,
    ):
        """Take `order`, the arguments of IndexStream, the share of the rows that are this stream's, and the prefix of
        its metrics."""
        super().__init__(*order)
        self.config, self.prefix, self._ids = config, prefix, rows.ids
        self._step = self.batch * share  # rows that a step takes
        self._rank = np.zeros(self.size, dtype=np.int64)
        if config.steps:
            values = rows.values if config.first == "low" else -rows.values
            self._rank[np.argsort(values, kind="stable")] = np.arange(self.size)
        self._taken = 0
        self._visits: dict[int, list[int]] = {}  # row -> (passed, samples) of its latest visits, end to end
        self._weight, self._credit = np.ones(self.size), np.zeros(self.size)

    @property
    def taken(self) -> int:
        return self._taken

    def take(self, count: int) -> np.ndarray:
        """Return the next `count` row numbers, int64, and advance the cursor behind the last one."""
        pieces = []
        while count:
            open_rows, until = self._open()
            pieces.append(self._walk(open_rows, min(count, until - self._taken)))
            self._taken += len(pieces[-1])
            count -= len(pieces[-1])
        return np.concatenate(pieces)

    def _open(self) -> tuple[int, int]:
        """Return how many rows are open, and the number of rows taken from which on others are."""
        step, steps = self._taken // self._step + 1, self.config.steps
        share = Fraction(step, steps) if step < steps else 1
        opened = max(math.ceil(self._step), math.ceil(self.size * share))
        return min(opened, self.size), math.ceil(step * self._step)

    def _walk(self, open_rows: int, count: int) -> np.ndarray:
        """Return at most `count` rows of the rest of this epoch's order, and advance the cursor."""
        epoch, offset = divmod(self.cursor, self.size)
        rest = self._order(epoch)[offset:]
        credit = self._credit[rest] + np.where(self._rank[rest] < open_rows, self._weight[rest], 0.0)
        due = np.flatnonzero(credit >= DUE)[:count]
        credit[due] -= 1
        end = int(due[-1]) + 1 if len(due) == count else len(rest)
        self._credit[rest[:end]] = credit[:end]
        self.cursor += end
        return rest[due]

    def observe(self, outcomes: Mapping[int, tuple[int, int]]) -> None:
        """Count samples of rows: id -> (passed, samples)."""
        for identity, (passed, samples) in sorted(outcomes.items()):
            row, least = int(np.searchsorted(self._ids, identity)), self.config.attempts
            visits = [*self._visits.get(row, ()), passed, samples]
            while sum(visits[3::2]) >= least:
                del visits[:2]
            self._visits[row], self._weight[row] = visits, self._weight_by(visits)

    def _weight_by(self, visits: Sequence[int]) -> float:
        passed, samples = sum(visits[::2]), sum(visits[1::2])
        if samples < self.config.attempts:
            return 1.0
        rate, least = passed / samples, 1 / (self.config.skip_epochs + 1)
        low, high = self.config.pass_rates
        if rate <= low or rate >= high:
            return least
        return max(least, 4 * rate * (1 - rate)) if self.config.learnability else 1.0

    def metrics(self) -> ScalarMetrics:
        """Return {skipped,gated,open}: rows passed over so far, rows that are not visited in each epoch, share of rows
        that are open."""
        gated = float((self._weight < 1).sum())
        values = {"skipped": float(self.cursor - self._taken), "gated": gated, "open": self._open()[0] / self.size}
        return {f"{self.prefix}/{name}": value for name, value in values.items()}

    def state_dict(self) -> dict[str, Any]:
        credit = {str(row): float(self._credit[row]) for row in np.flatnonzero(self._credit)}
        visits = {str(row): self._visits[row] for row in sorted(self._visits)}
        return super().state_dict() | {"taken": self._taken, "visits": visits, "credit": credit}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self._taken = state.get("taken", self.cursor)
        self._visits = {int(row): visits for row, visits in state.get("visits", {}).items()}
        self._weight, self._credit = np.ones(self.size), np.zeros(self.size)
        for row, visits in self._visits.items():
            self._weight[row] = self._weight_by(visits)
        for row, credit in state.get("credit", {}).items():
            self._credit[int(row)] = credit
