"""The launchers on a real Slurm of several virtual nodes. Jobs run side by side: the fixture `jobs` submits them all.

Most "train" with a stand-in (tests/launchers/stand_in.sh) through the same scripts; one trains for real.
"""

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

import pytest

from aligner.config.freeze import load_frozen
from aligner.config.resolve import quoted
from aligner.sandbox.terminal import lacks
from tests import soak_terminal, stages

pytestmark = [pytest.mark.slurm, pytest.mark.slow, pytest.mark.timeout(3600)]
ROOT = Path(__file__).parents[2]
TERMINALS = 4  # of a rollout
STAND_IN = ROOT / "tests/launchers/stand_in.sh"
NASTY = """it's "$HOME" ${seed} `id` $(id) {a: [1, 2]},\nline 2; día 日本 \\ * #"""


def log(run: Path) -> str:
    return "".join(path.read_text() for path in sorted((run / "logs").glob("*.log")))


def attempts(run: Path) -> list[tuple[str, ...]]:
    """(start or end, attempt, step, outcome) of each line."""
    rows = [line.split("\t") for line in (run / "logs/attempts.tsv").read_text().splitlines()]
    return [(row[0], row[2], row[4], row[5]) for row in rows]


def step(run: Path) -> int:
    path = run / "progress.json"
    text = path.read_text() if path.exists() else ""
    return json.loads(text)["step"] if text.strip() else 0


def pipeline(cluster, root: Path, folder: str, *arguments: str, **environ: str) -> dict[str, str]:
    """Job of each of the given stages, as a chain."""
    words = [folder, "model.tokenizer=.", "data.train=train.jsonl", *(f"@{stage}" for stage in arguments)]
    environ["ALIGNER_PYTHON"] = cluster.stand_in
    out = cluster.run(ROOT / "launchers/pipeline.sh", *words, cwd=root, **environ)
    return {line.split(":")[0]: line.split()[2].rstrip(",") for line in out.splitlines() if ": job " in line}


def rounds(cluster, folder: Path) -> dict[str, str]:
    """Job of each run of two rounds."""
    words = ["runs/rounds", "2", "model.tokenizer=.", "data.train=train.jsonl", "@sample"]
    words += ["stage.sample.pairs=answers", "@dpo"]
    out = cluster.run(ROOT / "launchers/iterate.sh", *words, cwd=folder, ALIGNER_PYTHON=cluster.stand_in)
    return {line.split(":")[0]: line.split()[2].rstrip(",") for line in out.splitlines() if ": job " in line}


def in_terminals(folder: Path, name: str) -> list[str]:
    """The overrides of a run whose second rollout lasts until the time limit of its job."""
    soak_terminal.make_data(folder / "terminal")
    args = f"{{memory_mb: 128, disk_mb: 16, starts: '{folder / name}.starts', rollout: {TERMINALS}}}"
    own = ["environment.path=tests/assets/held_terminal.py:HeldShell", f"environment.args={args}", "run.steps=2"]
    own += ["batch.group=2", "batch.micro_batch_samples=4"]
    return soak_terminal.overrides(folder / "terminal", folder / "runs" / name, *own, "checkpoint.every=1")


def submit_real(cluster, overrides: list[str]) -> str:
    return cluster.aligner("submit", "--parsable", *overrides, cwd=ROOT, ALIGNER_PYTHON=sys.executable)


