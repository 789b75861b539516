"""What replay of the engine's routing removes, for each kind of router: logprobs of an engine that differs from the
trainer by its precision or by older weights, against the trainer's with and without replay.

    python -m benchmarks.replayed_routing [--rows 64]

Random weights in float32 in the trainer, one process, a CPU. Older weights: all matrices with noise of a thousandth of
their size, about what some steps of Adam change. Prints a Markdown table.
"""

from __future__ import annotations

import argparse
import os
from dataclasses import replace

import torch
import torch.distributed as dist

from aligner.cluster.env import RankEnv
from aligner.config.sections.batch import BatchConfig
from aligner.config.sections.engine import EngineConfig
from aligner.config.sections.model.config import ModelConfig
from aligner.engines.native import NativeEngine
from aligner.engines.quantized import quantized_engine
from aligner.megatron.groups import init_distributed
from aligner.ops.packing.routing import widened
from aligner.roles.policy import Policy
from aligner.types import SamplingParams, TrainBatch
from tests.megatron.models import build, nll_loss, weights
from tests.tiny import DEEPSEEK, GPT_OSS, MIXTRAL, MOE, MORE, SGD

FAMILIES = {"qwen3_moe": MOE, "mixtral": MIXTRAL, "gpt_oss": GPT_OSS, "deepseek_v3": DEEPSEEK}
FAMILIES |= {"gemma4_text": MORE["gemma4-experts"], "nemotron_h": MORE["nemotron_h"], "qwen3_next": MORE["qwen3_next"]}
ENGINES = ("bfloat16", "fp8", "older weights")
HEAD = "| family | experts | engine | routed differently | mean of abs(log r) | largest | `gen_kl` |"
PROMPT, ANSWER = 12, 48


def widened_model(cfg: ModelConfig) -> ModelConfig:
    """Return the tiny model with more experts: 16, of which 4 compute a token."""
    moe = replace(cfg.moe, num_experts=16, top_k=4)
    return replace(cfg, moe=replace(moe, groups=4, top_groups=2) if moe.groups > 1 else moe)


def measured(cfg: ModelConfig, kind: str, rows: int) -> list[float]:
    """Return the share of (token, layer) routed differently, then mean and largest abs(log r) and k3, each without and
    with replay."""
    model = build(cfg, optim=SGD)
    dtype = torch.bfloat16 if kind == "bfloat16" else torch.float32
    native = NativeEngine(cfg, EngineConfig(), device="cpu", dtype=dtype, pad_id=0, reports_routing=True)
    engine = quantized_engine(native, "fp8", False)[0] if kind == "fp8" else native
    tensors = {name: t.clone() for name, t in weights(model).items()}
    if kind == "older weights":
        noise = torch.Generator().manual_seed(1)
        for t in tensors.values():
            if t.is_floating_point() and t.dim() > 1:
                t += 1e-3 * t.std() * torch.randn(t.shape, generator=noise)
    engine.begin_update(1)
    engine.update_weights(tensors.items())
    engine.finish_update()
    draw = torch.Generator().manual_seed(2)
    prompts = torch.randint(0, cfg.vocab_size, (rows, PROMPT), generator=draw).tolist()
    out = engine.generate(prompts, [[i] for i in range(rows)], SamplingParams(ANSWER))
    tokens = torch.cat([torch.tensor(prompts), out.tokens], 1)
    mask = (torch.arange(tokens.shape[1]) >= PROMPT).float().expand(rows, -1).contiguous()
    lengths = torch.full((rows,), tokens.shape[1])
    full = TrainBatch(tokens, lengths, mask, routing=widened(out.routing, tokens.shape[1]))
    columns = []
    for batch in (replace(full, routing=None), full):
        ratio = (Policy(model, BatchConfig()).logprobs(batch)[:, PROMPT:] - out.logprobs).double()
        columns.append([ratio.abs().mean(), ratio.abs().max(), (ratio.exp() - 1 - ratio).mean()])
    differs = model.step([full], nll_loss(model, full))["moe/routing_differs"]
    return [differs, *(float(x) for pair in zip(*columns, strict=True) for x in pair)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=64)
    args = parser.parse_args()
    init_distributed(RankEnv(), "gloo", 60)
    print(HEAD + "\n|---|---|---|---|---|---|---|")
    for family, cfg in FAMILIES.items():
        cfg = widened_model(cfg)
        for kind in ENGINES:
            differs, *pairs = measured(cfg, kind, args.rows)
            mean, largest, kl = (f"{a:.2g}, {b:.2g}" for a, b in zip(pairs[::2], pairs[1::2], strict=True))
            experts = f"{cfg.moe.num_experts}, {cfg.moe.top_k}"
            print(f"| `{family}` | {experts} | {kind} | {differs:.1%} | {mean} | {largest} | {kl} |", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
