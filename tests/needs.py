"""What tests need of a machine beside the packages."""

import os
from importlib import import_module
from types import ModuleType

import pytest


def lacking(what: str) -> None:
    """Skip; `./launchers/test.sh --all` makes a failure of it."""
    if os.environ.get("ALIGNER_TEST_ALL") == "1":
        pytest.fail(f"--all: {what}")
    pytest.skip(what)


def package(name: str) -> ModuleType:
    """The optional package; a test, or a module of tests, without it is skipped."""
    try:
        return import_module(name)
    except ImportError:
        if os.environ.get("ALIGNER_TEST_ALL") == "1":
            raise
        pytest.skip(f"{name} is not installed", allow_module_level=True)
