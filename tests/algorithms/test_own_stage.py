"""A stage in a user's file: out of the documented parts, equal to the project's own, and refused before it starts."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from aligner import api
from aligner.__main__ import main
from aligner.config.own_stage import typed_args
from aligner.config.resolve import compose
from aligner.config.unread import compose_run
from aligner.config.validate import validate
from aligner.errors import ConfigError, StageCodeError, UnknownKeyError
from tests import stages

EXAMPLE = "examples/own_stage.py"
FAITHFUL = ["run.steps=2", "batch.epochs=2", "batch.minibatch_samples=16", "algorithm.kl.coef=0.05"]
SOURCE = """
from dataclasses import dataclass, replace

from aligner import api


@dataclass
class SharpConfig(api.Section, key="stage.args"):
    scale: float = api.key(1.0, "Factor of the loss.", above=0)


STAGE = api.Stage(section=SharpConfig, defaults={"run.steps": 2, "optim.lr": 3e-3})


def main(job):
    batches = api.make_batches(job, api.make_training_set(job, lambda *a: api.make_answers(job, *a)), api.collate_sft)
    policy = api.make_policy(job, job.cfg.run.steps)
    run = api.make_run(job, {"policy": policy.model}, {"data": batches.stream})
    group = policy.model.layout.pgs.dp
    with api.saved_first(run):
        for step in run.steps():
            batch = batches.next()
            tokens = api.denominator(batch.loss_mask, "token_mean", group=group)

            def loss(out, rows):
                nll = api.aggregate(-out.logprobs, rows.loss_mask, "token_mean", tokens)
                return api.LossOutput(nll * job.args.scale, {})

            run.finish_batch(step, policy.update(batch, loss) | {"sharp/scale": job.args.scale}, batch, group.size())
    api.finish(job, run, policy.model)
"""


def overrides(stage: str, path: Path | str, data: Path, folder: Path, *settings: str) -> list[str]:
    """The command line of a toy run of the stage in a file, with the data of the project's `stage`."""
    line = stages.overrides(stage, data, folder, *settings)
    return [f"stage={path}" if word == f"stage={stage}" else word for word in line]


@pytest.fixture
def sharp(tmp_path):
    path = tmp_path / "sharp.py"
    path.write_text(SOURCE)
    return path


@pytest.mark.slow
def test_grpo_out_of_the_documented_parts_equals_the_projects_bit_for_bit(tiny_data, tmp_path):
    built = stages.stage("grpo", tiny_data, tmp_path / "built", *FAITHFUL)
    own = stages.run(overrides("grpo", EXAMPLE, tiny_data, tmp_path / "own", *FAITHFUL))
    assert stages.same_weights(built, own)
    assert {name for _, name, *_ in stages.differences(built, own)} == {"kl/coef"}
    assert (own / "DONE").read_text() == f"{EXAMPLE}\n"


def test_the_example_is_short():
    body = Path(EXAMPLE).read_text().partition("STAGE =")[2]
    assert len([line for line in body.splitlines() if line.strip()]) <= 44


@pytest.mark.slow
def test_a_resumed_run_names_an_edited_file(tiny_data, tmp_path, sharp, capfd):
    line = overrides("sft", sharp, tiny_data, tmp_path / "run", "checkpoint.every=1")
    stages.run([*line, "run.steps=1"])
    sharp.write_text(SOURCE + "\n# edited\n")
    capfd.readouterr()
    run = stages.run([*line, "run.steps=2"])
    out = capfd.readouterr().out
    assert "content of stage.name" in out and "resumed at step 1 of 2" in out
    assert [record["sharp/scale"] for record in stages.records(run)] == [1.0, 1.0]
    with pytest.raises(Exception, match=r"another run: stage.args"):
        stages.run([*line, "run.steps=2", "stage.args.scale=2"])


@pytest.mark.slow
def test_other_commands_take_the_file(tiny_data, tmp_path, sharp, capsys):
    run = tmp_path / "run"
    line = [*overrides("sft", sharp, tiny_data, run), "stage.args.scale=2", "model.vocab_size=300"]
    for command in (["plan"], ["submit", "--dry-run"], ["rehearse"]):
        assert main([*command, *line]) == 0, capsys.readouterr()
    command = [sys.executable, "-m", "aligner", "launch", "--ranks", "2", *line]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert (run / "DONE").exists() and [record["sharp/scale"] for record in stages.records(run)] == [2.0, 2.0]


def test_defaults_of_the_file_yield_to_files_and_command_line(sharp):
    cfg = compose([f"stage={sharp}"])
    assert (cfg.run.steps, cfg.optim.lr, cfg.run.dir) == (2, 3e-3, "runs/sharp")
    assert compose(["optim.lr=1e-5", f"stage={sharp}"]).optim.lr == 1e-5
    odd = sharp.with_name("a b=c,ü.v2.py")
    odd.write_text(SOURCE)
    assert compose([f'stage="{odd}"']).stage.name == str(odd)
    assert compose([f"stage={EXAMPLE}"]).batch.group == compose(["stage=grpo"]).batch.group == 8


