"""Cores of the main thread and of the others, each case in a process of its own."""

import json
import os
import platform
import subprocess
import sys
from typing import Any

import pytest

from aligner.cluster import threads

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
SEEN = """
import json, os, threading
from aligner.cluster import threads
{before}
import torch, torch.distributed as dist
threads.use({wanted}, {ranks})
other = []
thread = threading.Thread(target=lambda: other.append(torch.get_num_threads()))
thread.start(), thread.join()
while os.path.exists(f"/proc/self/task/{{thread.native_id}}"):
    pass
dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
count = lambda: len(os.listdir("/proc/self/task"))
torch.ones(1 << 20).mul(2)  # the main thread's team
dist.all_reduce(torch.ones(8))
started, gathered = count(), torch.zeros(1 << 20)
for _ in range(8):  # each of gloo's threads gets some; what is gathered together is copied there
    with dist._coalescing_manager(async_ops=True) as work:
        dist.all_gather_into_tensor(gathered, torch.ones(1 << 20))
    work.wait()
assert gathered.all()
print(json.dumps([torch.get_num_threads(), other[0], count() - started, os.environ.get("OMP_NUM_THREADS")]))
"""


def seen(wanted: int = 0, ranks: int = 1, before: str = "threads.reserve()", threads: str | None = None) -> list:
    """Threads of the main thread, of another, teams that gloo's threads made, and what children will find."""
    environment = {name: text for name, text in os.environ.items() if name != "OMP_NUM_THREADS"} | {"PYTHONPATH": ROOT}
    environment["GOMP_SPINCOUNT"] = "0"  # by itself a second team comes and goes with what else runs (`_watch`)
    if threads:
        environment["OMP_NUM_THREADS"] = threads
    code = SEEN.format(before=before, wanted=wanted, ranks=ranks)
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.slow
def test_only_the_main_thread_has_a_team():
    assert seen(wanted=3) == [3, 1, 0, "1"]


@pytest.mark.slow
def test_torch_alone_gives_every_thread_a_team():
    """What `reserve` is for: without it the threads of gloo make teams, and ours still has its number."""
    main, other, teams, _ = seen(wanted=3, before="")
    assert (main, other) == (3, 3) and teams >= 2


def reported(code: str, **settings: str) -> Any:
    """The JSON that it prints in a process whose waiting nothing decides but the package and `settings`."""
    unset = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")
    environment = (
        {name: text for name, text in os.environ.items() if name not in unset} | {"PYTHONPATH": ROOT} | settings
    )
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


SPINS = """
import os, time
from aligner.cluster import threads
threads.reserve()
import torch
threads.use(2, 1)
os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})  # two threads take turns, as beside another program
x, start = torch.ones(1 << 17), time.process_time()
for _ in range(60):
    x.mul_(1.0)
print(time.process_time() - start)
"""


@pytest.mark.slow
@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="libgomp spins less where it finds one core")
def test_waiting_takes_no_core_from_whom_it_waits_for():
    ours, libgomps = reported(SPINS), reported(SPINS, GOMP_SPINCOUNT="300000")
    assert ours * 3 < libgomps, (ours, libgomps)


BESIDE = """
import json, os, threading, time
from pathlib import Path
from aligner.cluster import threads
os.nice(1)
threads.reserve()
import torch
threads.use(2, 1)
x = torch.ones(1 << 17)

def slices():
    lines = [line for file in Path("/proc/self/task").glob("*/sched") for line in file.read_text().splitlines()]
    return sorted({int(line.split(":")[1]) for line in lines if line.startswith("se.slice ")})

cores, tasks = os.sched_getaffinity(0), lambda: len(os.listdir("/proc/self/task"))
second = lambda: any(thread.name == "one too many" for thread in threading.enumerate())

def until(done, on):
    for task in os.listdir("/proc/self/task"):
        os.sched_setaffinity(int(task), on)
    end = time.monotonic() + 300
    while time.monotonic() < end and not done():
        x.mul_(1.0)

until(second if {watched} else lambda: True, {min(cores)})
start = time.process_time()
for _ in range(2000):
    x.mul_(1.0)
used, most, turns = time.process_time() - start, tasks(), slices()
threads._turns = lambda: {0: (time.monotonic_ns(), 0)}  # it had all that it wanted, whatever else the machine does
until(lambda: not second() and tasks() <= most - 2 * {watched}, cores)
nice = {os.getpriority(os.PRIO_PROCESS, int(task)) for task in os.listdir("/proc/self/task")}
print(json.dumps([used, most - tasks(), turns, slices(), nice == {os.nice(0)}]))
"""


