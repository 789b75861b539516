"""Memory of one rank against the context-parallel size: what is saved for backward, by formula and measured.

    python -m benchmarks.context_memory [--tokens 2048] [--json FILE]

Trains one row of --tokens on 1, 2 and 4 gloo ranks and counts the bytes that autograd keeps (each storage once), beside
the formula; then applies the formula to one row of 131,072 tokens in the 8B shape, bfloat16.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass
from pathlib import Path

from aligner.config.sections.model.config import ModelConfig
from aligner.config.sections.parallel import ParallelConfig
from aligner.plan.activations import layer_activations
from aligner.plan.job import PlannedModel
from aligner.plan.shapes import Grid

SMALL = ModelConfig(
    num_layers=4, hidden_size=64, ffn_hidden_size=192, num_heads=8, num_kv_heads=4, vocab_size=64, max_position=65536
)
EIGHT_B = ModelConfig(
    num_layers=32,
    hidden_size=4096,
    ffn_hidden_size=14336,
    num_heads=32,
    num_kv_heads=8,
    vocab_size=128256,
    max_position=131072,
)


@dataclass(frozen=True)
class Saved:
    """Bytes kept for backward by one rank."""

    layers: float
    gathered: float  # keys and values of the other ranks (allgather)

    @property
    def total(self) -> float:
        return self.layers + self.gathered


def saved_bytes(cfg: ModelConfig, tokens: int, context: int, mode: str, element: int) -> Saved:
    """Return the bytes by the calculator's formula, `aligner.plan.activations.layer_activations`."""
    grid = Grid(context=context, over_heads=mode == "alltoall")
    own, gathered = layer_activations(PlannedModel("policy", cfg), grid, cfg.layer_kinds(0))
    return Saved(cfg.num_layers * own * tokens / context * element, cfg.num_layers * gathered * tokens * element)


def kept_activations(cfg: ModelConfig, parallel: ParallelConfig, tokens: int, dtype: str = "float32") -> int:
    """Return the bytes that autograd keeps of one row of this rank's pass (each storage once), without the head and the
    loss. Runs on every rank of the world."""
    import torch

    from aligner.megatron.groups import build_layout
    from aligner.megatron.model import Head
    from aligner.megatron.train import ShardedModel
    from aligner.megatron.weights import random_source
    from aligner.types import TrainBatch

    source = random_source(cfg, 0)
    layout, kind = build_layout(parallel), getattr(torch, dtype)
    model = ShardedModel(cfg, layout, Head("score"), kind, torch.device("cpu"), source)
    model.module.requires_grad_(True).train()
    row = torch.randint(1, cfg.vocab_size, (1, tokens), generator=torch.Generator().manual_seed(0))
    batch, stream = model._prepare(TrainBatch(row, torch.tensor([tokens]), torch.ones(1, tokens)))
    packing = batch.packing
    parameters = {p.untyped_storage().data_ptr() for p in model.module.parameters()}
    kept: dict[int, int] = {}

    def keep(x: torch.Tensor) -> torch.Tensor:
        storage = x.untyped_storage()
        if (x.is_floating_point() or x.dtype == torch.uint8) and storage.data_ptr() not in parameters:
            kept[storage.data_ptr()] = storage.nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        model.module(row.view(-1)[packing.source][None], packing.positions[None], None, packed_seq_params=stream)
    return sum(kept.values())


def main(arguments: list[str]) -> int:
    from rich.console import Console
    from rich.table import Table

    from benchmarks.common import write_json
    from tests.ranks import Ranks

    parser = argparse.ArgumentParser(prog="python -m benchmarks.context_memory", description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    ranks, measurements = Ranks(), []
    cases = [(1, "allgather"), (2, "allgather"), (4, "allgather"), (2, "alltoall"), (4, "alltoall")]
    for context, mode in cases:
        parallel = ParallelConfig(context=context, context_mode=mode)
        job = {"cfg": SMALL, "parallel": parallel, "tokens": options.tokens}
        results = ranks.run("benchmarks.context_memory:kept_activations", world=context, **job)
        wanted = saved_bytes(SMALL, options.tokens, context, mode, 4).total
        measurements.append({"context": context, "mode": mode, "measured_bytes": max(results), "formula_bytes": wanted})
    ranks.close()
    title = f"{options.tokens} tokens, small model (on a CPU masks come on top with allgather)"
    table = Table("context", "mode", "measured MiB", "formula MiB", "ratio", title=title)
    for row in measurements:
        measured, wanted = row["measured_bytes"], row["formula_bytes"]
        cells = [f"{measured / 2**20:.1f}", f"{wanted / 2**20:.1f}", f"{measured / wanted:.2f}"]
        table.add_row(str(row["context"]), row["mode"], *cells)
    Console(width=110).print(table)
    title = "131,072 tokens, 8B, bfloat16 (formula)"
    table = Table("context", "allgather GiB", "of it gathered", "alltoall GiB", title=title)
    for context in (1, 2, 4, 8, 16, 32):
        one, two = (saved_bytes(EIGHT_B, 131072, context, mode, 2) for mode in ("allgather", "alltoall"))
        other = f"{two.total / 2**30:.1f}" if EIGHT_B.num_kv_heads % context == 0 else "heads do not divide"
        table.add_row(str(context), f"{one.total / 2**30:.1f}", f"{one.gathered / 2**30:.1f}", other)
    Console(width=110).print(table)
    write_json(options.json, {"rows": measurements})
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
