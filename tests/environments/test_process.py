"""Worker processes whose code does what it should not: each costs its own trajectory, within a time and a size."""

import gc
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from aligner.answers import AnswerLog
from aligner.config.sections.environment import EnvironmentConfig
from aligner.environments.limits import CHARS, LEFT, MAX_LINE
from aligner.environments.pool import Pool, Session
from aligner.environments.tools import load_tools, schemas
from aligner.processes import REQUESTS
from tests.environments.test_pool import call, pass_over, wait_for
from tests.test_processes import gone

HARMS = '''
import asyncio, json, os, pathlib, signal, subprocess, sys, time


def pipe():
    """Of the answers: the one that is written to, and that no program which is started has."""
    for fd in map(int, os.listdir("/proc/self/fd")):
        try:
            if fd > 2 and os.readlink(f"/proc/self/fd/{fd}").startswith("pipe:") and not os.get_inheritable(fd):
                os.write(fd, b"")
                return fd
        except OSError:
            pass


class Harms:
    def __init__(self, folder=""):
        self.folder = pathlib.Path(folder)

    def reset(self, seed):
        self.seed = seed

    def says(self, text: str, size: int = 1) -> str:
        """
        Writes to the pipe of answers.

        Args:
            text: What.
            size: How often.
        """
        for _ in range(size):
            os.write(pipe(), text.encode("latin-1"))
        return "said"

    def large(self, size: int) -> str:
        """
        Says much.

        Args:
            size: How much.
        """
        return "x" * size

    def deep(self, depth: int) -> dict:
        """
        Says it deep inside.

        Args:
            depth: How deep.
        """
        found = {}
        for _ in range(depth):
            found = {"a": found}
        return found

    async def waits(self, file: str) -> str:
        """
        Waits for a file.

        Args:
            file: Its name.
        """
        (self.folder / f"{file}-here-{time.time_ns()}").touch()
        while not (self.folder / file).exists():
            await asyncio.sleep(0.01)
        return "waited"

    def holds(self) -> str:
        """Keeps the interpreter."""
        (self.folder / "holds").touch()
        9**9**9
        return ""

    async def blocks(self) -> str:
        """Keeps the loop."""
        (self.folder / "holds").touch()
        time.sleep(600)
        return ""

    async def deaf(self) -> str:
        """Minds no end."""
        while True:
            try:
                await asyncio.sleep(600)
            except asyncio.CancelledError:
                pass

    def sleeps(self) -> str:
        """Sleeps."""
        time.sleep(600)
        return ""

    def leaves(self, how: str) -> str:
        """
        Wants to leave the program.

        Args:
            how: By what.
        """
        raise {"exit": SystemExit(3), "interrupt": KeyboardInterrupt(), "cancel": asyncio.CancelledError()}[how]

    async def leaves_too(self, how: str) -> str:
        """
        Wants to leave the program.

        Args:
            how: By what.
        """
        self.leaves(how)

    def forks(self, command: str = "") -> str:
        """
        A child keeps all that is open, and the process ends.

        Args:
            command: What the child is.
        """
        if os.fork() == 0:
            os.setsid()
            time.sleep(600)
            os._exit(0)
        marks = list(self.folder.glob("forked-*"))
        (self.folder / f"forked-{len(marks)}").touch()
        if not marks:
            os.kill(os.getpid(), signal.SIGKILL)
        return "forked"
'''


@pytest.fixture
def made(tmp_path, monkeypatch):
    """made(**environment) -> a pool; nothing that it has started is left behind it."""
    (tmp_path / "harms.py").write_text(HARMS)
    monkeypatch.setenv("MARK", str(tmp_path))
    pools = []

    def make(**settings):
        args = {"folder": str(tmp_path)}
        cfg = EnvironmentConfig(**{"workers": 1, "path": f"{tmp_path / 'harms.py'}:Harms", "args": args} | settings)
        log = AnswerLog(tmp_path / f"log-{len(pools)}", 0)
        log.begin(1)
        pools.append(Pool(cfg, schemas(load_tools(cfg)), log))
        return pools[-1]

    yield make
    pools.clear()
    gc.collect()  # errors may have kept them
    gone(str(tmp_path))


def opened(pool, key="1"):
    session = Session(key, 7, {})
    assert pool.ask(session, "reset", seed=7, row={}).result(300)["value"] == []
    return session


def asked(pool, session, name, **arguments):
    return pool.ask(session, "turn", calls=[call(name, **arguments)])


