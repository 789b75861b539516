"""The launchers without a scheduler, and their body's decisions with stand-ins for Python and for Slurm's commands."""

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from aligner.__main__ import main
from aligner.config.freeze import load_frozen
from aligner.config.resolve import quoted
from aligner.config.sections.engine import EngineConfig
from aligner.config.stages import STAGES
from aligner.engines.child.process import END_S

ROOT = Path(__file__).parents[2]
BODY = shlex.quote(str(ROOT / "launchers/body.sh"))
STAND_IN = Path(__file__).parent / "stand_in.sh"
text = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=20) | st.sampled_from(
    [
        "it's",
        '"q"',
        "$HOME",
        "${x}",
        "a,b",
        "{a: [1]}",
        "l1\nl2",
        "día 日本",
        "`id`",
        "$(id)",
        "\\",
        "a=b",
        "*",
        " ",
        "--x",
    ]
)


@pytest.fixture
def workdir(tmp_path, monkeypatch):
    """An empty folder to work in, an environment without a job, and rows to "train" on."""
    for name in [*os.environ]:
        if name.startswith(("SLURM_", "SBATCH_", "ALIGNER_")):
            monkeypatch.delenv(name)
    monkeypatch.setenv("ALIGNER_PYTHON", str(STAND_IN))
    monkeypatch.setenv("REAL_PYTHON", sys.executable)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.jsonl").write_text("{}\n")
    return tmp_path


def launch(stage, *arguments, **environ):
    command = ["bash", str(ROOT / f"launchers/{stage}.sbatch"), *arguments]
    done = subprocess.run(command, env={**os.environ, **environ}, capture_output=True, text=True)
    return done.returncode, done.stdout + done.stderr


@pytest.mark.parametrize("value", ["", "3"])
def test_the_threads_of_one_process_are_not_those_of_ranks(tmp_path, value):
    (tmp_path / "launchers").mkdir()
    (tmp_path / "launchers/env.sh").write_text('export OMP_NUM_THREADS="${OMP_NUM_THREADS:-8}"\n')
    text = f'source {BODY}; ALIGNER_ROOT={tmp_path}; aligner_python; echo "${{OMP_NUM_THREADS:-none}}"'
    environ = {k: v for k, v in os.environ.items() if k not in ("ALIGNER_PYTHON", "OMP_NUM_THREADS")}
    environ |= {"OMP_NUM_THREADS": value} if value else {}
    done = subprocess.run(["bash", "-c", text], env=environ, capture_output=True, text=True, check=True)
    assert done.stdout.split()[-1] == (value or "none")


@pytest.mark.parametrize("stage", ["sft", "rm"])
def test_a_launcher_runs_without_a_scheduler(workdir, stage):
    code, output = launch(stage, "--ranks", "2", "data.train=train.jsonl")
    assert code == 0 and "done" in output
    cfg = load_frozen(f"runs/{stage}")
    assert cfg.stage.name == stage and Path(f"runs/{stage}/DONE").exists()
    argv = Path(f"runs/{stage}/argv.0").read_bytes().decode().split("\0")
    assert argv[:6] == ["-m", "aligner", "launch", "--ranks", "2", "--frozen"]
    rows = [line.split("\t") for line in Path(f"runs/{stage}/logs/attempts.tsv").read_text().splitlines()]
    assert [(row[0], row[4], row[5]) for row in rows] == [("start", "0", "-"), ("end", "3", "finished")]


@pytest.mark.slow
def test_what_is_refused_starts_nothing(workdir):
    code, output = launch("sft", "--ranks", "2", "optim.lrr=1")
    assert code == 2 and "Did you mean `optim.lr`?" in output and not Path("runs").exists()
    code, output = launch("sft", "--ranks", "3", "parallel=tp2", "data.train=train.jsonl")
    assert code == 2 and "world size=3" in output and not Path("runs").exists()
    code, output = launch("sft", "--site", "nowhere", "data.train=train.jsonl")
    assert code == 2 and "generic" in output


