"""The command line, in this process where it can be and as a program where start-up counts."""

import os
import subprocess
import sys
import types
from pathlib import Path

import pytest
import yaml

from aligner.__main__ import COMMANDS, main
from aligner.config.freeze import accept, freeze, load_frozen
from aligner.config.resolve import compose
from aligner.errors import AlignerError, CheckpointError
from aligner.pipe import CLOSED

ROOT = Path(__file__).parents[1]
LAUNCHER_VARIABLES = (
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "ALIGNER_FAILURE_FILE",
    "ALIGNER_TRACEBACK",
)


@pytest.fixture(autouse=True)
def alone(monkeypatch, tmp_path):
    for name in LAUNCHER_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.jsonl").write_text("{}\n")


@pytest.fixture
def stage(monkeypatch):
    """Stands in for training: records what it was given."""
    calls = []
    fake = types.ModuleType("aligner.builders.stage")
    fake.run_stage = lambda cfg, env, signals: calls.append((cfg, env)) or 0
    monkeypatch.setitem(sys.modules, "aligner.builders.stage", fake)
    monkeypatch.setattr("aligner.builders.stage", fake, raising=False)
    return calls


@pytest.mark.parametrize(
    ("option", "message"),
    [("--learning_rate=1e-5", "optim.lr=..."), ("--bf16", "model.dtype=bfloat16"), ("--nonsense", "")],
)
def test_a_setting_written_as_an_option_is_reported_as_a_key(option, message, capsys):
    with pytest.raises(SystemExit) as ended:
        main(["run", "stage=sft", option])
    error = capsys.readouterr().err.strip()
    assert ended.value.code == 2 and error.endswith(message or option) and ("KEY=VALUE: " in error) == bool(message)


@pytest.mark.parametrize("arguments", [["--help"], ["run", "--help"]])
def test_help_comes_at_once(arguments):
    """Half a second on a laptop: it imports nothing large, and little of what is ours."""
    command = [sys.executable, "-X", "importtime", "-m", "aligner", *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0 and "experiment=NAME" in done.stdout
    assert arguments[0] == "run" or all(command in done.stdout for command in COMMANDS)
    imported = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines() if line.startswith("import time:")}
    roots = {name.partition(".")[0] for name in imported}
    assert "argparse" in roots and not roots & {"hydra", "omegaconf", "torch", "numpy", "yaml", "rich"}
    assert len([name for name in imported if name.startswith("aligner.")]) < 20


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (["--help"], 0),  # argparse's own
        (["keys"], CLOSED),
        (["doctor", "stage=grpo"], 1),  # rich's own
        (["run", "--cfg", "stage=grpo"], CLOSED),
        (["run", "data.train=train.jsonl"], CLOSED),
        (["submit", "data.train=train.jsonl", "--ranks-per-node", "1", "--dry-run"], CLOSED),
    ],
)
def test_a_command_whose_reader_has_gone_ends_quietly(arguments, code):
    """As `aligner keys | head` does."""
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "aligner", *arguments]
    done = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, text=True)
    os.close(writer)
    assert (done.stderr, done.returncode) == ("", code)


@pytest.mark.parametrize(
    ("end", "code", "shown"),
    [("raise ValueError('boom')", 1, "ValueError: boom"), ("sys.exit(2)", 2, ""), ("sys.exit(0)", CLOSED, "")],
)
def test_errors_stay_where_the_reader_has_gone(end, code, shown):
    reader, writer = os.pipe()
    os.close(reader)
    program = f"import sys\nfrom aligner.pipe import quiet_pipe\nwith quiet_pipe():\n    print('line')\n    {end}"
    environ = os.environ | {"PYTHONUNBUFFERED": ""}  # the line waits for the end of the block
    done = subprocess.run(
        [sys.executable, "-c", program], env=environ, stdout=writer, stderr=subprocess.PIPE, text=True
    )
    os.close(writer)
    assert done.returncode == code and done.stderr.strip().endswith(shown) and bool(done.stderr) == bool(shown)


WITHOUT = ("import", "export", "keys", "board", "replay", "bisect", "shakedown", "recipes", "data", "convert-config")


@pytest.mark.parametrize(
    "command",
    [name for name in COMMANDS if name not in WITHOUT],
)
def test_cfg_prints_the_resolved_config_on_every_command_with_one(command, capsys):
    needed = {"launch": ["--ranks", "2"], "check": ["layouts"]}.get(command, [])
    assert main([command, *needed, "stage=grpo", "--cfg", "optim.lr=3e-4", "run.name=x"]) == 0
    shown = yaml.safe_load(capsys.readouterr().out)
    assert (shown["stage"]["name"], shown["optim"]["lr"], shown["run"]["dir"]) == ("grpo", 3e-4, "runs/x")
    assert not Path("runs").exists()


