"""`aligner submit`: what is composed, frozen, written and given to sbatch, with a stand-in for sbatch."""

import argparse
import os
from pathlib import Path
from types import SimpleNamespace

import pytest

from aligner.__main__ import main
from aligner.cluster.site import Engines, Site
from aligner.cluster.size import Size, job_size
from aligner.cluster.submit import clean_environment, time_limit_s
from aligner.config.freeze import load_frozen
from aligner.errors import ConfigError
from aligner.rehearse import command


@pytest.fixture
def sbatch(tmp_path, monkeypatch):
    """Notes its arguments and its environment; answers with job 17."""
    for name in [*os.environ]:
        if name.startswith(("SLURM_", "SBATCH_", "ALIGNER_")):
            monkeypatch.delenv(name)
    fake = tmp_path / "bin/sbatch"
    fake.parent.mkdir()
    fake.write_text(
        f"#!/bin/sh\nprintf '%s\\n' \"$@\" >{tmp_path}/argv\nenv >{tmp_path}/env\n"
        "case \"$*\" in *bad*) echo 'invalid partition' >&2; exit 1;; *test-only*) echo 'would start' >&2;; esac\n"
        "echo '17;cluster'\n"
    )
    fake.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.jsonl").write_text("{}\n")
    return lambda: (tmp_path / "argv").read_text().splitlines() if (tmp_path / "argv").exists() else None


def submit(*arguments):
    return main(["submit", "data.train=train.jsonl", *arguments])


def test_the_run_is_frozen_and_its_script_submitted(sbatch, capsys):
    assert submit("--nodes", "2", "--ranks-per-node", "2", "run.dir=runs/a %j", "--sbatch=--qos=high", "seed=3") == 0
    folder = Path("runs/a %j").absolute()
    assert capsys.readouterr().out == f"job 17: sft, 4 ranks, {folder}\n"
    plain = str(folder).replace("%", "%%")
    assert sbatch() == ["--parsable", f"--output={plain}/logs/%x-%j.log", "--qos=high", f"{folder}/job.sbatch"]
    assert load_frozen(folder).seed == 3 and (folder / "logs").is_dir()
    script = (folder / "job.sbatch").read_text()
    assert "#SBATCH --nodes=2" in script and "#SBATCH --ntasks-per-node=2" in script


def test_a_chain_waits_and_its_upstream_need_not_be_there_yet(sbatch, capsys):
    chain = ["--parsable", "--after", "5", "--after", "6", "--upstream", "runs/sft", "model.init=runs/sft", "stage=rm"]
    assert submit(*chain) == 0 and capsys.readouterr().out == "17\n"
    assert "--dependency=afterok:5:6" in sbatch() and "--kill-on-invalid-dep=yes" in sbatch()
    assert f"ALIGNER_UPSTREAM=({Path('runs/sft').absolute()})" in Path("runs/rm/job.sbatch").read_text()
    assert load_frozen("runs/rm").model.init == "runs/sft"
    assert submit("model.init=runs/none", "stage=rm") == 2  # what nobody will write is still refused
    assert "model.init='runs/none'" in capsys.readouterr().err


def test_a_sweep_is_an_array(sbatch):
    assert submit("-m", "--at-once", "2", "optim.lr=1e-4,2e-4", "seed=0,1") == 0
    assert "--array=0-3%2" in sbatch() and sbatch()[-1] == str(Path("runs/sft/job.sbatch").absolute())
    folders = sorted(p.parent for p in Path("runs/sft").glob("*/config.yaml"))
    assert [p.name[0] for p in folders] == ["0", "1", "2", "3"]
    assert [(load_frozen(p).optim.lr, load_frozen(p).seed) for p in folders] == [
        (1e-4, 0), (1e-4, 1), (2e-4, 0), (2e-4, 1)
    ]  # fmt: skip
    assert all(Path(load_frozen(p).run.dir) == p for p in folders)