@pytest.fixture(scope="module")
def jobs(cluster, tiny_data, tmp_path_factory):
    """Everything that needs no hand while it runs."""
    folder = tmp_path_factory.mktemp("jobs")
    cluster.stand_in = str(ROOT / "tests/launchers/stand_in.sh")
    (folder / "train.jsonl").write_text("{}\n")
    actual = SimpleNamespace(place=folder, run=lambda name: folder / "runs" / name)

    def submit(name: str, *arguments: object, **environ: str) -> str:
        return cluster.aligner(
            "submit", "--parsable", "data.train=train.jsonl", f"run.dir=runs/{name}", *arguments, cwd=folder, **environ
        )

    grpo = stages.overrides(
        "grpo", tiny_data, folder / "runs/grpo", "run.steps=2", "parallel.tensor=2", "parallel.pipeline=2"
    )
    actual.grpo = cluster.aligner(
        "submit", "--parsable", "--nodes", "2", "--ranks-per-node", "2", *grpo, cwd=ROOT, ALIGNER_PYTHON=sys.executable
    )
    actual.ahead = stages.overrides("grpo", tiny_data, folder / "runs/ahead", "engine.ranks=1", "engine.lag=1")
    actual.apart = cluster.aligner(
        "submit", "--parsable", "--nodes", "2", "run.steps=2", *actual.ahead, cwd=ROOT, ALIGNER_PYTHON=sys.executable
    )
    actual.in_terminals = in_terminals(folder, "terminal")
    actual.limited = "" if lacks() else submit_real(cluster, actual.in_terminals)
    sft = stages.overrides("sft", tiny_data, folder / "runs/sft", "run.steps=1000000", "run.eval_every=0")
    actual.sft = submit_real(cluster, sft)
    actual.stop = submit("stop", STEPS="100000")
    engines = ["reward.functions=[{path: math}]", "engine.ranks=2"]
    apart = ["stage=grpo", "--engine-nodes", "1", "--ranks-per-node", "2"]
    actual.het = submit("het", *apart, *engines, STEPS="100000")
    two = [
        "--parsable",
        "-N1",
        "--ntasks-per-node=2",
        ":",
        "-N1",
        "--ntasks-per-node=2",
        ROOT / "launchers/grpo.sbatch",
    ]
    fails = {"STEPS": "100000", "FAIL_ON": "rank3", "CODE": "7", "ALIGNER_PYTHON": cluster.stand_in}
    words = ["data.train=train.jsonl", "run.dir=runs/broken", *engines]
    actual.broken = cluster.run("sbatch", *two, *words, cwd=folder, **fails).strip()
    actual.cap = submit("cap", "--max-requeues", "1", STOP_AFTER="2", STEPS="100000")
    actual.stuck = submit("stuck", STUCK="1", STOP_AFTER="2", STEPS="100000")
    actual.array = submit("array", "-m", "seed=3,4,5")
    actual.chain = pipeline(cluster, folder, "runs/chain", "sft", "rm", "ppo")
    actual.rounds = rounds(cluster, folder)
    actual.failing = pipeline(cluster, folder, "runs/failing", "sft", "rm", CODE="7")
    (folder / "plain.yaml").write_text((ROOT / "slurm/sites/localslurm.yaml").read_text() + f"python: {STAND_IN}\n")
    actual.bare = submit("bare", "--site", "plain.yaml", "--nodes", "2", "--sbatch=--export=NONE")
    actual.few = submit("few", "--site", "plain.yaml", "--sbatch=--export=HOME,PATH")
    two = ["--nodes", "2", "--sbatch=--nodelist=node4,node5"]
    actual.refused = submit("refused", *two, STEPS="100000", FAIL_ON="node5", CODE="93")
    after = [f"--dependency=afterok:{actual.refused}", "--output=/dev/null", "--wrap=true"]
    actual.waiting = cluster.run("sbatch", "--parsable", *after).strip()
    actual.own = cluster.run(
        *["sbatch", "--parsable", "--array=3-4", "--output=%x-%A_%a.log"],
        f"--wrap=bash {ROOT}/launchers/sft.sbatch data.train=train.jsonl run.dir=runs/own$SLURM_ARRAY_TASK_ID",
        cwd=folder,
        ALIGNER_PYTHON=cluster.stand_in,
    ).strip()
    words = ["data.train=train.jsonl", "run.dir='runs/na sty'", f"logging.project={quoted(NASTY)}"]
    launcher = ROOT / "launchers/sft.sbatch"
    options = ["--parsable", "--nodes=2", "--ntasks-per-node=2"]
    actual.direct = cluster.run(
        "sbatch", *options, launcher, *words, cwd=folder, ALIGNER_PYTHON=cluster.stand_in
    ).strip()
    return actual


