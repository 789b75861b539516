"""What the ranks run for the tests of sharded engines and of several replicas."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial

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
    late: str = "",
    meet: str = "",
    **options,
) -> dict:
    """Every rank asks for its own share of the requests. By model. `late`: a name that no other job uses, with which
    rank 0's engine decodes when the other's has ended; `meet`: with which nobody goes on with a second part of the
    common work before all decode a first one."""
    rank, told = dist.get_rank(), {}
    for name, (cfg, weights) in models.items():
        engine = make(cfg, weights, width, **options)
        engine.steal = steal
        if late and rank == 0:
            engine.model.decode = before(engine.model.decode, partial(until, late, 1))
        elif late:
            engine._generated = then(engine._generated, partial(count, late))
        if meet:
            engine.model.decode = before(engine.model.decode, meeting(engine, f"{meet}/{name}"))
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


def before(function: Callable, act: Callable[[], object]) -> Callable:
    return lambda *given, **named: (act(), function(*given, **named))[1]


def then(function: Callable, act: Callable[[], object]) -> Callable:
    return lambda *given, **named: (function(*given, **named), act())[0]


def meeting(engine: FleetEngine, name: str) -> Callable[[], None]:
    met: set[int] = set()  # calls of `generate`

    def meets() -> None:
        if engine._calls not in met:
            met.add(engine._calls)
            count(f"{name}/{engine._calls}")
            until(f"{name}/{engine._calls}", dist.get_world_size())

    return meets


def count(name: str, more: int = 1) -> int:
    return dist.distributed_c10d._get_default_store().add(f"tests/fleet/{name}", more)


def until(name: str, many: int) -> None:
    while count(name, 0) < many:
        time.sleep(0.005)


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
