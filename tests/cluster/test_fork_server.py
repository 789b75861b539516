"""Processes that are forked from one with imports: the same as others, with what it has imported."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from aligner.cluster import fork_server
from aligner.cluster.launch import launch

ROOT = Path(__file__).parents[2]
LONG_S = 600  # what nobody waits for
COUNTED = "import os\nopen({0!r}, 'a').write(f'{{os.getpid()}} ')\n"


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """One for modules, of which `counted` writes down each process that imports it."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), str(ROOT)]))
    (tmp_path / "counted.py").write_text(COUNTED.format(str(tmp_path / "imported")))
    return tmp_path


def run(folder: Path, code: str, ranks: int = 3, imports: tuple[str, ...] = ("counted",), **options) -> int:
    (folder / "ranks_code.py").write_text(f"import json, os, sys, time\nrank = os.environ['RANK']\n{code}")
    command = [sys.executable, "-m", "ranks_code", "an argument"]
    return launch(folder / "config.yaml", ranks, folder, argv=command, imports=imports, **options)


def imported(folder: Path) -> list[str]:
    return (folder / "imported").read_text().split()


TELL = """import counted
with open(f'told-{rank}', 'w') as file:
    omp = os.environ['OMP_NUM_THREADS']
    json.dump([__name__, sys.argv[1:], omp, os.getpid(), os.getpgrp(), os.getppid()], file)
"""


def test_ranks_find_what_was_imported_once_and_are_the_command(folder, monkeypatch):
    monkeypatch.chdir(folder)
    assert run(folder, TELL, threads=3) == 0
    content = [json.loads((folder / f"told-{rank}").read_text()) for rank in range(3)]
    assert len(imported(folder)) == 1
    for name, arguments, threads, pid, group, parent in content:
        assert (name, arguments) == ("__main__", ["an argument"])
        assert threads == "1"  # as `reserve` leaves it to children of a rank
        assert group == pid and parent == os.getpid()
    assert len({pid for *_, pid, _, _ in content} | set(imported(folder))) == 4


def test_with_a_thread_each_rank_imports_for_itself(folder, monkeypatch, capfd):
    monkeypatch.chdir(folder)
    with (folder / "counted.py").open("a") as file:
        file.write("import threading\nthreading.Thread(target=threading.Event().wait, daemon=True).start()\n")
    assert run(folder, TELL, threads=3) == 0
    content = [json.loads((folder / f"told-{rank}").read_text()) for rank in range(3)]
    assert len(imported(folder)) == 4
    assert {parent for *_, parent in content} == {os.getpid()}
    assert "fork() may lead to deadlocks" not in capfd.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("raised", ["ImportError('a library is missing')", "SystemExit('a library is missing')"])
def test_ranks_tell_what_an_import_raises(folder, capfd, raised):
    (folder / "broken.py").write_text(f"raise {raised}")
    assert run(folder, "if rank == '1': import broken\ntime.sleep(600)", imports=("counted", "broken")) == 1
    err = capfd.readouterr().err
    assert "rank 1 of 3 failed first (exit code 1)" in err and "a library is missing" in err
    assert run(folder, "import counted", imports=("counted", "broken")) == 0
    assert len(imported(folder)) == 1 + 1 + 3


def test_where_no_more_processes_may_be_made_no_rank_stays_and_the_cause_is_reported(folder, capfd):
    code = "import os\nfork, left = os.fork, [3]\ndef few():\n  left[0] -= 1\n  return fork() if left[0] else 1 / 0\n"
    (folder / "few.py").write_text(code + "os.fork = few")
    parent = "from pathlib import Path\nfrom aligner.cluster.launch import launch\nimport sys\n"
    parent += f"command = [sys.executable, '-m', 'ranks_code', {str(folder)!r}]\n"
    parent += f"sys.exit(launch(Path('x'), 2, Path({str(folder)!r}), argv=command, imports=['few']))"
    (folder / "ranks_code.py").write_text(
        COUNTED.format(str(folder / "imported")) + f"import time\ntime.sleep({LONG_S})"
    )
    assert subprocess.run([sys.executable, "-c", parent], timeout=LONG_S / 2).returncode == 1
    assert "ZeroDivisionError" in capfd.readouterr().err
    while (folder / "imported").exists() and any(alive(int(pid)) for pid in imported(folder)):
        time.sleep(0.02)


