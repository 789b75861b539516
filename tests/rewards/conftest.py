"""Fixtures of the tests of rewards."""

import pytest

from aligner.rewards import client
from tests.clocks import Clock


@pytest.fixture
def clock(monkeypatch):
    """Of a client that asks one at a time."""
    made = Clock()

    async def sleep(seconds):
        made.sleep(seconds)

    monkeypatch.setattr(client, "time", made)
    monkeypatch.setattr(client, "sleep", sleep)
    return made
