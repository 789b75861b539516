"""A rollout engine in one screen: a class of transformers computes all logits of a row again for each token.

python -m aligner run experiment=quickstart_grpo run.dir=runs/own_engine engine.name=examples/own_engine.py:ENGINE
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from aligner import api


@dataclass
class OwnEngineConfig(api.Section, key="engine.args"):
    attention: str = api.key("eager", "Attention of transformers.", choices=("eager", "sdpa"))


class OwnEngine(api.RolloutEngine):
    def __init__(self, model, config, *, args, device, dtype, **others):
        raw = api.hf_config(model, bos_token_id=None, eos_token_id=None, pad_token_id=None)
        config = AutoConfig.for_model(**raw, attn_implementation=args.attention)
        self._model = AutoModelForCausalLM.from_config(config).to(device, dtype).eval().requires_grad_(False)
        self._ledger, self._tensors = api.UpdateLedger(api.expected_hf_shapes(model)), self._model.state_dict()
        self.dtype, self._device = dtype, device

    @property
    def weight_version(self):
        return self._ledger.version

    def begin_update(self, version):
        self._ledger.begin(version)

    def update_weights(self, tensors):
        for name, tensor in tensors:
            if self._ledger.accept(name, tensor.shape):
                self._tensors[name].copy_(tensor)

    def finish_update(self):
        self._ledger.finish()

    def checksums(self):
        return {name: api.tensor_checksum(self._tensors[name]) for name in self._ledger.expected}

    def close(self):
        self._ledger.lose()

    def generate(self, prompts, seeds, sampling, progress=None):
        self._ledger.require()
        every = [(prompt, seed) for prompt, own in zip(prompts, seeds, strict=True) for seed in own]
        rows = []
        for prompt, seed in every:
            rows.append(self._sample(list(prompt), torch.Generator().manual_seed(seed), sampling))
            if progress:
                progress(len(rows), len(every))
        lengths = torch.tensor([len(row) for row in rows], dtype=torch.int64)
        tokens = torch.zeros(len(rows), int(lengths.max()) if rows else 0, dtype=torch.int64)
        logprobs, finish = torch.zeros(tokens.shape), torch.ones_like(lengths)
        for i, row in enumerate(rows):
            tokens[i, : len(row)], logprobs[i, : len(row)] = torch.tensor(row).T
            finish[i] = int(row[-1][0] not in sampling.stop_token_ids)  # 0: it stopped, 1: the limit
        return api.Generations(tokens, lengths, logprobs, finish, self.weight_version)

    def _sample(self, row, random, sampling):
        """Return (token, its logprob) of each token behind the row."""
        response = []
        while len(response) < sampling.max_response_tokens:
            logits = self._model(torch.tensor([row], device=self._device)).logits[0, -1].float().cpu()
            logits[sampling.vocabulary or len(logits) :] = -torch.inf
            logprobs = (logits / (sampling.temperature or 1.0)).log_softmax(-1)
            greedy = sampling.temperature == 0
            token = int(logprobs.argmax() if greedy else torch.multinomial(logprobs.exp(), 1, generator=random))
            response.append((token, float(logprobs[token])))
            row.append(token)
            if token in sampling.stop_token_ids:
                break
        return response

    def logprobs(self, tokens, lengths, temperature=1.0):
        self._ledger.require()
        rows, out = tokens.to(self._device), torch.zeros(tokens.shape)
        each = (self._model(rows).logits[:, :-1].float() / temperature).log_softmax(-1)
        out[:, 1:] = each.gather(2, rows[:, 1:, None])[..., 0].cpu()
        return out * (torch.arange(tokens.shape[1]) < lengths[:, None])


def check(cfg, model):
    for key, value, plain in (("stop", cfg.sampling.stop, []), ("top_p", cfg.sampling.top_p, 1.0)):
        if value != plain:
            raise api.ConfigError(f"sampling.{key}", value, f"{plain} with engine.name={cfg.engine.name}")


ENGINE = api.EngineEntry(
    api.Capabilities(any_prompt=True, request_seeds=True, repeats=True),
    made_by="examples/own_engine.py:OwnEngine",
    check=check,
    args=OwnEngineConfig,
    planned={"padded": True, "launches": True},
)
