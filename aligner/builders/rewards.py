"""From a job to its rewards: functions, a reward model, judges with the run's engine or one of their own."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from aligner.builders.engines import native_engine
from aligner.builders.job import Job, digest
from aligner.config.sections.judge import JudgeConfig
from aligner.config.sections.model.lora import LoraConfig
from aligner.config.validate_model import validate_shares
from aligner.engines.native.load import fill
from aligner.errors import CheckpointError, ConfigError, DataError
from aligner.foreign import record
from aligner.megatron.checkpoint_files import complete_checkpoints, read_state
from aligner.rewards.composite import RewardPipeline
from aligner.rewards.endpoint import EndpointJudge
from aligner.rewards.environment import EnvironmentReward
from aligner.rewards.functions import load_function
from aligner.rewards.judge import Judge
from aligner.roles.model_init import resolve
from aligner.roles.process_reward import ProcessRewardModel
from aligner.roles.reward_model import RewardModel
from aligner.rollout.replies import EngineReplies


def _sum_over_data_ranks(job: Job, values: list[float]) -> list[float]:
    total = torch.tensor(values, dtype=torch.float64, device=job.device)
    dist.all_reduce(total, group=job.layout.pgs.dp)
    return total.tolist()


def make_rewards(job: Job, model: RewardModel | ProcessRewardModel | None) -> RewardPipeline:
    found: list[tuple[Any, float]] = [
        (load_function(function, i), function.weight) for i, function in enumerate(job.cfg.reward.functions)
    ]
    if model is not None:
        found.append((model, job.cfg.reward.model_weight))
    if job.environment_scores:
        found.append((EnvironmentReward(), job.cfg.environment.weight))
    asks: dict[str, EngineReplies] = {}
    for judge in job.cfg.reward.judges:
        if judge.question_file:
            job.contents[f"reward.judges.{judge.name}.question_file"] = digest(judge.text)
        if judge.endpoint.base_url:
            found.append((_over_http(judge), judge.weight))
            continue
        if judge.model not in asks:
            asks[judge.model] = _frozen(job, judge) if judge.model else _own_replies(job)
        found.append((Judge(judge, asks[judge.model]), judge.weight))
    if job.cfg.run.resume != "auto" and job.env.rank == 0:
        job.answers.clear()
    outside = job.cfg.environment.on or any(hasattr(reward, "keep_answers") for reward, _ in found)
    answers = job.answers if outside else None
    if outside and job.env.rank == 0:
        job.on_commit.append(lambda _: job.answers.drop(_first_rollout(job)))
    return RewardPipeline(found, job.cfg.reward, partial(_sum_over_data_ranks, job), answers)


def _first_rollout(job: Job) -> int:
    """The first that a start may go through, whichever checkpoint it resumes from: of windows one that was in flight
    then. 0: not known."""
    step, path = complete_checkpoints(Path(job.cfg.run.dir) / "checkpoints")[0]
    try:
        state = record(read_state(path)["state"], str(path), CheckpointError)
        groups = state.record("clock").integers("groups") if "clock" in state else []
    except CheckpointError as error:
        job.say(f"warning: {error}: answers from outside stay")
        return 0
    return min([step, *(number // job.cfg.batch.prompts for number in groups)]) + 1


def _over_http(judge: JudgeConfig) -> EndpointJudge:
    try:
        return EndpointJudge(judge)
    except ConfigError as error:
        raise ConfigError(f"reward.judges.{judge.name}.endpoint.{error.key}", error.value, error.expected) from None


def _own_replies(job: Job) -> EngineReplies:
    """Of the run's engine, which is made after this."""
    return EngineReplies(lambda: job.engine, job.tokenizer, job.layout.peers, job.initial.config.max_position)


def _frozen(job: Job, judge: JudgeConfig) -> EngineReplies:
    """Of another model, in a native engine of its own on the ranks that train. Raises ConfigError."""
    path, key = judge.model, f"reward.judges.{judge.name}.model"
    try:
        initial = resolve(replace(job.cfg.model, tokenizer="", lora=LoraConfig()), path, job.cfg.seed, key=key)
    except DataError as error:  # it speaks of model.tokenizer
        raise ConfigError(key, path, "a folder with the model's tokenizer", str(error)) from error
    if initial.folder is None or initial.adapters:
        raise ConfigError(key, path, "a Hugging Face folder, or a run that has exported one (`aligner export`)")
    if initial.has_scores:
        raise ConfigError(key, path, "a language model: this one has a head of scores (reward.model)")
    if initial.tokenizer.chat_template is None:
        raise ConfigError(key, path, "a model whose tokenizer has a chat template: questions are a user's turns")
    validate_shares(job.cfg, initial.config, key)
    job.contents[key] = initial.content
    engine = native_engine(job, initial.config, initial.tokenizer)
    fill(engine, initial.folder)
    engine.sleep()
    job.judges[f"judge.{len(job.judges)}"] = engine
    return EngineReplies(lambda: engine, initial.tokenizer, job.layout.peers, initial.config.max_position, own=True)
