"""Fixtures of all tests."""

import pytest

from tests.ranks import Ranks


def pytest_collection_modifyitems(config, items):
    """Workers of xdist take whole files in this order: the one that takes longest comes first."""
    if hasattr(config, "workerinput"):
        items.sort(key=lambda item: item.path.name != "test_quickstart.py")


@pytest.fixture(scope="session")
def ranks():
    """The session's pool of rank processes (see tests/ranks.py); nothing starts before its first job."""
    pool = Ranks()
    yield pool
    pool.close()


@pytest.fixture(scope="session")
def tiny_data(tmp_path_factory):
    """Tokenizer and data files of the toy runs (see tests/stages.py)."""
    from tests import stages

    return stages.make_data(tmp_path_factory.mktemp("tiny_data"))


@pytest.fixture(scope="session")
def tiny_runs(tiny_data, tmp_path_factory):
    """Finished toy runs that other stages start from: {"sft": folder, "rm": folder}."""
    from tests import stages

    root = tmp_path_factory.mktemp("tiny_runs")
    sft = stages.stage("sft", tiny_data, root / "sft", "run.steps=40", "checkpoint.every=20")
    rm = stages.stage("rm", tiny_data, root / "rm", "run.steps=20", f"model.init={sft}")
    return {"sft": sft, "rm": rm}
