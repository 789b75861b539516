"""Two processes never use one run folder, and nobody waits for one that is gone."""

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest

from aligner.cluster import lock
from aligner.cluster.lock import NAME, RunLock, user_here
from aligner.errors import ConfigError

ROOT = Path(__file__).parents[2]
HOLD = "import sys\nfrom pathlib import Path\nfrom aligner.cluster.lock import RunLock\n"
HOLD += "with RunLock(Path(sys.argv[1])):\n    print('in', flush=True)\n    sys.stdin.read()\n"


def start(folder: Path) -> subprocess.Popen:
    """Holds the folder until its input ends."""
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen([sys.executable, "-c", HOLD, str(folder)], cwd=ROOT, text=True, **pipes)


@pytest.fixture
def holder(tmp_path):
    process = start(tmp_path)
    assert process.stdout.readline() == "in\n"
    yield process
    process.kill()
    process.communicate()


def write(folder: Path, age_s: float = 0.0, **owner: object) -> None:
    (folder / NAME).write_text(json.dumps({"id": "x", "host": "far", "pid": 7, "place": "there", "started": 1} | owner))
    os.utime(folder / NAME, (time.time() - age_s,) * 2)


@pytest.fixture
def at_once(monkeypatch):
    """Nothing is waited for."""
    monkeypatch.setattr(lock, "time", SimpleNamespace(time=time.time, strftime=time.strftime))


@contextmanager
def touched(path: Path) -> Iterator[None]:
    """A process elsewhere gives signs of life."""
    ended = threading.Event()

    def beat() -> None:
        while not ended.wait(0.05):
            os.utime(path)

    thread = threading.Thread(target=beat)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def owner(folder: Path) -> dict:
    return json.loads((folder / NAME).read_text())


def test_a_second_process_is_refused_in_one_line(holder, tmp_path):
    with pytest.raises(ConfigError) as error, RunLock(tmp_path):
        pass
    host = owner(tmp_path)["host"]
    assert f"no other process uses; process {holder.pid} on {host} does since" in str(error.value)
    assert "\n" not in str(error.value) and owner(tmp_path)["pid"] == holder.pid
    assert [p.name for p in tmp_path.iterdir()] == [NAME]
    assert user_here(tmp_path) == holder.pid


def mine() -> dict:
    return lock._own_record()


ODD = [{"pid": -1}, {"pid": 0}, {"pid": True}, {"pid": "7"}, {"pid": 7.5}, {"pid": 2**70}, {"pid": [7]}]
ODD += [{"started": None}, {"started": "x"}, {"place": 7}, {"id": None}]


@pytest.mark.parametrize("odd", ODD)
def test_a_file_that_no_run_has_written_names_nobody(tmp_path, odd):
    write(tmp_path, **mine() | odd)
    assert user_here(tmp_path) is None and lock._read(tmp_path / NAME) == {}


def test_the_first_process_of_a_container_is_a_user_like_others(tmp_path, monkeypatch, capfd):
    """Its number is 1. It gives the folder back, and what it left is taken over."""
    monkeypatch.setattr(lock.os, "getpid", lambda: 1)
    with RunLock(tmp_path):
        assert owner(tmp_path)["pid"] == 1 and lock._read(tmp_path / NAME) == owner(tmp_path)
    assert not list(tmp_path.iterdir())
    write(tmp_path, **mine() | {"id": "of the container before"})
    with RunLock(tmp_path):
        assert "which has ended" in capfd.readouterr().err


def test_a_process_that_does_not_have_the_file_open_is_not_named_by_it(holder, tmp_path):
    """Whoever can write the file could name any process, with the time of its start."""
    others = tmp_path / "others"
    others.mkdir()
    for pid in (os.getpid(), os.getppid(), holder.pid):
        write(others, **mine() | {"pid": pid, "started": lock._started(pid)})
        assert user_here(others) is None
    (tmp_path / "link").mkdir()
    (tmp_path / "link" / NAME).symlink_to(tmp_path / NAME)
    assert user_here(tmp_path / "link") is None and user_here(tmp_path) == holder.pid


