"""What the ranks run for the tests of sharded engines and of several replicas."""

from __future__ import annotations

import time

import torch
import torch.distributed as dist

from aligner.config.sections.engine import EngineConfig
from aligner.config.sections.model.config import ModelConfig
from aligner.engines.native.fleet import FleetEngine
from aligner.errors import EngineError
from aligner.megatron.groups import neighbours
from aligner.types import SamplingParams


def make(
    cfg: ModelConfig, weights: dict, width: int, dtype=torch.float32, reports_routing: bool = False, **options
) -> FleetEngine:
    here = {"device": "cpu", "dtype": dtype, "pad_id": 0, "decode": letters, "group": neighbours(width)}
    engine = FleetEngine(cfg, EngineConfig(**options), **here, reports_routing=reports_routing)
    engine.begin_update(3)
    engine.update_weights(weights.items())
    engine.finish_update()
    return engine


def letters(tokens: list[int]) -> str:
    return "".join(chr(60 + t) for t in tokens)


def generate(
    models: dict[str, tuple[ModelConfig, dict]],
    width: int,
    requests: list[tuple[list, list]],
    samplings: list[SamplingParams],
    scored: tuple[torch.Tensor, torch.Tensor],
    steal: bool = False,
    late: float = 0.0,
    **options,
) -> dict:
    """Every rank asks for its own share of the requests; rank 0's engine is `late` seconds in each step. By model."""
    rank, told = dist.get_rank(), {}
    for name, (cfg, weights) in models.items():
        engine = make(cfg, weights, width, **options)
        engine.steal = steal
        if late and rank == 0:
            decode = engine.model.decode
            engine.model.decode = lambda *a, decode=decode: (time.sleep(late), decode(*a))[1]
        prompts, seeds = requests[rank]
        ended: list[list] = []
        engine.finished = lambda *about, ended=ended: ended[-1].append(about)
        outs = [(ended.append([]), engine.generate(prompts, seeds, sampling))[1] for sampling in samplings]
        told[name] = {
            "outs": outs,
            "ended": ended,
            "scored": engine.logprobs(*scored),
            "checksums": engine.checksums(),
            "stolen": engine.stolen,
            "rows": engine.stats.decoded_rows,
            "bytes": sum(view.nbytes for view in engine.model.views.values()),
            "token_bytes": engine.cache.token_bytes,
        }
    return told


def broken(cfg: ModelConfig, weights: dict, steal: bool) -> str:
    """Every rank asks for a prompt; the last one's holds a token whose embedding is NaN. What came of it here."""
    rank, world = dist.get_rank(), dist.get_world_size()
    weights["model.embed_tokens.weight"][cfg.vocab_size - 1] = float("nan")
    engine = make(cfg, weights, 1)
    engine.steal = steal
    try:
        out = engine.generate([[5, 6, cfg.vocab_size - 1 if rank == world - 1 else 7]], [[1, 2]], SamplingParams(4))
    except EngineError as error:
        return str(error)
    return f"{len(out.lengths)} samples"