@pytest.mark.parametrize(
    "settings, error, message",
    [
        (["stage.args.scale=-1"], ConfigError, "stage.args.scale=-1.0: expected a number > 0"),
        (["stage.args.scale=large"], ConfigError, "stage.args.scale='large': expected a number"),
        (
            ["stage.args.scael=1"],
            UnknownKeyError,
            "unknown config key `stage.args.scael`. Did you mean `stage.args.scale`?",
        ),
        (["critic.clip=0.1"], ConfigError, "a key that stage {path} reads"),
    ],
)
def test_its_own_keys_are_typed(sharp, settings, error, message):
    with pytest.raises(error, match=re.escape(message.format(path=sharp))):
        validate(compose_run([f"stage={sharp}", "data.train=README.md", *settings]), 1)


@pytest.mark.parametrize(
    "rule", ["optim.rl>1 => run.steps <=9", "=> optim.rl <1", "run.steps>99 => run.steps <=optim.rl"]
)
def test_a_rule_with_an_unknown_key_is_refused_also_where_it_does_not_apply(sharp, rule):
    sharp.write_text(SOURCE.replace("defaults=", f"rules=api.rules('{rule}'), defaults="))
    with pytest.raises(UnknownKeyError, match=re.escape("unknown config key `optim.rl`. Did you mean `optim.lr`?")):
        validate(compose_run([f"stage={sharp}", "data.train=README.md"]), 1)


def test_stage_args_are_for_files_alone(tmp_path):
    with pytest.raises(ConfigError, match=r"stage.args.scale=1: expected a key that stage sft reads"):
        compose_run(["stage=sft", "stage.args.scale=1"])
    with pytest.raises(ConfigError, match=r"no entries: STAGE of .* has no section"):
        typed_args(compose_run([f"stage={EXAMPLE}", "stage.args.scale=1"]))


@pytest.mark.parametrize(
    "text, error, message",
    [
        ("", StageCodeError, "expected STAGE = api.Stage(...) in the file"),
        ("from aligner import api\nSTAGE = api.Stage()\n", StageCodeError, "expected a function main(job)"),
        ("from aligner import api\nSTAGE = api.Stage()\ndef main(): pass\n", StageCodeError, "a function main(job)"),
        ("import no_such_module\n", StageCodeError, "raised ModuleNotFoundError: No module named 'no_such_module'"),
        ("from aligner import api\napi.make_polic\n", StageCodeError, "aligner.api has no `make_polic`"),
        (SOURCE.replace("optim.lr", "optim.rl"), UnknownKeyError, "unknown config key `optim.rl`"),
        (SOURCE.replace("@dataclass\n", ""), StageCodeError, "expected a class with @dataclass that begins `class"),
        (
            SOURCE.replace("defaults=", "reads=('polcy',), defaults="),
            StageCodeError,
            "reads with 'polcy': expected one of comp",
        ),
        (SOURCE.replace("optim.lr", "stage.name"), ConfigError, "stage.name=0.003: expected no default of stage="),
    ],
)
def test_a_file_that_is_no_stage_is_refused(tmp_path, text, error, message):
    path = tmp_path / "stage.py"
    path.write_text(text)
    with pytest.raises(error, match=re.escape(message)):
        compose([f"stage={path}"])


def test_a_missing_file_is_refused(tmp_path):
    with pytest.raises(StageCodeError, match=r"FileNotFoundError: no file"):
        compose([f"stage={tmp_path / 'absent.py'}"])


def test_a_module_of_a_package_is_a_stage(tiny_data, tmp_path, monkeypatch):
    (tmp_path / "my_lab").mkdir()
    (tmp_path / "my_lab/__init__.py").touch()
    (tmp_path / "my_lab/sharper.py").write_text(SOURCE)
    monkeypatch.syspath_prepend(tmp_path)
    assert compose(["stage=my_lab.sharper"]).run.name == "sharper"
    run = stages.run(overrides("sft", "my_lab.sharper", tiny_data, tmp_path / "run", "run.steps=1"))
    assert [record["sharp/scale"] for record in stages.records(run)] == [1.0]
    with pytest.raises(StageCodeError, match=r"importing my_lab.absent raised ModuleNotFoundError"):
        compose(["stage=my_lab.absent"])


@pytest.mark.slow
def test_a_file_may_not_import_megatron_before_the_run(tmp_path):
    path, stand_in = tmp_path / "early.py", tmp_path / "packages/megatron/core"  # the real one takes seconds
    stand_in.mkdir(parents=True)
    (stand_in / "__init__.py").touch()
    path.write_text("import megatron.core\n" + SOURCE)
    command = [sys.executable, "-m", "aligner", "run", "--cfg", f"stage={path}"]
    env = os.environ | {"PYTHONPATH": f"{tmp_path / 'packages'}:{Path.cwd()}"}
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    assert done.returncode == 2 and "expected a file that does not import Megatron" in done.stderr, done.stderr


def test_every_name_of_the_api_has_its_home_and_a_meaning():
    homes = api.homes()
    assert list(homes) == api.__all__ and {*homes} == {*dir(api)} and len(homes) > 40
    for name in homes:
        assert getattr(api, name).__name__.rpartition(".")[2] == name
    with pytest.raises(AttributeError, match=r"aligner\.api has no `nothing`: Stage, "):
        _ = api.nothing


def test_the_api_and_the_example_are_read_without_torch():
    code = f"import sys; from aligner import api; from aligner.config.stages import STAGES; STAGES['{EXAMPLE}']\n"
    subprocess.run([sys.executable, "-c", code + "assert 'torch' not in sys.modules"], check=True)