def test_run_validates_prints_freezes_and_starts_the_stage(stage, capsys):
    assert main(["run", "data.train=train.jsonl", "seed=3", "batch.micro_batch_samples=8"]) == 0
    (cfg, env) = stage[0]
    assert (cfg.seed, env.world_size) == (3, 1)
    assert load_frozen("runs/sft/config.yaml") == cfg
    assert "32 sequences = 4 micro-batches x 8 micro_batch_samples x 1 data-parallel rank" in capsys.readouterr().out
    assert main(["run", "data.train=train.jsonl", "seed=4"]) == 0
    assert load_frozen("runs/sft").seed == 3  # until the stage has accepted the folder's checkpoints
    accept("runs/sft")
    assert load_frozen("runs/sft").seed == 4
    assert main(["run", "--frozen", "runs/sft/config.yaml"]) == 0 and stage[2][0] == stage[1][0]
    assert main(["run", "--frozen", "runs/sft/config.yaml", "run.resume=never"]) == 0
    assert (stage[3][0].seed, stage[3][0].run.resume) == (4, "never")
    assert main(["run", "--frozen", "runs/sft/config.yaml"]) == 0
    accept("runs/sft")  # not what the start before this one left behind
    assert load_frozen("runs/sft") == stage[1][0]


@pytest.mark.parametrize("command", [["run"], ["launch", "--ranks", "2"], ["submit", "--shell"]])
def test_a_run_that_is_on_is_left_alone(stage, capsys, command):
    """Neither its config nor that of its next start changes."""
    assert main(["run", "data.train=train.jsonl", "seed=3"]) == 0
    before = {path.name: path.read_bytes() for path in Path("runs/sft").iterdir()}
    code = "import sys\nfrom pathlib import Path\nfrom aligner.cluster.lock import RunLock\n"
    code += "with RunLock(Path('runs/sft')):\n    print('in', flush=True)\n    sys.stdin.read()\n"
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environ
    ) as holder:
        assert holder.stdout.readline() == "in\n"
        capsys.readouterr()
        assert main([*command, "data.train=train.jsonl", "seed=4"]) == 2
        assert f"process {holder.pid} on" in (err := capsys.readouterr().err) and err.startswith("error: run.dir=")
        holder.stdin.close()
    assert {path.name: path.read_bytes() for path in Path("runs/sft").iterdir()} == before and len(stage) == 1


