"""The launcher of the tests, with stand-ins for Python and ruff."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
STAND_INS = 'python() { echo "threads $OMP_NUM_THREADS: $*"; }; ruff() { :; }; export -f python ruff'


@pytest.mark.parametrize("arguments", [[], ["--fast"]])
@pytest.mark.parametrize("counts", [None, "3"])
def test_workers_share_the_cores_unless_it_is_said_how(arguments, counts):
    """env.sh, which the launcher begins with, gives one process all cores."""
    environ = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    environ |= {} if counts is None else {"OMP_NUM_THREADS": counts}
    done = subprocess.run(
        ["bash", "-c", f'{STAND_INS}; ./launchers/test.sh "$@"', "test", *arguments],
        cwd=ROOT,
        env=environ,
        capture_output=True,
        text=True,
    )
    match = re.search(r"^threads (\d+): .*?(?: -n (\d+))?(?: --dist|$)", done.stdout, re.MULTILINE)
    assert match, done.stdout + done.stderr
    threads, workers, cores = int(match[1]), int(match[2] or 1), len(os.sched_getaffinity(0))
    assert threads == int(counts or max(1, cores // workers))
    assert min(cores, 4) <= workers <= min(cores, 4) + (not arguments) or cores == 1


@pytest.mark.slow
def test_a_room_that_is_none_is_refused_by_workers_too():
    command = [sys.executable, "-m", "pytest", "-n", "2", "rolout"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == pytest.ExitCode.USAGE_ERROR, done.stdout + done.stderr
    assert re.search(r"no tests at rolout: .* rollout, ", done.stderr) and "assets" not in done.stderr
