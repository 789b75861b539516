"""Local ranks, with small Python children in place of training."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from aligner.cluster.launch import _Rank, _watch, launch
from aligner.errors import ConfigError

NUMBERS = ["RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "OMP_NUM_THREADS"]


ROOT = Path(__file__).parents[2]
LONG_S = 600  # what nobody waits for
HEAD = """
import json, os, signal, sys, time
rank, place = int(os.environ["RANK"]), os.path.dirname(os.environ["ALIGNER_FAILURE_FILE"])
os.symlink(str(os.getpid()), f"{place}/pid-{rank}")
def until(number, states):  # R or S: it runs, T: it is stopped, Z: it has ended, -: and the launcher has seen that
    while not os.path.islink(f"{place}/pid-{number}"):
        time.sleep(0.01)
    state, path = "", f"/proc/{os.readlink(f'{place}/pid-{number}')}/stat"
    while not state or state not in states:
        time.sleep(0.01)
        try:
            with open(path) as file:
                state = file.read().rpartition(")")[2].split()[0]
        except OSError:
            state = "-"
"""


# how ranks start: each for itself, or forked from one process that has imported something
both = pytest.mark.parametrize("imports", [(), ("json",)], ids=["apart", "forked"])


def child(code: str, imports: Sequence[str], folder: Path) -> list[str]:
    if not imports:
        return [sys.executable, "-S", "-c", HEAD + code]
    (folder / "ranks_code.py").write_text(HEAD + code)
    return [sys.executable, "-m", "ranks_code"]


def run(code: str, ranks: int, folder: Path, imports: Sequence[str] = (), **options) -> int:
    with pytest.MonkeyPatch.context() as patch:
        if imports:
            folder.mkdir(exist_ok=True)
            patch.setenv("PYTHONPATH", os.pathsep.join([str(folder), str(ROOT), *sys.path]))
        command = child(code, imports, folder)
        return launch(folder / "config.yaml", ranks, folder, argv=command, imports=imports, **options)


@both
def test_every_rank_gets_its_numbers_and_its_log(imports, tmp_path, capfd, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "99")
    code = f"print(json.dumps({{k: os.environ[k] for k in {NUMBERS!r}}}))"
    assert run(code, 3, tmp_path, imports) == 0
    out, err = capfd.readouterr()
    assert str(tmp_path / "logs") in err
    logs = sorted((tmp_path / "logs").glob("rank-*.log"))
    assert [log.name for log in logs] == ["rank-0001.log", "rank-0002.log"]
    seen = [json.loads(text) for text in (out, *(log.read_text() for log in logs))]
    assert [s["RANK"] for s in seen] == [s["LOCAL_RANK"] for s in seen] == ["0", "1", "2"]
    assert {(s["WORLD_SIZE"], s["LOCAL_WORLD_SIZE"], s["MASTER_ADDR"]) for s in seen} == {("3", "3", "127.0.0.1")}
    assert len({s["MASTER_PORT"] for s in seen}) == 1 and 1024 < int(seen[0]["MASTER_PORT"]) < 65536
    assert {int(s["OMP_NUM_THREADS"]) for s in seen} == {max(1, len(os.sched_getaffinity(0)) // 3)}


def test_threads_may_be_given(tmp_path, capfd):
    assert run("print(os.environ['OMP_NUM_THREADS'])", 1, tmp_path, threads=5) == 0
    assert capfd.readouterr().out == "5\n"


@both
def test_a_failing_rank_ends_the_others_and_is_shown(imports, tmp_path, capfd):
    code = f"if rank == 1:\n  raise ValueError('broken at step 3')\ntime.sleep({LONG_S})"
    started = time.monotonic()
    assert run(code, 3, tmp_path, imports) == 1
    assert time.monotonic() - started < LONG_S
    err = capfd.readouterr().err
    assert "rank 1 of 3 failed first (exit code 1)" in err
    assert "ValueError: broken at step 3" in err and "rank-0001.log" in err


def test_the_rank_that_raised_first_counts_not_the_one_that_exited_first(tmp_path, capfd):
    reported = tmp_path / "told"
    code = (
        "from aligner.cluster import failure\n"
        f"if rank == 2:\n  failure.record('the cause', 7)\n  open({str(reported)!r}, 'w').close()\n"
        "  time.sleep(0.3)\n  sys.exit(7)\n"
        f"while not os.path.exists({str(reported)!r}):\n  time.sleep(0.01)\n"
        "failure.record('lost connection to rank 2', 1)\nsys.exit(1)"
    )
    path = os.pathsep.join([str(Path(__file__).parents[2]), *sys.path])
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", path)
        assert run(code, 3, tmp_path) == 7
    err = capfd.readouterr().err
    assert "rank 2 of 3 failed first" in err and "| the cause" in err


def test_a_lost_connection_is_no_cause_though_told_first(tmp_path, capfd, monkeypatch):
    monkeypatch.setattr("aligner.cluster.launch.SETTLE_S", 0.1)
    monkeypatch.setattr("aligner.cluster.launch.KILL_AFTER_S", LONG_S)
    code = (
        "from aligner.cluster import failure\n"
        "if rank:\n  failure.record('RuntimeError: Connection closed by peer', 1)\n  sys.exit(1)\n"
        "until(1, '-')\ntime.sleep(0.3)\nfailure.record('error: no space left', 7)\nsys.exit(7)"
    )
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(Path(__file__).parents[2]), *sys.path]))
    assert run(code, 2, tmp_path) == 7
    last = capfd.readouterr().err.strip().splitlines()[-1]
    assert last.startswith("rank 0 of 2 failed first (") and last.endswith("): error: no space left")


@pytest.mark.slow
def test_a_long_cause_is_told_whole_a_log_from_its_end(tmp_path, capfd):
    """The stacks of many ranks are longer than the tail of a log that is shown where nothing else is known."""
    code = "from aligner.cluster import failure\nlines = '\\n'.join(f'line {n}.' for n in range(200))\n"
    code = f"{code}if rank == 1:\n  print(lines)\n  %s\n  sys.exit(7)\ntime.sleep({LONG_S})"
    assert run(code % "failure.record(lines, 7)", 2, tmp_path / "told") == 7
    err = capfd.readouterr().err
    assert all(f"| line {n}.\n" in err for n in range(200))
    assert run(code % "pass", 2, tmp_path / "silent") == 7
    err = capfd.readouterr().err
    assert "| line 199.\n" in err and "| line 100.\n" not in err


@both
def test_a_rank_that_ignores_sigterm_is_killed(imports, tmp_path, monkeypatch):
    monkeypatch.setattr("aligner.cluster.launch.KILL_AFTER_S", 0.5)
    deaf = str(tmp_path / "deaf")
    code = f"if rank == 0:\n  while not os.path.exists({deaf!r}):\n    time.sleep(0.01)\n  sys.exit(3)\n"
    code += f"signal.signal(signal.SIGTERM, signal.SIG_IGN)\nopen({deaf!r}, 'w').close()\ntime.sleep({LONG_S})"
    started = time.monotonic()
    assert run(code, 2, tmp_path, imports) == 3
    assert time.monotonic() - started < LONG_S


@both
def test_death_by_signal_is_128_plus_its_number(imports, tmp_path, capfd):
    assert (
        run(f"os.kill(os.getpid(), signal.SIGKILL) if rank == 1 else time.sleep({LONG_S})", 2, tmp_path, imports) == 137
    )
    assert "SIGKILL" in capfd.readouterr().err


@both
def test_a_killed_rank_counts_not_those_that_have_lost_it(imports, tmp_path, capfd, monkeypatch):
    code = (
        "from aligner.cluster import failure\nif rank == 1:\n  os.kill(os.getpid(), signal.SIGKILL)\n"
        "until(1, 'Z-')\nfailure.record('lost connection to rank 1', 1)\nsys.exit(1)"
    )
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(Path(__file__).parents[2]), *sys.path]))
    assert run(code, 3, tmp_path, imports) == 137
    assert "rank 1 of 3 failed first (signal SIGKILL)" in capfd.readouterr().err


class Process:
    """One that is found in these states, one after the other."""

    def __init__(self, *codes: int | None):
        self.codes, self.returncode = list(codes), None

    def poll(self) -> int | None:
        self.returncode = self.codes.pop(0) if len(self.codes) > 1 else self.codes[0]
        return self.returncode


def ranks_of(folder: Path, *processes: Process) -> list[_Rank]:
    return [_Rank(number, process, None, folder / f"{number}.json") for number, process in enumerate(processes)]


def test_a_killed_rank_counts_though_who_has_lost_it_is_seen_to_end_first(tmp_path):
    """The launcher came to look at one before, at the other after both had ended."""
    ranks = ranks_of(tmp_path, Process(None, 0), Process(None, -signal.SIGKILL), Process(1))
    assert _watch(ranks, [], (), lambda: True) is ranks[1]


@both
def test_a_request_to_stop_waits_for_a_rank_that_does_not_listen_yet(imports, tmp_path, monkeypatch):
    monkeypatch.setattr("aligner.cluster.launch.ASK_AGAIN_S", 0.2)
    up, heard, asked = tmp_path / "up", tmp_path / "heard", tmp_path / "asked"
    code = f"open({str(up)!r}, 'w').close()\nwhile not os.path.exists({str(asked)!r}):\n  time.sleep(0.01)\n"
    code += "time.sleep(0.3)\n"
    code += f"def stop(n, _):\n  signal.signal(n, signal.SIG_IGN)\n  open({str(heard)!r}, 'w').close()\n  sys.exit(0)\n"
    code += f"signal.signal(signal.SIGUSR1, stop)\ntime.sleep({LONG_S})"

    def ask() -> None:
        while not up.exists():
            time.sleep(0.02)
        os.kill(os.getpid(), signal.SIGUSR1)
        asked.touch()

    threading.Thread(target=ask, daemon=True).start()
    assert run(code, 2, tmp_path, imports) == 0 and heard.exists()


def until_up(process: subprocess.Popen, folder: Path, ranks: int) -> None:
    """The ranks of a launcher have made their files up-RANK."""
    while len(list(folder.glob("up-*"))) < ranks:
        assert process.poll() is None, process.stderr.read()
        time.sleep(0.02)


@both
@pytest.mark.parametrize(("number", "saves"), [(signal.SIGTERM, True), (signal.SIGINT, True), (signal.SIGTERM, False)])
def test_signals_reach_every_rank(imports, tmp_path, number, saves):
    handler = (
        f"def save(n, _):\n  open({str(tmp_path)!r} + f'/saved-{{rank}}-{{n}}', 'w').close()\n  sys.exit(0)\n"
        f"signal.signal({int(number)}, save)\n"
    )
    code = (handler if saves else "") + f"open({str(tmp_path)!r} + f'/up-{{rank}}', 'w').close()\ntime.sleep({LONG_S})"
    parent = "from pathlib import Path\nfrom aligner.cluster.launch import launch\nimport sys\n"
    parent += f"command = {child(code, imports, tmp_path)!r}\n"
    parent += f"sys.exit(launch(Path('x'), 2, Path({str(tmp_path)!r}), argv=command, imports={imports!r}))"
    path = os.pathsep.join([str(ROOT), str(tmp_path)])
    process = subprocess.Popen(
        [sys.executable, "-c", parent], env=os.environ | {"PYTHONPATH": path}, stderr=subprocess.PIPE, text=True
    )
    until_up(process, tmp_path, 2)
    process.send_signal(number)
    _, err = process.communicate(timeout=LONG_S / 2)
    if saves:
        assert process.returncode == 0
        assert {p.name for p in tmp_path.glob("saved-*")} == {f"saved-{rank}-{int(number)}" for rank in (0, 1)}
    else:
        assert process.returncode == 128 + number and f"stopped by {number.name}" in err


SAVES = """
def save(n, _):
  signal.signal(n, signal.SIG_IGN)
  time.sleep(0.3)
  open({0!r}, 'w').close()
  sys.exit(0)