@pytest.mark.parametrize("data", [b"", b"[]", b"7", b"\xff\x00" * 99, b"[" * 10**5, b'{"a":"' + b"x" * 10**6 + b'"}'])
def test_rubbish_is_a_file_of_nobody(tmp_path, data, at_once, monkeypatch):
    (tmp_path / NAME).write_bytes(data)
    assert user_here(tmp_path) is None
    old = time.time() - 3600
    os.utime(tmp_path / NAME, (old, old))
    with RunLock(tmp_path):
        assert user_here(tmp_path) == os.getpid()
    for make in (lambda path: path.mkdir(), os.mkfifo):
        make(tmp_path / NAME)
        assert user_here(tmp_path) is None
        (tmp_path / NAME).rmdir() if (tmp_path / NAME).is_dir() else (tmp_path / NAME).unlink()


@pytest.mark.parametrize("data", [b"[]", b'{"id": "another"}', b"7"])
def test_whoever_holds_it_hears_that_it_is_anothers_now(tmp_path, data):
    informed, heard = [], threading.Event()
    with RunLock(tmp_path, lambda why: (informed.append(why), heard.set()), beat_s=0.01):
        (tmp_path / NAME).write_bytes(data)
        assert heard.wait(120)
    assert "this run was silent for too long" in informed[0]


def test_a_thread_that_ends_ends_the_run(tmp_path, monkeypatch):
    informed, heard = [], threading.Event()
    monkeypatch.setattr(lock, "json", SimpleNamespace(loads=lambda text: 1 / 0, dumps=json.dumps))
    with RunLock(tmp_path, lambda why: (informed.append(why), heard.set()), beat_s=0.01):
        assert heard.wait(120)
    assert "its thread has ended by ZeroDivisionError" in informed[0]


def test_one_that_was_killed_is_followed_at_once_and_told(holder, tmp_path, capfd, at_once):
    holder.send_signal(signal.SIGKILL)
    holder.wait()
    assert user_here(tmp_path) is None
    with RunLock(tmp_path):
        assert owner(tmp_path)["pid"] == os.getpid()
    assert f"process {holder.pid} on" in (err := capfd.readouterr().err) and "which has ended: taking it over" in err
    assert list(tmp_path.iterdir()) == []


def test_a_number_that_another_process_has_by_now_is_no_owner(tmp_path):
    own = lock._own_record()
    write(tmp_path, **own | {"pid": os.getppid(), "started": own["started"] + 1})
    assert user_here(tmp_path) is None
    with RunLock(tmp_path):
        assert owner(tmp_path)["pid"] == os.getpid()


def test_on_another_host_the_file_must_be_touched(tmp_path, monkeypatch, capfd):
    monkeypatch.setattr(lock, "POLL_S", 0.01)
    write(tmp_path, age_s=3600)
    assert user_here(tmp_path) is None
    with RunLock(tmp_path):
        assert re.search(r"silent for 36\d\d s: taking it over", capfd.readouterr().err)
    write(tmp_path)
    with touched(tmp_path / NAME), pytest.raises(ConfigError, match="process 7 on far does since"), RunLock(tmp_path):
        pass
    write(tmp_path)
    sleep, limits = time.sleep, iter([lock.STALE_S, -1.0])

    def look_again(seconds: float) -> None:
        sleep(seconds)
        lock.STALE_S = next(limits)

    with monkeypatch.context() as patch:
        patch.setattr(lock, "STALE_S", lock.STALE_S)
        patch.setattr(lock, "time", SimpleNamespace(sleep=look_again, strftime=time.strftime, time=time.time))
        with RunLock(tmp_path):  # silent while we looked
            assert "waiting for a heartbeat" in capfd.readouterr().err
    (tmp_path / NAME).write_text("")  # of one that died where there are no hard links
    os.utime(tmp_path / NAME, (time.time() - 3600,) * 2)
    with RunLock(tmp_path):
        assert owner(tmp_path)["pid"] == os.getpid()


