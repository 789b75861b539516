"""The rows of one model: layers expanded, sizes filled in.

Canonical names and layouts are those of Megatron's `GPTModel` with the local layer spec, at TP=1 and with the true
vocabulary.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from math import prod
from operator import attrgetter

from aligner.config.sections.model.config import ModelConfig
from aligner.errors import ConfigError
from aligner.families import rows
from aligner.families.family import Family
from aligner.families.rows import ParamSpec


def check_family(cfg: ModelConfig) -> Family:
    """Return the family of `cfg`. Raises ConfigError for a flag that the family's checkpoints cannot hold."""
    family = cfg.traits
    for flag in ("qkv_bias", "qk_norm"):
        if flag not in family.varies and getattr(cfg, flag) != getattr(family, flag):
            raise ConfigError(
                f"model.{flag}", getattr(cfg, flag), f"{getattr(family, flag)} for model.family={cfg.family}"
            )
    if cfg.vocab_size < 1:
        raise ConfigError("model.vocab_size", cfg.vocab_size, "the tokenizer's vocabulary size, filled in before use")
    return family


def dimensions(cfg: ModelConfig, num_labels: int = 1) -> dict[str, int]:
    head, heads, groups, linear = cfg.kv_channels, cfg.num_heads, cfg.num_kv_heads, cfg.linear
    return {
        "1": 1,
        "vocab": cfg.vocab_size,
        "hidden": cfg.hidden_size,
        "2hidden": 2 * cfg.hidden_size,
        "ffn": cfg.ffn_hidden_size,
        "2ffn": 2 * cfg.ffn_hidden_size,
        "layer_input": cfg.layer_input_size,
        "layer_inputs": cfg.num_layers * cfg.layer_input_size,
        "experts": cfg.moe.num_experts,
        "expert_ffn": cfg.expert_ffn,
        "expert_hidden": cfg.expert_hidden,
        "2": 2,
        "head": head,
        "heads": heads,
        "groups": groups,
        "shared_ffn": cfg.moe.shared_ffn_hidden_size,
        "2shared_ffn": 2 * cfg.moe.shared_ffn_hidden_size,
        "q": heads * head,
        "context": heads * cfg.value_channels,
        "q_rank": cfg.latent.query_rank,
        "kv_rank": cfg.latent.kv_rank,
        "kv_rank+rotary": cfg.latent.kv_rank + cfg.latent.rotary_dim,
        "plain+value": heads * (cfg.latent.plain_dim + cfg.latent.value_dim),
        "kv": groups * head,
        "qk": (cfg.queries_per_group + 1) * groups * head,
        "qkv": (cfg.queries_per_group + 2) * groups * head,
        "2head": 2 * head,
        "o_groups": cfg.latent.output_groups,
        "o_ranks": cfg.latent.output_groups * cfg.latent.output_rank,
        "o_group": heads * head // max(1, cfg.latent.output_groups),
        "entry": cfg.entries.tokens,
        "heavy_entry": cfg.entries.heavy_tokens,
        "streams": cfg.hyper.streams,
        "streams_hidden": cfg.hyper.streams * cfg.hidden_size,
        "streams_numbers": cfg.hyper.streams * (cfg.hyper.streams + 2),
        "3": 3,
        "top_k": cfg.moe.top_k,
        "2index_head": 2 * cfg.indexer.head_dim,
        "index_head": cfg.indexer.head_dim,
        "index_heads": cfg.indexer.heads,
        "index_q": cfg.indexer.heads * cfg.indexer.head_dim,
        "key_heads": linear.key_heads,
        "value_heads": linear.value_heads,
        "value_head": linear.value_head_dim,
        "linear_in": linear.key_heads * linear.width,
        "linear_mixed": linear.key_heads * linear.mixed_width,
        "linear_out": linear.value_heads * linear.value_head_dim,
        "conv": linear.conv,
        "labels": num_labels,
    }


def rows_of(cfg: ModelConfig, head: str) -> list[ParamSpec]:
    """Return the family's rows that this model has, not yet expanded. `head` may be empty: no row of a head."""
    assert head in ("lm", "score", ""), f"head={head!r}: expected lm, score or nothing"
    table = [row for row in cfg.traits.table if not row.when or attrgetter(row.when)(cfg)]
    if head == "score":
        table.append(rows.SCORE_HEAD)
    elif head and not cfg.tie_embeddings:
        table.append(rows.LM_HEAD)
    return table


