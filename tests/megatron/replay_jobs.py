"""What the ranks run for test_replay.py."""

from __future__ import annotations

from dataclasses import replace

import torch

from aligner.config.sections.batch import BatchConfig
from aligner.config.sections.engine import EngineConfig
from aligner.config.sections.model.config import ModelConfig
from aligner.config.sections.parallel import ParallelConfig
from aligner.engines.native import NativeEngine
from aligner.megatron.model import Head
from aligner.megatron.moe import ExpertLayer
from aligner.ops.packing.pack import Times
from aligner.ops.packing.routing import Replay, widened
from aligner.roles.critic import Critic
from aligner.roles.policy import Policy, Reference
from aligner.stages.ppo import value_loss
from aligner.types import SamplingParams, TrainBatch
from tests.megatron.jobs import build, from_folder, nll_loss, weights
from tests.tiny import SGD, wild_source


def layer(cfg: ModelConfig, parallel: ParallelConfig, x, grad, experts, known) -> dict:
    """The last layer alone: what it computes with experts [layers, n, k], and its gradients."""
    model = build(cfg, parallel, SGD)
    last = [m for m in model.module.modules() if isinstance(m, ExpertLayer)][-1]
    x = x.clone().requires_grad_()
    times = replace(Times.of(torch.ones(len(x))), replay=Replay(experts, known))
    out = last(x[:, None], times)[0][:, 0]
    found = torch.autograd.grad((out * grad).sum(), [x, *last.parameters()])
    return {
        "out": out.detach(),
        "x": found[0],
        "params": dict(zip([n for n, _ in last.named_parameters()], found[1:], strict=True)),
        "weights": {n: p.detach() for n, p in last.named_parameters()},
        "replays": last.replays.tolist(),
    }


def logits(folder: str, rows: TrainBatch) -> torch.Tensor:
    """[B, T, V] of the token after each but the last."""
    model = from_folder(folder)
    (found,) = model.forward([rows], lambda hidden, b: model.over_logits(hidden, b, lambda z, _: z.float(), 1 << 30))
    return found[:, 1:]


def engine_and_trainer(cfg: ModelConfig, dtype: torch.dtype, prompts: list[list[int]], group: int) -> dict:
    """Samples of an engine in `dtype`, and what a trainer in float32 with the same weights says of them: with the
    engine's routing and without, and what its step and a reference do."""
    model = build(cfg, optim=SGD, share=True)
    engine = NativeEngine(cfg, EngineConfig(max_batch=5), device="cpu", dtype=dtype, pad_id=0, reports_routing=True)
    engine.begin_update(1)
    engine.update_weights(weights(model).items())
    engine.finish_update()
    out = engine.generate(prompts, [[7 * i + j for j in range(group)] for i in range(len(prompts))], SamplingParams(12))
    asked = [prompt for prompt in prompts for _ in range(group)]
    rows = [p + t[:n] for p, t, n in zip(asked, out.tokens.tolist(), out.lengths.tolist(), strict=True)]
    lengths = torch.tensor([len(r) for r in rows])
    tokens = torch.nn.utils.rnn.pad_sequence([torch.tensor(r) for r in rows], batch_first=True)
    start = torch.tensor([len(p) for p in asked])
    column = torch.arange(tokens.shape[1])
    mask = ((column >= start[:, None]) & (column < lengths[:, None])).float()
    engines = torch.zeros_like(mask)
    engines[mask.bool()] = out.logprobs[torch.arange(out.tokens.shape[1]) < out.lengths[:, None]]
    full = TrainBatch(tokens, lengths, mask, routing=widened(out.routing, tokens.shape[1]))
    bare, bc = replace(full, routing=None), BatchConfig()
    found = {
        "rows": full,
        "engine": engines,
        "replayed": Policy(model, bc).logprobs(full),
        "own": Policy(model, bc).logprobs(bare),
        "reference": Reference(model, bc).logprobs(full),
    }
    return found | {"metrics": model.step([full], nll_loss(model, full)), "without": step(cfg, bare)}


def critics(cfg: ModelConfig, rows: TrainBatch) -> list[tuple]:
    """What a critic's step tells, and its values afterwards: with rows that have routing and without."""
    found = []
    for batch in (rows, replace(rows, routing=None)):
        batch = replace(batch, values=torch.zeros_like(rows.loss_mask), returns=rows.loss_mask * rows.tokens / 50)
        critic = Critic(build(cfg, optim=SGD, head=Head("score")), BatchConfig())
        group = critic.model.layout.pgs.dp
        found.append((critic.update(batch, value_loss(batch, 0.2, group)), critic.values(batch)))
    return found


def step(cfg: ModelConfig, rows: TrainBatch) -> dict[str, float]:
    model = build(cfg, optim=SGD, share=True, source=wild_source(cfg))
    return model.step([rows], nll_loss(model, rows))