JUNK = {
    "no JSON": ("oops\n", 1),
    "many lines": ("a\n\n\nb\n", 9),
    "no object": ("[1]\n", 1),
    "an answer to nothing": ('{"id": 99999999, "value": 1}\n', 1),
    "an endless number": ('{"id": ' + "9" * 5000 + "}\n", 1),
    "no UTF-8": ("\xff\xfe\n", 1),
    "half a line": ("half a line, ", 1),
    "deep": ("[" * 100_000 + "\n", 1),
    "nothing but zeros": ("\0" * 1000 + "\n", 1),
}


@pytest.mark.parametrize("kind", JUNK)
def test_what_something_else_writes_to_the_pipe_costs_nothing(made, kind, capfd):
    text, size = JUNK[kind]
    pool = made(retries=0)
    other, session = opened(pool, "1"), opened(pool, "2")
    for _ in range(2):
        assert asked(pool, session, "says", text=text, size=size).result(300)["value"]["texts"] == ["said"]
        assert asked(pool, other, "large", size=3).result(300)["value"]["texts"] == ["xxx"]
    assert session.process is other.process and session.process.over is None  # it has not begun anew
    output = [line for line in capfd.readouterr().err.splitlines() if "warning: environment" in line]
    assert len(output) <= 1 and (output or kind in ("half a line", "an answer to nothing", "an endless number"))


def test_requests_to_stop_that_all_processes_get_are_left_to_the_rank(made):
    pool = made(retries=0)
    session = opened(pool)
    (worker,) = psutil.Process(session.process.transport.get_pid()).children()
    for number in REQUESTS:
        worker.send_signal(number)
    assert asked(pool, session, "large", size=3).result(300)["value"]["texts"] == ["xxx"]


def test_a_spoilt_answer_costs_its_own_question(made):
    """And tells at once."""
    pool = made(retries=0)
    other, session = opened(pool, "1"), opened(pool, "2")
    one = session.process
    spoilt = pool.ask(session, "turn", calls=[call("waits", file="go")])
    until = time.monotonic() + 120
    while not one._open:
        assert time.monotonic() < until
        time.sleep(0.01)
    (number,) = one._open
    answer = asked(pool, other, "says", text=f'{{"id": {number}, "value": {{"texts": ["half\n').result(300)
    assert answer["value"]["texts"] == ["said"]
    assert spoilt.result(300)["failed"] == "raised" and one.over is None


def test_a_line_without_end_is_no_answer(made):
    pool = made(retries=0)
    other, session = opened(pool, "1"), opened(pool, "2")
    answer = asked(pool, session, "says", text="x" * (1 << 20), size=64).result(300)
    assert answer["failed"] == "died" and f"at most {MAX_LINE} bytes" in answer["text"]
    assert asked(pool, other, "large", size=3).result(300)["value"]["texts"] == ["xxx"]


@pytest.mark.parametrize("size", [CHARS * 2048, 1 << 30])
def test_what_a_tool_says_is_cut(made, size):
    pool = made(max_tokens=2048)
    (text,) = asked(pool, opened(pool), "large", size=size).result(300)["value"]["texts"]
    assert len(text) <= CHARS * 2048 + 60 and text.endswith(f"of {size} characters)") == (size > CHARS * 2048)


def test_what_is_nested_deep_is_text_or_a_failure(made):
    pool = made(retries=0)
    session = opened(pool)
    assert len(asked(pool, session, "deep", depth=50).result(300)["value"]["texts"][0]) == 50 * 7 + 2
    assert "Recursion" in asked(pool, session, "deep", depth=200_000).result(300)["text"]


@pytest.mark.parametrize("kind", ["holds", "blocks"])
def test_one_that_holds_everything_up_is_blamed_alone(made, tmp_path, kind):
    """Of those that its process had begun nobody knows which it was: they are asked again, each where no other is."""
    pool = made(retries=0)
    others, holder = [opened(pool, str(i)) for i in range(4)], opened(pool, "9")
    waiting = [asked(pool, one, "waits", file="go") for one in others]
    until = time.monotonic() + 120
    while len(list(tmp_path.glob("go-here-*"))) < 4:
        assert time.monotonic() < until
        time.sleep(0.01)
    held = asked(pool, holder, kind)
    wait_for(tmp_path / "holds")
    late = [asked(pool, opened_by(one), "large", size=2) for one in (Session("a", 7, {}), Session("b", 7, {}))]
    (tmp_path / "go").touch()
    seconds = 300
    while not held.done():  # it is asked a second time, alone
        pass_over(pool, seconds)
        seconds += 300
        time.sleep(2.0)
    assert held.result()["failed"] == "hung" and held.result()["retried"] == 0
    for one in (*waiting, *late):
        answer = one.result(300)
        assert answer["retried"] == 0 and "value" in answer
    fresh = opened(pool, "10")
    assert asked(pool, fresh, "large", size=1).result(300)["value"]["texts"] == ["x"]


