"""The forward of TensorRT-LLM's Llama and Qwen classes from their named parameters, read off their definition.

Knows nothing of this project's models or of the layout under test: parameters by TensorRT-LLM's names, sizes and rotary
constants from config.json.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor


def forward(weights: dict[str, Tensor], raw: dict, tokens: Tensor) -> Tensor:
    """Logits [n, T, V] in the dtype of the weights. tokens int64 [n, T], right-padded: nothing looks ahead."""
    q_heads, kv_heads, head = raw["num_attention_heads"], raw["num_key_value_heads"], raw["head_dim"]
    eps, count = raw["rms_norm_eps"], tokens.shape[1]
    x = weights["transformer.vocab_embedding.weight"][tokens]
    cos, sin = _rotation(raw, count, x.dtype)
    hidden = torch.ones(count, count).triu(1).bool()
    for layer in range(raw["num_hidden_layers"]):
        own = {k.removeprefix(f"transformer.layers.{layer}."): w for k, w in weights.items() if f"layers.{layer}." in k}
        qkv = _norm(x, own["input_layernorm.weight"], eps) @ own["attention.qkv.weight"].T
        if "attention.qkv.bias" in own:
            qkv = qkv + own["attention.qkv.bias"]
        q, k, v = (
            word.unflatten(-1, (-1, head)) for word in qkv.split([q_heads * head, kv_heads * head, kv_heads * head], -1)
        )
        if "attention.q_layernorm.weight" in own:
            q = _norm(q, own["attention.q_layernorm.weight"], eps)
            k = _norm(k, own["attention.k_layernorm.weight"], eps)
        q, k = _rotate(q, cos, sin), _rotate(k, cos, sin)
        out = torch.empty_like(q)
        for i in range(q_heads):
            j = i * kv_heads // q_heads  # consecutive query heads share a pair
            scores = q[:, :, i] @ k[:, :, j].transpose(1, 2) / math.sqrt(head)
            out[:, :, i] = scores.masked_fill(hidden, -math.inf).softmax(-1) @ v[:, :, j]
        x = x + out.flatten(2) @ own["attention.dense.weight"].T
        h = _norm(x, own["post_layernorm.weight"], eps)
        fc, gate = h @ own["mlp.fc.weight"].T, h @ own["mlp.gate.weight"].T
        x = x + (fc / (1 + (-fc).exp()) * gate) @ own["mlp.proj.weight"].T
    return _norm(x, weights["transformer.ln_f.weight"], eps) @ weights["lm_head.weight"].T


def _norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt() * weight


def _rotation(raw: dict, count: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """[T, 1, D/2]."""
    half, scaling = raw["head_dim"] // 2, raw["rope_scaling"]
    frequencies = [raw["rope_theta"] ** (-i / half) for i in range(half)]
    if scaling:
        frequencies = [_scaled(f, scaling) for f in frequencies]
    angles = torch.tensor([[t * f for f in frequencies] for t in range(count)], dtype=torch.float64)[:, None]
    return angles.cos().to(dtype), angles.sin().to(dtype)


def _scaled(frequency: float, scaling: dict) -> float:
    """Llama 3.1: long waves are stretched, short ones are not, those between are mixed."""
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    turns = scaling["original_max_position_embeddings"] * frequency / (2 * math.pi)
    mix = min(1.0, max(0.0, (turns - low) / (high - low)))
    return frequency * (mix + (1 - mix) / scaling["factor"])


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    a, b = x.chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)
