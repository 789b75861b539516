"""Fixtures of the tests in which a stage must learn."""

import fcntl

import pytest

from tests import stages
from tests.algorithms.schedules import MODES


@pytest.fixture(scope="session")
def sums(tmp_path_factory, worker_id):
    """Folder of sums of two numbers from 10 to 49 (see `stages.make_sums`), and a model that knows a third. Made once
    for all workers."""
    base = tmp_path_factory.getbasetemp()
    root = (base if worker_id == "master" else base.parent) / "sums"
    made = root / "made"
    with root.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not made.exists():
            stages.make_sums(root, "[1-4]")
            stages.sums_model(root, "run.steps=200", "batch.sequences=128", "batch.micro_batch_samples=128")
            made.touch()
    return root


@pytest.fixture(scope="session")
def settings(tiny_data, request):
    """settings(mode, folder, *more) -> the command line of a run by this schedule."""

    def get(name, run, *more):
        scored = [f"reward.model={request.getfixturevalue('tiny_runs')['rm']}"] if name == "ppo" else []
        return MODES[name].settings(tiny_data, run, *scored, *more)

    return get


@pytest.fixture(scope="session")
def runs(ranks, settings, tmp_path_factory):
    """runs(mode, cut=, world=) -> (folder, Told of each rank): a run by it that nothing interrupts, or that the power
    goes off for in step 4, where the last checkpoint is of step 2. Each is made once; to go on with one, copy it."""
    made = {}

    def get(name, cut=0, world=0):
        key = name, cut, world
        if key not in made:
            run, world = tmp_path_factory.mktemp(name) / "run", world or MODES[name].world
            results = ranks.run("tests.run.jobs:played", world, arguments=settings(name, run), cut=cut)
            assert results[0].end == ("cut" if cut else "0")
            assert stages.checkpoints(run) == [2] if cut else (run / "DONE").exists()
            made[key] = run, results
        return made[key]

    return get
