"""Fixtures of the tests in which a stage must learn."""

import pytest

from tests import stages


@pytest.fixture(scope="session")
def sums(tmp_path_factory):
    """Folder of sums of two numbers from 10 to 49 (see `stages.make_sums`), and a model that knows a third."""
    root = stages.make_sums(tmp_path_factory.mktemp("sums"), "[1-4]")
    stages.sums_model(root, "run.steps=200", "batch.sequences=128", "batch.micro_batch_samples=128")
    return root
