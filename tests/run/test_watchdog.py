"""A run that hangs says where, on every rank, and ends."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from aligner.config.sections.watchdog import WatchdogConfig
from aligner.errors import ConfigError
from aligner.run.timers import Timers
from tests import stages

HEAD = """
import re, sys, time
from pathlib import Path
from aligner.config.sections.watchdog import WatchdogConfig
from aligner.run.timers import Timers
from aligner.run.watchdog import Watchdog
"""


def child(code: str, folder: Path, world: int = 1) -> subprocess.CompletedProcess:
    environment = {**os.environ, "PYTHONPATH": str(stages.ROOT), "ALIGNER_FAILURE_FILE": str(folder / "failure.json")}
    command = [sys.executable, "-c", HEAD + code, str(folder)]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)


HANGS = """
def sleeps_for_ever(): time.sleep(60)
dog = Watchdog(WatchdogConfig(score_s=0.4, other_s=0), Path(sys.argv[1]), 0, 1)
timers = Timers()
timers.on_phase = dog.phase
dog.start()
with timers("generate"):
    time.sleep(0.8)
time.sleep(0.6)
for i in range(6):
    with timers("score"):
        time.sleep(0.1)
print("so far", flush=True)
with timers("score"):
    sleeps_for_ever()
"""


def test_a_phase_over_its_limit_ends_the_process_with_its_stacks(tmp_path):
    """Others may take longer, and each time a phase begins its clock starts anew."""
    done = child(HANGS, tmp_path)
    assert done.returncode == 1 and done.stdout == "so far\n"
    assert done.stderr.splitlines()[-1].startswith("error: watchdog: rank 0 is in phase `score` for")
    assert "in sleeps_for_ever" in done.stderr and "rank 0 is in phase `score` for" in done.stderr
    assert "cluster.watchdog.score_s=0.4" in done.stderr
    assert "cluster.watchdog.score_s=0.4" in json.loads((tmp_path / "failure.json").read_text())["text"]


def test_a_rank_that_gives_no_stacks_is_the_one_that_hangs(tmp_path):
    quick = "import aligner.run.watchdog\naligner.run.watchdog.GRACE_S = 0.5\n"
    done = child(quick + HANGS.replace(", 0, 1)", ", 0, 2)"), tmp_path)
    last = done.stderr.splitlines()[-1]
    assert last.startswith("error: watchdog: rank 1 gives no stacks") and "rank 0 is in phase `score` for" in last


LOCKED = """
dog = Watchdog(WatchdogConfig(update_s=0.4), Path(sys.argv[1]), 0, 1, stuck_s=1.0)
dog.start()
def backtracks(): re.match("(a+)+$", "a" * 40 + "b")
time.sleep(0.3)
backtracks()
"""


def test_code_that_never_gives_up_pythons_lock_is_shown_too(tmp_path):
    """No Python thread runs then, this one's watchdog included; seconds with computing in them are what counts."""
    began = time.monotonic()
    done = child(LOCKED, tmp_path)
    assert done.returncode == -signal.SIGPROF and "in backtracks" in done.stderr and time.monotonic() - began < 30


KEEPS = """
import os, sys, time
sys.path.insert(0, "")
from aligner.run import keeper
began = time.monotonic()
keeper._computed_s = lambda pid: 16 * (time.monotonic() - began)
keeper.os.kill = lambda pid, number: print(time.monotonic() - began)
keeper.keep(os.getppid(), float(sys.argv[1]))
"""