@pytest.mark.parametrize(("code", "wanted"), [("1", 1), ("93", 93), ("127", 127), ("137", 137)])
def test_the_ranks_exit_code_is_the_jobs(workdir, code, wanted):
    assert launch("sft", "data.train=train.jsonl", CODE=code)[0] == wanted
    assert not Path("runs/sft/DONE").exists()


def test_an_old_done_or_stopped_file_does_not_count(workdir):
    folder = Path("runs/sft")
    folder.mkdir(parents=True)
    for name in ("DONE", "STOPPED"):
        (folder / name).write_text("")
        os.utime(folder / name, (1, 1))
    code, output = launch("sft", "data.train=train.jsonl", ALIGNER_PYTHON=str(_quiet(workdir)))
    assert code == 1 and "neither DONE nor STOPPED" in output


def _quiet(folder: Path) -> Path:
    """Ends well and leaves nothing."""
    script = folder / "quiet.sh"
    script.write_text('#!/bin/sh\ncase "$*" in *"aligner launch"*) exit 0;; esac\nexec "$REAL_PYTHON" "$@"\n')
    script.chmod(0o755)
    return script


@pytest.mark.slow
def test_upstream_must_be_finished(workdir):
    Path("runs/up").mkdir(parents=True)
    code, output = launch("rm", "--upstream", "runs/up", "model.init=runs/up", "data.train=train.jsonl")
    assert code == 1 and "up has not finished" in output and not Path("runs/rm/DONE").exists()
    Path("runs/up/DONE").write_text("sft\n")
    assert launch("rm", "--upstream", "runs/up", "model.init=runs/up", "data.train=train.jsonl")[0] == 0


def until(process: subprocess.Popen, path: Path) -> None:
    while not path.exists():
        assert process.poll() is None, process.stdout.read()
        time.sleep(0.05)


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGTERM, signal.SIGINT])
def test_a_signal_stops_the_run_and_the_same_command_resumes(workdir, number):
    command = ["bash", str(ROOT / "launchers/sft.sbatch"), "data.train=train.jsonl"]
    environ = {**os.environ, "STEPS": "100000"}
    process = subprocess.Popen(
        command, env=environ, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, process_group=0
    )
    until(process, Path("runs/sft/progress.json"))
    if number == signal.SIGINT:  # as a terminal does
        os.killpg(process.pid, number)
    else:
        process.send_signal(number)
    output, _ = process.communicate()
    assert process.returncode == 75 and "stopped at step" in output and Path("runs/sft/STOPPED").exists(), output
    step = json.loads(Path("runs/sft/progress.json").read_text())["step"]
    assert launch("sft", "data.train=train.jsonl", STEPS=str(step + 2))[0] == 0
    assert json.loads(Path("runs/sft/progress.json").read_text())["step"] == step + 2
    assert not Path("runs/sft/STOPPED").exists()


