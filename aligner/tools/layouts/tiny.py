"""A tiny model of a model's family, with its options: each kind of its layers, at sizes that a CPU computes at once."""

from __future__ import annotations

from dataclasses import replace

from aligner.config.checks import AUTO
from aligner.config.sections.model.attention import AttentionConfig
from aligner.config.sections.model.config import ModelConfig
from aligner.config.sections.model.latent import LatentConfig
from aligner.config.sections.model.linear import LinearConfig
from aligner.config.sections.model.lora import LoraConfig
from aligner.config.sections.model.moe import MoeConfig
from aligner.config.sections.model.rope import RopeScalingConfig

LAYERS = 4  # at least: two stages on each of two ranks
HEADS, HEAD_DIM, FFN, EXPERT_FFN = 8, 16, 48, 24
WINDOW = 6  # rows are longer
SIZES = {"hidden_size": 32, "ffn_hidden_size": FFN, "num_heads": HEADS, "vocab_size": 101}  # two ranks pad the odd one
FIELDS = ("recompute_modules",)  # of `model.megatron`: the others need a GPU, or change no number


def tiny_model(model: ModelConfig) -> ModelConfig:
    """Return the model with few layers and small sizes, in float32, with modules of this project."""
    layers = chosen_layers(model)
    sizes = SIZES | {
        "num_layers": len(layers),
        "pattern": "".join(model.pattern[layer] for layer in layers) if model.pattern else "",
        "num_kv_heads": _kv_heads(model),
        "head_dim": 0 if model.latent.kv_rank else HEAD_DIM,
        "layer_input_size": 6 if model.layer_input_size else 0,
    }
    run = {"dtype": "float32", "kernels": "own", "varlen_attention": AUTO, "init": "random", "tokenizer": ""}
    sections = {
        "attention": _attention(model, layers),
        "latent": _latent(model.latent),
        "linear": _linear(model, layers),
        "moe": _moe(model, layers),
        "lora": _lora(model.lora),
        "entries": replace(model.entries, heavy_layers=_at(layers, model.entries.heavy_layers)),
        "rope_scaling": _rope(model),
    }
    if model.entries.tokens:
        sections["entries"] = replace(sections["entries"], tokens=2, heavy_tokens=3)
    if model.indexer.heads:
        shared = _at(layers, model.indexer.shared_layers)
        sections["indexer"] = replace(model.indexer, heads=16, head_dim=8, top_k=5, shared_layers=shared)
    if model.hyper.streams:
        sections["hyper"] = replace(model.hyper, streams=min(model.hyper.streams, 3), iterations=4)
    fields = {name: value for name, value in model.megatron.items() if name in FIELDS}
    return replace(model, **sizes, **run, **sections, megatron=fields)


def chosen_layers(model: ModelConfig) -> list[int]:
    """Return the first and the last layer of each kind, and as many of the first others as four stages need."""
    kinds: dict[tuple, list[int]] = {}
    for layer in range(model.num_layers):
        attention = model.attention
        kind = attention.is_local(layer), layer in attention.nope_layers, layer in model.indexer.shared_layers
        kinds.setdefault((*model.layer_kinds(layer), *kind), []).append(layer)
    chosen = {layers[end] for layers in kinds.values() for end in (0, -1)}
    for layer in range(model.num_layers):
        if len(chosen.difference(model.indexer.shared_layers)) >= LAYERS:
            break
        chosen.add(layer)
    return sorted(chosen)


def _at(layers: list[int], named: list[int]) -> list[int]:
    """Return where those of the named layers are that were chosen."""
    return [position for position, layer in enumerate(layers) if layer in named]


def _kv_heads(model: ModelConfig) -> int:
    if model.num_kv_heads == model.num_heads:
        return HEADS
    return max(count for count in (1, 2, 4) if count <= model.num_kv_heads)


def _attention(model: ModelConfig, layers: list[int]) -> AttentionConfig:
    attention = model.attention
    reading = [layer for layer in layers if not model.has_keys(layer)]
    whole = [position for position, layer in enumerate(layers) if not attention.is_local(layer)]
    return replace(
        attention,
        window=WINDOW if attention.window else 0,
        global_every=0,
        global_layers=whole if attention.window else [],
        nope_layers=_at(layers, attention.nope_layers),
        kv_shared_layers=len(reading),
        global_head_dim=HEAD_DIM if attention.global_head_dim else 0,
        global_kv_heads=min(attention.global_kv_heads, 4),
        query_scale_dim=HEAD_DIM if attention.query_scale_dim else 0,
        multiplier=attention.multiplier * model.kv_channels / HEAD_DIM,
    )


def _latent(latent: LatentConfig) -> LatentConfig:
    sizes = {"kv_rank": 24, "query_rank": 20, "plain_dim": 12, "rotary_dim": 6, "value_dim": 10}
    sizes |= {"output_groups": 2, "output_rank": 12}
    return replace(latent, **{name: size for name, size in sizes.items() if getattr(latent, name)})


def _linear(model: ModelConfig, layers: list[int]) -> LinearConfig:
    linear = model.linear
    if not linear.key_heads:
        return linear
    sizes = {"key_heads": 4, "key_head_dim": 8, "value_head_dim": 6}
    sizes["value_heads"] = 4 * min(2, linear.values_per_key)
    if model.pattern:
        return replace(linear, **sizes)
    with_attention = [position for position, layer in enumerate(layers) if not linear.is_linear(layer)]
    return replace(linear, **sizes, attention_every=0, attention_layers=with_attention)


def _moe(model: ModelConfig, layers: list[int]) -> MoeConfig:
    moe = model.moe
    if not moe.num_experts:
        return moe
    groups = min(moe.groups, 2)
    shared = FFN if model.traits.branch_norms else EXPERT_FFN
    return replace(
        moe,
        num_experts=8,
        top_k=min(moe.top_k, 2),
        ffn_hidden_size=EXPERT_FFN,
        shared_ffn_hidden_size=shared if moe.shared_ffn_hidden_size else 0,
        latent_size=20 if moe.latent_size else 0,
        groups=groups,
        top_groups=groups if moe.top_groups == moe.groups else 1,
        hash_layers=sum(layer < moe.hash_layers for layer in layers),
        dense_layers=_at(layers, moe.dense_layers),
    )


def _lora(lora: LoraConfig) -> LoraConfig:
    """Return small adapters of float32 matrices. Dropout depends on the data ranks, so there is none."""
    return replace(lora, rank=min(lora.rank, 4), init="", quantize_base="none", dropout=0.0)


def _rope(model: ModelConfig) -> RopeScalingConfig:
    """Return the scaling; with longrope as many divisors as heads have frequencies, the model's in turn."""
    rope = model.rope_scaling
    count = int(HEAD_DIM * model.attention.rotary_fraction) // 2
    short, long = ((factors * count)[:count] for factors in (rope.short_factor, rope.long_factor))
    return replace(rope, short_factor=short, long_factor=long)
