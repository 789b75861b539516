"""An engine in a user's file: its class, and its methods."""

from __future__ import annotations

from typing import Any

import torch

from aligner.builders.job import Job
from aligner.config.engines import entry_of
from aligner.config.own_stage import engine_args
from aligner.config.schema import Config
from aligner.config.sections.model.config import ModelConfig
from aligner.engines.base import RolloutEngine
from aligner.errors import EngineCodeError, EngineError
from aligner.megatron.groups import neighbours
from aligner.ops.agree import raised_together
from aligner.user_code import load

METHODS = ("generate", "logprobs", "begin_update", "update_weights", "finish_update", "checksums")


def engine_class(cfg: Config) -> type[RolloutEngine]:
    """Import the class. Raises EngineCodeError if it is none of an engine, or lacks a method."""
    name, entry = cfg.engine.name, entry_of(cfg.engine.name)
    kind: Any = load(entry.made_by, f"engine.name={name}: made_by", "Class", EngineCodeError)
    if not (isinstance(kind, type) and issubclass(kind, RolloutEngine)):
        raise EngineCodeError(f"engine.name={name!r}: expected a class with api.RolloutEngine as base: {entry.made_by}")
    needed = (*METHODS, *(["top_logprobs"] if entry.can.scores else []))
    if lacking := [method for method in needed if getattr(kind, method) is getattr(RolloutEngine, method)]:
        raise EngineCodeError(f"engine.name={name!r}: expected methods {', '.join(lacking)} of {entry.made_by}")
    return kind


def user_engine(job: Job, model: ModelConfig, dtype: torch.dtype) -> RolloutEngine:
    """Make the engine without weights. Collective."""
    cfg, tokenizer = job.cfg, job.tokenizer
    kind: Any = engine_class(cfg)
    with raised_together(EngineError):
        engine = kind(
            model,
            cfg.engine,
            args=engine_args(cfg),
            device=job.device,
            dtype=dtype,
            pad_id=tokenizer.pad_token_id,
            decode=tokenizer.decode,
            group=neighbours(cfg.engine.tensor_parallel),
        )
    engine.can, engine.tensor_parallel = entry_of(cfg.engine.name).can, cfg.engine.tensor_parallel
    return engine
