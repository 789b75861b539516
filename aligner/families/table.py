"""The rows of one model: layers expanded, sizes filled in.

Canonical names and layouts are those of Megatron's `GPTModel` with the local layer spec, at TP=1 and with the true
vocabulary.
"""

from __future__ import annotations

from aligner.config.sections.model.config import ModelConfig
from aligner.errors import ConfigError
from aligner.families import FAMILIES, rows
from aligner.families.family import Family
from aligner.families.rows import ParamSpec


def check_family(cfg: ModelConfig) -> Family:
    """The family of `cfg`; ConfigError where a flag says what the family's checkpoints cannot hold."""
    family = FAMILIES[cfg.family]
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
        "ffn": cfg.ffn_hidden_size,
        "2ffn": 2 * cfg.ffn_hidden_size,
        "experts": cfg.moe.num_experts,
        "expert_ffn": cfg.expert_ffn,
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
        "qkv": (cfg.queries_per_group + 2) * groups * head,
        "key_heads": linear.key_heads,
        "value_heads": linear.value_heads,
        "value_head": linear.value_head_dim,
        "linear_in": linear.key_heads * linear.width,
        "linear_mixed": linear.key_heads * linear.mixed_width,
        "linear_out": linear.value_heads * linear.value_head_dim,
        "conv": linear.conv,
        "labels": num_labels,
    }


def family_table(cfg: ModelConfig, head: str = "lm", num_labels: int = 1) -> list[ParamSpec]:
    """Every parameter of the model, layers expanded, sizes filled in.

    `head`: "lm" (no row of its own when embeddings are tied) or "score" (reward and value models, `num_labels` rows).
    """
    assert head in ("lm", "score"), f"head={head!r}: expected lm or score"
    table = [row for row in check_family(cfg).table if not row.when or getattr(cfg, row.when)]
    if head == "score":
        table.append(rows.SCORE_HEAD)
    elif not cfg.tie_embeddings:
        table.append(rows.LM_HEAD)
    sizes = dimensions(cfg, num_labels)
    out = []
    for row in table:
        layers = cfg.layers_of(row.kind) if row.kind else range(cfg.num_layers)
        for layer in layers if "{layer}" in row.canonical else (0,):
            out.append(
                ParamSpec(
                    row.canonical.format(layer=layer),
                    tuple(
                        name.format(layer=layer, expert=expert)
                        for expert in (range(cfg.moe.num_experts) if row.experts else (0,))
                        for name in row.hf
                    ),
                    row.transform,
                    row.tp_axis,
                    tuple(sizes[name] for name in row.shape),
                    sizes[row.units] if isinstance(row.units, str) else 0,
                    row.padded,
                    row.experts,
                    float32=row.float32,
                )
            )
    return out
