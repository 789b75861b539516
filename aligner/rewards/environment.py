"""The environments' rewards of trajectories, as one reward function."""

from __future__ import annotations

from collections.abc import Sequence

from aligner.types import Sample


class EnvironmentReward:
    name = "environment"

    def __call__(self, samples: Sequence[Sample]) -> list[float | None]:
        return [None if sample.trajectory is None else sample.trajectory.reward for sample in samples]
