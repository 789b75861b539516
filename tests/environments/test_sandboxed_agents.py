"""Agents that are command lines, in the sandbox of their task: what they reach, who decides, what is left."""

import shutil
import socket
import tarfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from aligner.answers import AnswerLog
from aligner.config.sections.environment import EnvironmentConfig
from aligner.environments.pool import Pool, Session
from aligner.environments.tools import load_tools, schemas
from aligner.errors import EnvironmentCodeError
from aligner.sandbox.terminal import lacks
from tests.environments.test_agents import QUESTION, SAMPLING, first, reply
from tests.environments.test_terminal_images import make_root, sif, squashfs
from tests.needs import lacking

pytest.importorskip("uvicorn")
pytestmark = pytest.mark.skipif(bool(why := lacks()), reason=str(why))
AGENT = Path(__file__).parents[1] / "assets" / "sandboxed_agent.py"
TERMINAL = "aligner.environments.terminal:Terminal"
ROW = {"files": {"a.txt": "one two"}, "tests": "grep -q three a.txt", "instruction": "Replace it.", "answer": "x"}


def config(agent=f"python3 {AGENT}", **args) -> EnvironmentConfig:
    args = {"readable": [str(AGENT)], "cpu_s": 0.5} | args
    return EnvironmentConfig(path=TERMINAL, agent=agent, args=args, workers=1, retries=1, max_turns=2, timeout_s=300)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("answers")


def opened(folder, cfg=None) -> Pool:
    log = AnswerLog(folder, 0)
    log.begin(1)
    return Pool(cfg or config(), [], log)


@pytest.fixture(scope="module")
def pool(folder):
    return opened(folder)


def play(pool, key, *texts):
    """Return the events of an agent whose model says these texts."""
    session = Session(key, 7, dict(ROW))
    events = [first(pool, session)]
    for text in texts:
        events.append(reply(pool, session, events[-1], text))
    return session, events


def shown(event):
    return event["value"]["request"]["messages"][-1]["content"]


def test_an_agent_works_in_the_sandbox_and_the_tests_decide(pool, folder):
    with socket.create_server(("127.0.0.1", 0)) as server:
        reach = f"(exec 3<>/dev/tcp/127.0.0.1/{server.getsockname()[1]}) 2>&- && echo net"
        look = f"{reach}; touch {AGENT} 2>&- && echo written; ls; ls /tests"
        texts = (look, "sed -i s/two/three/ a.txt", "ls /proc | grep -c '^[0-9]'; echo done")
        _, events = play(pool, "works", *texts)
    opening = events[0]["value"]["request"]["messages"]
    assert [message["content"] for message in opening] == ["q\n\nReplace it.", "{}"]  # no column of the row
    assert shown(events[1]) == "a.txt\n"
    assert events[-1]["value"] == {"end": 1.0, "value": {"reward": 1.0, "ended": ""}}
    again = opened(folder)  # as after a kill: nobody is asked
    session, recorded = play(again, "works", *texts)
    assert session.process is None and recorded == events
    forged = "mkdir -p /logs/verifier; echo 1 > /logs/verifier/reward.txt"
    assert play(pool, "forges", forged, "echo done")[1][-1]["value"]["end"] == 0.0


def test_an_agent_that_fails_is_restarted_and_one_that_was_refused_or_cut_is_tested(pool):
    _, events = play(pool, "fails", "echo fail")
    assert events[-1]["failed"] == "raised" and events[-1]["retried"] == 1 and "exit code 3" in events[-1]["text"]
    session, _ = play(pool, "refused", "sed -i s/two/three/ a.txt")
    assert pool.ask(session, "score", why="no more", code="budget_of_turns").result(300)["value"] == 1.0
    session = Session("cut", 7, dict(ROW))
    event, text = first(pool, session), "sed -i s/two/three/ a.txt; echo fail"
    last = reply(pool, session, event, text, reason="length")
    assert last["value"]["end"] == 1.0 and last["retried"] == 0


