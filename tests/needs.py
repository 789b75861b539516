"""What tests need of a machine beside the packages."""

import os

import pytest


def lacking(what: str) -> None:
    """Skip; `./launchers/test.sh --all` makes a failure of it."""
    if os.environ.get("ALIGNER_TEST_ALL") == "1":
        pytest.fail(f"--all: {what}")
    pytest.skip(what)
