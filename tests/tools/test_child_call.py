"""Functions in processes of their own."""

import os
from pathlib import Path

import pytest

from aligner.cluster import fork_server
from aligner.errors import AlignerError, ConfigError
from aligner.tools.child_call import call_in_child

CODE = """
import os
from aligner.errors import ConfigError
def who(number):
    return number, os.getpid(), os.getppid()
def refuses():
    raise ConfigError("seed", 3, "another one")
def leaves():
    os._exit(9)
"""


@pytest.fixture(autouse=True)
def functions(tmp_path, monkeypatch):
    (tmp_path / "functions_apart.py").write_text(CODE)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), str(Path(__file__).parents[2])]))


@pytest.mark.slow
def test_a_child_process_returns_the_result():
    number, pid, parent = call_in_child("functions_apart:who", 7)
    assert number == 7 and pid != os.getpid() == parent


@pytest.mark.slow
def test_results_errors_and_ends_by_one_fork_server():
    with fork_server.kept(["functions_apart", "torch"], dict(os.environ), ()):
        test_a_child_process_returns_the_result()
        with pytest.raises(ConfigError, match="seed=3: expected another one") as caught:
            call_in_child("functions_apart:refuses")
        assert caught.value.key == "seed" and caught.value.exit_code == 2
        with pytest.raises(AlignerError, match="leaves ended with exit code 9"):
            call_in_child("functions_apart:leaves")


def test_without_its_fork_server():
    with fork_server.kept(["functions_apart"], dict(os.environ), ()) as server:
        server.process.kill()
        with pytest.raises(AlignerError, match="who ended with exit code -9"):
            call_in_child("functions_apart:who", 7)