@pytest.mark.slow
def test_a_request_to_stop_is_kept_for_ranks_that_do_not_listen_yet(workdir):
    command = ["bash", str(ROOT / "launchers/sft.sbatch"), "data.train=train.jsonl"]
    environ = {**os.environ, "STEPS": "100000", "LISTEN_AFTER_S": "2", "ALIGNER_ASK_AGAIN_S": "0.3"}
    process = subprocess.Popen(command, env=environ, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    until(process, Path("runs/sft/started"))
    process.send_signal(signal.SIGUSR1)
    output, _ = process.communicate()
    assert process.returncode == 75 and "stopped at step" in output, output


@pytest.mark.parametrize("early", [True, False])
def test_a_request_to_stop_neither_ends_ranks_that_are_not_ready_nor_gets_lost(tmp_path, early):
    """A process that has just been forked would end by the signal, and before that there is none to ask."""
    late = """bash -c 'sleep 0.5; trap "exit 9" USR1; for _ in {1..99}; do sleep 0.05; done' &"""
    before, after = ("kill -USR1 $$; sleep 0.1;", "") if early else ("", "(sleep 0.2; kill -USR1 $$) &")
    start = f"aligner_start_here() {{ {before} {late} }}; aligner_record() {{ :; }}"
    text = f"source {BODY}; {start}; ALIGNER_LOGS=. ALIGNER_RUN=.; {after} aligner_ranks; exit $?"
    environ = {k: v for k, v in os.environ.items() if not k.startswith(("SLURM_", "ALIGNER_"))}
    environ |= {"ALIGNER_ASK_AGAIN_S": "0.1", "ALIGNER_STAGE": "sft", "ALIGNER_JOB": "1", "ALIGNER_ATTEMPT": "0"}
    environ |= {"ALIGNER_RANKS": "1"}
    done = subprocess.run(["bash", "-c", text], env=environ, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == 9, done.stdout + done.stderr


@given(st.lists(text, min_size=1, max_size=4))
@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
def test_overrides_reach_python_as_they_were_given(tmp_path_factory, words):
    """Whatever is in them, on the way through the launcher and its body."""
    folder = tmp_path_factory.mktemp("argv")
    echo = folder / "echo.sh"
    echo.write_text(f"#!/bin/sh\nprintf '%s\\0' \"$@\" >{folder}/argv\nexit 9\n")
    echo.chmod(0o755)
    environ = {k: v for k, v in os.environ.items() if not k.startswith(("SLURM_", "ALIGNER_"))}
    command = ["bash", str(ROOT / "launchers/sft.sbatch"), *words]
    done = subprocess.run(command, cwd=folder, env={**environ, "ALIGNER_PYTHON": str(echo)}, capture_output=True)
    assert done.returncode == 9, done.stderr
    assert (folder / "argv").read_bytes() == "\0".join(
        ["-m", "aligner", "submit", "--shell", "stage=sft", *words, ""]
    ).encode()


NASTY = """it's "$HOME" ${seed} `id` $(id) {a: [1, 2]},\nline 2; día 日本 \\ * #"""


@pytest.mark.slow
def test_a_nasty_override_is_in_the_frozen_config_and_a_nasty_folder_works(workdir):
    folder = "runs/a 'b' \"c\" $d, é\n x"
    overrides = ["data.train=train.jsonl", f"logging.project={quoted(NASTY)}", f"run.dir={quoted(folder)}"]
    code, output = launch("sft", *overrides)
    assert code == 0, output
    assert load_frozen(folder).logging.project == NASTY and (Path(folder) / "DONE").exists()


@pytest.mark.slow
def test_the_chain_runs_one_by_one_without_a_scheduler(workdir):
    path = os.pathsep.join(p for p in os.environ["PATH"].split(os.pathsep) if not (Path(p) / "sbatch").exists())
    chain = ["bash", str(ROOT / "launchers/pipeline.sh"), "runs/c h", "data.train=train.jsonl", "@sft", "seed=1"]
    environ = {**os.environ, "PATH": _without_sbatch(workdir, path)}
    done = subprocess.run([*chain, "@dpo", "@rm", "seed=2"], env=environ, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    sft, dpo, rm = (load_frozen(f"runs/c h/{stage}") for stage in ("sft", "dpo", "rm"))
    assert (sft.seed, dpo.seed, rm.seed) == (1, 0, 2)
    assert [cfg.model.init for cfg in (sft, dpo, rm)] == ["random", "runs/c h/sft", "runs/c h/dpo"]
    for broken in (["@sft"], ["runs/x"], ["runs/x", "@dqo"]):
        done = subprocess.run([*chain[:2], *broken], capture_output=True, text=True)
        assert done.returncode == 2 and "launchers/pipeline.sh DIR" in done.stderr
    done = subprocess.run(
        [*chain[:2], "runs/y", *chain[3:], "@rm", "optim.lrr=2"], env=environ, capture_output=True, text=True
    )
    assert done.returncode == 2 and not Path("runs/y").exists()  # the last stage's mistake, before the first starts


@pytest.mark.slow
def test_rounds_of_sampling_and_training_go_on_where_they_ended(workdir):
    path = os.pathsep.join(p for p in os.environ["PATH"].split(os.pathsep) if not (Path(p) / "sbatch").exists())
    words = ["runs/s p", "2", "data.train=train.jsonl", "@sample", "stage.sample.pairs=answers", "run.name=r{round}"]
    command = ["bash", str(ROOT / "launchers/iterate.sh"), *words, "@dpo", "seed=1"]
    environ = {**os.environ, "PATH": _without_sbatch(workdir, path)}

    def go(**more: str) -> tuple[int, str]:
        done = subprocess.run(command, env=environ | more, capture_output=True, text=True)
        return done.returncode, done.stdout + done.stderr

    code, output = go(STOP_AFTER="1")  # a kill: within the first sampling
    assert code == 75 and not Path("runs/s p/round-1/dpo").exists(), output
    code, output = go()
    assert code == 0, output
    names = [f"round-{i}/{stage}" for i in (1, 2) for stage in ("sample", "dpo")]
    one, first, two, second = (load_frozen(f"runs/s p/{name}") for name in names)
    assert [cfg.model.init for cfg in (one, first)] == ["random"] * 2
    assert [cfg.model.init for cfg in (two, second)] == ["runs/s p/round-1/dpo"] * 2
    assert [cfg.data.train for cfg in (one, two)] == ["train.jsonl"] * 2
    assert [cfg.data.train for cfg in (first, second)] == [
        f"runs/s p/{name}/sampled/pairs.jsonl" for name in names[::2]
    ]
    assert [(cfg.stage.sample.round, cfg.run.name, cfg.seed) for cfg in (one, two)] == [(1, "r1", 0), (2, "r2", 0)]
    assert (first.seed, second.seed) == (1, 1)
    times = {name: Path(f"runs/s p/{name}/DONE").stat().st_mtime_ns for name in names}
    Path("runs/s p/round-2/dpo/DONE").unlink()
    assert go()[0] == 0
    again = [name for name in names if Path(f"runs/s p/{name}/DONE").stat().st_mtime_ns != times[name]]
    assert again == ["round-2/dpo"]
    for broken in (["runs/x", "0", *words[2:], "@dpo"], words[:4], [*words, "@grpo"], [*words, "@sft", "@dpo"]):
        done = subprocess.run([*command[:2], *broken], capture_output=True, text=True)
        assert done.returncode == 2 and "launchers/iterate.sh DIR ROUNDS" in done.stderr


def _without_sbatch(folder: Path, path: str) -> str:
    """The same programs but sbatch; where it lies among the others, links to those."""
    if path == os.environ["PATH"]:
        return path
    links = folder / "bin"
    links.mkdir()
    for source in os.environ["PATH"].split(os.pathsep):
        for program in Path(source).iterdir() if Path(source).is_dir() else []:
            if program.name != "sbatch" and not (links / program.name).exists():
                (links / program.name).symlink_to(program)
    return str(links)


def test_srun_waits_longer_than_a_rank_takes_to_end_when_others_have():
    """Which closes its engine, and waits for those that generate."""
    (wait_s,) = re.findall(r"--kill-on-bad-exit=1 --wait=(\d+)", (ROOT / "launchers/body.sh").read_text())
    assert int(wait_s) > END_S + EngineConfig().silent_s


def test_launchers_start_stages():
    assert {path.stem for path in (ROOT / "launchers").glob("*.sbatch")} <= set(STAGES)


@pytest.mark.parametrize("stage", STAGES)
def test_no_name_of_a_job_is_part_of_where_its_log_goes(stage):
    """`sbatch -J a/b` by hand: the log would go to a folder that is not there, and the job would not start."""
    lines = (ROOT / f"launchers/{stage}.sbatch").read_text().splitlines()
    assert [line for line in lines if "--output" in line] == [f"#SBATCH --output=aligner-{stage}-%j.log"]


# --- with stand-ins for Slurm's commands: what the body decides -------------------------------------------------------


@pytest.fixture
def slurm(workdir, monkeypatch):
    """A "job" of one node: srun runs the command, scontrol and scancel note what they were asked."""
    folder = workdir / "fake"
    folder.mkdir()
    fakes = {
        "srun": 'while [[ "$1" == -* ]]; do shift; done\nexec "$@"\n',
        "scontrol": f'echo "scontrol $*" >>{workdir}/asked\n'
        'case "$1" in show) echo node1;; requeue) kill -TERM $PPID;; esac\n',
        "scancel": f'echo "scancel $*" >>{workdir}/asked\n',
        "squeue": 'case "$*" in *%T*) echo "${STATE:-RUNNING}";; *%E*) cat dependants 2>/dev/null || true;; esac\n',
        "sinfo": "exit 0\n",
    }
    for name, code in fakes.items():
        (folder / name).write_text("#!/usr/bin/env bash\n" + code)
        (folder / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
    numbers = {"JOB_ID": "42", "JOB_NODELIST": "node1", "NNODES": "1", "NTASKS": "1", "PROCID": "0", "STEP_ID": "0"}
    for name, value in numbers.items():
        monkeypatch.setenv(f"SLURM_{name}", value)
    monkeypatch.setenv("SLURM_SUBMIT_DIR", str(workdir))
    monkeypatch.setenv("SLURM_JOB_END_TIME", "2000000000")
    monkeypatch.setenv("ALIGNER_ROOT", str(ROOT))
    return workdir / "asked"


def asked(path: Path) -> list[str]:
    lines = path.read_text().splitlines() if path.exists() else []
    return [line for line in lines if not line.startswith("scontrol show")]


def stopping(folder: Path) -> str:
    """Ranks that stop at once by themselves, one step on (or none, with STUCK)."""
    script = folder / "stop.sh"
    script.write_text(
        '#!/usr/bin/env bash\ncase "$*" in *"aligner run"*) ;; *) exec "$REAL_PYTHON" "$@" ;; esac\n'
        'run=$(dirname "${@: -1}")\nprintf %s "${@: -1}" >"$run/frozen"\n'
        'step=$(sed "s/[^0-9]//g" "$run/progress.json" 2>/dev/null || echo 0)\n'
        '[[ -n "${STUCK:-}" ]] || echo "{\\"step\\": $((step + 1))}" >"$run/progress.json"\ntouch "$run/STOPPED"\n'
    )
    script.chmod(0o755)
    return str(script)


@pytest.mark.slow
def test_stopped_is_requeued_and_the_restart_reads_what_was_frozen(slurm, workdir):
    launch("sft", "data.train=train.jsonl", "seed=7", ALIGNER_PYTHON=stopping(workdir))
    assert asked(slurm) == ["scontrol requeue 42"]
    assert Path("runs/.jobs/cluster-42.sh").exists()
    # overrides that would not compose any more: the restart does not look at them
    code, output = launch("sft", "no.such=key", SLURM_RESTART_COUNT="1")
    assert code == 0 and "attempt 1, step 1" in output and load_frozen("runs/sft").seed == 7
    assert Path("runs/sft/logs/42.0/rank-0000.log").exists() and Path("runs/sft/logs/42.1/rank-0000.log").exists()


@pytest.mark.slow
def test_a_second_job_in_the_folder_leaves_the_first_ones_config_alone(slurm, workdir):
    """Job 43 waits, or ran, between two starts of job 42: each reads what it was submitted with."""

    def start(job, seed, attempt):
        ranks = {"ALIGNER_PYTHON": stopping(workdir), "SLURM_JOB_ID": job, "SLURM_RESTART_COUNT": attempt}
        launch("sft", "data.train=train.jsonl", f"seed={seed}", **ranks)
        return load_frozen(Path("runs/sft/frozen").read_text()).seed

    (workdir / "fake/sbatch").write_text("#!/bin/sh\necho 43\n")
    (workdir / "fake/sbatch").chmod(0o755)
    assert start("42", 7, "0") == 7
    assert main(["submit", "data.train=train.jsonl", "seed=8"]) == 0
    assert start("42", 7, "1") == 7
    assert start("43", 8, "0") == 8
    assert start("42", 7, "2") == 7


@pytest.mark.slow
def test_each_start_of_ranks_by_srun_has_a_secret_of_its_own(slurm, workdir):
    """Unless the user has given one. Ranks of mpirun, which may not take it to other nodes, share a file."""
    script = workdir / "tell.sh"
    script.write_text(
        '#!/usr/bin/env bash\ncase "$*" in *"aligner run"*) ;; *) exec "$REAL_PYTHON" "$@" ;; esac\n'
        f'echo "${{ALIGNER_SECRET:-}}" >>{workdir}/secrets\ntouch "$(dirname "${{@: -1}}")/DONE"\n'
    )
    script.chmod(0o755)
    (workdir / "fake/mpirun").write_text(
        '#!/usr/bin/env bash\n[[ "$1" != --version ]] || exit 0\n'
        'while [[ "$1" != */rank.sh ]]; do shift; done\nexec "$@"\n'
    )
    (workdir / "fake/mpirun").chmod(0o755)
    site = ["--site", str(workdir / "mpirun.yaml")]
    Path("mpirun.yaml").write_text("description: with mpirun\nmpi: mpirun\n")
    inputs = "ab" * 32
    for overrides, environ in (
        ([], {}),
        ([], {}),
        ([], {"ALIGNER_SECRET": inputs}),
        (site, {}),
        (site, {"ALIGNER_SECRET": inputs}),
    ):
        code, output = launch("sft", "data.train=train.jsonl", *overrides, ALIGNER_PYTHON=str(script), **environ)
        assert code == 0, output
    first, second, *rest = (workdir / "secrets").read_text().split("\n")[:-1]
    assert len(bytes.fromhex(first)) == len(bytes.fromhex(second)) == 32 and first != second
    assert rest == [inputs, "", inputs]


@pytest.fixture
def het(slurm, monkeypatch):
    """The job has a second component, of one node for two ranks. Words for a launcher."""
    numbers = {"JOB_NUM_NODES_HET_GROUP_1": "1", "NTASKS_PER_NODE_HET_GROUP_0": "1", "NTASKS_PER_NODE_HET_GROUP_1": "2"}
    numbers |= {"JOB_NODELIST_HET_GROUP_1": "node2", "CPUS_PER_TASK_HET_GROUP_1": "5", "HET_SIZE": "2"}
    for name, value in numbers.items():
        monkeypatch.setenv(f"SLURM_{name}", value)
    return ["data.train=train.jsonl", "reward.functions=[{path: math}]", "engine.ranks=2"]


def test_the_health_check_asks_the_nodes_of_both_components(slurm, workdir, het):
    """That of engines, which no spare node can replace, does not answer."""
    (workdir / "fake/scontrol").write_text('#!/usr/bin/env bash\necho "${@: -1}"\n')
    (workdir / "fake/srun").write_text(
        '#!/usr/bin/env bash\nwhile [[ "$1" == -* ]]; do shift; done\nwords=()\n'
        'for word in "$@"; do [[ "$word" != : ]] || break; words+=("$word"); done\n'
        'SLURMD_NODENAME=node1 exec "${words[@]}"\n'
    )
    code, output = launch("grpo", *het)
    assert code == 1 and "node node2 is unfit: no report" in output
    assert "2 nodes are needed, 1 are fit (bad: node2)" in output and not Path("runs/grpo/DONE").exists()


def test_a_rank_has_the_threads_of_its_step(tmp_path):
    own = {key: value for key, value in os.environ.items() if key not in ("OMP_NUM_THREADS", "SLURM_CPUS_PER_TASK")}
    command = [str(ROOT / "launchers/rank.sh"), "bash", "-c", "echo threads $OMP_NUM_THREADS"]
    for number, extra in enumerate(
        ({}, {"SLURM_CPUS_PER_TASK": "5"}, {"OMP_NUM_THREADS": "2", "SLURM_CPUS_PER_TASK": "5"})
    ):
        environ = own | {"ALIGNER_LOGS": str(tmp_path), "SLURM_PROCID": str(number)} | extra
        subprocess.run(command, env=environ, check=True)
    answer = [(tmp_path / f"rank-{rank:04d}.log").read_text().split("\n")[1] for rank in range(3)]
    assert answer == ["threads 1", "threads 5", "threads 2"]


@pytest.mark.parametrize(("version", "mpi"), [("22.05.8", "none"), ("24.05.1", "none"), ("24.11.0", "pmix")])
def test_both_components_of_a_heterogeneous_job_are_one_step(slurm, workdir, het, version, mpi):
    """By `sbatch ... : ... launchers/grpo.sbatch`. Before Slurm 24.11 srun may not end with PMIx in two components."""
    (workdir / "fake/srun").write_text(
        f'#!/usr/bin/env bash\n[[ "$1" != --version ]] || {{ echo "slurm-wlm {version}"; exit 0; }}\n'
        f'printf "%s\\n" "$@" >{workdir}/words\nprintf %s "$ALIGNER_MPI" >{workdir}/mpi\ntouch runs/grpo/DONE\n'
    )
    (workdir / "pmix.yaml").write_text("description: x\nmpi: pmix\n")
    code, output = launch("grpo", "--site", str(workdir / "pmix.yaml"), *het, ALIGNER_HEALTH="0")
    assert code == 0 and "nodes: 1 for training, 1 for engines" in output
    first, _, second = (workdir / "words").read_text().partition("\n:\n")
    assert "--nodes=1\n--ntasks=1\n--ntasks-per-node=1\n" in first and "--het-group" not in first
    assert "--het-group=1\n--nodes=1\n--ntasks=2\n--ntasks-per-node=2\n--cpus-per-task=5\n" in second
    assert first.count("aligner\nrun\n") == second.count("aligner\nrun\n") == 1
    for piece in (first, second):
        assert [word for word in piece.split("\n") if word.startswith("--mpi")][-1] == f"--mpi={mpi}"
    assert [path.read_text() for path in Path("runs/grpo/logs").glob("*/trainers")] == ["1\n"]
    assert (workdir / "mpi").read_text() == mpi and ("no MPI: srun's PMIx" in output) == (mpi == "none")


def test_stopped_without_progress_is_not_requeued(slurm, workdir):
    code, said = launch("sft", "data.train=train.jsonl", ALIGNER_PYTHON=stopping(workdir), STUCK="1")
    assert code == 1 and "no progress" in said and asked(slurm) == []


def test_progress_is_what_was_saved(slurm, workdir):
    Path("runs/sft").mkdir(parents=True)
    Path("runs/sft/progress.json").write_text('{"step": 9, "steps": 20, "saved": 4}')
    assert "attempt 0, step 4," in launch("sft", "data.train=train.jsonl", ALIGNER_PYTHON=stopping(workdir))[1]


def test_a_run_is_not_requeued_beyond_its_cap(slurm, workdir):
    code, output = launch(
        "sft",
        "data.train=train.jsonl",
        "--max-requeues",
        "2",
        ALIGNER_PYTHON=stopping(workdir),
        SLURM_RESTART_COUNT="2",
    )
    assert code == 1 and "the limit is 2" in output and asked(slurm) == []
    code, output = launch("sft", "data.train=train.jsonl", "--max-requeues", "2", SLURM_RESTART_COUNT="3")
    assert code == 1 and "requeued 3 times" in output


def test_many_attempts_at_one_step_end_the_job(slurm, workdir):
    folder = Path("runs/sft/logs")
    folder.mkdir(parents=True)
    (folder / "attempts.tsv").write_text("".join(f"start\t42\t{i}\t{i}\t5\t-\t1\n" for i in range(3)))
    checkpoint = folder.parent / "checkpoints/step-00000005"
    checkpoint.mkdir(parents=True)
    code, output = launch("sft", "data.train=train.jsonl", SLURM_RESTART_COUNT="3")
    assert code == 1 and "3 attempts in a row began at step 5" in output
    checkpoint.rename(checkpoint.with_name("step-00000011"))
    assert launch("sft", "data.train=train.jsonl", SLURM_RESTART_COUNT="3")[0] == 0


@pytest.mark.parametrize("state", ["CANCELLED", "PREEMPTED", "COMPLETING"])
def test_a_job_that_slurm_is_ending_is_left_to_it(slurm, workdir, state):
    code, said = launch("sft", "data.train=train.jsonl", ALIGNER_PYTHON=stopping(workdir), STATE=state)
    assert code == 0 and "leaving it to Slurm" in said and asked(slurm) == []


def test_93_cancels_what_depends_on_it(slurm, workdir):
    Path("dependants").write_text(
        "43|afterok:42(unfulfilled)\n44|afterok:7:43(unfulfilled)\n45|afterok:142(unfulfilled)\n"
        "46|afterany:42(unfulfilled)\n47|(null)\n48|afterok:421(unfulfilled)\n"
    )
    assert launch("sft", "data.train=train.jsonl", CODE="93")[0] == 93
    assert asked(slurm) == ["scancel 43", "scancel 44"]


def test_a_failure_is_explained_and_not_requeued(slurm, workdir):
    code, output = launch("sft", "data.train=train.jsonl", CODE="1", PEER="")
    assert code == 1 and "triage: " in output and asked(slurm) == []
    rows = [line.split("\t") for line in Path("runs/sft/logs/attempts.tsv").read_text().splitlines()]
    assert rows[-1][5] == "failed"


def failing(folder: Path, code: str) -> str:
    """Ranks of one process that do `code` after a note of failure-0000.json may be written by `note TEXT CODE`."""
    script = folder / "failing.sh"
    script.write_text(
        '#!/usr/bin/env bash\ncase "$*" in *"aligner run"*) ;; *) exec "$REAL_PYTHON" "$@" ;; esac\n'
        'run=$(dirname "${@: -1}")\n'
        'note() { echo "{\\"time_s\\": 1, \\"text\\": \\"$1\\", \\"exit_code\\": $2}" >"$ALIGNER_FAILURE_FILE"; }\n'
        + code
    )
    script.chmod(0o755)
    return str(script)


def test_the_code_of_the_rank_that_failed_first_counts_not_sruns(slurm, workdir):
    """`srun` returns the largest code, and ends the others of a failed rank with TERM: 143."""
    Path("dependants").write_text("43|afterok:42(unfulfilled)\n")
    ranks = failing(workdir, "note 'error: optim.lr=-1: expected a number' 93\nexit 143\n")
    code, output = launch("sft", "data.train=train.jsonl", ALIGNER_PYTHON=ranks)
    assert code == 93 and asked(slurm) == ["scancel 43"]
    assert output.strip().splitlines()[-1] == "  | error: optim.lr=-1: expected a number"


@pytest.mark.slow
def test_a_port_that_is_taken_is_left_for_another_one_in_place(slurm, workdir):
    taken = "note 'DistNetworkError: port: x, name: EADDRINUSE, message: address already in use' 1\nexit 1\n"
    once = f'echo "$MASTER_PORT" >>ports\n(($(wc -l <ports) > 2)) || {{\n{taken}}}\ntouch "$run/DONE"\n'
    code, output = launch("sft", "data.train=train.jsonl", ALIGNER_PYTHON=failing(workdir, once))
    assert code == 0 and output.count("was taken: starting again") == 2 and asked(slurm) == []
    assert len(set(Path("ports").read_text().split())) == 3
    code, output = launch("sft", "data.train=train.jsonl", ALIGNER_PYTHON=failing(workdir, taken))
    assert code == 1 and output.count("was taken: starting again") == 5  # and not for ever


def test_an_array_of_the_users_own_runs_what_each_task_says(slurm, workdir):
    words = ["data.train=train.jsonl", "run.dir=runs/task3"]
    assert launch("sft", *words, SLURM_ARRAY_TASK_ID="3", SLURM_ARRAY_JOB_ID="40")[0] == 0
    assert Path("runs/task3/DONE").exists()


@pytest.mark.slow
def test_what_the_body_decides_is_what_triage_tells(slurm, workdir):
    triage = [str(ROOT / "slurm/triage"), "runs/sft"]
    words = ["data.train=train.jsonl", "--max-requeues", "2"]
    launch("sft", *words, ALIGNER_PYTHON=stopping(workdir), STUCK="1")
    assert "no progress" in subprocess.run(triage, capture_output=True, text=True).stdout
    launch("sft", *words, SLURM_RESTART_COUNT="3")
    assert "requeued 3 times, the limit is 2" in subprocess.run(triage, capture_output=True, text=True).stdout
    assert launch("sft", "data.train=train.jsonl")[0] == 0
    assert "limit" not in subprocess.run(triage, capture_output=True, text=True).stdout
