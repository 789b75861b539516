"""Tools, environments and generators of trajectories, from a job."""

from __future__ import annotations

import os
import sys
from functools import partial
from typing import Any

from aligner.builders.job import Job, Tooling
from aligner.cluster.env import RankEnv
from aligner.cluster.node_memory import node_bytes
from aligner.config.schema import Config
from aligner.data.dialogue import Dialogue
from aligner.data.formats import Tools
from aligner.engines.base import RolloutEngine
from aligner.environments.pool import Pool
from aligner.environments.tools import load_tools, schemas
from aligner.errors import ConfigError
from aligner.rollout.trajectory_generator import TrajectoryContext, TrajectoryGenerator, TurnAdmission, generator_class
from aligner.types import SamplingParams


def find_tools(cfg: Config, env: RankEnv, tokenizer: Any) -> Tooling:
    """Load the tools that prompts describe to the model. Raises EnvironmentCodeError, ConfigError."""
    tooling = load_tools(cfg.environment)
    if hasattr(tooling.kind, "most_mb") and env.local_rank == 0:
        _compare_memory(cfg, env, tooling.kind.most_mb(**cfg.environment.args))
    if not (tooling.scores or cfg.reward.functions):
        expected = "at least one function: environment.path has neither get_reward nor turn_reward (environment.reward)"
        raise ConfigError("reward.functions", [], expected)
    tools = schemas(tooling)
    return Tooling(tools, _dialogue(cfg, tokenizer, tools), tooling.scores)


def _compare_memory(cfg: Config, env: RankEnv, each_mb: int) -> None:
    """Warn if the environments of this node may take more memory than it has."""
    count, has_mb = _most_open(cfg, env), node_bytes() >> 20
    # no error: limits are maxima, which few environments reach at once
    if count * each_mb > has_mb:
        text = (
            f"warning: environment: {os.uname().nodename} has {has_mb} MiB of memory for this job, and {count} "
            f"environments at once may take {count} x {each_mb} = {count * each_mb} MiB (environment.args). Where they "
            "do, Linux ends processes. Lower their limits (memory_mb, disk_mb), batch.prompts, batch.group, "
            "eval.prompts or engine.lag, or take more nodes or memory (Slurm's --mem)"
        )
        print(text, file=sys.stderr, flush=True)


def _most_open(cfg: Config, env: RankEnv) -> int:
    """Return how many environments this node's ranks hold at once: those of an order, and with windows, where paused
    trajectories keep theirs, of all groups in flight."""
    generating = cfg.engine.ranks or env.world_size
    node = range(env.rank - env.local_rank, env.rank - env.local_rank + env.local_world_size)
    groups = cfg.batch.prompts * (cfg.engine.lag + 1 if cfg.engine.window else 1)
    trained, tested = (-(-count // generating) for count in (groups, cfg.eval.prompts if cfg.data.eval else 0))
    each = max(trained * cfg.batch.group, tested * cfg.eval.samples)
    return each * sum(rank >= env.world_size - generating for rank in node)


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
