"""Fixtures of the tests in which a stage must learn."""

import fcntl

import pytest

from tests import stages


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
