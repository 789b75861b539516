"""The command's own processes: none outlives it, and it says what they do."""

import io
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from aligner.rehearse import command
from aligner.rehearse.progress import Progress, follow

COMMAND = [sys.executable, "-m", "aligner", "rehearse", "--gpus", "4", "stage=sft", "model=tiny"]
COMMAND += ["model.vocab_size=320", "parallel.pipeline=2", "batch.sequences=64", "data.max_tokens=1000"]


def started(mark):
    """Command lines of living processes with this in their environment."""
    results = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            alive = (folder / "stat").read_bytes().rpartition(b")")[2].split()[0] != b"Z"
            if alive and f"MARK={mark}\0".encode() in (folder / "environ").read_bytes():
                results[int(folder.name)] = (folder / "cmdline").read_bytes().decode()
        except OSError:
            pass
    return results


def wait_until(true):
    until = time.monotonic() + 300
    while not true():
        assert time.monotonic() < until
        time.sleep(0.05)


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGKILL])
def test_no_process_outlives_the_command(number, tmp_path):
    mark = str(tmp_path)
    environment = os.environ | {"MARK": mark, "TMPDIR": mark}
    listens = lambda: signal.signal(number, signal.SIG_DFL) if number != signal.SIGKILL else None  # noqa: E731
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    process = subprocess.Popen(COMMAND, env=environment, preexec_fn=listens, **quiet)
    # the guard, and the process that imports what ranks need
    wait_until(lambda: sum("aligner.rehearse.rank" in line for line in started(mark).values()) >= 2)
    process.send_signal(number)
    assert process.wait(300) in (-number, 128 + number)
    wait_until(lambda: not started(mark))
    if number != signal.SIGKILL:
        assert not list(tmp_path.iterdir())  # its temporary folder


# the loop of a rehearsal's processes around ranks that end themselves
ENDS = """
import json, os, sys
from aligner.rehearse import forks
forks.fork(json.load(open(sys.argv[1]))["cases"], 1, lambda case: os.kill(os.getpid(), case["signal"]))
"""


def test_a_rank_that_aborts_is_a_fault_and_one_that_was_killed_is_not(tmp_path, monkeypatch):
    numbers = {1: signal.SIGABRT, 3: signal.SIGKILL}
    outs = {rank: tmp_path / f"rank-{rank}.json" for rank in numbers}
    for rank in numbers:
        (tmp_path / f"rank-{rank}.log").touch()
    (tmp_path / "ends.py").write_text(ENDS)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setattr(command, "PROGRAM", "ends")
    with pytest.raises(command.RehearsalError, match=r"without a result: the process of rank 3 was killed: Linux .*"):
        cases = [{"rank": rank, "out": str(outs[rank]), "signal": number} for rank, number in numbers.items()]
        command.run(cases, "h100", tmp_path)
    (error,) = json.loads(outs[1].read_text())["errors"]
    assert "the process ended with -6" in error["text"] and not outs[3].exists()


# ranks that write down their start, of which only rank 0 ends while there is little memory
SHORT = """
import json, os, sys, time
from pathlib import Path
from aligner.rehearse import forks
folder, cases = Path(sys.argv[1]).parent, json.load(open(sys.argv[1]))["cases"]
forks.free_bytes = lambda: (0 if Path(cases[1]["out"] + ".begun").exists() and not ended(0) else 1 << 40)
ended = lambda rank: Path(cases[rank]["out"]).exists()
taken_back = lambda out: Path(out + ".begun").exists() and not Path(out).with_suffix(".run").exists()
def work(case):
    out, rank = Path(case["out"]), case["rank"]
    out.with_suffix(".run").mkdir()
    out.with_suffix(forks.SUFFIX).open("a").write("spoken ")
    with open(str(out) + ".begun", "a") as file:
        print(rank, file=file)
    while not (ended(0) if rank else taken_back(cases[1]["out"])):
        time.sleep(0.01)
    out.write_text(json.dumps({"rank": rank}))
    os._exit(0)
forks.fork(cases, 3, work)
"""


def test_where_memory_is_short_the_last_rank_is_ended_and_begins_again(tmp_path, monkeypatch):
    (tmp_path / "short.py").write_text(SHORT)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setattr(command, "PROGRAM", "short")
    cases = [{"rank": rank, "out": str(tmp_path / f"rank-{rank}.json")} for rank in range(3)]
    assert [record["rank"] for record in command.run(cases, "h100", tmp_path)] == [0, 1, 2]
    starts = [Path(f"{case['out']}.begun").read_text().split() for case in cases]
    assert starts[0] == ["0"] and starts[1] == ["1"] * 2  # the first one went on
    for case in cases:  # nothing is left of what was ended
        assert Path(case["out"]).with_suffix(".spoken").read_text() == "spoken "


class Stream(io.StringIO):
    def __init__(self, terminal):
        super().__init__()
        self.isatty = lambda: terminal


def test_a_terminal_has_one_line_with_phase_rank_and_time():
    now = [100.0]
    stream = Stream(True)
    progress = Progress(2, stream, lambda: now[0])
    progress.event({"rank": 8, "phase": "refit"})
    now[0] += 3
    progress.event({"rank": 8, "phase": "update"})
    now[0] += 61
    progress.tick()
    assert stream.getvalue() == "\r\x1b[Krehearsing, 64 s, 0 of 2 ranks done; rank 8: update, 61 s"
    progress.event({"rank": 8, "ended": True})
    assert stream.getvalue().endswith("\r\x1b[Krank 8 rehearsed (1 of 2)\n") and "rank 8:" not in progress.line()


def test_a_log_has_no_control_characters_and_few_lines():
    now = [0.0]
    stream = Stream(False)
    progress = Progress(1, stream, lambda: now[0])
    progress.event({"rank": 0, "phase": "build"})
    for _ in range(100):
        now[0] += 1
        progress.tick()
    lines = stream.getvalue().splitlines()
    assert len(lines) == 3 and all("rank 0: build" in line and line.isprintable() for line in lines)


def test_events_that_come_in_pieces_are_whole():
    reading, writing = os.pipe()
    text = "".join(json.dumps({"rank": rank, "ended": True}) + "\n" for rank in range(3)).encode()
    stream = Stream(False)
    pid = os.fork()
    if not pid:
        for start in range(0, len(text), 7):
            os.write(writing, text[start : start + 7])
            time.sleep(0.001)
        os._exit(0)
    os.close(writing)
    follow(reading, Progress(3, stream))
    os.close(reading)
    os.waitpid(pid, 0)
    assert stream.getvalue().splitlines() == [f"rank {i} rehearsed ({i + 1} of 3)" for i in range(3)]