@pytest.mark.slow
@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="libgomp spins less where it finds one core")
def test_a_team_that_waits_for_cores_sleeps_and_one_that_has_them_spins_again():
    """One core for both threads, as another program's turns would leave them, and then as many as they want."""
    sleeping, ended, short, usual, same = reported(BESIDE.replace("{watched}", "True"))
    spinning, none, *alike, _ = reported(BESIDE.replace("{watched}", "False"), GOMP_SPINCOUNT="5001")
    assert ended >= 2 and none == 0  # the second team's two threads
    assert sleeping * 1.5 < spinning, (sleeping, spinning)
    assert same and alike == [usual, usual]
    if usual and tuple(int(n) for n in platform.release().split(".")[:2]) >= (6, 12):
        assert short == [threads.SHORT_NS]


TWO = """
import json, os, subprocess, sys, threading, time
from contextlib import suppress
from aligner.cluster import threads
cores = set(sorted(os.sched_getaffinity(0))[:2])
os.sched_setaffinity(0, cores)
threads.reserve()
import torch
threads.use({team}, 1)
x, main, tasks = torch.ones(1 << 17), threading.get_native_id(), lambda: map(int, os.listdir("/proc/self/task"))

def bound():
    found = set()
    for task in tasks():
        with suppress(OSError):  # it has just ended
            found.add(tuple(os.sched_getaffinity(task)))
    return {on == (threads._core(main),) for on in found if len(on) == 1}

def until(done, limit_s):
    end = time.monotonic() + limit_s
    while time.monotonic() < end:
        if done():
            return True
        for _ in range(200):
            x.mul_(1.0)
    return False

others = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(4)]
followed = until(lambda: bound() == {True}, {limit_s})
main_is_free = os.sched_getaffinity(main) == cores
for other in others:
    other.kill()
threads._idle_s = lambda thread: time.monotonic()  # one core has nothing to do, whatever else the machine does
print(json.dumps([followed, main_is_free, until(lambda: not bound(), 600)]))
"""


@pytest.mark.slow
@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="a team needs two cores")
def test_a_team_of_two_shares_a_core_while_others_want_both():
    def shares(team: int, limit_s: float) -> list:
        return reported(TWO.replace("{team}", str(team)).replace("{limit_s}", str(limit_s)))

    assert shares(2, 600) == [True, True, True]
    assert shares(3, 5) == [False, True, True]  # whose cores are not as many


@pytest.mark.slow
def test_the_environment_and_then_the_cores_decide():
    cores = len(os.sched_getaffinity(0))
    assert seen(threads="3")[:2] == [3, 1]
    assert seen(threads="3,2")[:2] == [3, 1]
    assert seen(threads="3", wanted=2)[:2] == [2, 1]
    assert seen()[:2] == [cores, 1]
    assert seen(ranks=cores)[0] == 1
    assert seen(ranks=1000)[0] == 1


@pytest.mark.slow
@pytest.mark.parametrize("threads", [None, "1"])
def test_too_late_for_torch_changes_nothing_but_the_number(threads):
    main, other, _, told = seen(before="import torch; threads.reserve()", threads=threads)
    assert main == other == (1 if threads else len(os.sched_getaffinity(0))) and told == threads


@pytest.mark.parametrize("command", ["run", "eval", "chat", "serve"])
def test_what_computes_reserves_before_torch_is_imported(tmp_path, command):
    """Nothing that composes and validates a config imports torch: it would be too late then."""
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"prompt": "a", "completion": "b"}\n')
    code = (
        "import sys\nfrom aligner.cluster import threads\nfrom aligner.__main__ import main\n"
        "threads.reserve = lambda: sys.exit(7 if 'torch' in sys.modules else 6)\n"
        f"main(['{command}', 'stage=sft', 'data.train={rows}', 'run.dir={tmp_path}/run'])"
    )
    done = subprocess.run([sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": ROOT}, capture_output=True)
    assert done.returncode == 6, done.stderr.decode()
