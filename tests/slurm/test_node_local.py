"""Copies on the nodes that ranks import from: a real Slurm, a real but small virtual environment, and the real command
line, which counts the files that it opens and ends where training would begin."""

import json
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from tests.slurm.test_slurm import log

pytestmark = [pytest.mark.slurm, pytest.mark.slow, pytest.mark.timeout(3600)]
ROOT = Path(__file__).parents[2]
PACKAGES = ("yaml", "omegaconf", "hydra", "antlr4", "packaging")
COUNTS = """
import json, os, subprocess, sys, types
from pathlib import Path
opened = []

def run_stage(cfg, env, signals):
    told = {"opened": opened, "modules": [getattr(m, "__file__", None) or "" for m in list(sys.modules.values())]}
    code = "import sys; print(sys.path[0])"
    told["beside"] = subprocess.check_output([sys.executable, "-c", code], text=True).split()
    Path(cfg.run.dir, f"opened.{env.rank}").write_text(json.dumps(told))
    if env.rank == 0:
        Path(cfg.run.dir, "DONE").touch()
    return 0

if "run" in sys.orig_argv:
    sys.addaudithook(lambda event, told: opened.append(os.path.abspath(str(told[0]))) if event == "open" else None)
    sys.modules["aligner.builders.stage"] = types.ModuleType("aligner.builders.stage")
    sys.modules["aligner.builders.stage"].run_stage = run_stage
"""


@pytest.fixture(scope="module")
def shared(tmp_path_factory):
    """The virtual environment that all nodes see."""
    folder = tmp_path_factory.mktemp("shared") / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    (packages,) = folder.glob("lib/python*/site-packages")
    for name in PACKAGES:
        shutil.copytree(Path(sysconfig.get_path("platlib")) / name, packages / name)
    for about in Path(sysconfig.get_path("platlib")).glob("*.dist-info"):  # `submit` asks for what setup.py names
        (packages / about.name).mkdir()
        shutil.copy(about / "METADATA", packages / about.name)
    (packages / "sitecustomize.py").write_text(COUNTS)
    return folder


def started(cluster, shared: Path, folder: Path, name: str) -> list[dict[str, list[str]]]:
    """What each of the four ranks of a job on two nodes opened."""
    site = (ROOT / "slurm/sites/localslurm.yaml").read_text().replace("mpi: pmix", "mpi: none")
    (folder / "site.yaml").write_text(site + f"node_local: {folder}/local\n")
    (folder / "train.jsonl").write_text("{}\n")
    job = cluster.aligner(
        *["submit", "--parsable", "--site", "site.yaml", "--nodes", "2", "--ranks-per-node", "2"],
        *["stage=sft", "data.train=train.jsonl", f"run.dir=runs/{name}"],
        cwd=folder,
        ALIGNER_PYTHON=str(shared / "bin/python"),
    )
    run = folder / "runs" / name
    assert cluster.ended(job) == "COMPLETED", log(run)
    return [json.loads((run / f"opened.{rank}").read_text()) for rank in range(4)]


def test_no_rank_opens_a_file_of_the_shared_folders(cluster, shared, tmp_path):
    ranks = started(cluster, shared, tmp_path, "first")
    of = {kind: [path for result in ranks for path in result[kind]] for kind in ("opened", "modules")}
    for paths in of.values():
        assert not [path for path in paths if path.startswith((f"{shared}/", f"{ROOT}/"))]
        assert sum(path.startswith(f"{tmp_path}/local/") for path in paths) > 4 * 50
    assert {tuple(result["beside"]) for result in ranks} == {
        ()
    }  # what ranks start finds modules beside itself, as ever
    assert "copying" in log(tmp_path / "runs/first")
    copies = sorted(path.name for path in (tmp_path / "local").iterdir())
    assert len(copies) == 2 and not any("." in name for name in copies)  # no archive, nothing half unpacked

    (shared / "lib/__pycache__").mkdir()  # which changes the time of the folder
    started(cluster, shared, tmp_path, "second")
    assert "copying" not in log(tmp_path / "runs/second")
    (shared / "new").write_text("")
    started(cluster, shared, tmp_path, "third")
    result = log(tmp_path / "runs/third")
    assert result.count("copying") == 1 and f"copying {shared} to" in result
    assert (tmp_path / "local" / copies[0]).is_dir() and len(list((tmp_path / "local").iterdir())) == 3