def test_usr1_saves_stops_requeues_and_goes_on_under_the_same_number(cluster, jobs):
    run = jobs.run("stop")
    cluster.until(lambda: step(run) >= 3, "some steps")
    cluster.run("scancel", "--batch", "--signal=USR1", jobs.stop)
    cluster.until(lambda: (run / "logs" / f"{jobs.stop}.1/rank-0000.log").exists(), "the second attempt")
    reached = int(attempts(run)[1][2])
    assert attempts(run)[:2] == [("start", "0", "0", "-"), ("end", "0", str(reached), "stopped")] and reached >= 3
    assert attempts(run)[2] == ("start", "1", str(reached), "-")
    cluster.until(lambda: step(run) > reached, "steps after the stop")
    assert "requeueing job" in log(run) and f"attempt 1, step {reached}" in log(run)  # one log, appended
    cluster.run("scancel", jobs.stop)
    assert cluster.ended(jobs.stop) == "CANCELLED"  # not requeued once more


def test_real_training_is_stopped_requeued_and_resumed(cluster, jobs):
    run = jobs.run("sft")
    cluster.until(lambda: step(run) >= 3, "some steps")
    cluster.run("scancel", "--batch", "--signal=USR1", jobs.sft)
    log = run / "logs" / f"{jobs.sft}.1/rank-0000.log"
    cluster.until(lambda: log.exists() and "resumed at step" in log.read_text(), "the second attempt")
    reached = int(attempts(run)[1][2])
    assert attempts(run)[1] == ("end", "0", str(reached), "stopped") and reached >= 3
    assert f"resumed at step {reached} of 1000000" in log.read_text()
    cluster.until(lambda: step(run) > reached, "a step after it")
    cluster.run("scancel", jobs.sft)


def test_the_retry_cap_and_no_progress(cluster, jobs):
    assert cluster.ended(jobs.stuck) == "FAILED" and "no progress" in log(jobs.run("stuck"))
    assert cluster.ended(jobs.cap) == "FAILED" and "the limit is 1" in log(jobs.run("cap"))
    assert [row[3] for row in attempts(jobs.run("cap")) if row[0] == "end"] == ["stopped", "stopped"]


def test_a_chain_runs_in_order_and_each_stage_starts_from_the_one_before(cluster, jobs):
    assert list(jobs.chain) == ["sft", "rm", "ppo"]
    assert [cluster.ended(job) for job in jobs.chain.values()] == ["COMPLETED"] * 3
    runs = [jobs.run("chain") / stage for stage in jobs.chain]
    done = [(run / "DONE").stat().st_mtime for run in runs]
    assert done == sorted(done)
    ppo = load_frozen(runs[2])
    assert (ppo.model.init, ppo.reward.model, ppo.critic.init) == ("runs/chain/sft", "runs/chain/rm", "runs/chain/rm")
    out = cluster.run(ROOT / "slurm/watch", jobs.run("chain"))
    assert out.count("DONE") == 3


def test_rounds_run_in_order_and_only_what_is_not_done_runs_again(cluster, jobs):
    names = [f"round-{i}/{stage}" for i in (1, 2) for stage in ("sample", "dpo")]
    assert list(jobs.rounds) == names
    assert [cluster.ended(job) for job in jobs.rounds.values()] == ["COMPLETED"] * 4
    runs = [jobs.run("rounds") / name for name in names]
    done = [(run / "DONE").stat().st_mtime for run in runs]
    assert done == sorted(done)
    assert load_frozen(runs[3]).model.init == "runs/rounds/round-1/dpo"
    assert load_frozen(runs[3]).data.train == "runs/rounds/round-2/sample/sampled/pairs.jsonl"
    (runs[3] / "DONE").unlink()
    again = rounds(cluster, jobs.place)
    assert list(again) == names[3:] and cluster.ended(again[names[3]]) == "COMPLETED"