def keeps(limit_s: float, beats: list[float]) -> str:
    """What the process beside a rank that computes on 16 cores says, with a beat of the rank after each of so many
    seconds, and no more behind them."""
    command = [sys.executable, "-S", "-c", KEEPS, str(limit_s)]
    with subprocess.Popen(command, cwd=stages.ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as child:
        for wait_s in beats:
            time.sleep(wait_s)
            os.write(child.stdin.fileno(), b".")
        if beats:
            child.stdin.close()  # as a rank that ends
        return child.stdout.read()


def test_many_threads_do_not_make_a_call_of_c_take_longer():
    """They compute without Python's lock, which a call keeps for less than the limit: seconds of the clock count, and
    not those of all cores."""
    assert keeps(8.0, [0.2, 1.5, 0.2]) == ""  # of 16 cores 24 seconds
    assert float(keeps(1.0, [])) >= 1.0


SUSPENDED = """
dog = Watchdog(WatchdogConfig(score_s=2), Path(sys.argv[1]), 0, 1, stuck_s=1.5)
timers = Timers()
timers.on_phase = dog.phase
dog.start()
with timers("score"):
    awake, wall = dog.clock.now(), time.monotonic()
    print("in", flush=True)
    while time.monotonic() - wall < 5:
        time.sleep(0.05)
    awake, wall = dog.clock.now() - awake, time.monotonic() - wall
dog.stop()
print(wall - awake)
"""


def test_a_process_that_was_stopped_did_not_hang(tmp_path):
    """Nor did it take long: what else asks the clock sees the seconds in which it ran."""
    process = subprocess.Popen(
        [sys.executable, "-c", HEAD + SUSPENDED, str(tmp_path)],
        env={**os.environ, "PYTHONPATH": str(stages.ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout.readline() == "in\n"
    process.send_signal(signal.SIGSTOP)
    time.sleep(4.5)
    process.send_signal(signal.SIGCONT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 0 and float(out) > 3, err


QUIET = """
dog = Watchdog(WatchdogConfig(**{name: 0 for name in WatchdogConfig.__dataclass_fields__}), Path(sys.argv[1]), 0, 1)
dog.start()
time.sleep(0.5)
dog.stop()
dog = Watchdog(WatchdogConfig(startup_s=0.4), Path(sys.argv[1]), 0, 1, stuck_s=0.6)
dog.start()
dog.stop()
time.sleep(1)
print("well")
"""


def test_it_can_be_turned_off_and_stopped(tmp_path):
    done = child(QUIET, tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (0, "well\n", "")


@pytest.mark.slow
@pytest.mark.multirank
def test_a_rank_that_hangs_is_found(tiny_data, tiny_runs, tmp_path):
    """Rank 1 sleeps in its second score; rank 0 waits for it. Both stacks are printed, and the job ends."""
    hangs = "reward.functions=[{path: tests/assets/tiny_rewards.py:hangs_on, args: {rank: 1, at: 2, counter: %s}}]"
    line = stages.overrides("grpo", tiny_data, tmp_path / "run", f"model.init={tiny_runs['sft']}", "run.steps=4")
    line += [hangs % (tmp_path / "calls"), "cluster.watchdog.score_s=4", "logging.progress=false"]
    line += ["batch.micro_batch_samples=4"]
    environment = {**os.environ, "PYTHONPATH": str(stages.ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-W", "ignore", "-m", "aligner", "launch", "--ranks", "2", *line]
    done = subprocess.run(command, cwd=stages.ROOT, env=environment, capture_output=True, text=True, timeout=150)
    assert done.returncode == 1, done.stderr
    last = done.stderr.strip().splitlines()[-1]
    assert "watchdog: rank 1 hangs, the others wait for it;" in last and "cluster.watchdog.score_s=4" in last
    stacks = {rank: (tmp_path / "run" / "watchdog" / f"rank-000{rank}.txt").read_text() for rank in (0, 1)}
    assert "in hangs_on" in stacks[1] and "in hangs_on" not in stacks[0] and "first_cause" in stacks[0]
    assert "in hangs_on" in done.stderr and "--- rank 0: phase" in done.stderr and "--- rank 1: phase" in done.stderr


def test_limits_by_phase():
    config = WatchdogConfig(eval_s=5, other_s=7, save_s=0)
    assert config.limit("eval/generate") == ("cluster.watchdog.eval_s", 5)
    assert config.limit("") == config.limit("advantages") == ("cluster.watchdog.other_s", 7)
    assert config.limit("save")[1] == 0 and config.shortest == 5
    with pytest.raises(ConfigError, match=r"cluster\.watchdog\.save_s=-1"):
        WatchdogConfig(save_s=-1)


def test_timers_tell_every_change_of_phase():
    timers, told = Timers(), []
    timers.on_phase = told.append
    with timers("eval"), timers("generate"):
        pass
    assert told == ["eval", "eval/generate", "eval", ""]
