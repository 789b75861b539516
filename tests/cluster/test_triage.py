"""The earliest real cause, among the consequences that every other rank reports."""

import json
import os
import subprocess
from pathlib import Path

import pytest

from aligner.cluster import triage

ROOT = Path(__file__).parents[2]
LOST = 'Traceback (most recent call last):\n  File "a.py", line 1, in f\n    dist.all_reduce(x)\n' + (
    "RuntimeError: [../gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:5"
)
BUG = 'Traceback (most recent call last):\n  File "reward.py", line 7, in score\n    1 / 0\n' + (
    "ZeroDivisionError: division by zero"
)


def log(folder, rank, text, node="n0", at=None):
    path = folder / f"rank-{rank:04d}.log"
    path.write_text(f"[rank-{rank:04d} on {node}, pid 7, 2026-01-01 00:00:00]\nstep 1\n{text}\nlater words\n")
    if at is not None:
        os.utime(path, (at, at))


def note(folder, rank, text, at, code=1):
    (folder / f"failure-{rank:04d}.json").write_text(json.dumps({"time_s": at, "text": text, "exit_code": code}))


def test_the_cause_wins_over_earlier_consequences(tmp_path):
    log(tmp_path, 0, LOST, at=10)
    log(tmp_path, 3, BUG, node="n1", at=12)
    log(tmp_path, 1, "all is well", at=14)
    text, cause = triage.explain(tmp_path)
    assert cause and text.startswith("rank 3 on n1 failed first (1 more failed after it)")
    assert "ZeroDivisionError: division by zero" in text and "later words" not in text and "rank-0003.log" in text


def test_a_ranks_note_is_more_exact_than_its_log(tmp_path):
    for rank, at in ((0, 20.0), (1, 10.0)):
        log(tmp_path, rank, "", node=f"n{rank}", at=5)
        note(tmp_path, rank, f"error (rank {rank}): reward.functions: {rank}", at)
    assert triage.explain(tmp_path)[0].startswith("rank 1 on n1 failed first")


@pytest.mark.parametrize(
    "last",
    [
        "torch.distributed.DistBackendError: NCCL error in: x.cpp:1, remote process exited",
        "RuntimeError: Timed out waiting 1800000ms for recv operation to complete",
        "torch.distributed.DistNetworkError: The client socket has timed out",
        "ConnectionResetError: [Errno 104] Connection reset by peer",
        "RuntimeError: [Rank 3] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=5)",
    ],
)
def test_only_consequences_are_no_cause(tmp_path, last):
    log(tmp_path, 2, f'Traceback (most recent call last):\n  File "x"\n{last}', node="n1")
    text, cause = triage.explain(tmp_path)
    assert not cause and "first on rank 2 (n1)" in text and last.split(":")[0] in text
    assert triage.main([str(tmp_path)]) == triage.NO_CAUSE


@pytest.mark.parametrize(
    "last",
    [
        "aligner.errors.RewardError: reward.functions[0]: timed out after 5 s",
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB",
        "OSError: [Errno 28] No space left on device",
        "KeyError: 'peer'",
    ],
)
def test_these_last_lines_are_causes(tmp_path, last):
    log(tmp_path, 2, f'Traceback (most recent call last):\n  File "x"\n{last}')
    log(tmp_path, 1, LOST, at=1)
    assert triage.explain(tmp_path) == (triage.explain(tmp_path)[0], True)
    assert last in triage.explain(tmp_path)[0]


def test_the_exit_code_is_what_the_cause_meant_and_the_cause_is_the_last_line(tmp_path, capsys):
    for rank, (text, at, code) in enumerate([(LOST, 1, 1), ("error (rank 1): optim.lr=-1", 2, 93), (BUG, 3, 1)]):
        log(tmp_path, rank, "")
        note(tmp_path, rank, text, at, code)
    assert triage.main(["--exit-code", "143", str(tmp_path)]) == 0 and capsys.readouterr().out == "93\n"
    assert triage.explain(tmp_path)[0].splitlines()[-1] == "  | error (rank 1): optim.lr=-1"
    (tmp_path / "failure-0001.json").unlink()
    (tmp_path / "failure-0002.json").unlink()
    triage.main(["--exit-code", "137", str(tmp_path)])  # a lost connection tells nothing
    assert capsys.readouterr().out == "137\n"


def test_the_one_rank_that_says_nothing_is_named(tmp_path):
    for rank, text in enumerate([LOST, "all is well", LOST]):
        log(tmp_path, rank, text)
    text, cause = triage.explain(tmp_path)
    assert not cause and text.startswith("rank 1 ended without a message")


def test_a_port_that_is_taken_is_a_cause(tmp_path):
    log(tmp_path, 0, "")
    text = "torch.distributed.DistNetworkError: The server socket has failed to listen on any local network address. "
    note(tmp_path, 0, text + "port: 25000, code: -98, name: EADDRINUSE, message: address already in use", 1)
    assert triage.explain(tmp_path)[1]