def test_a_failed_upstream_ends_the_chain(cluster, jobs):
    assert cluster.ended(jobs.failing["sft"]) == "FAILED"
    assert cluster.ended(jobs.failing["rm"]) == "CANCELLED"
    assert "triage: rank 0 on node" in log(jobs.run("failing") / "sft")
    # afterok is not trusted alone: a stage that starts all the same looks for DONE
    job = cluster.aligner(
        *["submit", "--parsable", "stage=rm", "data.train=train.jsonl", "run.dir=runs/orphan"],
        *["--upstream", "runs/failing/sft"],
        cwd=jobs.place,
    )
    assert cluster.ended(job) == "FAILED" and "has not finished" in log(jobs.run("orphan"))


def test_a_sweep_runs_as_an_array(cluster, jobs):
    assert cluster.ended(jobs.array) == "COMPLETED"
    folders = sorted(path.parent for path in jobs.run("array").glob("*/DONE"))
    assert [load_frozen(folder).seed for folder in folders] == [3, 4, 5]
    assert len(list((jobs.run("array") / "logs").glob("aligner-sft-*_[012].log"))) == 3


def test_an_array_of_the_users_own_around_a_launcher(cluster, jobs):
    assert cluster.ended(jobs.own) == "COMPLETED"
    assert [(jobs.run(f"own{task}") / "DONE").exists() for task in (3, 4)] == [True, True]


def test_a_job_that_gets_no_environment_hands_its_own_to_the_ranks(cluster, jobs):
    """To the health check, too, which jobs of several nodes begin with."""
    for name, job, ranks in (("bare", jobs.bare, 2), ("few", jobs.few, 1)):
        assert cluster.ended(job) == "COMPLETED", log(jobs.run(name))
        first = jobs.run(name) / "logs" / f"{job}.0/rank-0000.log"
        assert (jobs.run(name) / "DONE").exists() and f"rank 0 of {ranks}" in first.read_text()


def test_93_of_one_rank_is_the_jobs_whatever_becomes_of_the_others(cluster, jobs):
    assert cluster.ended(jobs.refused) == "FAILED"
    assert "ExitCode=93:0" in cluster.run("scontrol", "show", "job", "-o", jobs.refused)
    assert attempts(jobs.run("refused"))[-1][3] == "refused" and cluster.ended(jobs.waiting) == "CANCELLED"
    assert log(jobs.run("refused")).strip().splitlines()[-1] == "  | error: as asked"


def test_a_launcher_by_sbatch_keeps_its_overrides_and_finds_its_checkout(cluster, jobs):
    assert cluster.ended(jobs.direct) == "COMPLETED"
    run = jobs.run("na sty")
    assert load_frozen(run).logging.project == NASTY and (run / "DONE").exists()
    texts = [(run / "logs" / f"{jobs.direct}.0/rank-{rank:04d}.log").read_text() for rank in range(4)]
    assert all(f"rank {rank} of 4 attempt 0" in text for rank, text in enumerate(texts))
    assert {text.split("pid")[0].split()[-1] for text in texts} == {
        text.split(" node ")[1].split()[0] + "," for text in texts
    }
    assert all("master 127.0.0.1" in text for text in texts)  # node names do not resolve here: NodeAddr


BOOTSTRAP = """
import pathlib, sys
from aligner.cluster.mpi import join
world = join()
words = [world.env.rank, world.env.local_rank, world.env.world_size, world.env.launcher, *world.hosts,
         *world.comm.allgather(world.env.master_port), any(world.comm.allgather(world.env.rank == 1))]
pathlib.Path(sys.argv[1] + str(world.env.rank)).write_text(" ".join(map(str, words)))
world.leave(True)
"""


def test_shakedown_runs_as_a_batch_job(cluster, tmp_path):
    words = ["sbatch", "--parsable", f"--output={tmp_path}/log", ROOT / "launchers/shakedown.sh"]
    job = cluster.run(*words, "--cpu", "--only", "machine", tmp_path / "out", ALIGNER_PYTHON=sys.executable).strip()
    assert cluster.ended(job) == "COMPLETED", (tmp_path / "log").read_text()
    assert "passed" in (tmp_path / "out/report.html").read_text()


