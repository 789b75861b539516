"""Replicas of an engine that are lost while they generate (engine.spares): the run goes on with the same samples."""

import signal

import pytest

from tests import stages

pytestmark = [pytest.mark.slow, pytest.mark.multirank]

JOB = "tests.algorithms.lost_jobs:lose"
STEPS = 3


def settings(data, run, *more):
    own = [f"run.steps={STEPS}", "run.export=true", "batch.epochs=2", "sampling.top_p=0.9", "engine.silent_s=600"]
    return stages.overrides("grpo", data, run, *own, "engine.ranks=2", *more)


@pytest.mark.parametrize(
    "world, more",
    [
        (3, ["engine.lag=1", "sampling.max_response_tokens=8"]),
        (3, ["engine.lag=1", "engine.window=3", "sampling.max_response_tokens=8"]),
        (4, ["refit.verify=checksum"]),
    ],
    ids=["lag", "windows", "turns"],
)
def test_without_one_of_two_replicas_the_run_is_the_same(ranks, tiny_data, tmp_path, world, more):
    """It is killed in the middle of a rollout, whose weights the trainer has trained on meanwhile: samples, losses and
    weights are bit by bit those of a run in which nothing was lost."""
    ranks.run("tests.run.jobs:run_stage", world=world, arguments=settings(tiny_data, tmp_path / "whole", *more))
    arguments = settings(tiny_data, tmp_path / "run", "engine.spares=1", "engine.silent_s=5", *more)
    told, *_ = ranks.run(JOB, world=world, arguments=arguments, rank=world - 1, step=12, lost=[world - 1])
    assert f"WARNING: rank {world - 1} on " in told and "has ended or hangs" in told and "engines on 1 ranks" in told
    assert stages.differences(tmp_path / "whole", tmp_path / "run") == [], told
    assert stages.same_weights(tmp_path / "whole", tmp_path / "run")


def test_without_a_spare_one_the_run_ends_and_names_it(ranks, tiny_data, tmp_path):
    """A rank that is stopped is as good as one that is killed."""
    arguments = settings(tiny_data, tmp_path / "run", "engine.lag=1", "checkpoint.every=1", "engine.silent_s=5")
    told, *_ = ranks.run(JOB, world=3, arguments=arguments, rank=1, step=12, how=signal.SIGSTOP, lost=[1])
    error = told.splitlines()[-1]
    assert error.startswith("EngineError: rollout ") and "rank 1 on " in error and "(`generate`)" in error