def test_dry_run_and_test_only(sbatch, capsys):
    assert submit("--dry-run", "--site", "localslurm") == 0
    out = capsys.readouterr().out
    assert "#SBATCH --partition=batch" in out and "# sbatch --parsable" in out and "# note: sbatch rounds" in out
    assert sbatch() is None and not Path("runs").exists()
    assert submit("--test-only") == 0
    assert "--test-only" in sbatch() and capsys.readouterr().out == "would start\n"


def test_what_is_wrong_is_said_before_anything_is_written(sbatch, capsys):
    for arguments, message in (
        (["optim.lrr=1"], "Did you mean `optim.lr`?"),
        (["--ranks-per-node", "3", "parallel=tp2"], "world size=3"),
        (["--site", "nowhere"], "generic"),
        (["--nodes", "-1"], "--nodes=-1"),
    ):
        assert submit(*arguments) == 2 and message in capsys.readouterr().err
    assert sbatch() is None and not Path("runs").exists()
    assert submit("run.dir=runs/b\\\\c") == 2 and "backslashes" in capsys.readouterr().err


def test_sbatchs_own_error_is_shown(sbatch, capsys, monkeypatch):
    assert submit("--sbatch=--partition=bad") == 1 and "invalid partition" in capsys.readouterr().err
    monkeypatch.setenv("PATH", "/nonexistent")
    assert submit() == 1 and "sbatch: not found" in capsys.readouterr().err


def test_a_frozen_run_is_submitted_as_it_is(sbatch, capsys):
    assert submit("run.dir=runs/a", "seed=5") == 0
    assert main(["submit", "--frozen", "runs/a"]) == 0 and load_frozen("runs/a").seed == 5
    assert main(["submit", "--frozen", "runs/a", "seed=6"]) == 2


def test_a_job_does_not_inherit_the_one_it_is_submitted_from():
    outside = {"SBATCH_PARTITION": "p", "SLURM_CONF": "c", "PMIX_RANK": "0", "SLURM_NTASKS": "3", "HOME": "h"}
    assert clean_environment(outside) == {"SBATCH_PARTITION": "p", "SLURM_CONF": "c", "HOME": "h"}
    assert clean_environment(outside | {"SLURM_JOB_ID": "1"}) == {"SLURM_CONF": "c", "HOME": "h"}


def options(**settings):
    defaults = {
        "nodes": 0,
        "engine_nodes": 0,
        "multirun": False,
        "ranks_per_node": 0,
        "ranks": 0,
        "spare": 0,
        "max_requeues": 20,
        "at_once": 0,
        "shell": False,
    }
    return argparse.Namespace(**(defaults | settings))


def size(environ=None, site=None, **given):
    found = job_size(options(**given), site or Site(), environ or {})
    return found.nodes, found.per_node


def test_the_number_of_ranks_comes_from_whoever_knows():
    job = {"SLURM_JOB_ID": "1", "SLURM_NNODES": "3"}
    assert size() == (1, 1) and size(site=Site(gpus_per_node=8), nodes=2) == (2, 8)
    assert size(shell=True, ranks=4) == (1, 4)
    assert size(job | {"SLURM_NTASKS_PER_NODE": "2"}, shell=True) == (3, 2)
    assert size(job | {"SLURM_NTASKS": "6"}, shell=True) == (3, 2)
    assert size(job | {"SLURM_NTASKS": "3"}, site=Site(gpus_per_node=8), shell=True) == (3, 8)
    assert size(job | {"SLURM_NTASKS_PER_NODE": "2"}, shell=True, spare=1) == (2, 2)
    assert size(job, shell=True, ranks_per_node=5) == (3, 5)
    with pytest.raises(ConfigError, match="a multiple of the 3 nodes"):
        size(job | {"SLURM_NTASKS": "4"}, shell=True)
    with pytest.raises(ConfigError, match="from 1 to 3"):
        size(job, shell=True, nodes=4)


GRPO = ["stage=grpo", "reward.functions=[{path: math}]"]