def family_table(cfg: ModelConfig, head: str = "lm", num_labels: int = 1) -> list[ParamSpec]:
    """Return every parameter of the model, layers expanded, sizes filled in.

    `head`: "lm" (no row of its own when embeddings are tied) or "score" (reward and value models, `num_labels` rows).
    """
    check_family(cfg)
    experts, kinds = range(cfg.moe.num_experts), [cfg.layer_kinds(layer) for layer in range(cfg.num_layers)]
    sizes = {each: dimensions(cfg.of_kinds(each), num_labels) for each in set(kinds)}
    out = []
    for row in rows_of(cfg, head):
        layers = [layer for layer, each in enumerate(kinds) if row.is_in(each)]
        out += [_filled(row, sizes[kinds[layer]], layer, experts) for layer in (layers if is_of_layer(row) else (0,))]
    return out + (ahead_table(cfg) if head == "lm" and cfg.mtp.layers else [])


def ahead_table(cfg: ModelConfig) -> list[ParamSpec]:
    """Return the rows of the layer for multi-token prediction."""
    layer = cfg.num_layers
    kinds, experts = cfg.layer_kinds(layer), range(cfg.moe.num_experts)
    sizes = dimensions(cfg.of_kinds(kinds))
    inner = [row for row in rows_of(cfg, "") if is_of_layer(row) and row.is_in(kinds)]
    inner = [replace(row, canonical=row.canonical.replace(rows.in_layer(""), rows.AHEAD_LAYER)) for row in inner]
    filled = (_filled(row, sizes, layer, experts) for row in (*rows.PREDICTS_AHEAD, *inner))
    return [replace(row, hf=tuple(ahead_name(cfg, name) for name in row.hf)) for row in filled]


def ahead_name(cfg: ModelConfig, name: str) -> str:
    """Return Hugging Face's name of a tensor that a model with another layer behind the last would have."""
    at = f"model.layers.{cfg.num_layers}."
    if not cfg.traits.ahead_apart or not name.startswith(at):
        return name
    own = name.removeprefix(at)
    apart = rows.AHEAD_APART.get(own.removesuffix(".weight"))
    return f"{apart}.weight" if apart else rows.AHEAD_LAYER_APART + own


def layer_table(cfg: ModelConfig, kinds: tuple[str, ...]) -> list[ParamSpec]:
    """Return the rows of one layer of these kinds (`ModelConfig.layer_kinds`), named as layer 0 and its expert 0."""
    sizes = dimensions(cfg.of_kinds(kinds))
    wanted = (row for row in rows_of(cfg, "") if is_of_layer(row) and row.is_in(kinds))
    return [_filled(row, sizes, 0, range(1)) for row in wanted]


def end_table(cfg: ModelConfig, head: str, num_labels: int) -> list[ParamSpec]:
    """Return the rows outside of layers."""
    sizes = dimensions(cfg, num_labels)
    return [_filled(row, sizes, 0, range(1)) for row in rows_of(cfg, head) if not is_of_layer(row)]


def parameters(cfg: ModelConfig, head: str = "lm", outputs: int = 1) -> int:
    """Return the number of elements of all weights; tied embeddings once."""
    layers = Counter(map(cfg.layer_kinds, range(cfg.num_layers)))
    within = sum(count * prod(spec.shape) for kinds, count in layers.items() for spec in layer_table(cfg, kinds))
    ends = end_table(cfg, head, outputs) + (ahead_table(cfg) if head == "lm" and cfg.mtp.layers else [])
    return within + sum(prod(spec.shape) for spec in ends)


def is_of_layer(row: ParamSpec) -> bool:
    return "{layer}" in row.canonical


def _filled(row: ParamSpec, sizes: dict[str, int], layer: int, experts: range) -> ParamSpec:
    names = (
        name.format(layer=layer, expert=expert) for expert in (experts if row.experts else (0,)) for name in row.hf
    )
    return replace(
        row,
        canonical=row.canonical.format(layer=layer),
        hf=tuple(names),
        shape=tuple(sizes[name] for name in row.shape),
        units=sizes[row.units] if isinstance(row.units, str) else 0,
        repeats=row.units == "groups",
        when="",
        kind="",
    )