def test_a_child_whose_end_a_signals_handler_finds_first(monkeypatch):
    process = subprocess.Popen([sys.executable, "-S", "-c", "raise SystemExit(7)"])
    child, wait = fork_server.Child(process.pid), os.waitid

    def interrupted(*arguments):
        actual = wait(*arguments)
        monkeypatch.undo()
        child.terminate()
        assert child.returncode == 7
        return actual

    monkeypatch.setattr(os, "waitid", interrupted)
    assert child.wait() == 7
    process.returncode = 7  # nothing is left for it to wait for


def test_random_numbers_of_ranks_differ(folder, monkeypatch):
    monkeypatch.chdir(folder)
    code = "import random, numpy\nfrom aligner.rewards.client import _jitter\n"
    code += "drawn = [random.random(), numpy.random.rand(), _jitter.random()]\n"
    code += "open(f'told-{rank}', 'w').write(' '.join(map(str, drawn)))"
    assert run(folder, code, imports=("numpy.random", "random", "aligner.rewards.client")) == 0
    drawn = [(folder / f"told-{rank}").read_text().split() for rank in range(3)]
    assert all(len(set(numbers)) == 3 for numbers in zip(*drawn, strict=True))


def test_one_that_is_kept_serves_several_launches(folder, monkeypatch):
    monkeypatch.chdir(folder)
    with fork_server.kept(("counted",), dict(os.environ), ()):
        for _ in range(2):
            assert run(folder, "import counted", imports=("json",)) == 0
        assert run(folder, "sys.exit(7 if rank == '1' else 0)") == 7
        assert run(folder, "import counted") == 0
    assert len(imported(folder)) == 1


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.parametrize("when", ["importing", "running"])
def test_nothing_outlives_a_launcher_that_is_killed(folder, when):
    waits = f"import time\ntime.sleep({LONG_S})\n"
    with (folder / "counted.py").open("a") as file:
        file.write(waits if when == "importing" else "")
    (folder / "ranks_code.py").write_text(COUNTED.format(str(folder / "imported")) + waits)
    parent = "from pathlib import Path\nfrom aligner.cluster.launch import launch\nimport sys\n"
    parent += "command = [sys.executable, '-m', 'ranks_code']\n"
    parent += f"launch(Path('x'), 2, Path({str(folder)!r}), argv=command, imports=['counted'])"
    process = subprocess.Popen([sys.executable, "-c", parent])
    expected = 1 if when == "importing" else 3
    while not (folder / "imported").exists() or len(imported(folder)) < expected:
        assert process.poll() is None
        time.sleep(0.02)
    process.kill()
    process.wait()
    while any(alive(int(pid)) for pid in imported(folder)):
        time.sleep(0.02)


def test_ctrl_c_while_it_imports_waits_for_ranks_and_the_second_does_not(folder):
    with (folder / "counted.py").open("a") as file:
        file.write(f"import time\nwhile not os.path.exists({str(folder / 'go')!r}):\n  time.sleep(0.01)\n")
    (folder / "ranks_code.py").write_text("import time\ntime.sleep(600)")
    parent = "from pathlib import Path\nfrom aligner.cluster.launch import launch\nimport sys\n"
    parent += "command = [sys.executable, '-m', 'ranks_code']\n"
    parent += f"sys.exit(launch(Path('x'), 2, Path({str(folder)!r}), argv=command, imports=['counted']))"
    for second in (False, True):
        (folder / "imported").unlink(missing_ok=True)
        (folder / "go").unlink(missing_ok=True)
        process = subprocess.Popen([sys.executable, "-c", parent], stderr=subprocess.PIPE, text=True)
        while not (folder / "imported").exists() or not imported(folder):
            assert process.poll() is None
            time.sleep(0.02)
        process.send_signal(signal.SIGINT)
        assert any("a second one ends it at once" in line for line in process.stderr)
        assert alive(int(imported(folder)[0]))
        if second:
            process.send_signal(signal.SIGINT)
        else:
            (folder / "go").touch()
        process.communicate(timeout=LONG_S / 2)
        assert process.returncode != 0 if second else process.returncode == 130


@pytest.mark.slow
@pytest.mark.skipif(os.path.exists("/dev/nvidiactl"), reason="with a GPU ranks start each for itself")
def test_what_stages_import_starts_no_thread_and_no_cuda():
    code = "from aligner.cluster.fork_server import _ready\nfrom aligner.config.resolve import compose\n"
    code += "from aligner.run.launched import imports\nfrom aligner.config.stages import STAGES\n"
    code += "given = {name: imports(compose([f'stage={name}', 'data.train=x'])) for name in STAGES}\n"
    code += "names = {module for modules in given.values() for module in modules}\n"
    code += "assert len(names) == len(STAGES) + 7, names\nassert _ready(sorted(names))"
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