def test_engines_on_nodes_of_another_kind_are_a_heterogeneous_job(sbatch, tmp_path, capsys):
    kinds = "partition: big\ncpus_per_rank: 14\ngpus_per_node: 8\ntime: '60'\n"
    (tmp_path / "two.yaml").write_text(
        f"description: x\n{kinds}engines: {{partition: small, gpus_per_node: 4, cpus_per_rank: 6}}\n"
    )
    words = ["--site", "two.yaml", "--nodes", "2", "--engine-nodes", "3", "engine.ranks=12", "run.dir=runs/a", *GRPO]
    assert submit(*words) == 0
    message = "28 ranks, nodes: 2 for training, 3 for engines, "
    assert message in capsys.readouterr().out and "--array" not in " ".join(sbatch())
    script = Path("runs/a/job.sbatch").read_text()
    first, second = (word.split("# shellcheck")[0] for word in script.split("#SBATCH hetjob\n"))
    for word, asked in (
        (first, ("partition=big", "nodes=2", "ntasks-per-node=8", "cpus-per-task=14", "gpus-per-node=8")),
        (second, ("partition=small", "nodes=3", "ntasks-per-node=4", "cpus-per-task=6", "gpus-per-node=4")),
    ):
        assert all(f"#SBATCH --{flag}\n" in word for flag in asked)
    assert "export ALIGNER_RANKS=28\n" in script and "export ALIGNER_ENGINE_NODES=3\n" in script
    assert "ALIGNER_ENGINE_SRUN=(--mpi=none --cpus-per-task=6)" in script


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["engine.ranks=3"], "engine.ranks=3: expected 4: --engine-nodes 2 of 2 ranks each"),
        ([], "engine.ranks=0: expected 4: --engine-nodes 2 of 2 ranks each"),
        (["engine.ranks=4", "--spare", "1"], "--spare=1: expected 0 with --engine-nodes"),
        (["engine.ranks=4", "-m", "seed=0,1"], "Slurm has no arrays of heterogeneous jobs"),
        (["engine.ranks=4", "--site", "mpirun.yaml"], "mpi='mpirun': expected pmix, pmi2 or none with --engine-nodes"),
        (["engine.ranks=4", "--site", "copies.yaml"], "node_local='/tmp/x': expected empty with --engine-nodes"),
        (["engine.ranks=4", "--shell"], "--engine-nodes=2: expected 0: the nodes of the job's second component"),
        (
            ["--ranks-per-node", "3", "engine.ranks=6", "engine=vllm", "engine.tensor_parallel=2"],
            "ranks 6 to 8, of a node, are 1 and 2 of a replica",
        ),
        (["--engine-nodes=-1"], "--engine-nodes=-1: expected a number >= 0"),
    ],
)
def test_what_engines_on_nodes_of_their_own_cannot_have_is_refused(sbatch, words, message, capsys):
    Path("mpirun.yaml").write_text("description: x\nmpi: mpirun\n")
    Path("copies.yaml").write_text("description: x\nnode_local: /tmp/x\n")
    assert submit("--nodes", "2", "--ranks-per-node", "2", "--engine-nodes", "2", *GRPO, *words) == 2
    assert message in capsys.readouterr().err and sbatch() is None and not Path("runs").exists()


