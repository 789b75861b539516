"""The config that a rehearsal runs: its own rows, tokenizer and rewards, as long as the user's config allows, two
steps, and one save. Imports no torch."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

from aligner.config.derived import evaluates, response_limit
from aligner.config.schema import Config
from aligner.config.sections.checkpoint import CheckpointConfig
from aligner.config.sections.cluster import SCALE
from aligner.config.sections.data import DataConfig
from aligner.config.sections.debug import DebugConfig
from aligner.config.sections.distill import RIGHT_ANSWER
from aligner.config.sections.environment import EnvironmentConfig
from aligner.config.sections.judge import FIELDS, JudgeConfig
from aligner.config.sections.logging import LoggingConfig
from aligner.config.sections.model.config import ModelConfig, for_run
from aligner.config.sections.rewards import RewardFunctionConfig
from aligner.config.sections.run import StopConfig
from aligner.config.stages import STAGES
from aligner.families.hf_config import hf_config
from aligner.plan.job import known_shape
from aligner.plan.presets import preset_of
from aligner.plan.rows import CHARACTERS, CRITERIA, CRITERION_TOKENS

ROWS, STEPS = 16, 2
REWARD = "aligner.rehearse.program:reward"


def prepared(cfg: Config, folder: Path) -> Config:
    """Return the config of a rehearsal, and write rows and a tokenizer into `folder`. Raises ConfigError for
    unsupported keys."""
    shape = known_shape(cfg, "a rehearsal")
    model_folder, tokenizer = folder / "model", folder / "tokenizer"
    model_folder.mkdir(parents=True)

    def there(path: str) -> str:
        """Return a model's folder if it exists, else one with the shape of the published model of this name, else one
        that has no shape."""
        if path and Path(path).expanduser().exists():
            return path
        return str(_published(shape, preset, folder / Path(path).name) if (preset := preset_of(path)) else model_folder)

    own = cfg.model.init == "random" or Path(cfg.model.init).expanduser().exists()
    init = cfg.model.init if own else str(model_folder)
    ready = replace(
        cfg,
        model=replace(shape, init=init, tokenizer=str(tokenizer), lora=replace(cfg.model.lora, init="")),
        data=_data(cfg, cfg.data, folder / "rows.jsonl"),
        ptx=replace(cfg.ptx, data=_data(cfg, cfg.ptx.data, folder / "ptx.jsonl")) if cfg.ptx.coef else cfg.ptx,
        engine=replace(
            cfg.engine, name="native", window=0, cuda_graphs=False
        ),  # windows run as their lag does, nothing is launched
        run=replace(cfg.run, steps=STEPS, epochs=0.0, resume="never", eval_every=0, samples_every=0, stop=StopConfig()),
        eval=replace(cfg.eval, functions=[], tasks=[], tasks_folder="", tasks_chat=False),
        checkpoint=CheckpointConfig(
            every=min(STEPS, cfg.checkpoint.every), rollouts=cfg.engine.lag > 0, async_save=cfg.checkpoint.async_save
        ),
        logging=LoggingConfig(progress=False, trackers=[]),
        debug=DebugConfig(),
        sampling=replace(cfg.sampling, max_response_tokens=response_limit(cfg)),
        environment=EnvironmentConfig(),
        cluster=replace(cfg.cluster, watchdog={SCALE: 0.0}),
    )
    judges = [
        replace(judge, model=judge.model and there(judge.model), question=_question(judge), question_file="")
        for judge in cfg.reward.judges
        if not judge.endpoint.base_url
    ]
    stage = STAGES[cfg.stage.name]
    scores = stage.rollouts or stage.generates(cfg) or evaluates(cfg)  # else a function would bring an engine
    functions = [RewardFunctionConfig(REWARD)] if scores else []
    ready.reward = replace(cfg.reward, functions=functions, judges=judges, workers=1)
    ready.critic = replace(cfg.critic, warmup_steps=0, pretrain_steps=min(1, cfg.critic.pretrain_steps))
    if cfg.reward.model or (cfg.stage.name == "ppo" and not cfg.critic.init):
        ready.reward.model = there(cfg.reward.model)
    if cfg.critic.init:
        ready.critic.init = there(cfg.critic.init)
    distill = cfg.algorithm.distill
    teachers = {name: there(path) for name, path in distill.teachers.items()}
    single = there(distill.teacher) if cfg.stage.name == "distill" and not teachers else ""
    single = distill.teacher if distill.own_teacher else single
    own = {"teacher": single, "teachers": teachers, "store": "", "teacher_prompt": _teacher_prompt(cfg)}
    ready.algorithm = replace(cfg.algorithm, distill=replace(distill, **own))
    return ready


def _teacher_prompt(cfg: Config) -> str:
    """Return a prompt for teachers as long as `plan` takes the config's to be; rows of a rehearsal lack its columns."""
    written, fields = cfg.algorithm.distill.pieces
    there = ("prompt", RIGHT_ANSWER[1:-1])
    columns = sum(name not in there for name in fields) * response_limit(cfg)
    return "?" * (written // CHARACTERS + columns) + "".join(f"{{{name}}}" for name in fields if name in there)


def _published(run: ModelConfig, preset: ModelConfig, folder: Path) -> Path:
    """Write a folder with the shape of a preset, and return it."""
    folder.mkdir(exist_ok=True)
    shape = hf_config(for_run(preset, run), bos_token_id=None, eos_token_id=0, pad_token_id=None, dtype="bfloat16")
    (folder / "config.json").write_text(json.dumps(shape), encoding="utf-8")
    return folder


def _question(judge: JudgeConfig) -> str:
    """Return a question about columns of the rehearsed rows, as long as `plan` takes the judge's own to be."""
    fields = "".join(f"{{{name}}}" for name in ("prompt", *FIELDS[judge.kind]))
    return "?" * (len(judge.text) // CHARACTERS) + fields


def _data(cfg: Config, data: DataConfig, path: Path) -> DataConfig:
    """Write rows for every stage in one file: each stage reads the columns it knows. Tokens are bytes."""
    stage, most = cfg.stage.name, data.max_tokens
    prompt = min(data.max_prompt_tokens, most - 2)
    rows = []
    for number in range(ROWS):
        first = chr(ord("a") + number)
        answer = first * (most - prompt - 1)  # and the end token
        row = {"prompt": first * prompt, "completion": answer, "chosen": answer, "label": number % 2 == 0}
        row |= {"rejected": chr(ord("A") + number) + answer[1:], "margin": 0.5, "text": first * (most - 1)}
        names = [*cfg.algorithm.reward_loss.attributes, "weight", "chosen_reward", "rejected_reward"]
        row |= dict.fromkeys(names, 0.5)
        row["rubric"] = [{"criterion": "?" * CRITERION_TOKENS, "points": 1}] * CRITERIA
        if stage == "rm" and cfg.algorithm.reward_loss.kind == "steps":
            row |= {"completions": [answer[: len(answer) // 4]] * 3, "labels": [1, 0, 1]}
        rows.append(row)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return replace(
        DataConfig(),
        train=str(path),
        eval=data.eval and str(path),
        format="text" if data.format == "text" else "auto",
        max_prompt_tokens=prompt,
        max_tokens=most,
        loss_on=data.loss_on,
        across_documents=data.across_documents,
    )
