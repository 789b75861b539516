"""Between `ModelConfig` and the config.json of a Hugging Face folder."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

from aligner.config.attention import AttentionConfig
from aligner.config.moe import MoeConfig
from aligner.config.schema import ModelConfig, RopeScalingConfig
from aligner.errors import CheckpointError, ConfigError
from aligner.models.families import FAMILIES, Family, check_family


def hf_config(
    cfg: ModelConfig,
    *,
    bos_token_id: int | None,
    eos_token_id: int | list[int] | None,
    pad_token_id: int | None,
    vocab_size: int = 0,
    head: str = "lm",
    num_labels: int = 1,
    dtype: str = "float32",
) -> dict[str, Any]:
    """config.json of a model of this shape. `vocab_size` 0: that of `cfg`; `dtype` is that of the stored weights."""
    family = check_family(cfg)
    if head == "lm":
        architecture = family.architecture + "ForCausalLM"
    else:
        architecture = (family.score_architecture or family.architecture) + "ForSequenceClassification"
    out: dict[str, Any] = {
        "architectures": [architecture],
        "model_type": family.model_type,
        "vocab_size": vocab_size or cfg.vocab_size,
        "hidden_size": cfg.hidden_size,
        "intermediate_size": cfg.ffn_hidden_size,
        "num_hidden_layers": cfg.num_layers,
        "num_attention_heads": cfg.num_heads,
        "num_key_value_heads": cfg.num_kv_heads,
        "head_dim": cfg.kv_channels,
        family.activation_key: family.activation,
        "max_position_embeddings": cfg.max_position,
        "initializer_range": cfg.init_std,
        "rms_norm_eps": cfg.norm_eps,
        "tie_word_embeddings": cfg.tie_embeddings,
        "attention_dropout": 0.0,
        "bos_token_id": bos_token_id,
        "eos_token_id": eos_token_id,
        "pad_token_id": pad_token_id,
        "torch_dtype": dtype,
        "dtype": dtype,
    }
    out |= family.constants
    if family.moe is not None:
        keys = {name: key for name, key in dataclasses.asdict(family.moe).items() if key}
        out |= {key: getattr(cfg.moe, name) for name, key in keys.items()}
        out[family.moe.ffn_hidden_size] = cfg.expert_ffn
    if head != "lm":  # transformers derives num_labels from the label maps
        out["id2label"] = {str(i): f"LABEL_{i}" for i in range(num_labels)}
        out["label2id"] = {f"LABEL_{i}": i for i in range(num_labels)}
    scaling = _scaling_out(cfg.rope_scaling)
    # transformers 4 reads the first two keys, transformers 5 the third
    out |= {"rope_theta": cfg.rope_base, "rope_scaling": scaling}
    out["rope_parameters"] = {"rope_type": "default", "rope_theta": cfg.rope_base} | (scaling or {})
    return out | _attention_out(cfg, family, out["rope_parameters"])


def _attention_out(cfg: ModelConfig, family: Family, rope: dict[str, Any]) -> dict[str, Any]:
    attention = cfg.attention
    if not family.default_window:
        return {}
    out: dict[str, Any] = {"sliding_window": attention.window or None}
    if family.local_layers:
        base = attention.local_rope_base or cfg.rope_base
        kinds = ["sliding_attention" if attention.is_local(i) else "full_attention" for i in range(cfg.num_layers)]
        local = {"rope_type": "default", "rope_theta": base}
        out |= {"layer_types": kinds, "query_pre_attn_scalar": attention.query_scale_dim or cfg.kv_channels}
        out |= {"rope_local_base_freq": base, "sliding_window_pattern": attention.global_every or cfg.num_layers + 1}
        out["rope_parameters"] = {"full_attention": rope, "sliding_attention": local}
    return out


def _scaling_out(scaling: RopeScalingConfig) -> dict[str, Any] | None:
    if scaling.factor == 1.0:
        return None
    return {
        "rope_type": "llama3",
        "factor": scaling.factor,
        "low_freq_factor": scaling.low_freq_factor,
        "high_freq_factor": scaling.high_freq_factor,
        "original_max_position_embeddings": scaling.original_max_position,
    }


def config_from_hf(folder: str | Path) -> ModelConfig:
    """The shape of the model in a Hugging Face folder, with `init` set to the folder.

    Raises CheckpointError when config.json is missing or damaged, ConfigError when the architecture is not supported.
    """
    path = Path(folder) / "config.json"
    if not path.is_file():
        raise CheckpointError(f"model.init={str(folder)!r}: expected a Hugging Face folder, but it has no config.json")
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise CheckpointError(f"{path}:{error.lineno}: not valid JSON ({error.msg})") from None
    family = _family_of(raw, path)
    missing = [k for k in ("hidden_size", "intermediate_size", "num_hidden_layers", "vocab_size") if k not in raw]
    if missing or "num_attention_heads" not in raw:
        raise CheckpointError(f"{path}: no value for {', '.join(missing or ['num_attention_heads'])}")
    base, scaling = _rope_in(raw, path, 1e6 if family.local_layers else 1e4)
    return ModelConfig(
        family=family.model_type,
        num_layers=raw["num_hidden_layers"],
        hidden_size=raw["hidden_size"],
        ffn_hidden_size=raw["intermediate_size"],
        num_heads=raw["num_attention_heads"],
        num_kv_heads=raw.get("num_key_value_heads") or raw["num_attention_heads"],
        head_dim=raw.get("head_dim") or family.default_head_dim,
        vocab_size=raw["vocab_size"],
        rope_base=base,
        rope_scaling=scaling,
        norm_eps=raw.get("rms_norm_eps", 1e-6),
        max_position=raw.get("max_position_embeddings", 4096),
        tie_embeddings=raw.get("tie_word_embeddings", family.default_tied),
        qk_norm=family.qk_norm,
        qkv_bias=family.qkv_bias,
        attention=_attention_in(raw, family, path),
        moe=_experts_in(raw, family, path),
        init_std=raw.get("initializer_range", 0.02),
        init=str(folder),
    )


def _attention_in(raw: dict[str, Any], family: Family, path: Path) -> AttentionConfig:
    if not family.default_window:
        return AttentionConfig()
    window = raw.get("sliding_window", family.default_window) or 0
    if not family.local_layers:
        return AttentionConfig(window)
    layers = raw["num_hidden_layers"]
    every = raw.get("sliding_window_pattern", 6)
    kinds = raw.get("layer_types") or ["full" if (i + 1) % every == 0 else "sliding" for i in range(layers)]
    full = [i + 1 for i, kind in enumerate(kinds) if kind.startswith("full")]
    every = full[0] if full else 0
    if full != list(range(every, layers + 1, every) if every else []) or len(kinds) != layers:
        raise ConfigError("model.init", str(path.parent), "every n-th layer global", f"layer_types: {kinds}.")
    local = (raw.get("rope_parameters") or {}).get("sliding_attention") or {}
    if local.get("rope_type", "default") != "default":
        raise ConfigError("model.init", str(path.parent), "rope_type default in local layers", f"It has {local!r}.")
    base = local.get("rope_theta", raw.get("rope_local_base_freq", 10000.0))
    return AttentionConfig(window, every, float(base), raw.get("query_pre_attn_scalar", 256))


def is_known(folder: Path) -> bool:
    """Whether the model in a Hugging Face folder is of a family that has a table; also if config.json cannot tell."""
    path = folder / "config.json"
    try:
        kind = json.loads(path.read_text(encoding="utf-8")).get("model_type")
    except (OSError, ValueError):
        return True
    return kind in FAMILIES


def _experts_in(raw: dict[str, Any], family: Family, path: Path) -> MoeConfig:
    """Without the coefficient of the auxiliary loss, which a run decides."""
    if family.moe is None:
        return MoeConfig()
    if "num_local_experts" in raw:  # what transformers 5 writes for every family
        raw = {"num_experts": raw["num_local_experts"]} | raw
    names = ["num_experts", "top_k", "ffn_hidden_size", *(["norm_topk_prob"] if family.moe.norm_topk_prob else [])]
    keys = {name: getattr(family.moe, name) for name in names}
    missing = [key for key in keys.values() if key not in raw]
    if missing:
        raise CheckpointError(f"{path}: no value for {', '.join(missing)}")
    return MoeConfig(**{name: raw[key] for name, key in keys.items()})


def _family_of(raw: dict[str, Any], path: Path) -> Family:
    known = ", ".join(FAMILIES)
    kind = raw.get("model_type")
    if kind not in FAMILIES:
        hint = f"Its model_type is {kind!r}; `aligner import` converts others where Megatron-Bridge is installed."
        raise ConfigError("model.init", str(path.parent), f"model_type {known}", hint)
    wrong: dict[str, Any] = {"attention_bias": False, "mlp_bias": False, "use_sliding_window": False}
    wrong |= {FAMILIES[kind].activation_key: FAMILIES[kind].activation} | dict(FAMILIES[kind].constants)
    for key, wanted in wrong.items():
        if raw.get(key) not in (None, wanted):
            raise ConfigError(
                "model.init", str(path.parent), f"{key}={wanted!r} in config.json", f"It has {raw[key]!r}."
            )
    return FAMILIES[kind]


def _rope_in(raw: dict[str, Any], path: Path, default_base: float) -> tuple[float, RopeScalingConfig]:
    rope = {"rope_theta": raw.get("rope_theta", default_base)} | (raw.get("rope_scaling") or {})
    parameters = raw.get("rope_parameters") or {}
    rope |= parameters.get("full_attention", parameters)
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "default":
        return float(rope["rope_theta"]), RopeScalingConfig()
    if kind != "llama3":
        raise ConfigError("model.init", str(path.parent), "rope_type default or llama3", f"It has {kind!r}.")
    return float(rope["rope_theta"]), RopeScalingConfig(
        float(rope["factor"]),
        float(rope["low_freq_factor"]),
        float(rope["high_freq_factor"]),
        int(rope["original_max_position_embeddings"]),
    )
