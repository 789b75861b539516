"""The node's memory, by files as Linux and Slurm make them."""

from pathlib import Path

import pytest

from aligner.cluster import node_memory

JOB = "/system.slice/slurmstepd.scope/job_7"


@pytest.mark.parametrize(
    ("groups", "files", "wanted"),
    [
        (f"0::{JOB}/step_0/user/task_0", {f"{JOB}/memory.max": "268435456\n", f"{JOB}/step_0/memory.max": "max"}, 28),
        (f"0::{JOB}/step_0", {f"{JOB}/memory.max": "max\n"}, 0),
        ("0::/", {"/memory.max": f"{1 << 27}"}, 27),  # within a container
        ("0::/docker/of-the-host", {"/memory.max": f"{1 << 62}"}, 0),
        ("9:pids:/\n4:memory:/slurm/u5/job_7\n0::/", {"/memory/slurm/u5/memory.limit_in_bytes": f"{1 << 29}"}, 29),
        ("4:cpuset:/a\n", {"/memory/a/memory.limit_in_bytes": "4096"}, 0),
    ],
)
def test_a_job_has_the_least_limit_of_its_groups(groups, files, wanted, tmp_path, monkeypatch):
    whole = node_memory.node_bytes()
    (tmp_path / "cgroup").write_text(groups)
    for name, text in files.items():
        file = Path(f"{tmp_path}/root{name}")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    monkeypatch.setattr(node_memory, "GROUPS", tmp_path / "cgroup")
    monkeypatch.setattr(node_memory, "ROOT", tmp_path / "root")
    assert node_memory.node_bytes() == (1 << wanted if wanted else whole) and whole >= 1 << 29
