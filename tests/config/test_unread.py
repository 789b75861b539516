"""Keys that a stage does not read: which they are, by whole stages that are watched, and how they are refused."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import pytest

from aligner.__main__ import main
from aligner.config.freeze import freeze
from aligner.config.identity import uses
from aligner.config.options import hints
from aligner.config.resolve import compose, sweep
from aligner.config.schema import Config
from aligner.config.stages import STAGES
from aligner.config.unread import compose_run
from aligner.config.validate import validate
from aligner.errors import ConfigError
from aligner.files import conf_dir
from tests import stages

# modules that look at every key, or only to refuse it
NO_READERS = ("dataclasses", "copy", "aligner.config.freeze", "aligner.config.identity", "aligner.config.schema")
CHECKS = ("aligner.config.validate", "aligner.config.rule", "aligner.config.rules")
# asked of every stage by what they share, without anything that follows where no engine, critic or judge is there
IN_VAIN = (
    *("engine.name", "engine.ranks", "engine.kv_cache_bytes", "sampling.max_response_tokens"),
    *("environment.path", "environment.tools", "environment.agent", "critic.warmup_steps", "reward.judges"),
    *("mismatch.correction", "mismatch.replay_routing", "run.eval_every", "engine.quantization"),
)
# numbers in place of auto, for which a start replaces the sections and reckons what any stage could need
SIZES = ["batch.micro_batch_samples=8", "batch.logprob_tokens=4096", "engine.kv_cache_bytes=1073741824"]
IN_VAIN_OF = {
    "online_dpo": (
        "algorithm.advantage",
        "algorithm.kl.placement",
        "algorithm.positive.coef",
        "algorithm.observation_coef",
    ),
    "sample": ("batch.micro_batch_samples",),
}


def sections(section: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    yield prefix, section
    for name in hints(type(section)):
        if dataclasses.is_dataclass(value := getattr(section, name)):
            yield from sections(value, f"{prefix}{name}.")


@contextmanager
def watched(cfg: Config, seen: dict[str, str]) -> Iterator[None]:
    """Within, `seen` gets each leaf of `cfg` that is read, and where."""
    prefixes = {id(section): prefix for prefix, section in sections(cfg)}
    classes = {type(section) for _, section in sections(cfg)}

    def read(self, name):
        value = object.__getattribute__(self, name)
        prefix = prefixes.get(id(self))
        if prefix is not None and name in hints(type(self)) and not dataclasses.is_dataclass(value):
            frames, frame = [], sys._getframe(1)
            while frame and len(frames) < 8:
                frames.append(frame.f_globals.get("__name__", ""))
                frame = frame.f_back
            if frames[0] not in NO_READERS and not set(frames) & set(CHECKS):
                seen.setdefault(f"{prefix}{name}", f"{frames[0]} < {frames[1]}")
        return value

    with ExitStack() as stack:
        for cls in classes:
            stack.enter_context(patch.object(cls, "__getattribute__", read))
        yield


CASES = {
    "sft": [
        "sampling.max_response_tokens=4",
        "eval.functions=[{path: tests/assets/tiny_rewards.py:vowels}]",
        "model.lora.rank=2",
    ],
    "rm": ["model.lora.rank=2"],
    "dpo": [],
    "kto": [],
    "distill": ["algorithm.distill.on_policy=0.5", "eval.functions=[{path: tests/assets/tiny_rewards.py:vowels}]"],
    "online_dpo": [],
    "grpo": ["algorithm.kl.coef=0.1", "algorithm.kl.placement=loss", "ema.decay=0.9"],
    "ppo": [],
    "sample": [],
}


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_no_stage_reads_what_it_is_said_not_to(name, tiny_data, tiny_runs, tmp_path):
    evaluation = {"dpo": "pairs", "rm": "pairs", "kto": "labels"}.get(name, "eval")
    overrides = [f"model.init={tiny_runs['sft']}", *SIZES, *CASES[name]]
    if name != "sample":
        overrides += [f"data.eval={tiny_data / f'{evaluation}.jsonl'}", "run.steps=2", "run.eval_every=1"]
    overrides += [f"algorithm.distill.teacher={tiny_runs['sft']}"] if name == "distill" else []
    overrides += [f"reward.model={tiny_runs['rm']}"] if name == "ppo" else []
    cfg, seen = compose(stages.overrides(name, tiny_data, tmp_path, *overrides)), {}
    validate(cfg, 1)
    with watched(cfg, seen):
        stages.execute(cfg)
    assert len(seen) > 40  # it watches
    vain = (*IN_VAIN, *IN_VAIN_OF.get(name, ()))
    wrong = {key: where for key, where in seen.items() if not uses(name, key) and key not in vain}
    assert not wrong, "\n".join(f"{key}: {where}" for key, where in wrong.items())


def test_stages_are_all_watched():
    assert set(CASES) == set(STAGES)


@pytest.fixture
def recipe(tmp_path):
    """A folder of the user's with an experiment of this content."""

    def write(text: str, path: str = "experiment/mine") -> str:
        file = tmp_path / "mine" / f"{path}.yaml"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
        return str(tmp_path / "mine")

    return write