def test_a_requeued_job_follows_itself_at_once(tmp_path, monkeypatch, at_once):
    monkeypatch.setenv("SLURM_JOB_ID", "42")
    write(tmp_path, job="42")
    with RunLock(tmp_path):
        assert owner(tmp_path)["job"] == "42"


@pytest.mark.parametrize(("name", "value"), [("SLURM_RESTART_COUNT", "1"), ("ALIGNER_LOGS", "logs/42.0+1")])
def test_two_steps_of_one_start_of_a_job_are_two(tmp_path, monkeypatch, name, value):
    monkeypatch.setattr(lock, "POLL_S", 0.05)
    monkeypatch.setenv("SLURM_JOB_ID", "42")
    monkeypatch.delenv("SLURM_RESTART_COUNT", raising=False)
    monkeypatch.delenv("ALIGNER_LOGS", raising=False)
    write(tmp_path, job="42", attempt=lock._own_record()["attempt"])
    refused = pytest.raises(ConfigError, match="process 7 on far, job 42 does since")
    with touched(tmp_path / NAME), refused, RunLock(tmp_path):
        pass
    monkeypatch.setenv(name, value)  # the next start
    with RunLock(tmp_path):
        assert owner(tmp_path)["pid"] == os.getpid()


def test_a_folder_can_be_locked_without_hard_links(holder, tmp_path, monkeypatch):
    def refused(*_):
        raise OSError(1, "Operation not permitted")

    monkeypatch.setattr(os, "link", refused)
    with pytest.raises(ConfigError, match="no other process uses"), RunLock(tmp_path):
        pass
    with RunLock(tmp_path / "other"):
        assert owner(tmp_path / "other")["pid"] == os.getpid()


def test_who_loses_the_folder_is_notified(tmp_path):
    informed = threading.Event()
    words = []
    for spoil in (lambda: (tmp_path / NAME).unlink(), lambda: write(tmp_path)):
        informed.clear()
        with RunLock(tmp_path, lambda why: (words.append(why), informed.set()), beat_s=0.05):
            before = (tmp_path / NAME).stat().st_mtime_ns
            while (tmp_path / NAME).stat().st_mtime_ns == before:  # it is touched
                time.sleep(0.01)
            spoil()
            assert informed.wait(300)
    assert "is gone" in words[0] and "belongs to process 7 on far now" in words[1]


def test_one_of_many_takes_over(tmp_path):
    write(tmp_path, age_s=3600)
    processes = [start(tmp_path) for _ in range(4)]
    while sum(process.poll() is None for process in processes) > 1:
        time.sleep(0.05)
    answers = [process.communicate() for process in processes]  # closes the input of the one that holds it
    assert sorted(out for out, _ in answers) == ["", "", "", "in\n"]
    assert all("no other process uses" in err for out, err in answers if not out)


def test_who_comes_late_takes_nothing_from_the_one_that_took_over(tmp_path, monkeypatch):
    """Between the look at an owner that is gone and the taking, another process has followed it, and lives."""
    write(tmp_path, age_s=3600)
    follower, gone = lock._own_record() | {"pid": os.getppid(), "started": lock._started(os.getppid())}, RunLock._gone

    def late(self, owner, aside):
        why = gone(self, owner, aside)
        write(tmp_path, **follower)
        return why

    monkeypatch.setattr(RunLock, "_gone", late)
    with pytest.raises(ConfigError, match=f"process {os.getppid()} on"), RunLock(tmp_path):
        pass
    assert owner(tmp_path)["id"] == follower["id"] and [p.name for p in tmp_path.iterdir()] == [NAME]