def test_mpi_bootstraps_ranks_of_srun_and_of_mpirun(mpi, tmp_path):
    shared = {"MPI4PY_MPIABI": "openmpi", "OMPI_MCA_btl_tcp_if_include": "lo", "ALIGNER_RANKS": "4"}
    program = [sys.executable, "-c", BOOTSTRAP]
    mpi.run(
        "srun", "--mpi=pmix", "-N2", "--ntasks-per-node=2", *program, tmp_path / "srun", ALIGNER_MPI="pmix", **shared
    )
    options = ["--oversubscribe", "--allow-run-as-root", "-n", "4"]
    mpi.run("mpirun", *options, *program, tmp_path / "mpirun", ALIGNER_MPI="mpirun", MASTER_ADDR="127.0.0.1", **shared)
    for way, hosts, launcher in (("srun", 2, "slurm"), ("mpirun", 1, "openmpi")):
        rows = [(tmp_path / f"{way}{rank}").read_text().split() for rank in range(4)]
        assert [row[0] for row in rows] == ["0", "1", "2", "3"]
        assert [row[1] for row in rows] == (["0", "1", "0", "1"] if hosts == 2 else ["0", "1", "2", "3"])
        assert {(row[2], row[3], row[-1]) for row in rows} == {("4", launcher, "True")}
        assert {len(set(row[4:8])) for row in rows} == {hosts} and {len(set(row[8:12])) for row in rows} == {1}


def test_a_wrong_number_of_ranks_is_one_clear_error(mpi):
    program = [sys.executable, "-m", "aligner", "run", "data.train=x"]
    shared = {"MPI4PY_MPIABI": "openmpi", "ALIGNER_MPI": "pmix"}
    out = mpi.run("srun", "--mpi=pmix", "-n2", *program, check=False, ALIGNER_RANKS="4", **shared)
    assert "number of ranks='MPI 2, slurm 2, the job 4': expected the same number from all" in out
    assert "Traceback" not in out


def test_two_nodes_of_two_ranks_train_grpo_with_tensor_and_pipeline_parallelism(cluster, jobs):
    assert cluster.ended(jobs.grpo) == "COMPLETED", log(jobs.run("grpo"))
    run = jobs.run("grpo")
    assert (run / "DONE").exists() and (run / "hf/model.safetensors").exists()
    assert [r["step"] for r in stages.records(run) if "reward/mean" in r] == [1, 2]
    nodes = {(run / "logs" / f"{jobs.grpo}.0/rank-{rank:04d}.log").read_text().split()[2] for rank in range(4)}
    assert len(nodes) == 2


def nodes_of(run: Path, attempt: str) -> list[str]:
    """Of each rank."""
    heads = [log.read_text().split() for log in sorted((run / "logs" / attempt).glob("rank-*.log"))]
    return [words[2].rstrip(",") for words in heads if words]


def test_engines_on_a_node_of_their_own_generate_ahead_and_the_run_goes_on_as_a_heterogeneous_job(cluster, jobs):
    """Trained by rank 0, generated by rank 1: on two nodes of one srun, then on those of two components."""
    run = jobs.run("ahead")
    assert cluster.ended(jobs.apart) == "COMPLETED", log(run)
    assert len(set(nodes_of(run, f"{jobs.apart}.0"))) == 2
    overrides = ["--engine-nodes", "1", "run.steps=4", *jobs.ahead]
    second = submit_real(cluster, overrides)
    assert cluster.ended(second) == "COMPLETED", log(run)
    assert len(set(nodes_of(run, f"{second}.0"))) == 2
    assert "resumed at step 2 of 4" in (run / "logs" / f"{second}.0/rank-0000.log").read_text()
    rows = [r for r in stages.records(run) if "reward/mean" in r]
    assert [(r["step"], r["staleness/max"] > 0) for r in rows] == [(1, False), (2, True), (3, False), (4, True)]