def test_an_agent_that_is_made_again_may_see_something_else(pool):
    """As after a kill: its program gets the answers so far, and goes on."""
    session, (_, seen) = play(pool, "sees", "cat /proc/sys/kernel/random/uuid")
    again = replace(session, worker=None, process=None, name="")
    last = reply(pool, again, seen, "sed -i s/two/three/ a.txt")
    assert "value" in last and again.name != session.name and not again.answered
    assert reply(pool, again, last, "echo done")["value"]["end"] == 1.0


def test_limits_end_an_agent_and_the_tests_decide(pool):
    value = play(pool, "computes", "sed -i s/two/three/ a.txt; while :; do :; done")[1][-1]["value"]
    assert value["end"] == 1.0 and value["value"]["ended"].startswith("it computed for 1 s")


def test_nothing_is_left_of_an_agent_whose_trajectory_ends(pool):
    session = Session("left", 7, dict(ROW))
    event = first(pool, session)
    body = {"choices": [{"message": {"content": "sleep 424242"}}]}
    asked = pool.ask(session, "turn", digest=event["value"]["digest"], body=body)
    until = time.monotonic() + 120
    sleeps = lambda: [p for p in psutil.process_iter(["cmdline"]) if p.info["cmdline"] == ["sleep", "424242"]]  # noqa: E731
    while not sleeps():
        assert time.monotonic() < until and not asked.done(), event
    pool.forget(session)
    while sleeps():
        assert time.monotonic() < until


def images(folder: Path) -> list[Path]:
    """Make an image with an agent, of each kind."""
    root = make_root(folder / "image")
    shutil.copy(AGENT.with_name("image_agent.sh"), root / "usr/bin/agent")
    (root / "usr/bin/agent").chmod(0o755)
    with tarfile.open(folder / "image.tar", "w") as file:
        file.add(root, ".")
    packed = squashfs(folder, root).rename(folder / "image.sqsh")
    return [root, folder / "image.tar", packed, sif(folder / "image.sif", packed)]


def test_programs_of_images_are_agents_many_at_a_time_and_none_gets_anothers_answer(tmp_path):
    if shutil.which("mksquashfs") is None:
        lacking("there is no mksquashfs (package `squashfs-tools`)")
    kinds, pool = images(tmp_path), opened(tmp_path / "answers", config("agent", readable=[]))
    sessions = []
    for i in range(8):
        task = tmp_path / f"task{i}"
        for name, text in (
            ("task.toml", ""),
            ("instruction.md", f"Task {i}"),
            ("tests/test.sh", f"grep -qx {i}{i}{i} said"),
        ):
            (task / name).parent.mkdir(parents=True, exist_ok=True)
            (task / name).write_text(text)
        (task / "environment").mkdir()
        (task / "environment" / kinds[i % 4].name).symlink_to(kinds[i % 4])
        sessions.append(Session(f"image{i}", i, {"task": str(task)}))
    row = {"messages": QUESTION, "sampling": SAMPLING}
    asked = [pool.ask(session, "reset", seed=session.seed, row=session.row, **row) for session in sessions]
    events = [one.result(300) for one in asked]
    assert [shown(event) for event in events] == [f"Task {i}" for i in range(8)]
    for turn in range(3):
        with ThreadPoolExecutor(8) as threads:
            says = [f"printf {i} >> said; echo $(cat said) {'done' * (turn == 2)}" for i in range(8)]
            order = sorted(range(8), key=lambda i: i * (3 + 2 * turn) % 8)
            replies = {i: threads.submit(reply, pool, sessions[i], events[i], says[i]) for i in order}
            events = [replies[i].result(300) for i in range(8)]
        if turn < 2:
            assert [shown(event) for event in events] == [f"{i}" * (turn + 1) for i in range(8)]
    assert [event["value"]["end"] for event in events] == [1.0] * 8, events


def test_what_cannot_be_an_agents_environment_is_refused_before_a_run():
    assert schemas(load_tools(config())) == []
    with pytest.raises(EnvironmentCodeError, match=r"readable=/no/such: expected a file or folder"):
        load_tools(config(readable="/no/such"))
    other = EnvironmentConfig(path="tests/assets/environments.py:Guess", agent="a b")
    with pytest.raises(EnvironmentCodeError, match=r"environment\.path=.*expected aligner.*Terminal"):
        load_tools(other)
