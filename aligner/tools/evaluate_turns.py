"""Trajectories that `aligner eval` measures for a run with tools or environments."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch.distributed as dist

from aligner.answers import FOLDER, AnswerLog
from aligner.config.schema import Config
from aligner.data.tokenizer import sampled_with
from aligner.environments.pool import Pool
from aligner.environments.tools import Tools, schemas
from aligner.ops.seeds import request_seed
from aligner.rollout.requests import Request
from aligner.rollout.trajectory_generator import TrajectoryContext, generator_class
from aligner.tools.generate import Answerer, dialogue_of
from aligner.types import Prompt, Sample, SamplingParams


def generate_trajectories(
    cfg: Config, model: Answerer, tools: Tools, prompts: Sequence[Prompt], sampling: SamplingParams
) -> list[Sample]:
    """Return prompts x eval.samples trajectories, prompt-major. Nothing is logged."""
    tool_schemas = schemas(tools)
    sampling = replace(sampling, **sampled_with(model.tokenizer))
    dialogue = partial(dialogue_of, cfg, model.tokenizer)
    pool = Pool(cfg.environment, tool_schemas, AnswerLog(Path(cfg.run.dir) / FOLDER, 0))
    generator = generator_class(cfg.environment, dialogue)(
        model.engine,
        model.tokenizer,
        sampling,
        dist.group.WORLD,
        outside=TrajectoryContext(
            pool, dialogue(tool_schemas), cfg.environment, cfg.data.max_prompt_tokens, tools.scores
        ),
    )
    seeds = [[request_seed(cfg.seed, -1, prompt.id, i) for i in range(cfg.eval.samples)] for prompt in prompts]
    return generator.samples([Request(i, p, s) for i, (p, s) in enumerate(zip(prompts, seeds, strict=True))], sampling)
