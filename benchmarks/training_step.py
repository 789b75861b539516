"""The training step against the machine's matrix products: tokens/s, and the share of the time they would need alone.

    python -m benchmarks.training_step [--shapes quickstart,100m] [--steps 7] [--json FILE]

Rows of ragged lengths (uniform between half of the longest and the longest), one micro-batch, float32, one rank, the
threads torch has. The rate of matrix products is measured between the steps of the same run, on the shapes of the
model's own layers; operations are 6 x parameters of the matrices x tokens (attention's scores not counted), of the
head's x tokens that predict one. The loss reads all tokens but the first of each row, so that no layer leaves any out.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from pathlib import Path

import torch

from aligner.cluster.env import RankEnv
from aligner.config.sections.batch import BatchConfig
from aligner.config.sections.model.config import ModelConfig
from aligner.config.sections.optim import OptimConfig
from aligner.config.sections.parallel import ParallelConfig
from aligner.megatron.groups import build_layout, init_distributed
from aligner.megatron.model import Head
from aligner.megatron.train import ShardedModel
from aligner.megatron.weights import random_source
from aligner.ops.packing.needed import WORTH
from aligner.roles.policy import Policy
from aligner.shakedown.rates import Products
from aligner.shakedown.rates import seconds as seconds_of
from aligner.stages.sft import sft_loss
from aligner.types import TrainBatch
from benchmarks.common import write_json

# name -> model, rows, longest row
SHAPES = {
    "quickstart": (ModelConfig(num_layers=4, hidden_size=128, ffn_hidden_size=384, vocab_size=91), 256, 14),
    "100m": (
        ModelConfig(
            num_layers=12,
            hidden_size=768,
            ffn_hidden_size=2048,
            num_heads=12,
            num_kv_heads=4,
            vocab_size=32000,
            max_position=1024,
        ),
        8,
        192,
    ),
}


def rows(vocab_size: int, count: int, longest: int) -> TrainBatch:
    g = torch.Generator().manual_seed(0)
    lengths = torch.randint(longest // 2, longest + 1, (count,), generator=g)
    lengths[0] = longest
    tokens = torch.randint(1, vocab_size, (count, longest), generator=g)
    mask = (torch.arange(longest)[None] < lengths[:, None]).float()
    mask[:, 0] = 0
    return TrainBatch(tokens * (torch.arange(longest)[None] < lengths[:, None]), lengths, mask)


def measure(name: str, steps: int) -> dict:
    cfg, count, longest = SHAPES[name]
    batch = BatchConfig(micro_batch_samples=count)
    layout = build_layout(ParallelConfig())
    model = ShardedModel(
        cfg, layout, Head(), torch.float32, torch.device("cpu"), random_source(cfg, 0), OptimConfig(lr=1e-4), steps
    )
    policy, data = Policy(model, batch), rows(cfg.vocab_size, count, longest)
    shapes = [tuple(p.shape) for n, p in model.module.named_parameters() if p.dim() == 2]
    tokens = int(data.lengths.sum())
    read = int(data.loss_mask.sum())
    assert read > WORTH * tokens, f"{read} of {tokens} tokens are read: the last layer would leave some out"
    counts = {cfg.vocab_size: read}
    products = Products([(counts.get(n, tokens), n, k) for n, k in shapes], torch.float32, model.device)
    seconds, rates = [], []
    for step in range(steps + 2):
        start = time.perf_counter()
        policy.update(data, sft_loss(data, layout.pgs.dp))
        took = time.perf_counter() - start
        rate = products.operations / seconds_of(products, model.device)
        if step >= 2:  # the first steps make buffers
            seconds.append(took)
            rates.append(rate)
    shares = [3 * products.operations / rate / took for took, rate in zip(seconds, rates, strict=True)]
    return {
        "shape": name,
        "parameters": sum(p.numel() for p in model.module.parameters()),
        "tokens": tokens,
        "seconds": statistics.median(seconds),
        "tokens_per_s": tokens / statistics.median(seconds),
        "matrix_gflops": statistics.median(rates) / 1e9,
        "share_of_matrix_rate": statistics.median(shares),
    }


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.training_step", description=__doc__.splitlines()[0])
    parser.add_argument("--shapes", default=",".join(SHAPES), help=f"of {','.join(SHAPES)}")
    parser.add_argument("--steps", type=int, default=7)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    init_distributed(RankEnv(), "auto", 60.0)
    measured = [measure(name, options.steps) for name in options.shapes.split(",")]
    for row in measured:
        print(
            f"{row['shape']}: {row['parameters'] / 1e6:.1f} M parameters, {row['tokens']} tokens in "
            f"{row['seconds']:.3f} s = {row['tokens_per_s']:.0f} tokens/s, {100 * row['share_of_matrix_rate']:.0f} % "
            f"of the matrix-product rate ({row['matrix_gflops']:.0f} GFLOP/s)"
        )
    write_json(options.json, {"rows": measured})
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
