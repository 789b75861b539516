"""The session: all rows of a batch advance together; finished ones go on with the end id.

The engine writes each step's logits into the tensor it was given before the first; the sampler scales them in place.
"""

import os
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch

from tensorrt_llm.builder import Engine
from tensorrt_llm.calls import note
from tests.engines.trtllm.oracle import forward


@dataclass(kw_only=True)
class SamplingConfig:
    end_id: int
    pad_id: int
    max_new_tokens: int = 20
    num_beams: int = 1
    max_attention_window_size: int | None = None
    output_sequence_lengths: bool = False
    return_dict: bool = False
    stop_words_list: Any = None
    bad_words_list: Any = None
    temperature: float = 1.0
    top_k: int = 1
    top_p: float = 0.0
    random_seed: torch.Tensor | None = None
    min_length: int = 1
    use_beam_hyps: bool = True
    min_p: float = 0.0


class GenerationSession:
    def __init__(self, engine: Engine):
        self.runtime = SimpleNamespace(engine=engine.engine)
        self.raw = engine.config.pretrained_config.raw
        self.buffer, self.buffer_allocated = None, False

    def decode(self, prompts, config, processor, criterion):
        note("run", str(len(prompts)))
        plan, vocab = self.runtime.engine, self.raw["vocab_size"]
        weights = {name: w.float() for name, w in plan.weights.items()}
        n, lengths = len(prompts), torch.tensor([len(p) for p in prompts])
        width = int(lengths.max()) + config.max_new_tokens
        ids = torch.full((n, width), config.end_id, dtype=torch.int32)
        for i, prompt in enumerate(prompts):
            ids[i, : len(prompt)] = prompt
        ends, finished = lengths.clone(), torch.zeros(n, dtype=torch.bool)
        bound = torch.empty(n, vocab)
        self.buffer, self.buffer_allocated = {"logits": bound, "cache": torch.empty(n, width)}, True
        seeds = config.random_seed if config.random_seed is not None else torch.zeros(n, dtype=torch.int64)
        assert seeds.dtype == torch.int64 and seeds.shape == (n,)
        draws = [torch.Generator().manual_seed(int(seed) % 2**63) for seed in seeds]
        for step in range(config.max_new_tokens):
            seen = (
                ids[:, : int(ends.max())].long().clamp(0, vocab - 1)
            )  # the lookup of the real one does not raise either
            bound.copy_(forward(weights, self.raw, seen)[torch.arange(n), ends - 1])
            if processor is not None:
                self.buffer["logits"] = processor(step, ids.clone(), self.buffer["logits"])
            picked = self._pick(self.buffer["logits"], config, step, draws)
            for i in [i for i in range(n) if not finished[i]]:
                ids[i, ends[i]] = picked[i]
                ends[i] += 1
                finished[i] = picked[i] == config.end_id or self._stops(config, i, picked[i])
            if bool(finished.all()):
                break
            if criterion is not None and criterion(step, ids.clone(), self.buffer["logits"]):
                break
        if not config.return_dict:
            return ids[:, None]
        out = {"output_ids": ids[:, None]}
        return out | ({"sequence_lengths": ends[:, None].int()} if config.output_sequence_lengths else {})

    def _stops(self, config, row: int, token) -> bool:
        if config.stop_words_list is None:
            return False
        words, ends = config.stop_words_list[row]
        assert list(ends) == list(range(1, len(ends) + 1)), "words of one token"
        return int(token) in words.tolist()

    def _pick(self, logits, config, step: int, draws):
        vocab = logits.shape[1]
        if step < config.min_length and not 0 <= config.end_id < vocab:
            raise RuntimeError("CUDA error: the logit of the end id lies outside of the row")
        if config.top_k > 1024:
            raise RuntimeError("top k is clipped to 1024")
        if os.environ.get("FAKE_TRTLLM_BEYOND"):
            return torch.full((len(logits),), vocab)
        logits.div_(config.temperature)  # in place
        if config.top_k == 1 or (config.top_k == 0 and config.top_p == 0):
            return logits.argmax(-1)
        order = logits.argsort(dim=-1, descending=True, stable=True)
        probs = logits.softmax(-1).gather(1, order).double()
        if config.top_k:
            probs[:, config.top_k :] = 0
        probs /= probs.sum(-1, keepdim=True)
        probs[probs.cumsum(-1) - probs >= config.top_p] = 0
        probs[probs < config.min_p * probs[:, :1]] = 0
        cumulative = probs.cumsum(-1)
        u = torch.tensor([torch.rand((), generator=g, dtype=torch.float64) for g in draws])
        at = torch.searchsorted(cumulative, u[:, None] * cumulative[:, -1:], right=True)
        return order.gather(1, at.clamp(max=vocab - 1))[:, 0]
