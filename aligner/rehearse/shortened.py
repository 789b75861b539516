"""Shortened runs of like micro-batches: only the first few and the last are run, and one of them counts as often as
there are others. A job with a thousand of them is then rehearsed in minutes.

Patches that stay."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import groupby
from typing import Any

import torch

from aligner.rehearse.record import Counts, RehearsalRecord
from aligner.types import PtxRows, TrainBatch


def kept(kinds: Sequence[Any], stages: int) -> list[tuple[int, int]]:
    """Return (number of a micro-batch that is run, how many later ones of its kind are not). Enough of a kind are run
    for every stage of a pipeline to reach its steady state, with a backward pass between two forward ones. Then as many
    activations exist as ever."""
    runs, start = [], 0
    for _, group in groupby(kinds):
        count = len(list(group))
        first = min(count, stages + 1)
        left_out = max(0, count - first - 1)
        runs += [(start + i, left_out * (i == first - 1)) for i in range(first)]
        runs += [(start + count - 1, 0)] * (count > first)
        start += count
    return runs


def install(record: RehearsalRecord) -> None:
    from aligner.megatron.train import ShardedModel

    run = ShardedModel._run

    def timed(self: Any, micro_batches: Sequence[TrainBatch], *arguments: Any, **named: Any) -> list:
        """Add the pipeline's bubble: the first micro-batch's way to the last stage (`plan/times.py`)."""
        phase = record.phase
        before = phase.seconds
        outputs = shortened(self, micro_batches, *arguments, **named)
        waits = (self.layout.pipeline - 1) / self.layout.virtual_stages
        bubble_s = (phase.seconds - before) * waits / max(1, len(micro_batches))
        phase.bubble_s += bubble_s
        phase.seconds += bubble_s
        phase.micro_batches += len(micro_batches)
        return outputs

    def shortened(
        self: Any, micro_batches: Sequence[TrainBatch], collect: Callable, forward_only: bool, non_loss: bool
    ) -> list:
        plan = kept([_kind(batch) for batch in micro_batches], self.layout.pipeline)
        # with turns, what a rank holds and sends depends on all of them
        if len(plan) == len(micro_batches) or self.layout.virtual_stages > 1:
            return run(self, micro_batches, collect, forward_only, non_loss)
        prepare, begun = self._prepare, iter(range(len(plan)))
        repeat: list[tuple[Counts, int]] = []  # counters before the one to be repeated, and how often it is

        def prepared(batch: TrainBatch) -> Any:
            if repeat:
                record.repeat(*repeat.pop())
            if left_out := plan[next(begun)][1]:
                repeat.append((record.counts(), left_out))
            return prepare(batch)

        self._prepare = prepared
        try:
            outputs = run(self, [micro_batches[number] for number, _ in plan], collect, forward_only, non_loss)
        finally:
            del self._prepare
        if not outputs:  # not the last stage
            return outputs
        with record.uncounted():
            repeated = [
                [_copy(output) for _ in range(left_out)] for (_, left_out), output in zip(plan, outputs, strict=True)
            ]
        return [each for output, others in zip(outputs, repeated, strict=True) for each in (output, *others)]

    ShardedModel._run = timed


def _kind(batch: TrainBatch) -> tuple:
    """Return the properties by which micro-batches are computed alike."""
    return batch.tokens.shape, int(batch.lengths.sum()), int(batch.lengths.max()), batch.find(PtxRows) is not None


def _copy(output: Any) -> Any:
    """Return the output of another micro-batch of the kind: as much memory, where that grows with its rows."""
    return torch.empty_like(output) if isinstance(output, torch.Tensor) else output