def opened_by(session):
    session.asked.append({"op": "reset", "seed": 7, "row": {}})
    return session


@pytest.mark.parametrize("how", ["exit", "interrupt", "cancel"])
@pytest.mark.parametrize("name", ["leaves", "leaves_too"])
def test_code_that_wants_to_leave_the_program_leaves_alone(made, name, how):
    pool = made(retries=0)
    other, session = opened(pool, "1"), opened(pool, "2")
    assert asked(pool, session, name, how=how).result(300)["failed"] == "raised"
    assert asked(pool, other, "large", size=1).result(300)["value"]["texts"] == ["x"]
    assert other.process.over is None


def test_a_coroutine_that_minds_no_end_is_given_up(made):
    pool = made(retries=0, timeout_s=0.2)
    other, session = opened(pool, "1"), opened(pool, "2")
    assert asked(pool, session, "deaf").result(300)["failed"] == "hung"
    assert asked(pool, other, "large", size=1).result(300)["value"]["texts"] == ["x"]
    assert other.process.over is None


def test_a_child_that_keeps_the_pipe_holds_nobody_up(made, tmp_path):
    pool = made(retries=1)
    answer = asked(pool, opened(pool), "forks").result(300)
    assert answer["value"]["texts"] == ["forked"] and answer["retried"] == 1


def threads(one):
    """Of the worker behind its guard."""
    guard = one.transport.get_pid()
    (worker,) = Path(f"/proc/{guard}/task/{guard}/children").read_text().split()
    return len(os.listdir(f"/proc/{worker}/task"))


@pytest.mark.slow
def test_threads_that_hang_are_bounded(made):
    """Sixteen at a time, each of which is given up: their process takes no more, and ends with those that it has."""
    pool = made(retries=0, timeout_s=0.5)
    kept, most, seen = opened(pool, "kept"), 0, set()
    for start in range(0, 6 * 16, 16):
        sessions = [opened(pool, str(start + i)) for i in range(16)]
        seen |= {session.process for session in sessions}
        waiting = [asked(pool, session, "sleeps") for session in sessions]
        assert {one.result(300)["failed"] for one in waiting} == {"hung"}
        most = max([most, *(threads(one) for one in seen if one.over is None)])
        for session in sessions:
            pool.forget(session)
    assert LEFT < most <= LEFT + 2 * 16 + 10 and len(seen) >= 2
    first = kept.process
    assert asked(pool, kept, "large", size=1).result(300)["value"]["texts"] == ["x"] and kept.process is first
    pool.forget(kept)
    until = time.monotonic() + 120
    while not all(one.ended.done() for one in seen - {pool._workers[0].processes[-1]}):
        assert time.monotonic() < until
        time.sleep(0.01)


@pytest.mark.parametrize("error", [SystemExit(3), KeyboardInterrupt()])
def test_whoever_waits_hears_of_a_thread_that_has_ended(made, error):
    """A task's error of this kind ends its loop."""
    pool = made()
    session = opened(pool)
    waiting = asked(pool, session, "sleeps")

    async def ends():
        raise error

    pool._loop.call_soon_threadsafe(lambda: pool._loop.create_task(ends()))
    with pytest.raises(RuntimeError, match="the thread `environments` has ended"):
        waiting.result(300)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_worker_whose_interpreter_is_held_ends_with_its_rank(made, tmp_path, number):
    program = (
        "import sys, time\nfrom tests.environments.test_process import *\n"
        "cfg = EnvironmentConfig(workers=2, path=sys.argv[1] + '/harms.py:Harms', args={'folder': sys.argv[1]})\n"
        "pool = Pool(cfg, schemas(load_tools(cfg)), AnswerLog(Path(sys.argv[1]) / 'log', 0))\n"
        "pool.log.begin(1)\nsession = opened(pool)\nasked(pool, session, 'holds')\ntime.sleep(600)\n"
    )
    with subprocess.Popen([sys.executable, "-c", program, str(tmp_path)]) as rank:
        wait_for(tmp_path / "holds")
        rank.send_signal(number)
        gone(str(tmp_path))