def test_what_the_batch_script_decided_is_reported(tmp_path, capsys):
    (tmp_path / "logs/9.0").mkdir(parents=True)
    log(tmp_path / "logs/9.0", 0, BUG)
    (tmp_path / "logs/refused").write_text("requeued 20 times, the limit is 20 (--max-requeues)\n")
    (tmp_path / "STOPPED").touch()
    assert triage.main([str(tmp_path)]) == 0 and "the limit is 20" in capsys.readouterr().out


@pytest.mark.parametrize(("marker", "meaning"), [("DONE", "is finished"), ("STOPPED", "can resume")])
def test_a_run_that_did_not_fail_has_no_cause(tmp_path, capsys, marker, meaning):
    (tmp_path / marker).touch()
    assert triage.main([str(tmp_path)]) == 0 and meaning in capsys.readouterr().out
    (tmp_path / "logs/9.0").mkdir(parents=True)  # of a later attempt
    log(tmp_path / "logs/9.0", 0, BUG)
    (tmp_path / "logs/9.0/started").touch()
    os.utime(tmp_path / marker, (0, 0))
    assert triage.main([str(tmp_path)]) == 0 and "rank 0" in capsys.readouterr().out
    assert triage.main([str(tmp_path / "nowhere")]) == 2
    assert "nowhere': expected the folder of a run" in capsys.readouterr().err


def test_a_killed_task_is_told_from_srun(tmp_path):
    log(tmp_path, 0, LOST)
    (tmp_path / "srun.log").write_text("srun: error: n1: task 1: Killed\nsrun: error: n0: task 0: Terminated\n")
    text, cause = triage.explain(tmp_path)
    assert not cause and text.startswith("rank 1 on n1: Killed (out of memory on that node")


def test_a_task_that_srun_killed_afterwards_is_not_the_cause(tmp_path):
    log(tmp_path, 0, "MPI says: wrong library")
    log(tmp_path, 1, "")
    (tmp_path / "srun.log").write_text(
        "srun: error: n0: tasks 0,2: Exited with exit code 1\nsrun: error: n1: task 1: Killed\n"
    )
    text, cause = triage.explain(tmp_path)
    assert cause and text.startswith("rank 0 on n0 ended first") and "| MPI says: wrong library" in text


def test_srun_counts_the_tasks_of_each_component_of_a_heterogeneous_job_by_itself(tmp_path):
    for rank, node in enumerate(("n0", "n1", "n1", "n2", "n2")):  # n0 trains, the others generate
        log(tmp_path, rank, f"the words of {rank}", node=node)
    (tmp_path / "trainers").write_text("1\n")
    answer = tmp_path / "srun.log"
    answer.write_text("srun: error: n2: task 3: Exited with exit code 1\n")
    text, cause = triage.explain(tmp_path)
    assert cause and text.startswith("rank 4 on n2 ended first") and "| the words of 4" in text
    answer.write_text("srun: error: n1: tasks 0-1: Killed\n")
    assert triage.explain(tmp_path)[0].startswith("rank 1-2 on n1: Killed")
    answer.write_text("srun: error: n0: task 0: Killed\n")
    assert triage.explain(tmp_path)[0].startswith("rank 0 on n0: Killed")


def test_of_one_component_srun_tells_ranks_also_where_one_never_began(tmp_path):
    for rank in (0, 1, 2, 4, 5, 6):  # 3 and 7 have no log
        log(tmp_path, rank, f"the words of {rank}", node=f"n{rank // 4}")
    (tmp_path / "srun.log").write_text("srun: error: n1: task 5: Exited with exit code 1\n")
    text, _ = triage.explain(tmp_path)
    assert text.startswith("rank 5 on n1 ended first") and "| the words of 5" in text
    (tmp_path / "srun.log").write_text("srun: error: n1: task 7: Killed\n")
    assert triage.explain(tmp_path)[0].startswith("rank 7 on n1: Killed")


def test_a_crash_without_python(tmp_path):
    log(tmp_path, 4, "Fatal Python error: Segmentation fault\n\nThread 0x1:")
    assert "Segmentation fault" in triage.explain(tmp_path)[0]


def test_the_command_finds_the_newest_attempt_of_a_run(tmp_path):
    for attempt, rank in (("9.0", 1), ("9.1", 2)):
        folder = tmp_path / "logs" / attempt
        folder.mkdir(parents=True)
        log(folder, rank, BUG, node="n5")
    os.utime(tmp_path / "logs/9.0", (1, 1))
    done = subprocess.run([ROOT / "slurm/triage", tmp_path], capture_output=True, text=True)
    assert done.returncode == 0 and "triage: rank 2 on n5 failed first" in done.stdout
    assert subprocess.run([ROOT / "slurm/triage"], capture_output=True).returncode == 2
    assert subprocess.run([ROOT / "slurm/triage", tmp_path / "none"], capture_output=True).returncode == 2
