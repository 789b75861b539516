"""Models that judge in words, from a job: over HTTP, with the run's engine, or with their own."""

from __future__ import annotations

from dataclasses import replace

from aligner.builders.engines import native_engine
from aligner.builders.job import POLICY, Job, digest
from aligner.config.sections.judge import JudgeConfig
from aligner.config.sections.model.config import beside
from aligner.config.sections.model.lora import LoraConfig
from aligner.config.validate_model import validate_shares
from aligner.engines.native.load import fill
from aligner.errors import ConfigError, DataError
from aligner.rewards.endpoint import EndpointJudge
from aligner.rewards.judge import Judge
from aligner.roles.model_init import resolve
from aligner.rollout.replies import EngineReplies


def make_judges(job: Job) -> list[tuple[Judge | EndpointJudge, float]]:
    """Make the judges with their weights. Raises ConfigError."""
    judges: list[tuple[Judge | EndpointJudge, float]] = []
    asks: dict[str, EngineReplies] = {}
    for judge in job.cfg.reward.judges:
        if judge.question_file:
            job.built.contents[f"reward.judges.{judge.name}.question_file"] = digest(judge.text)
        if judge.endpoint.base_url:
            judges.append((_over_http(judge), judge.weight))
            continue
        if judge.model not in asks:
            asks[judge.model] = _frozen(job, judge) if judge.model else _own_replies(job)
        judges.append((Judge(judge, asks[judge.model]), judge.weight))
    return judges


def _over_http(judge: JudgeConfig) -> EndpointJudge:
    try:
        return EndpointJudge(judge)
    except ConfigError as error:
        raise ConfigError(f"reward.judges.{judge.name}.endpoint.{error.key}", error.value, error.expected) from None


def _own_replies(job: Job) -> EngineReplies:
    """Return replies of the run's engine, which is made after this."""
    return EngineReplies(
        lambda: job.built.engines[POLICY], job.tokenizer, job.layout.peers, job.initial.config.max_position
    )


def _frozen(job: Job, judge: JudgeConfig) -> EngineReplies:
    """Return replies of another model, in its own native engine on the ranks that train. Raises ConfigError."""
    path, key = judge.model, f"reward.judges.{judge.name}.model"
    try:
        initial = resolve(replace(beside(job.cfg.model), lora=LoraConfig()), path, job.cfg.seed, key=key)
    except DataError as error:  # it names model.tokenizer
        raise ConfigError(key, path, "a folder with the model's tokenizer", str(error)) from error
    if initial.folder is None or initial.adapters:
        raise ConfigError(key, path, "a Hugging Face folder, or a run that has exported one (`aligner export`)")
    if initial.has_scores:
        raise ConfigError(key, path, "a language model: this one has a head of scores (reward.model)")
    if initial.tokenizer.chat_template is None:
        raise ConfigError(key, path, "a model whose tokenizer has a chat template: questions are a user's turns")
    validate_shares(job.cfg, initial.config, key)
    job.built.contents[key] = initial.content
    engine = native_engine(job, initial.config, initial.tokenizer)
    fill(engine, initial.folder)
    engine.sleep()
    job.built.engines[f"judge.{sum(role != POLICY for role in job.built.engines)}"] = engine
    return EngineReplies(lambda: engine, initial.tokenizer, job.layout.peers, initial.config.max_position, own=True)