@pytest.mark.parametrize(
    ("overrides", "key", "near", "readers"),
    [
        ("stage=sft critic.optim.lr=3", "critic.optim.lr", "optim.lr", "ppo"),
        ("critic={optim:{lr:1}}", "critic.optim.lr", "optim.lr", "ppo"),
        ("stage=sft algorithm.preference.beta=9", "algorithm.preference.beta", "", "dpo, online_dpo"),
        ("stage=dpo algorithm.kto.beta=9", "algorithm.kto.beta", "algorithm.preference.beta", "kto"),
        ("stage=kto algorithm.preference.beta=9", "algorithm.preference.beta", "algorithm.kto.beta", "dpo"),
        ("stage=grpo batch.sequences=4", "batch.sequences", "batch.prompts", "distill, dpo"),
        ("stage=dpo batch.prompts=4", "batch.prompts", "batch.sequences", "grpo"),
        ("stage=sft sampling.temperature=0.5", "sampling.temperature", "eval.temperature", "distill, grpo"),
        ("stage=dpo eval.functions=[{path:math}]", "eval.functions", "", "distill, grpo"),
        ("stage=sample optim.lr=1e-5", "optim.lr", "", "distill, dpo"),
        ("stage=rm engine.max_batch=3", "engine.max_batch", "", "distill, grpo"),
        ("stage=grpo stage.sample.best=2", "stage.sample.best", "", "sample"),
        ("experiment=quickstart_ppo algorithm.kto.beta=1", "algorithm.kto.beta", "algorithm.kl.coef", "kto"),
        ("stage=online_dpo algorithm.lam=0.9", "algorithm.lam", "", "grpo, ppo"),
        ("stage=kto ++critic.clip=0.1", "critic.clip", "", "ppo"),
        ("stage=dpo data.loss_on=all", "data.loss_on", "", "distill, sft"),
        ("stage=grpo data.across_documents=true", "data.across_documents", "", "distill, sft"),
        ("stage=sft data.empty_answers=drop", "data.empty_answers", "", "dpo, kto"),
        ("stage=rm ptx.sequences=3", "ptx.sequences", "batch.sequences", "distill, dpo"),
        ("stage=sample ptx.data.train=x", "ptx.data.train", "data.train", "distill, dpo"),
        ("stage=grpo data.max_tokens=512", "data.max_tokens", "data.max_prompt_tokens", "distill, dpo"),
        ("stage=dpo data.max_prompt_tokens=512", "data.max_prompt_tokens", "data.max_tokens", "distill, grpo"),
        ("stage=sample data.shuffle=false", "data.shuffle", "", "distill, dpo"),
    ],
)
def test_a_key_that_the_stage_does_not_read_is_refused(overrides, key, near, readers):
    with pytest.raises(ConfigError) as caught:
        compose_run(overrides.split())
    text, stage = str(caught.value), compose(overrides.split()).stage.name
    assert caught.value.key == key and f"that stage {stage} reads" in text and f"; {readers}" in text
    assert (f"`{near}`" in text) if near else "Did you mean" not in text
    compose_run([word if word.lstrip("+").startswith("stage=") else f"?{word}" for word in overrides.split()])


