"""A student that is its own teacher: it reads more than it does when it answers."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass

from aligner.roles.teacher import Student, Teacher
from aligner.types import TrainBatch


@dataclass
class OwnTeacher(Teacher):
    """A teacher with the student's weights before the update: their average if the model has one, else the weights
    themselves. Its targets are constants for the update."""

    pupil: Student | None = None
    phase: Callable[[str], AbstractContextManager[None]] = nullcontext  # of the run's memory and times

    def add_targets(self, rows: TrainBatch) -> TrainBatch:
        assert self.pupil is not None
        with ExitStack() as stack:
            if self.model.ema is not None:
                stack.enter_context(self.phase("average"))
                stack.enter_context(self.model.ema.in_place())
            rows = super().add_targets(rows)
            if not self.cfg.top_k:
                self.pupil.heads = [self.head(self.model)]
        return rows
