"""Guards of processes: whatever ends, nothing that was started is left."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from aligner.processes import guarded

HOLDS = "import sys; print('on', flush=True); 9**9**9"  # keeps its interpreter
TREES = {
    "itself": f'exec {sys.executable} -c "{HOLDS}"',
    "children": "sleep 600 & sleep 600 & echo on; wait",
    "a session of its own": "setsid sh -c 'sleep 600 & sleep 600' & echo on; wait",
    "what has no parent any more": "(setsid sh -c 'sleep 600 & sleep 600 &' &) ; echo on; sleep 600",
    "what minds no signal": "trap '' TERM INT HUP; (trap '' TERM; sleep 600) & echo on; while :; do sleep 1; done",
}


@pytest.fixture
def mark(tmp_path):
    """In the environment of all that a test starts, by which it is found."""
    return str(tmp_path)


def started(mark):
    results = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if f"MARK={mark}\0".encode() in (folder / "environ").read_bytes() and b"Z" not in state(folder):
                results.append(int(folder.name))
        except OSError:
            pass
    return results


def state(folder):
    return (folder / "stat").read_bytes().rpartition(b")")[2].split()[0]


def gone(mark):
    until = time.monotonic() + 120
    while left := started(mark):
        assert time.monotonic() < until, left
        time.sleep(0.01)


@pytest.mark.parametrize("tree", TREES)
@pytest.mark.parametrize("end", ["the parent is killed", "the guard is told to"])
def test_nothing_is_left_of_a_command(mark, tree, end):
    """A parent of its own, so that it can be killed."""
    program = (
        "import subprocess, sys\nfrom aligner.processes import guarded\n"
        "process = subprocess.Popen(guarded(sys.argv[1:]))\nprint(process.pid, flush=True)\nprocess.wait()\n"
    )
    command = [sys.executable, "-c", program, "sh", "-c", TREES[tree]]
    environ = os.environ | {"MARK": mark}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environ) as parent:
        lines = {parent.stdout.readline().strip(), parent.stdout.readline().strip()}
        (guard,) = lines - {"on"}
        assert "on" in lines and len(started(mark)) >= 3
        if end == "the parent is killed":
            parent.kill()
        else:
            os.kill(int(guard), signal.SIGTERM)
        gone(mark)
        parent.wait()


def test_nothing_is_left_when_a_command_ends_by_itself(mark):
    command = ["sh", "-c", "setsid sleep 600 & sleep 600 & cat; exit 3"]
    done = subprocess.run(guarded(command), input=b"text", stdout=subprocess.PIPE, env=os.environ | {"MARK": mark})
    assert (done.returncode, done.stdout) == (3, b"text")  # its pipe ends although others had it
    gone(mark)


@pytest.mark.parametrize(
    "script, code",
    [
        *(("exit 0", 0), ("exit 77", 77), ("kill -KILL $$", -9), ("kill -TERM $$", -15), ("kill -SEGV $$", -11)),
        *(("kill -INT $$", -2), ("kill -USR1 $$", -10)),
    ],
)
def test_it_ends_as_the_command_did(script, code):
    assert subprocess.run(guarded(["sh", "-c", script])).returncode == code


def test_a_command_that_is_none_is_reported(capfd):
    assert subprocess.run(guarded(["there-is-no-such-program"])).returncode == 127
    assert capfd.readouterr().err == "there-is-no-such-program: No such file or directory\n"


def test_one_whose_parent_is_gone_already_runs_nothing(mark, tmp_path):
    command = guarded(["sh", "-c", f"sleep 1; touch {tmp_path}/ran; sleep 600"])
    command[command.index(str(os.getpid()))] = "1"  # another one's
    assert subprocess.run(command, env=os.environ | {"MARK": mark}).returncode == -9
    gone(mark)
    assert not (tmp_path / "ran").exists()


def test_signals_for_all_processes_of_a_job_are_the_parents(mark):
    """A batch system's, and Ctrl-C."""
    with subprocess.Popen(
        guarded(["sh", "-c", "trap : INT USR1 HUP; echo on; cat"]),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=os.environ | {"MARK": mark},
    ) as process:
        assert process.stdout.readline() == b"on\n"
        for number in (signal.SIGINT, signal.SIGUSR1, signal.SIGHUP):
            process.send_signal(number)
        process.stdin.write(b"still")
        process.stdin.close()
        assert process.stdout.read() == b"still" and process.wait() == 0