def test_a_heterogeneous_job_is_one_world_that_stops_and_comes_back_as_a_whole(cluster, jobs):
    run = jobs.run("het")
    cluster.until(lambda: step(run) >= 3, "some steps")
    first = nodes_of(run, f"{jobs.het}.0")
    assert len(first) == 4 and first[0] == first[1] != first[2] == first[3]
    texts = [(run / "logs" / f"{jobs.het}.0/rank-{rank:04d}.log").read_text() for rank in range(4)]
    assert all(f"rank {rank} of 4 attempt 0" in text for rank, text in enumerate(texts))
    fit = {path.stem for path in (run / "logs" / f"{jobs.het}.0/health").glob("node*.json")}
    assert fit == set(first)  # every node of both components was looked at
    assert "RUNNING" in cluster.run(ROOT / "slurm/watch", run)
    cluster.run("scancel", "--batch", "--signal=USR1", jobs.het)
    cluster.until(lambda: len(nodes_of(run, f"{jobs.het}.1")) == 4, "the second attempt")
    reached = int(attempts(run)[1][2])
    assert attempts(run)[1] == ("end", "0", str(reached), "stopped") and reached >= 3
    cluster.until(lambda: step(run) > reached, "steps after the stop")
    cluster.run("scancel", jobs.het)
    assert cluster.ended(jobs.het) == "CANCELLED"


def test_a_rank_of_engines_that_fails_ends_both_components_with_its_code(cluster, jobs):
    """Of a job of two components by sbatch itself."""
    assert cluster.ended(jobs.broken) == "FAILED"
    states = cluster.run("scontrol", "show", "job", "-o", jobs.broken)
    assert states.count("JobState=FAILED") == states.count("ExitCode=7:0") == 2
    assert "rank 3 on node" in (jobs.place / f"aligner-grpo-{jobs.broken}.log").read_text()
    assert attempts(jobs.run("broken"))[-1][3] == "failed"


def answers_of(run: Path) -> Counter[str]:
    """How many answers to each terminal of the second rollout are recorded."""
    (path,) = (run / "answers").glob("step-00000002-*")
    return Counter(json.loads(line.partition(" ")[2])[0] for line in path.read_text().splitlines())


@pytest.mark.skipif(bool(why := lacks()), reason=str(why))
def test_what_a_time_limit_ends_within_a_terminals_call_the_next_job_goes_on_with(cluster, jobs):
    """Its metrics and weights are those of a run without an end, and it starts no terminal that had ended."""
    run, starts = jobs.run("terminal"), jobs.place / "terminal.starts"
    assert cluster.ended(jobs.limited) == "TIMEOUT", log(run)
    assert "got USR1" in log(run) and step(run) == 1 and not (run / "STOPPED").exists()
    before, started = answers_of(run), len(starts.read_text().splitlines())
    second = submit_real(cluster, jobs.in_terminals)
    whole = in_terminals(jobs.place, "whole")
    (jobs.place / "whole.starts.held").write_text("another job")
    with soak_terminal.as_commands(), patch.object(soak_terminal, "OTHERS", []):
        stages.run(whole)
    assert cluster.ended(second) == "COMPLETED", log(run)
    over = sum(before[key] == count for key, count in answers_of(run).items())
    assert 0 < over < TERMINALS and len(starts.read_text().splitlines()) == started + TERMINALS - over
    assert stages.same_weights(run, jobs.run("whole")) and stages.differences(run, jobs.run("whole")) == []


def test_a_job_that_is_preempted_comes_back_where_it_was(cluster, tmp_path):
    (tmp_path / "train.jsonl").write_text("{}\n")
    run = tmp_path / "runs/sft"
    job = cluster.aligner(
        "submit", "--parsable", "--sbatch=--nodelist=node3", "data.train=train.jsonl", cwd=tmp_path, STEPS="100000"
    )
    cluster.until(lambda: step(run) >= 3, "some steps")
    urgent = ["--parsable", "--partition=urgent", "--nodelist=node3", "--exclusive", "--output=/dev/null"]
    other = cluster.run("sbatch", *urgent, "--wrap=true").strip()
    cluster.until(lambda: attempts(run)[-1][:2] == ("start", "1"), "the second attempt")
    assert cluster.ended(other) == "COMPLETED" and int(attempts(run)[-1][2]) >= 3
    cluster.run("scancel", job)