def test_other_ranks_neither_print_nor_write(stage, capsys, monkeypatch):
    for name, value in {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    assert main(["run", "data.train=train.jsonl"]) == 0
    assert stage[0][1].rank == 1 and capsys.readouterr().out == "" and not Path("runs").exists()


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["optim.lrr=1"], "unknown config key `optim.lrr`. Did you mean `optim.lr`?"),
        ([], "data.train=''"),
        (["data.train=train.jsonl", "parallel=tp2"], "world size=1"),
        (["data.train=train.jsonl", "run.dir=train.jsonl/x"], "run.dir='train.jsonl/x'"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(stage, capsys, overrides, message):
    assert main(["run", *overrides]) == 2
    err = capsys.readouterr().err
    assert err.startswith("error: ") and message in err and err.count("\n") == 1
    assert not stage and not Path("runs").exists()


def test_errors_of_the_stage_set_the_exit_code(stage, capsys, monkeypatch):
    def fail(error):
        def run_stage(cfg, env, signals):
            raise error

        monkeypatch.setattr(sys.modules["aligner.builders.stage"], "run_stage", run_stage)
        return main(["run", "data.train=train.jsonl"])

    assert fail(CheckpointError("another model")) == 2
    assert fail(AlignerError("stopped")) == 1
    assert capsys.readouterr().err == "error: another model\nerror: stopped\n"
    monkeypatch.setenv("ALIGNER_TRACEBACK", "1")
    monkeypatch.setenv("ALIGNER_FAILURE_FILE", "failure.json")
    assert fail(AlignerError("stopped")) == 1
    assert "Traceback" in capsys.readouterr().err and "stopped" in Path("failure.json").read_text()
    assert fail(KeyboardInterrupt()) == 130
    with pytest.raises(ZeroDivisionError):  # a bug keeps its traceback
        fail(ZeroDivisionError("bug"))
    assert "bug" in Path("failure.json").read_text()


def test_the_cause_is_reported_before_the_report_of_a_long_run_is_written(stage, capsys, monkeypatch):
    monkeypatch.setenv("ALIGNER_FAILURE_FILE", "failure.json")
    seen = []

    def run_stage(cfg, env, signals):
        for name in ("starts.jsonl", "metrics.jsonl"):
            (Path(cfg.run.dir) / name).write_text("{}\n")
        raise CheckpointError("another model")

    def write_report(folders):
        seen.append((folders, Path("failure.json").read_text(), capsys.readouterr().err))
        raise KeyboardInterrupt  # it takes too long

    monkeypatch.setattr(sys.modules["aligner.builders.stage"], "run_stage", run_stage)
    monkeypatch.setattr("aligner.tools.report.write_report", write_report)
    assert main(["run", "data.train=train.jsonl"]) == 2
    ((folders, failure, err),) = seen
    assert folders == [Path("runs/sft")] and "another model" in failure and "error: another model" in err


def test_unknown_options_are_refused(capsys):
    with pytest.raises(SystemExit) as caught:
        main(["run", "--frozn", "x"])
    assert caught.value.code == 2 and "--frozn" in capsys.readouterr().err


def test_eval_and_chat_start_from_the_run_they_are_pointed_at(monkeypatch):
    freeze(compose(["stage=grpo", "model=qwen3_0.6b", "run.dir=runs/a"]), "runs/a")
    seen = []
    for name in ("evaluate", "chat"):
        fake = types.ModuleType(f"aligner.tools.{name}")
        fake.main = lambda cfg, *rest: seen.append(cfg) or 0
        monkeypatch.setitem(sys.modules, f"aligner.tools.{name}", fake)
        monkeypatch.setattr(f"aligner.tools.{name}", fake, raising=False)
    assert main(["eval", "run.dir=runs/a", "eval.samples=4", "eval.temperature=1"]) == 0
    assert main(["chat", "sampling.temperature=0.5", "run.dir=runs/a"]) == 0
    assert [(c.stage.name, c.model.num_layers, c.run.dir) for c in seen] == [("grpo", 28, "runs/a")] * 2
    assert (seen[0].eval.samples, seen[1].sampling.temperature) == (4, 0.5)
    assert main(["eval", "run.dir=runs/none"]) == 0 and seen[2].model.num_layers == 4
    Path("config.yaml").write_text("somebody: else's\n")  # where the command is typed, which is no run folder
    assert main(["eval", "seed=3"]) == 0 and seen[3].seed == 3


@pytest.mark.parametrize("command", ["eval", "chat", "serve"])
def test_a_run_folder_stands_for_its_run_dir(monkeypatch, tmp_path, command):
    """Whatever its name."""
    seen = []
    name = "evaluate" if command == "eval" else command
    fake = types.SimpleNamespace(main=lambda cfg, *rest: seen.append(cfg) or 0)
    monkeypatch.setitem(sys.modules, f"aligner.tools.{name}", fake)
    monkeypatch.setattr(f"aligner.tools.{name}", fake, raising=False)
    for name in ("a", "a b", "a=b", "it's", 'q"u', "${x}", "[1]", "²"):
        folder = tmp_path / name
        folder.mkdir()
        freeze(compose(["seed=7"]), folder)
        assert main([command, str(folder), "eval.temperature=0.5"]) == 0
        assert (seen[-1].run.dir, seen[-1].seed, seen[-1].eval.temperature) == (str(folder), 7, 0.5)
    assert main([command, f"run.dir={tmp_path}/a"]) == 0 and seen[-1].seed == 7
    count = len(seen)
    assert main([command, str(tmp_path / "a"), f"run.dir={tmp_path}/a"]) == 2
    assert main([command, str(tmp_path / "a"), str(tmp_path / "²")]) == 2 and len(seen) == count


def test_export_takes_a_run_by_its_key_too(monkeypatch):
    seen = []
    monkeypatch.setattr("aligner.tools.convert.main", lambda args, env: seen.append(args.source) or 0)
    assert main(["export", "run.dir=runs/a", "out"]) == main(["export", "runs/a", "out"]) == 0
    assert seen == ["runs/a"] * 2


def test_report_takes_folders_or_run_dir(monkeypatch):
    seen = []
    fake = types.ModuleType("aligner.tools.report")
    fake.main = lambda folders: seen.append(folders) or 0
    monkeypatch.setitem(sys.modules, "aligner.tools.report", fake)
    monkeypatch.setattr("aligner.tools.report", fake, raising=False)
    assert main(["report", "runs/a", "runs/b"]) == 0 and main(["report", "run.dir=runs/c"]) == 0
    assert main(["report", "stage=rm"]) == 0
    assert seen == [["runs/a", "runs/b"], ["runs/c"], ["runs/rm"]]


@pytest.fixture
def program(tmp_path, monkeypatch):
    """`python -m aligner` as child processes, with a stage that fails for seed 1."""
    (tmp_path / "site").mkdir()
    (tmp_path / "site/sitecustomize.py").write_text(
        "import sys, types\n"
        "fake = types.ModuleType('aligner.builders.stage')\n"
        "def run_stage(cfg, env, signals):\n"
        "    from aligner.errors import AlignerError\n"
        "    if cfg.seed == 1 and env.rank == env.world_size - 1: raise AlignerError('seed one')\n"
        "    print('trained', cfg.run.dir, env.rank, env.world_size, flush=True)\n"
        "    open(cfg.run.dir + '/DONE', 'w').close()\n"
        "fake.run_stage = run_stage\n"
        "for name in ('builders.stage', 'stages.sft'): sys.modules['aligner.' + name] = fake\n"
        "sys.modules['transformers.models.auto.tokenization_auto'] = fake\n"
    )
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path / "site"), str(ROOT)]))


