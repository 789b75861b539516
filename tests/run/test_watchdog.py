"""A run that hangs says where, on every rank, and ends."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from aligner.config.sections.cluster import ClusterConfig, Limits
from aligner.errors import ConfigError
from aligner.run import gil_monitor
from tests import stages

HEAD = """
import os, re, signal, sys, threading, time
from pathlib import Path
from aligner.config.sections.cluster import SECONDS
from aligner.run.awake_clock import AwakeClock
from aligner.run.timers import Timers
from aligner.run.watchdog import Watchdog

class Given:
    "A clock that a test sets; `passes` comes back once the watchdog has looked at it, twice."
    seconds, looks, ticking = 0.0, 0, False
    def start(self): pass
    def now(self):
        self.looks += threading.current_thread().name == "watchdog"
        return self.seconds
    def passes(self, seconds):
        self.seconds, looks = self.seconds + seconds, self.looks
        while self.looks < looks + 2:
            time.sleep(0.01)

def watchdog(clock, world=1, stuck_s=600.0, **limits):
    dog = Watchdog(limits, Path(sys.argv[1]), 0, world, stuck_s)
    dog.poll_s, dog.clock = 0.02, clock
    dog.phase("startup")
    return dog
"""


def child(code: str, folder: Path, world: int = 1) -> subprocess.CompletedProcess:
    environment = {**os.environ, "PYTHONPATH": str(stages.ROOT), "ALIGNER_FAILURE_FILE": str(folder / "failure.json")}
    command = [sys.executable, "-c", HEAD + code, str(folder)]
    return subprocess.run(command, env=environment, capture_output=True, text=True)


HANGS = """
def sleeps_for_ever():
    clock.seconds += 20
    time.sleep(3600)
clock = Given()
dog = watchdog(clock, WORLD, score_s=10, other_s=0)
timers = Timers()
timers.on_phase = dog.phase
dog.start()
with timers("generate"):
    clock.passes(20)
clock.passes(20)
for i in range(6):
    with timers("score"):
        clock.passes(8)
print("so far", flush=True)
with timers("score"):
    sleeps_for_ever()
"""


def test_a_phase_over_its_limit_ends_the_process_with_its_stacks(tmp_path):
    """Others may take longer, and each time a phase begins its clock starts anew."""
    done = child(HANGS.replace("WORLD", "1"), tmp_path)
    assert done.returncode == 1 and done.stdout == "so far\n"
    assert done.stderr.splitlines()[-1].startswith("error: watchdog: rank 0 is in phase `score` for")
    assert "in sleeps_for_ever" in done.stderr and "rank 0 is in phase `score` for" in done.stderr
    assert "cluster.watchdog.score_s=10" in done.stderr
    assert "cluster.watchdog.score_s=10" in json.loads((tmp_path / "failure.json").read_text())["text"]


ODD = """
class Odd(Given):
    def now(self):
        if threading.current_thread().name == "watchdog":
            raise ERROR
        return self.seconds
dog = watchdog(Odd(), score_s=10)
dog.start()
time.sleep(3600)
"""


@pytest.mark.parametrize("error", ["KeyError('score')", "SystemExit(0)", "MemoryError()"])
def test_a_watchdog_that_ends_ends_the_process(tmp_path, error):
    """Nobody would hear of a phase that hangs any more."""
    done = child(ODD.replace("ERROR", error), tmp_path)
    assert done.returncode == 1 and "error: watchdog: its thread has ended" in done.stderr
    assert error.partition("(")[0] in done.stderr and "its thread" in (tmp_path / "failure.json").read_text()


SHORT = """
class Passes(Given):
    "While the watchdog looks a phase ends, and of the next one pass 8 seconds."
    def now(self):
        if threading.current_thread().name == "watchdog":
            dog._now = ("score", self.seconds)
            self.seconds, self.looks = self.seconds + 8, self.looks + 1
        return self.seconds
clock = Passes()
dog = watchdog(clock, score_s=10)
dog.start()
clock.passes(0)
dog.stop()
print("well")
"""


def test_of_a_phase_that_begins_meanwhile_no_time_has_passed(tmp_path):
    done = child(SHORT, tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (0, "well\n", "")


SECOND = """
folder = Path(sys.argv[1], "watchdog")
folder.mkdir()
for name in ("fired.json", "rank-0001.txt"):
    (folder / name).touch()
clock = Given()
dog = watchdog(clock, 2, startup_s=10)
dog.start()
clock.seconds = 20
while not (folder / "rank-0000.txt").exists():
    time.sleep(0.01)
dog.stop()
print("well")
"""


def test_a_rank_whose_time_is_up_as_well_does_not_end_before_who_tells_of_it(tmp_path):
    """Its launcher would end that one, and take this one for the cause."""
    done = child("import aligner.run.watchdog\naligner.run.watchdog.GRACE_S = 600\n" + SECOND, tmp_path)
    assert (done.returncode, done.stdout) == (0, "well\n") and "error" not in done.stderr


def test_a_rank_that_gives_no_stacks_is_the_one_that_hangs(tmp_path):
    quick = "import aligner.run.watchdog\naligner.run.watchdog.GRACE_S = 0.5\n"
    done = child(quick + HANGS.replace("WORLD", "2"), tmp_path)
    last = done.stderr.splitlines()[-1]
    assert last.startswith("error: watchdog: rank 1 gives no stacks") and "rank 0 is in phase `score` for" in last


LOCKED = """
clock = Given()
watchdog(clock, stuck_s=1.0, update_s=10).start()
def backtracks(): re.match("(a+)+$", "a" * 60 + "b")
clock.passes(0)
backtracks()
"""


def test_code_that_never_gives_up_pythons_lock_is_shown_too(tmp_path):
    """No Python thread runs then, this one's watchdog included; seconds with computing in them are what counts."""
    done = child(LOCKED, tmp_path)
    assert done.returncode == -signal.SIGPROF and "in backtracks" in done.stderr


