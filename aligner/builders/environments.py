"""Tools, environments and generators of trajectories, from a job."""

from __future__ import annotations

from functools import partial
from typing import Any

from aligner.builders.job import Job, Tooling
from aligner.config.schema import Config
from aligner.data.dialogue import Dialogue
from aligner.data.formats import Tools
from aligner.engines.base import RolloutEngine
from aligner.environments.pool import Pool
from aligner.environments.tools import load_tools, schemas
from aligner.errors import ConfigError
from aligner.rollout.trajectory_generator import TrajectoryContext, TrajectoryGenerator, TurnAdmission, generator_class
from aligner.types import SamplingParams


def find_tools(cfg: Config, tokenizer: Any) -> Tooling:
    """Load the tools that prompts describe to the model. Raises EnvironmentCodeError, ConfigError."""
    tooling = load_tools(cfg.environment)
    if not (tooling.scores or cfg.reward.functions):
        expected = "at least one function: environment.path has neither get_reward nor turn_reward (environment.reward)"
        raise ConfigError("reward.functions", [], expected)
    tools = schemas(tooling)
    return Tooling(tools, _dialogue(cfg, tokenizer, tools), tooling.scores)


def _dialogue(cfg: Config, tokenizer: Any, tools: Tools) -> Dialogue:
    return Dialogue(tokenizer, tools, cfg.data.template_arguments, cfg.environment.calls)


def make_trajectories(job: Job, engine: RolloutEngine, sampling: SamplingParams) -> TrajectoryGenerator:
    cfg, tooling = job.cfg, job.tooling
    assert tooling is not None
    pool, pace = Pool(cfg.environment, tooling.schemas, job.answers), TurnAdmission.ROUNDS
    if engine.can.serves and cfg.engine.tensor_parallel == 1:
        pace = TurnAdmission.COUNTS if cfg.run.deterministic or cfg.engine.window else TurnAdmission.ANSWERS
    return generator_class(cfg.environment, partial(_dialogue, cfg, job.tokenizer))(
        engine,
        job.tokenizer,
        sampling,
        job.layout and job.layout.peers,
        job.timers,
        cfg.engine.window,
        outside=TrajectoryContext(pool, tooling.dialogue, cfg.environment, cfg.data.max_prompt_tokens, tooling.scores),
        pace=pace,
    )
