"""Ways to compute the same update, and how far two of them may be apart."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from aligner.config.rules import RuleContext
from aligner.config.schema import Config
from aligner.config.sections.batch import BatchConfig
from aligner.config.sections.model.config import ModelConfig
from aligner.config.sections.parallel import ParallelConfig
from aligner.errors import ConfigError

PLAIN_BATCH = BatchConfig(micro_batch_samples=16, share_prompts=False)
# in float32. loss: |difference| / max(1, |loss|); norm: of its own; gradient: of each tensor's norm
TOLERANCES = {"loss": 1e-5, "norm": 1e-5, "gradient": 1e-5}
CONTEXT_GRADIENT = 1e-4  # attention adds in another order
SHARP_GRADIENT = 1e-4  # of families whose scores have no factor: a sharp softmax magnifies what is rounded
STREAMS_GRADIENT = 1e-3  # with hyper-connections every layer makes vectors unit ones several times
FLOOR = 1e-3  # a tensor's difference is of its gradient's norm, or of this share of the whole gradient's, if it is more


@dataclass(frozen=True)
class LayoutCase:
    """One way to compute the same thing."""

    world: int = 1
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    batch: BatchConfig = field(default_factory=lambda: PLAIN_BATCH)
    recompute: str = "none"
    distributed: bool = True
    dtype: torch.dtype = torch.float32
    model: ModelConfig | None = None  # None: the table's
    replay: bool = False  # a policy's tokens go to experts by lot


def layouts() -> dict[str, tuple[int, ParallelConfig]]:
    """Return the eleven of tensor, pipeline, context and data parallelism of 1 and 2, up to four ranks."""
    results = {}
    for tp, pp, cp, dp in itertools.product((1, 2), repeat=4):
        if tp * pp * cp * dp <= 4:
            name = "+".join(f"{n}2" for n, size in (("tp", tp), ("pp", pp), ("cp", cp), ("dp", dp)) if size == 2)
            results[name or "one"] = (tp * pp * cp * dp, ParallelConfig(tensor=tp, pipeline=pp, context=cp))
    return results


def axes(parallel: ParallelConfig) -> dict[str, tuple[int, ParallelConfig]]:
    """Return each axis of a layout alone, with 2 ranks, and together all that `parallel` has."""
    mode = parallel.context_mode
    results = {
        "micro 2": (1, ParallelConfig()),
        "dp2": (2, ParallelConfig()),
        "tp2": (2, ParallelConfig(tensor=2)),
        "tp2 seq": (2, ParallelConfig(tensor=2, sequence=True)),
        "pp2": (2, ParallelConfig(pipeline=2)),
        "pp2 vp2": (2, ParallelConfig(pipeline=2, virtual_stages=2)),
        "cp2": (2, ParallelConfig(context=2)),
        "cp2 a2a": (2, ParallelConfig(context=2, context_mode="alltoall")),
        "ep2": (2, ParallelConfig(expert=2)),
        "ep2 tp2": (2, ParallelConfig(expert=2, tensor=2)),
    }
    sizes = {name: min(2, getattr(parallel, name)) for name in ("tensor", "pipeline", "context", "expert")}
    sizes["virtual_stages"] = min(2, parallel.virtual_stages)
    own = ParallelConfig(**sizes, context_mode=mode, sequence=parallel.sequence)
    if own != ParallelConfig(context_mode=mode):
        # twice: with data parallelism, unless that would be 16 ranks
        results["yours"] = (min(8, 2 * own.model_size), own)
    return results


def cases_of(cfg: Config, model: ModelConfig) -> tuple[dict[str, LayoutCase], dict[str, str]]:
    """Return name -> case with the options of `cfg` for its tiny `model`, and name -> why the model cannot have it.
    Raises ConfigError where it cannot have the layout of `cfg`."""
    batch = replace(cfg.batch, micro_batch_samples=2, micro_batch_tokens=0)
    options = {"batch": batch, "recompute": model.recompute, "distributed": cfg.optim.distributed, "model": model}
    cases, refused = {}, {}
    for name, (world, parallel) in axes(cfg.parallel).items():
        subject = RuleContext(replace(cfg, parallel=parallel, model=model), world, model)
        try:
            subject.check("layout")
        except ConfigError as error:
            if name == "yours":
                raise
            refused[name] = str(error)
        else:
            cases[name] = LayoutCase(world, parallel, **options)
    return cases, refused


def tolerances(case: LayoutCase, model: ModelConfig) -> dict[str, float]:
    """Return measure -> how far a case may be from one rank."""
    bounds = dict(TOLERANCES)
    allowed = [
        (CONTEXT_GRADIENT, case.parallel.context > 1),
        (SHARP_GRADIENT, model.traits.plain_scores),
        (STREAMS_GRADIENT, model.traits.hyper),
    ]
    for bound, needed in allowed:
        if needed:
            bounds |= {name: max(bounds[name], bound) for name in ("norm", "gradient")}
    return bounds


def relative(got: Tensor, wanted: Tensor, size: Tensor | float | None = None) -> float:
    """Return ||got - wanted|| / ||size||; `size` is `wanted` unless it is set."""
    difference = float((got.double() - wanted.double()).norm())
    scale = float(torch.as_tensor(wanted if size is None else size).double().norm())
    return difference / max(scale, 1e-30)


def distances(got: Mapping[str, Any], base: Mapping[str, Any]) -> dict[str, float]:
    """Return how far a result is from one rank's: `loss`, `norm`, and each tensor's gradient by its name."""
    whole = float(torch.stack([t.double().norm() for t in base["gradient"].values()]).norm())
    each = {
        name: relative(got["gradient"][name], t, max(float(t.double().norm()), FLOOR * whole))
        for name, t in base["gradient"].items()
    }
    return {
        "loss": abs(got["loss"] - base["loss"]) / max(1.0, abs(base["loss"])),
        "norm": abs(got["norm"] - base["norm"]) / max(1e-30, abs(base["norm"])),
        **each,
    }
