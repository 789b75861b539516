"""A real Slurm for the tests of this folder: slurm/localslurm, or a skip that says what is missing."""

from __future__ import annotations

import os
import re
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.needs import lacking

ROOT = Path(__file__).parents[2]
STAND_IN = ROOT / "tests/launchers/stand_in.sh"
LOCALSLURM = str(ROOT / "slurm/localslurm")
PACKAGES = "slurmctld slurmd slurm-client munge libpmix2 openmpi-bin"
NODES = 5
OURS = ("SLURM_", "SBATCH_", "ALIGNER_", "PMIX_", "PMI_", "OMPI_", "RANK", "WORLD_SIZE", "LOCAL_", "MASTER_")


def free_ports(count: int) -> int:
    """The first of `count` ports in a row that nothing listens at."""
    for first in range(16800 + os.getpid() % 1000, 19900, count):
        sockets = [socket.socket() for _ in range(count)]
        try:
            for number, probe in enumerate(sockets):
                probe.bind(("127.0.0.1", first + number))
            return first
        except OSError:
            continue
        finally:
            for probe in sockets:
                probe.close()
    raise AssertionError("no free ports")


class Cluster:
    def __init__(self, root: Path):
        self.root = root
        clean = {k: v for k, v in os.environ.items() if not k.startswith(OURS)}
        self.environ = clean | {
            "LOCALSLURM_ROOT": str(root),
            "SLURM_CONF": str(root / "etc/slurm.conf"),
            "ALIGNER_SITE": "localslurm",
            "PYTHONPATH": str(ROOT),
            "REAL_PYTHON": sys.executable,
            "PATH": f"{os.environ['PATH']}:/usr/sbin:/sbin",
            "OMP_NUM_THREADS": "1",
        }

    def run(self, *command: object, check: bool = True, cwd: Path | None = None, **environ: str) -> str:
        """Output of a command on the "login node"."""
        done = subprocess.run(
            [str(word) for word in command],
            env=self.environ | environ,
            cwd=cwd,
            capture_output=True,
            text=True,
            timeout=900,
        )
        assert not check or done.returncode == 0, f"{command}: {done.returncode}\n{done.stdout}{done.stderr}"
        return done.stdout if check else done.stdout + done.stderr

    def aligner(self, *arguments: object, cwd: Path | None = None, **environ: str) -> str:
        environ.setdefault("ALIGNER_PYTHON", str(STAND_IN))
        return self.run(sys.executable, "-m", "aligner", *arguments, cwd=cwd, **environ).strip()

    def state(self, job: str) -> str:
        """RUNNING, PENDING, COMPLETED, FAILED, CANCELLED, ...; the worst of an array's tasks."""
        out = self.run("scontrol", "show", "job", "-o", job, check=False)
        states = {word.partition("=")[2] for word in out.split() if word.startswith("JobState=")}
        return sorted(states, key=lambda s: (s == "COMPLETED", s))[0] if states else "GONE"

    def be(self, **settings: int) -> None:
        """Change what slurm.conf says."""
        conf = self.root / "etc/slurm.conf"
        text = conf.read_text()
        for name, value in settings.items():
            text, match = re.subn(rf"\b{name}=\d+", f"{name}={value}", text)
            assert match, name
        conf.write_text(text)
        self.run("scontrol", "reconfigure")

    def ended(self, job: str, timeout_s: float = 900) -> str:
        """Waits for a job's end; returns its state."""
        live = {"PENDING", "RUNNING", "COMPLETING", "CONFIGURING", "REQUEUED"}
        self.until(lambda: self.state(job) not in live, f"job {job} to end", timeout_s)
        return self.state(job)

    def until(self, condition: Callable[[], object], what: str, timeout_s: float = 900) -> None:
        deadline = time.monotonic() + timeout_s
        while not condition():
            if time.monotonic() > deadline:
                queue = self.run("squeue", check=False) + self.run("sinfo", "-N", "-l", check=False)
                raise AssertionError(f"waited {timeout_s:.0f} s for {what}\n{queue}")
            time.sleep(0.3)


@pytest.fixture(scope="session")
def cluster(tmp_path_factory):
    path = f"{os.environ['PATH']}:/usr/sbin:/sbin"
    missing = [name for name in ("slurmctld", "slurmd", "sbatch", "munged") if not shutil.which(name, path=path)]
    if missing:
        lacking(f"no Slurm ({', '.join(missing)}): apt-get install {PACKAGES}")
    actual = Cluster(tmp_path_factory.mktemp("slurm") / "cluster")
    options = ["--nodes", NODES, "--port", free_ports(NODES + 1)]
    try:
        actual.run(LOCALSLURM, "up", *options)
        actual.be(SlurmdTimeout=300, DefaultTime=600)  # who is late is not dead, and no job's time is over
        yield actual
    finally:
        actual.run(LOCALSLURM, "down", check=False)
        assert not actual.root.exists()


@pytest.fixture(scope="session")
def mpi(cluster):
    """Skips where srun cannot start Open MPI's ranks, or mpi4py cannot load it."""
    if not shutil.which("mpirun"):
        lacking("no MPI library: apt-get install openmpi-bin libpmix2")
    code = "from mpi4py import MPI; print(MPI.COMM_WORLD.Get_size())"
    out = cluster.run("srun", "--mpi=pmix", "-n2", sys.executable, "-c", code, check=False, MPI4PY_MPIABI="openmpi")
    if out.split() != ["2", "2"]:
        lacking(f"srun --mpi=pmix with mpi4py does not work here: {out[-300:]}")
    return cluster