@pytest.mark.parametrize("name", STAGES)
def test_the_projects_own_files_are_for_all_stages(name):
    shipped = conf_dir()
    compose_run([f"stage={name}"])
    compose_run([f"stage={name}", "engine=vllm", "optim=adamw_cosine"])
    assert len(list((shipped / "experiment").glob("*.yaml"))) > 40


def test_every_shipped_recipe_is_read_by_its_stage():
    for path in sorted((conf_dir() / "experiment").glob("*.yaml")):
        compose_run([f"experiment={path.stem}"])


def test_a_users_file_counts_as_what_it_says(recipe):
    folder = recipe("# @package _global_\ndefaults:\n  - override /stage: dpo\nalgorithm: {kto: {beta: 3}}\n")
    with pytest.raises(ConfigError, match=r"algorithm\.kto\.beta=3.*stage dpo reads.*mine\.yaml"):
        compose_run(["experiment=mine"], config_dir=folder)
    assert compose_run(["?experiment=mine"], config_dir=folder).algorithm.kto.beta == 3
    assert compose_run(["experiment=mine", "stage=kto"], config_dir=folder).stage.name == "kto"
    compose(["experiment=mine"], config_dir=folder)  # of a command that runs no stage
    searched = [f"hydra.searchpath=['file://{folder}']", "experiment=mine"]
    with pytest.raises(ConfigError, match=r"algorithm\.kto\.beta"):
        compose_run(searched)


def test_what_a_marked_recipe_includes_is_marked(recipe):
    folder = recipe("# @package _global_\ndefaults: [base, _self_]\noptim: {lr: 1.0e-3}\n")
    recipe("# @package _global_\ncritic: {clip: 0.1}\ndata: {columns: {prompt: q}}\n", "experiment/base")
    with pytest.raises(ConfigError, match=r"critic\.clip"):
        compose_run(["experiment=mine"], config_dir=folder)
    cfg = compose_run(["?experiment=mine"], config_dir=folder)
    assert (cfg.critic.clip, cfg.optim.lr, cfg.data.columns) == (0.1, 1e-3, {"prompt": "q"})


def test_jobs_of_a_sweep_keep_the_mark():
    jobs = sweep(["stage=sft", "?critic.optim.lr=1,2", "optim.lr=1e-4"])
    assert [job[1] for job in jobs] == ["?critic.optim.lr=1", "?critic.optim.lr=2"]
    assert compose_run(jobs[1]).critic.optim.lr == 2


def test_a_frozen_config_is_as_it_was(tmp_path, capsys):
    """What it has was once asked for; what is set on top of it is asked for now."""
    cfg = compose(["stage=sft", "critic.optim.lr=3", f"run.dir={tmp_path}", "data.train=."])
    freeze(cfg, tmp_path)
    assert main(["run", "--frozen", str(tmp_path), "--cfg"]) == 0
    assert "lr: 3.0" in capsys.readouterr().out
    assert main(["run", "--frozen", str(tmp_path), "--cfg", "critic.optim.lr=2"]) == 2
    assert "stage sft reads" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["run", "launch", "submit", "plan", "rehearse"])
def test_commands_that_run_a_stage_refuse_it(command, capsys):
    sizes = {"launch": ["--ranks", "1"], "plan": ["--gpus", "1"], "rehearse": ["--gpus", "1"]}.get(command, [])
    assert main([command, *sizes, "--cfg", "stage=sft", "critic.clip=0.3"]) == 2
    assert "critic.clip" in capsys.readouterr().err


def test_other_commands_read_other_keys(capsys):
    assert main(["chat", "--cfg", "stage=sft", "sampling.temperature=0.3"]) == 0
    assert "temperature: 0.3" in capsys.readouterr().out