def test_a_heterogeneous_jobs_numbers_come_from_its_components():
    job = {"SLURM_JOB_ID": "1", "SLURM_NNODES": "2", "SLURM_HET_SIZE": "2", "SLURM_NTASKS": "8"}
    job |= {"SLURM_NTASKS_PER_NODE_HET_GROUP_0": "4", "SLURM_JOB_NUM_NODES_HET_GROUP_1": "3"}

    def found(environ, site=None, **more):
        return job_size(options(shell=True, **more), site or Site(), environ)

    assert found(job | {"SLURM_NTASKS_PER_NODE_HET_GROUP_1": "2"}) == Size(2, 4, 3, 2)
    assert found(job | {"SLURM_NTASKS_HET_GROUP_1": "15"}) == Size(2, 4, 3, 5)
    assert found(job | {"SLURM_NTASKS_HET_GROUP_1": "3"}) == found(job) == Size(2, 4, 3, 4)
    with pytest.raises(ConfigError, match="--ntasks=4: expected a multiple of the 3 nodes"):
        found(job | {"SLURM_NTASKS_HET_GROUP_1": "4"})
    assert found(job, Site(engines=Engines(gpus_per_node=6)), engine_nodes=3) == Size(2, 4, 3, 6)
    with pytest.raises(ConfigError, match="SLURM_HET_SIZE='3': expected 2"):
        found(job | {"SLURM_HET_SIZE": "3"})
    with pytest.raises(ConfigError, match="--engine-nodes=3: expected 0"):
        found({"SLURM_JOB_ID": "1"}, engine_nodes=3)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("5", 300), ("5:30", 330), ("1:0:0", 3600), ("1-2", 93600), ("1-2:3", 93780), ("UNLIMITED", None), ("", None)],
)
def test_slurms_notations_of_a_time_limit(text, seconds):
    assert time_limit_s(text) == seconds


def test_a_time_limit_that_the_signal_uses_up_is_reported(sbatch, capsys):
    warning = "is not more than the site's signal_s=300"
    assert submit("--sbatch=--time=1:00:00", "--sbatch=-t", "--sbatch=5") == 0 and warning in capsys.readouterr().err
    assert submit("--sbatch=-t5", "--sbatch=--time=6") == 0 and warning not in capsys.readouterr().err


def test_a_job_name_with_a_slash_is_no_folder(sbatch):
    assert submit("--sbatch=--job-name=team/a", "run.dir=runs/a") == 0
    assert f"--output={Path('runs/a').absolute()}/logs/team_a-%j.log" in sbatch()


def test_a_job_whose_rehearsal_fails_is_not_handed_over(sbatch, monkeypatch, tmp_path, capsys):
    asked = []

    def rehearse(cfg, gpus, device):
        asked.append((gpus, device.name))
        return SimpleNamespace(faults=["rank 3, phase update, aligner/roles/policy.py:1: it breaks"])

    monkeypatch.setattr(command, "rehearse", rehearse)
    plain, always = tmp_path / "plain.yaml", tmp_path / "always.yaml"
    plain.write_text("gpu: h100\ngpus_per_node: 8\n")
    always.write_text("gpu: h100\ngpus_per_node: 8\nrehearse: true\n")
    model = ["model.vocab_size=320", "model.tokenizer=there"]
    assert submit("--site", str(plain), "--nodes", "2", "--rehearse", *model) == 1
    assert submit("--site", str(always), "--nodes", "2", *model) == 1
    assert asked == [(16, "h100")] * 2 and sbatch() is None and not Path("runs").exists()
    assert "the job would fail: rank 3, phase update" in capsys.readouterr().err
    assert submit("--site", str(plain), "--nodes", "2", *model) == 0
    assert submit("--rehearse", *model) == 2
    assert "--rehearse=True: expected a site whose file says which `gpu` it has" in capsys.readouterr().err
    with pytest.raises(ConfigError, match="rehearse=True: expected false without `gpu`"):
        Site(rehearse=True)


def test_the_number_of_gpus_of_a_config_gives_the_nodes():
    four, unknown = Site(gpus_per_node=4), Site()
    assert job_size(options(), four, {}, 64) == Size(16, 4) and job_size(options(), four, {}, 1) == Size(1, 1)
    assert job_size(options(nodes=2), four, {}, 64) == Size(2, 4) == job_size(options(nodes=2), four, {}, 0)
    assert job_size(options(), unknown, {}, 64) == Size(1, 1) and job_size(options(), four, {}) == Size(1, 4)
    with pytest.raises(ConfigError, match=r"cluster\.gpus=6: expected a multiple of the 4 ranks of a node"):
        job_size(options(), four, {}, 6)