@pytest.mark.slow
def test_multirun_runs_every_job_and_reports(program, capfd):
    assert main(["run", "-m", "data.train=train.jsonl", "seed=0,1", "run.dir=out", "optim=adamw"]) == 1
    out, err = capfd.readouterr()
    assert sorted(p.name for p in Path("out").iterdir()) == ["0_seed=0", "1_seed=1"]
    assert load_frozen("out/1_seed=1").seed == 1 and load_frozen("out/0_seed=0").run.dir == "out/0_seed=0"
    assert "trained out/0_seed=0 0 1" in out and "2 of 2 jobs" in out and "failed (1)" in out
    assert "error: seed one" in err
    assert main(["run", "-m", "data.train=train.jsonl", "seed=2"]) == 0


def test_multirun_composes_every_job_before_the_first(program, capfd):
    assert main(["run", "-m", "data.train=train.jsonl", "optim.lr=1e-4,-1"]) == 2
    assert "optim.lr=-1" in capfd.readouterr().err and not Path("runs").exists()


def test_launch_starts_ranks_that_read_one_frozen_config(program, capfd):
    assert main(["launch", "--ranks", "2", "data.train=train.jsonl", "run.dir=out"]) == 0
    out, _ = capfd.readouterr()
    assert "trained out 0 2" in out and "x 2 data-parallel ranks" in out
    assert Path("out/logs/rank-0001.log").read_text() == "trained out 1 2\n"


def test_launch_tells_which_rank_failed(program, capfd):
    assert main(["launch", "data.train=train.jsonl", "run.dir=out", "seed=1", "--ranks", "2"]) == 1
    err = capfd.readouterr().err
    assert "rank 1 of 2 failed first (exit code 1)" in err and "| error (rank 1): seed one" in err


def test_a_launch_whose_reader_has_gone_ends_quietly(program):
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "aligner", "launch", "--ranks", "2", "data.train=train.jsonl", "run.dir=out"]
    done = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, text=True)
    os.close(writer)
    assert done.returncode == CLOSED and done.stderr.startswith("2 ranks;") and done.stderr.count("\n") == 1


def test_launch_refuses_before_it_starts_ranks(program, capfd):
    assert main(["launch", "--ranks", "3", "parallel=tp2", "data.train=train.jsonl"]) == 2
    assert main(["launch", "--ranks", "0", "data.train=train.jsonl"]) == 2
    err = capfd.readouterr().err
    assert "world size=3" in err and "--ranks=0" in err and not Path("runs").exists()


def test_the_command_finds_modules_of_the_current_folder(tmp_path):
    """As `python -m aligner` does; a script's own folder is elsewhere."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "mine.py").write_text("print('found')\n")
    script = "from aligner.__main__ import entry\ntry:\n    entry()\nexcept SystemExit:\n    import mine\n"
    (tmp_path / "bin" / "aligner").write_text(script)
    command = [sys.executable, "bin/aligner", "--help"]
    done = subprocess.run(
        command, cwd=tmp_path, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": str(ROOT)}
    )
    assert done.stdout.endswith("found\n"), done.stderr
