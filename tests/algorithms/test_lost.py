"""A replica of an engine that is lost while it generates."""

import signal

import pytest

from tests import stages

pytestmark = [pytest.mark.slow, pytest.mark.multirank]

JOB = "tests.algorithms.lost_jobs:lose"
STEPS = 3


def settings(data, run, *more):
    own = [f"run.steps={STEPS}", "run.export=true", "batch.epochs=2", "sampling.top_p=0.9", "engine.silent_s=600"]
    return stages.overrides("grpo", data, run, *own, "engine.ranks=2", *more)


def test_the_run_ends_and_names_it(ranks, tiny_data, tmp_path):
    """A rank that is stopped is as good as one that is killed."""
    arguments = settings(tiny_data, tmp_path / "run", "engine.lag=1", "checkpoint.every=1", "engine.silent_s=5")
    results, *_ = ranks.run(JOB, world=3, arguments=arguments, rank=1, step=12, how=signal.SIGSTOP, lost=[1])
    error = results.splitlines()[-1]
    assert error.startswith("EngineError: rollout ") and "rank 1 on " in error and "(`generate`)" in error