def keeps(monkeypatch, limit_s: float, beats: list[float]) -> float | None:
    """When the process beside a rank ends it that computes on 16 cores, if it beats at these seconds, and after the
    last one ends."""
    now_s, left, ended_s = 0.0, list(beats), []

    def select(_reads, _writes, _errors, tick_s: float) -> tuple[list[int], list, list]:
        nonlocal now_s
        ready = bool(beats) and (not left or left[0] <= now_s + tick_s)
        now_s = (left or [now_s])[0] if ready else now_s + tick_s
        return [0] if ready else [], [], []

    read = lambda *_: b"." if left and left.pop(0) else b""  # noqa: E731
    system = SimpleNamespace(getppid=lambda: 7, read=read, kill=lambda *_: ended_s.append(now_s))
    with monkeypatch.context() as patch:
        patch.setattr(gil_monitor, "LEFT_TO_THE_RANK", ())
        patch.setattr(gil_monitor, "_computed_s", lambda pid: 16 * now_s)
        patch.setattr(gil_monitor, "select", SimpleNamespace(select=select))
        patch.setattr(gil_monitor, "os", system)
        gil_monitor.keep(7, limit_s)
    return ended_s[0] if ended_s else None


def test_many_threads_do_not_make_a_call_of_c_take_longer(monkeypatch):
    """They compute without Python's lock, which a call keeps for less than the limit: seconds of the clock count, and
    not those of all cores."""
    assert keeps(monkeypatch, 8.0, [0.2, 7.0, 7.2]) is None  # of 16 cores 112 seconds
    assert keeps(monkeypatch, 8.0, [0.2, 20.0]) == pytest.approx(0.2 + 9)
    assert 1.0 <= keeps(monkeypatch, 1.0, []) <= 1.25


SUSPENDED = """
dog = watchdog(AwakeClock(0.02), stuck_s=1.5, score_s=2)
timers = Timers()
timers.on_phase = dog.phase
dog.start()
with timers("score"):
    awake, wall = dog.clock.now(), time.monotonic()
    os.kill(os.getpid(), signal.SIGSTOP)
    time.sleep(0.3)
    awake, wall = dog.clock.now() - awake, time.monotonic() - wall
dog.stop()
print(wall - awake)
"""


@pytest.mark.slow
def test_a_process_that_was_stopped_did_not_hang(tmp_path):
    """Nor did it take long: what else asks the clock sees the seconds in which it ran."""
    process = subprocess.Popen(
        [sys.executable, "-c", HEAD + SUSPENDED, str(tmp_path)],
        env={**os.environ, "PYTHONPATH": str(stages.ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    _, status = os.waitpid(process.pid, os.WUNTRACED)
    assert os.WIFSTOPPED(status)
    time.sleep(3.5)
    process.send_signal(signal.SIGCONT)
    out, err = process.communicate()
    assert process.returncode == 0 and float(out) > 3, err


QUIET = """
dog = watchdog(Given(), **{name: 0 for name in SECONDS})
dog.start()
assert dog._thread is None and dog._keeper is None
dog.stop()
clock = Given()
dog = watchdog(clock, startup_s=10)
dog.start()
dog.stop()
clock.seconds = 20
time.sleep(0.2)
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
    done = subprocess.run(command, cwd=stages.ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 1, done.stderr
    last = done.stderr.strip().splitlines()[-1]
    assert "watchdog: rank 1 hangs, the others wait for it;" in last and "cluster.watchdog.score_s=4" in last
    stacks = {rank: (tmp_path / "run" / "watchdog" / f"rank-000{rank}.txt").read_text() for rank in (0, 1)}
    assert "in hangs_on" in stacks[1] and "in hangs_on" not in stacks[0] and "first_cause" in stacks[0]
    assert "in hangs_on" in done.stderr and "--- rank 0: phase" in done.stderr and "--- rank 1: phase" in done.stderr


def test_limits_by_phase():
    limits = Limits({"scale": 2, "eval_s": 5, "other_s": 7, "save_s": 0})
    assert limits.of("eval/generate") == ("cluster.watchdog.eval_s", 5)
    assert limits.of("") == limits.of("advantages") == ("cluster.watchdog.other_s", 7)
    assert limits.of("save")[1] == 0 and limits.shortest == 5
    assert limits.of("score")[1] == 3000 and Limits({"scale": 0}).shortest == 0
    with pytest.raises(ConfigError, match=r"cluster\.watchdog\.save_s=-1.0: expected a number >= 0"):
        ClusterConfig(watchdog={"save_s": -1.0})
    with pytest.raises(ConfigError, match=r"cluster\.watchdog\.saving_s=1.0: expected one of the entries scale,"):
        ClusterConfig(watchdog={"saving_s": 1.0})