def test_a_dead_node_costs_an_attempt_or_with_a_spare_one_only_a_restart_in_place(cluster, jobs, tmp_path):
    """The peers' lost connections are no cause; what Slurm says of the node is. A heterogeneous job is requeued as a
    whole by Slurm itself. After the other jobs have ended."""
    (tmp_path / "train.jsonl").write_text("{}\n")
    cluster.be(SlurmdTimeout=10)
    plain, spare, het = (tmp_path / "runs" / name for name in ("plain", "spare", "het"))

    def submit(run: Path, nodes: str, peer: str, *overrides: str) -> str:
        options = ["--parsable", "--nodes", "2", f"--sbatch=--nodelist={nodes}", f"run.dir={run}", *overrides]
        options.append("data.train=train.jsonl")
        return cluster.aligner("submit", *options, cwd=tmp_path, STEPS="100000", PEER=peer)

    first = submit(plain, "node4,node5", "node5")
    second = submit(spare, "node1,node2,node3", "node2", "--spare", "1")
    two = ["-N1", "-n1", "-w", "node4", ":", "-N1", "-n1", "-w", "node5", ROOT / "launchers/grpo.sbatch"]
    words = [f"run.dir={het}", "data.train=train.jsonl", "reward.functions=[{path: math}]", "engine.ranks=1"]
    stand_in = {"STEPS": "100000", "PEER": "node5", "ALIGNER_PYTHON": cluster.stand_in}
    third = cluster.run("sbatch", "--parsable", *two, *words, cwd=tmp_path, **stand_in).strip()
    cluster.until(lambda: min(step(run) for run in (plain, spare, het)) >= 3, "some steps")
    for node in ("node5", "node2"):
        cluster.run(ROOT / "slurm/localslurm", "node-down", node)

    again = spare / "logs" / f"{second}.0+1/rank-0001.log"
    cluster.until(lambda: again.exists() or cluster.state(second) != "RUNNING", "the restart in place")
    assert again.exists(), log(spare)
    cluster.until(again.read_text, "its first words")
    assert "dead: node2" in log(spare) and " on node3," in again.read_text()

    cluster.until(lambda: cluster.state(first) != "RUNNING", "the requeue")
    cluster.run(ROOT / "slurm/localslurm", "node-start", "node5")
    requeued = plain / "logs" / f"{first}.1/rank-0000.log"
    cluster.until(lambda: requeued.exists() or cluster.state(first) == "FAILED", "the second attempt")
    assert requeued.exists(), log(plain)
    assert attempts(plain)[0] == ("start", "0", "0", "-") and "attempt 1" in log(plain)
    cluster.until(lambda: nodes_of(het, f"{third}.1") == ["node4", "node5"], "the heterogeneous job's")
    cluster.run("scancel", first, second, third)


def test_the_cluster_comes_and_goes(tmp_path, cluster):
    """Mistakes are said; `down` of what is not there is no error. The session's cluster checks that nothing stays."""
    script = str(ROOT / "slurm/localslurm")
    environ = os.environ | {"LOCALSLURM_ROOT": str(tmp_path / "none")}
    for arguments, message in (
        (["status"], "no cluster is up"),
        (["node-down"], "needs the name of a node"),
        (["up", "--nodes", "x"], "expected a number"),
        (["up", "--root", "/tmp/a b"], "expected a path"),
        (["up", "--root", f"/tmp/{'a' * 66}"], "expected a path of at most 70 characters"),
        (["up", "--colour", "red"], "unknown option"),
    ):
        done = subprocess.run([script, *arguments], env=environ, capture_output=True, text=True)
        assert done.returncode == 1 and message in done.stderr
    assert subprocess.run([script, "down"], env=environ, capture_output=True).returncode == 0
    assert "already up" in cluster.run(script, "up", check=False)
    assert "no node 'node99'" in cluster.run(script, "node-down", "node99", check=False)
