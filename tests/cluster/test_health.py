"""A node that is unfit is named, with the reason; a fit one is not."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from aligner.cluster import health

ROOT = Path(__file__).parents[2]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setattr(health, "VISIBLE_WITHIN_S", 0.2)
    monkeypatch.delenv("SLURM_GPUS_ON_NODE", raising=False)
    (tmp_path / "token").write_text("1\n")
    return tmp_path


def report(folder, monkeypatch, node, **options):
    monkeypatch.setenv("SLURMD_NODENAME", node)
    return health.check(folder, **options)


def test_fit_nodes_have_no_problems(folder, monkeypatch):
    for node in ("n1", "n2", "n3"):
        assert report(folder, monkeypatch, node, min_free_bytes=1)["problems"] == []
    assert health.collect(folder, ["n1", "n2", "n3"]) == {}


def test_a_silent_node_and_a_wrong_clock(folder, monkeypatch):
    for node in ("n1", "n2", "n3"):
        report(folder, monkeypatch, node, min_free_bytes=1)
    content = json.loads((folder / "n2.json").read_text())
    (folder / "n2.json").write_text(json.dumps(content | {"time_s": content["time_s"] - 500}))
    bad = health.collect(folder, ["n1", "n2", "n3", "n4"])
    assert list(bad) == ["n2", "n4"] and "-500 s" in bad["n2"][0] and "no report" in bad["n4"][0]


def test_another_folder_and_a_full_disk(folder, monkeypatch):
    (folder / "token").unlink()
    assert "not the same folder" in report(folder, monkeypatch, "n1", min_free_bytes=1)["problems"][0]
    (folder / "token").write_text("")
    problems = report(folder, monkeypatch, "n1", min_free_bytes=1 << 62)["problems"]
    assert len(problems) == 2 and all("MiB free" in text for text in problems)


def test_a_check_that_did_not_run_blames_nobody(folder, capsys):
    assert health.collect(folder, ["n1", "n2"]) == {}
    assert health.main(["--collect", str(folder), "n1", "n2"]) == 0
    assert "did not run" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("lines", "message"),
    [("0, 0\n1, 3", "GPU 1 has 3 uncorrected"), ("0, 0", "1 GPUs, Slurm gave 2"), (None, "not answer")],
)
def test_gpu_problems_are_reported(folder, monkeypatch, lines, message):
    fake = folder / "nvidia-smi"
    fake.write_text(f"#!/bin/sh\nprintf '{lines}\\n'\n" if lines else "#!/bin/sh\nexit 9\n")
    fake.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("SLURM_GPUS_ON_NODE", "2")
    assert any(message in text for text in report(folder, monkeypatch, "n1", min_free_bytes=1)["problems"])


@pytest.mark.slow
def test_the_sum_over_all_ranks(tmp_path):
    """Two gloo ranks, as `aligner launch` numbers them."""
    from aligner.cluster.launch import launch

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(ROOT))
        command = [sys.executable, "-c", "from aligner.cluster.health import all_reduce as f; exit(f(megabytes=1))"]
        assert launch(tmp_path / "x", 2, tmp_path, argv=command) == 0
    assert "1 MB in" in (tmp_path / "logs/rank-0001.log").read_text()
    assert "0 wrong" in (tmp_path / "logs/rank-0001.log").read_text()


def test_the_command_needs_no_package(tmp_path):
    (tmp_path / "token").write_text("")
    command = [sys.executable, "-I", "-S", "-c", f"import sys; sys.path.insert(0, {str(ROOT)!r})\n"]
    command[-1] += f"from aligner.cluster import health, triage, watch\nhealth.main(['--check', {str(tmp_path)!r}])"
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def old_pythons():
    """Interpreters from 3.7 to 3.9, of a system's packages or of pyenv."""
    pyenv = Path(os.environ.get("PYENV_ROOT") or Path.home() / ".pyenv") / "versions"
    for minor in (7, 8, 9):
        program = shutil.which(f"python3.{minor}")
        for path in [*([program] if program else []), *pyenv.glob(f"3.{minor}.*/bin/python")]:
            if subprocess.run([path, "-c", ""], capture_output=True).returncode == 0:
                yield str(path)


@pytest.mark.slow
def test_the_hosts_python_may_be_old(tmp_path):
    """Ranks have theirs in a container, the batch script asks the host's."""
    python = next(old_pythons(), None)
    if python is None:
        pytest.skip("no Python from 3.7 to 3.9 here")
    (tmp_path / "n1.json").write_text(json.dumps({"time_s": 1.5, "problems": ["no GPU"]}))
    (tmp_path / "rank-0000.log").touch()
    (tmp_path / "failure-0000.json").write_text(json.dumps({"time_s": 2, "text": "error: no space", "exit_code": 9}))
    environ = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": "1"}

    def told(*arguments):
        command = [python, "-m", *arguments]
        return subprocess.run(command, env=environ, capture_output=True, text=True, check=True, cwd=tmp_path).stdout

    assert told("aligner.cluster.health", "--collect", ".", "n1") == "n1\n"
    assert told("aligner.cluster.triage", "--exit-code", "1", ".") == "9\n"
    assert "| error: no space" in told("aligner.cluster.triage", ".")
