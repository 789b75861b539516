"""The hidden states behind the layers of the engine while it reads a row again: its prompt at once, then a token in
each decode step."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from aligner.engines.native.batch import COUNT, Batch
from aligner.engines.native.engine import NativeEngine
from aligner.engines.native.schedule import CacheUse, PromptRequest, plan_generation
from aligner.types import SamplingParams


class ReadBatch(Batch):
    """One row whose next tokens are known."""

    def __init__(self, response: Tensor, *args: Any):
        super().__init__(*args)
        self.response = response

    def sample(self, logits: Tensor, sampling: SamplingParams) -> None:
        super().sample(logits, sampling)
        self._sampled = self.response[self.state[COUNT, :1]][:, None]


def layer_states(engine: NativeEngine, tokens: list[int], prompt: int) -> Tensor:
    """Return [1 + layers, tokens - 1, hidden] of all tokens but the last: embeddings, then the output of each layer.
    The first `prompt` tokens are read at once. Raises RefitError without weights."""
    engine.require_weights()
    model, sampling = engine.model, SamplingParams(max_response_tokens=len(tokens) - prompt)
    use = CacheUse(engine.cache.token_bytes, engine.cache.row_bytes)
    config = replace(engine.config, window=0, draft_tokens=0)
    plan = plan_generation([PromptRequest(tokens[:prompt], [0])], sampling, config, use)
    response = torch.tensor(tokens[prompt:], device=engine.device)
    batch = ReadBatch(response, plan, sampling, engine.device, engine.routes, None, model.cfg.invariant)
    passes: list[Tensor] = []
    model.watch = lambda x: passes.append(x.clone())
    try:
        with torch.inference_mode():
            model.packs.pack()
            engine.cache.resize(plan.shape, plan.staged_tokens, engine.config.cache_bytes, plan.chunk_prompts)
            while batch.finished < plan.rows:
                engine.step(plan, batch, sampling)
    finally:
        model.watch = None
    depth = 1 + model.cfg.num_layers
    return torch.stack([torch.cat(passes[layer::depth]) for layer in range(depth)]).cpu()
