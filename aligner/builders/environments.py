"""From a job to its tools and environments, and what generates with them."""

from __future__ import annotations

from functools import partial

from aligner.builders.job import Job
from aligner.data.dialogue import Dialogue
from aligner.data.formats import Tools
from aligner.engines.base import RolloutEngine
from aligner.environments.pool import Pool
from aligner.environments.tools import load_tools, schemas
from aligner.errors import ConfigError
from aligner.rollout.turns import Outside, Pace, TurnPlayer, kind_of_player
from aligner.types import SamplingParams


def find_tools(job: Job) -> None:
    """What prompts tell the model of, before they are made. Raises EnvironmentCodeError, ConfigError."""
    cfg = job.cfg
    found = load_tools(cfg.environment)
    job.tools, job.environment_scores = schemas(found), found.scores
    if not (found.scores or cfg.reward.functions):
        expected = "at least one function: environment.path has neither get_reward nor turn_reward"
        raise ConfigError("reward.functions", [], expected)
    job.dialogue = _dialogue(job, job.tools)


def _dialogue(job: Job, tools: Tools) -> Dialogue:
    return Dialogue(job.tokenizer, tools, job.cfg.data.template_arguments, job.cfg.environment.calls)


def make_turns(job: Job, engine: RolloutEngine, sampling: SamplingParams) -> TurnPlayer:
    """After `find_tools`."""
    cfg = job.cfg
    assert job.dialogue is not None
    pool, pace = Pool(cfg.environment, job.tools, job.answers), Pace.ROUNDS
    if engine.can.serves and cfg.engine.tensor_parallel == 1:
        pace = Pace.COUNTS if cfg.run.deterministic or cfg.engine.window else Pace.ANSWERS
    return kind_of_player(cfg.environment, partial(_dialogue, job))(
        engine,
        job.tokenizer,
        sampling,
        job.layout and job.layout.peers,
        job.timers,
        cfg.engine.window,
        outside=Outside(pool, job.dialogue, cfg.environment, cfg.data.max_prompt_tokens, job.environment_scores),
        pace=pace,
    )