signal.signal({1}, save)
"""


def start(code: str, ranks: int, folder: Path, imports: Sequence[str] = (), **options) -> subprocess.Popen:
    """`launch` in a process of its own that kills nobody in time, whose ranks make the files up-RANK when they are
    there."""
    code = code + f"open({str(folder)!r} + f'/up-{{rank}}', 'w').close()\ntime.sleep({LONG_S})"
    parent = "from pathlib import Path\nfrom aligner.cluster import launch as module\nimport sys\n"
    parent += f"launch, module.KILL_AFTER_S = module.launch, {LONG_S}\n"
    parent += f"proof = [Path({str(folder / 'STOPPED')!r})]\n"
    parent += f"more = dict(argv={child(code, imports, folder)!r}, imports={imports!r}, proof=proof, last=True)\n"
    parent += f"sys.exit(launch(Path('x'), {ranks}, Path({str(folder)!r}), **more))"
    command, environ = [sys.executable, "-c", parent], os.environ | {"PYTHONPATH": f"{ROOT}{os.pathsep}{folder}"}
    process = subprocess.Popen(command, env=environ, stderr=subprocess.PIPE, text=True, process_group=0, **options)
    until_up(process, folder, ranks)
    return process


@both
def test_term_is_a_request_to_ranks_of_a_run_and_may_come_often(imports, tmp_path):
    process = start(SAVES.format(str(tmp_path / "STOPPED"), int(signal.SIGTERM)), 2, tmp_path, imports)
    while process.poll() is None:  # also while the launcher ends
        process.terminate()
        time.sleep(0.01)
    assert process.returncode == 0 and (tmp_path / "STOPPED").exists(), process.stderr.read()


def test_what_nohup_ignores_stays_ignored(tmp_path):
    process = start(
        SAVES.format(str(tmp_path / "STOPPED"), int(signal.SIGTERM)),
        1,
        tmp_path,
        preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_IGN),
    )
    os.killpg(process.pid, signal.SIGHUP)
    time.sleep(0.3)
    process.terminate()
    assert process.wait(LONG_S / 2) == 0 and (tmp_path / "STOPPED").exists(), process.stderr.read()


@both
def test_the_second_ctrl_c_ends_all_at_once(imports, tmp_path):
    process = start(
        "signal.signal(signal.SIGINT, signal.SIG_IGN)\nprint(os.getpid(), flush=True)\n", 2, tmp_path, imports
    )
    process.send_signal(signal.SIGINT)
    assert any("a second one ends it at once" in line for line in process.stderr)
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=LONG_S / 2)  # not after KILL_AFTER_S
    assert process.returncode != 0


@both
@pytest.mark.parametrize(
    "rest", ["until(1, '-')\nsys.exit(0)", "until(1, '-')\nraise OSError('Connection closed by peer')"]
)
def test_a_rank_that_leaves_without_a_word_is_the_one_that_failed(imports, tmp_path, capfd, rest):
    proof = tmp_path / "DONE"
    proof.touch()  # of an earlier start
    code = f"if rank == 1:\n  os._exit(0)\n{rest}"
    assert run(code, 2, tmp_path, imports, proof=[proof]) == 1
    assert "rank 1 of 2 failed first (exit code 0): it left without DONE or STOPPED" in capfd.readouterr().err
    assert (
        run(f"open({str(proof)!r}, 'w').close() if rank == 0 else 0", 2, tmp_path / "well", imports, proof=[proof]) == 0
    )


def test_a_rank_that_says_why_it_fails_counts_before_those_that_ended_well(tmp_path, capfd, monkeypatch):
    """Late, where the others have nothing left to do and DONE is not written yet."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(Path(__file__).parents[2]), *sys.path]))
    code = "if rank == 0:\n  from aligner.cluster import failure\n  time.sleep(0.5)\n"
    code += "  failure.record('error: no space left', 7)\n  sys.exit(7)"
    assert run(code, 2, tmp_path, proof=[tmp_path / "DONE"]) == 7
    assert "rank 0 of 2 failed first (exit code 7): error: no space left" in capfd.readouterr().err


def test_no_ranks_and_unwritable_folder_are_refused(tmp_path):
    with pytest.raises(ConfigError, match="--ranks=0"):
        run("", 0, tmp_path)
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"run\.dir"):
        run("", 1, tmp_path / "file")
