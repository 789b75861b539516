"""The order in which rows are visited: one global order for any number of ranks, with cursors to save."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import Any

import numpy as np

from aligner.errors import CheckpointError, ConfigError
from aligner.types import ScalarMetrics


class IndexStream:
    """An endless stream of row numbers: epoch after epoch, each a permutation drawn from (seed, epoch).

    Every rank holds the same stream and takes its share of each global batch. A batch may span two epochs.
    """

    def __init__(self, size: int, seed: int, shuffle: bool = True, batch: int = 1, key: str = "data.train"):
        """Start at row 0. `key` is the config key, for errors."""
        if size < 1:
            raise ConfigError(key, size, "a dataset with at least one row")
        if batch < 1:
            raise ConfigError("batch", batch, "an integer >= 1")
        self.size, self.seed, self.shuffle, self.batch, self.key = size, seed, shuffle, batch, key
        self.cursor = 0  # rows taken so far, over all epochs
        self._orders: dict[int, np.ndarray] = {}

    @property
    def epoch(self) -> float:
        """Epochs done so far, with the fraction of the current one."""
        return self.cursor / self.size

    @property
    def taken(self) -> int:
        """Rows taken so far, over all epochs."""
        return self.cursor

    def batch_at(self, step: int) -> np.ndarray:
        """Return row numbers int64 [batch] of global batch `step`, counted from 0; the cursor stays."""
        return self._rows(step * self.batch, self.batch)

    def next(self) -> np.ndarray:
        """Return row numbers int64 [batch] of the batch at the cursor, and advance it."""
        return self.take(self.batch)

    def take(self, count: int) -> np.ndarray:
        """Return the next `count` row numbers, int64, and advance the cursor."""
        rows = self._rows(self.cursor, count)
        self.cursor += count
        return rows

    def metrics(self) -> ScalarMetrics:
        return {}

    def state_dict(self) -> dict[str, Any]:
        return {"cursor": self.cursor, "seed": self.seed, "size": self.size, "shuffle": self.shuffle}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue the saved order, with the saved seed: a new one would repeat rows within the epoch.

        The batch size may differ. Raises CheckpointError if the dataset has another number of rows.
        """
        if state["size"] != self.size:
            raise CheckpointError(
                f"{self.key}: expected the checkpoint's dataset of {state['size']} rows, found {self.size} rows; "
                "restore the data, or start again with run.resume=never"
            )
        self.cursor, self.seed, self.shuffle = int(state["cursor"]), int(state["seed"]), bool(state["shuffle"])
        self._orders.clear()

    def _rows(self, start: int, count: int) -> np.ndarray:
        pieces, end = [], start + count
        while start < end:
            epoch, offset = divmod(start, self.size)
            piece = self._order(epoch)[offset : offset + end - start]
            pieces.append(piece)
            start += len(piece)
        return np.concatenate(pieces)

    def _order(self, epoch: int) -> np.ndarray:
        if epoch not in self._orders:
            if len(self._orders) > 1:  # the current epoch and the one a batch may reach into
                self._orders.pop(min(self._orders))
            if self.shuffle:
                order = np.random.default_rng([self.seed, epoch]).permutation(self.size)
            else:
                order = np.arange(self.size)
            self._orders[epoch] = order.astype(np.int64)
        return self._orders[epoch]


class MixedStream:
    """Rows of several sources in fixed shares, each source in its own order, epoch after epoch.

    Row numbers count through all sources in order.

    For every k, a source has its share of the first k rows, rounded up or down, without randomness. The rule is
    Tijdeman's (The chairman assignment problem, 1980). Candidates are sources whose share of the next k + 1 rows is far
    enough above their rows so far. The candidate whose next row is due first is taken. By tokens, a source's distance
    from its share is at most a longest row of each source.
    """

    def __init__(
        self,
        streams: Mapping[str, IndexStream],
        weights: Sequence[float],
        batch: int = 1,
        section: str = "data",
        lengths: Sequence[np.ndarray] | None = None,
    ):
        """Take finite, positive weights; only their ratios count.

        With `lengths`, int64 [rows] of each source, they are shares of tokens: the next row is of the source with the
        largest deficit of tokens.
        """
        self.lengths, self._tokens = lengths, [0] * len(streams)
        self.streams, self.batch, self.section = dict(streams), batch, section
        exact = [Fraction(weight) for weight in weights]
        self._shares = [weight / sum(exact) for weight in exact]
        self._slack = Fraction(1, max(2 * len(exact) - 2, 1))

    def next(self) -> np.ndarray:
        """Return row numbers int64 [batch] of the batch at the cursors, and advance them."""
        return self.take(self.batch)

    def take(self, count: int) -> np.ndarray:
        """Return the next `count` row numbers, int64, and advance the cursors."""
        if self.lengths is not None:
            return np.array([self._next_by_tokens() for _ in range(count)], dtype=np.int64)
        streams = list(self.streams.values())
        picks, rows, first = self._picks(count), np.empty(count, dtype=np.int64), 0
        for number, stream in enumerate(streams):
            indices = np.flatnonzero(picks == number)
            if len(indices):
                rows[indices] = first + stream.take(len(indices))
            first += stream.size
        return rows

    def _picks(self, count: int) -> np.ndarray:
        """Return the source of each of the next `count` rows, which depends only on the rows taken so far."""
        taken, picks = [stream.taken for stream in self.streams.values()], []
        for k in range(sum(taken) + 1, sum(taken) + count + 1):
            behind = [share * k - n for share, n in zip(self._shares, taken, strict=True)]
            able = [i for i, lack in enumerate(behind) if lack >= self._slack] or [int(np.argmax(behind))]
            chosen = min(able, key=lambda i: (taken[i] + 1 - self._slack) / self._shares[i])
            taken[chosen] += 1
            picks.append(chosen)
        return np.array(picks)

    def _next_by_tokens(self) -> int:
        taken, streams = self._tokens, list(self.streams.values())
        total = sum(taken)
        chosen = max(range(len(streams)), key=lambda i: (self._shares[i] * total - taken[i], self._shares[i], -i))
        row = int(streams[chosen].take(1)[0])
        taken[chosen] += int(self.lengths[chosen][row])
        return row + sum(stream.size for stream in streams[:chosen])

    def metrics(self) -> ScalarMetrics:
        """Return data/<name>/epoch: completed epochs of each source, with the fraction of the current one; and the
        metrics of each stream."""
        epochs = {f"data/{name}/epoch": stream.epoch for name, stream in self.streams.items()}
        return epochs | {name: value for stream in self.streams.values() for name, value in stream.metrics().items()}

    def state_dict(self) -> dict[str, Any]:
        both = zip(self.streams.items(), self._tokens, strict=True)
        return {name: stream.state_dict() | {"tokens": tokens} for (name, stream), tokens in both}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the cursors. Raises CheckpointError for other sources, or other numbers of rows."""
        if list(state) != list(self.streams):
            raise CheckpointError(
                f"{self.section}.sources: expected the checkpoint's {', '.join(state)}, found {', '.join(self.streams)}"
            )
        for name, stream in self.streams.items():
            stream.load_state_dict(state[name])
        self._tokens = [source.get("tokens", 0) for source in state.values()]


Stream = IndexStream | MixedStream
