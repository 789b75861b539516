"""Conversion between `ModelConfig` and the config.json of a Hugging Face folder."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

from aligner.config.sections.model.attention import AttentionConfig, ScalesConfig, layer_pattern
from aligner.config.sections.model.config import PATTERN, ModelConfig
from aligner.config.sections.model.entries import EntriesConfig
from aligner.config.sections.model.hyper import HyperConfig
from aligner.config.sections.model.indexer import IndexerConfig
from aligner.config.sections.model.latent import LatentConfig
from aligner.config.sections.model.linear import LinearConfig
from aligner.config.sections.model.moe import MoeConfig
from aligner.errors import CheckpointError, ConfigError
from aligner.families import FAMILIES, OUTSIDE, find
from aligner.families.family import DEFAULTS, Family
from aligner.families.hf_entries import entries_out, heavy_layers_in
from aligner.families.hf_rope import NOTHING, rope_in, rotary_fraction_in, scaling_out
from aligner.families.table import check_family
from aligner.families.within import INNER, language_model, read_config
from aligner.foreign import REQUIRED, JsonObject, read_record

# limits, so that a damaged digit gives a message instead of an exhausted memory
MOST_LAYERS, MOST_HEADS, MOST_CHANNELS, MOST_EXPERTS = 10_000, 65_536, 1 << 28, 4096
UNLIMITED = [0.0, math.inf], [0.0, {"__float__": "Infinity"}]  # Mamba-2's steps; the latter as transformers 5 writes it
MODELOPT = "hf_quant_config.json"
# keys of which config.json writes none as 0, not as null
COUNTS = ("attention.kv_shared_layers", "layer_input_size", "moe.hash_layers")
TABLE_ROWS = "vocab_size_per_layer_input"
# kinds of `layers_block_type`, old and new -> `model.pattern`
BLOCKS = {"linear_attention": "M", "mamba": "M", "full_attention": "*", "attention": "*", "mlp": "-", "moe": "E"}


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
    """Return config.json of a model of this shape. `vocab_size` 0: that of `cfg`; `dtype` is that of the stored
    weights."""
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
        family.norm_key: cfg.norm_eps,
        "tie_word_embeddings": cfg.tie_embeddings,
        "attention_dropout": 0.0,
        "bos_token_id": bos_token_id,
        "eos_token_id": eos_token_id,
        "pad_token_id": pad_token_id,
        "torch_dtype": dtype,
        "dtype": dtype,
    }
    if cfg.latent.kv_rank:
        del out["head_dim"]  # transformers uses this name for the rotated part of a head
    if not family.dense:
        del out["intermediate_size"]
    out |= family.constants
    if family.predicts_ahead:
        out[family.predicts_ahead] = cfg.mtp.layers
    without = () if cfg.moe.num_experts else ("moe.",)  # in a family some of whose models have experts
    keys = [key for key in family.keys if not key[0].startswith(without)]
    out |= {theirs: _out_value(cfg, ours, default) for ours, theirs, default in keys}
    if family.moe is not None:
        names = dataclasses.asdict(family.moe) if cfg.moe.num_experts else {"switch": family.moe.switch}
        ours = dataclasses.asdict(cfg.moe) | {"ffn_hidden_size": cfg.expert_ffn, "switch": cfg.moe.num_experts > 0}
        ours |= {"first_dense": len(cfg.moe.dense_layers), "shared": cfg.moe.shared_ffn_hidden_size // cfg.expert_ffn}
        out |= {key: ours[name] for name, key in names.items() if key}
    if head != "lm":  # transformers derives num_labels from the label maps
        out["id2label"] = {str(i): f"LABEL_{i}" for i in range(num_labels)}
        out["label2id"] = {f"LABEL_{i}": i for i in range(num_labels)}
    return out | _layers_out(cfg, family)


def _layers_out(cfg: ModelConfig, family: Family) -> dict[str, Any]:
    """Return the keys of positions, of the kinds of the layers and of their inputs."""
    if family.single:
        return {"hybrid_override_pattern": cfg.pattern}
    scaling, out = scaling_out(cfg.rope_scaling), {TABLE_ROWS: cfg.vocab_size} if cfg.layer_input_size else {}
    if family.scaled_queries:  # transformers needs the first key also where it is 0, vLLM reads the second
        beta, length = cfg.rope_scaling.llama_4_scaling_beta, cfg.rope_scaling.original_max_position
        scaling = (scaling or {}) | {"llama_4_scaling_beta": beta}
        out["llama_4_scaling"] = {"beta": beta, "original_max_position_embeddings": length}
    # transformers 4 reads the first two keys, transformers 5 the third
    if cfg.rope_scaling.type != "proportional":  # which transformers 4 does not know
        out |= {"rope_theta": cfg.rope_base, "rope_scaling": scaling}
    out["rope_parameters"] = {"rope_type": "default", "rope_theta": cfg.rope_base} | (scaling or {})
    if cfg.attention.rotary_fraction != 1 or family.default_rotary_fraction not in (0, 1):
        fraction = {"partial_rotary_factor": cfg.attention.rotary_fraction}
        out |= {} if family.default_local_base else fraction  # which transformers would give to local layers too
        out["rope_parameters"] |= fraction
    if cfg.rope_scaling.type == "longrope":  # Phi-3's class assumes another number without it
        out["original_max_position_embeddings"] = cfg.rope_scaling.original_max_position
    if family.shares_indexer:
        full = [cfg.indexer.is_full(layer) for layer in range(cfg.num_layers)]
        out["indexer_types"] = ["full" if own else "shared" for own in full]
        out["index_topk_pattern"] = "".join("F" if own else "S" for own in full)  # which vLLM reads
    if family.lists_dense:
        dense = cfg.moe.dense_layers
        out["mlp_layer_types"] = ["dense" if layer in dense else "sparse" for layer in range(cfg.num_layers)]
    if family.nope_every:
        out["no_rope_layers"] = [int(layer not in cfg.attention.nope_layers) for layer in range(cfg.num_layers)]
    if family.default_attention_every:
        linear = [cfg.linear.is_linear(layer) for layer in range(cfg.num_layers)]
        out["layer_types"] = ["linear_attention" if here else "full_attention" for here in linear]
    out |= _attention_out(cfg, family, out["rope_parameters"])
    return entries_out(cfg, out) if family.entries else out


def _out_value(cfg: ModelConfig, key: str, default: Any) -> Any:
    """Return config.json's value for a key of `model`; null for a number that is 0 here: none, or the default."""
    section, _, name = key.rpartition(".")
    value = getattr(getattr(cfg, section) if section else cfg, name)
    if name == "query_scale_dim":
        return value or cfg.kv_channels
    if name == "multiplier":
        return value or cfg.kv_channels**-0.5
    return value if value or isinstance(default, bool) or key in COUNTS else None


def _attention_out(cfg: ModelConfig, family: Family, rope: dict[str, Any]) -> dict[str, Any]:
    attention = cfg.attention
    if not family.windows:
        return {}
    out: dict[str, Any] = {"use_sliding_window": bool(attention.window)} if family.window_switch else {}
    if family.window_switch and not attention.window:
        return out
    if family.windows == "every":
        return out | {"sliding_window": attention.window or None}
    # transformers needs one even if no layer is local
    out["sliding_window"] = attention.window or family.default_window
    local = [attention.is_local(layer) for layer in range(cfg.num_layers)]
    out["layer_types"] = ["sliding_attention" if here else "full_attention" for here in local]
    if family.default_global[0] == "max_window_layers":  # for older readers: layers before the first local one
        out["max_window_layers"] = local.index(True) if True in local else cfg.num_layers
    if family.default_local_base:
        base = attention.local_rope_base or cfg.rope_base
        out |= {"rope_local_base_freq": base, "sliding_window_pattern": attention.global_every or cfg.num_layers + 1}
        own = {"rope_type": "default", "rope_theta": base}
        out["rope_parameters"] = {"full_attention": rope, "sliding_attention": own}
    return out


def config_from_hf(folder: str | Path) -> ModelConfig:
    """Return the shape of the model in a Hugging Face folder, with `init` set to the folder.

    Raises CheckpointError when config.json is missing or damaged, ConfigError when the architecture is not supported.
    """
    path = Path(folder) / "config.json"
    if not path.is_file():
        raise CheckpointError(f"model.init={str(folder)!r}: expected a Hugging Face folder, but it has no config.json")
    whole = read_config(path.parent)
    raw = language_model(whole)
    family = _family_of(raw, whole, path)
    float8_block(raw)  # refuses other quantisations before tensors are reported missing
    pattern = _pattern_in(raw, family)
    if pattern:  # alone where transformers 5 wrote the file
        raw.fields["num_hidden_layers"] = len(pattern)
    default = {**DEFAULTS, **dict(family.defaults)}
    raw.fields.update((key, size) for key, size in family.sizes if key not in raw)
    raw.need("hidden_size", "num_hidden_layers", "vocab_size", "num_attention_heads")
    max_position = raw.integer("max_position_embeddings", default["max_position_embeddings"], low=1)
    heavy = heavy_layers_in(raw, family) if family.entries else []
    base, scaling = rope_in(raw, path, dict(family.default_rope), default["rope_theta"], max_position)
    heads = raw.integer("num_attention_heads", low=1, high=MOST_HEADS)
    _put_global_heads(raw, family)
    flags, sections = _keys_in(raw, family)
    if flags.get("layer_input_size") and raw.integer(TABLE_ROWS, 262144) != raw.integer("vocab_size"):
        raw.refuse(TABLE_ROWS, f"vocab_size={raw.integer('vocab_size')}")
    latent, hyper = LatentConfig(**sections["latent"]), HyperConfig(**sections["hyper"])
    moe = MoeConfig() if pattern and "E" not in pattern else _experts_in(raw, family, sections["moe"])
    return ModelConfig(
        family=raw.text("model_type"),
        num_layers=raw.integer("num_hidden_layers", low=1, high=MOST_LAYERS),
        pattern=pattern,
        hidden_size=raw.integer("hidden_size", low=1, high=MOST_CHANNELS),
        ffn_hidden_size=raw.integer("intermediate_size", moe.ffn_hidden_size or REQUIRED, low=1, high=MOST_CHANNELS),
        num_heads=heads,
        num_kv_heads=raw.integer("num_key_value_heads", heads, low=1, high=heads),
        head_dim=latent.head_dim or raw.integer("head_dim", family.default_head_dim, low=1, high=MOST_CHANNELS),
        latent=latent,
        indexer=IndexerConfig(**sections["indexer"], shared_layers=_shared_layers(raw, family)),
        entries=EntriesConfig(**sections["entries"], heavy_layers=heavy),
        hyper=hyper,
        vocab_size=raw.integer("vocab_size", low=1, high=MOST_CHANNELS),
        rope_base=base,
        rope_scaling=scaling,
        norm_eps=raw.number(family.norm_key, default["rms_norm_eps"], above=0),
        max_position=max_position,
        tie_embeddings=raw.flag("tie_word_embeddings", default["tie_word_embeddings"]),
        **{"qkv_bias": family.qkv_bias, "qk_norm": family.qk_norm} | flags,
        attention=AttentionConfig(
            **_windows_in(raw, family, path),
            **sections["attention"],
            rotary_fraction=rotary_fraction_in(raw, family.default_rotary_fraction or 1.0),
            nope_layers=[layer for layer, rotated in enumerate(_rotated_layers(raw, family)) if not rotated],
        ),
        linear=_linear_in(raw, family, path, pattern, sections["linear"]),
        scales=ScalesConfig(**sections["scales"]),
        moe=moe,
        init_std=raw.number("initializer_range", default["initializer_range"], above=0),
        init=str(folder),
    )


def _pattern_in(raw: JsonObject, family: Family) -> str:
    """Return `model.pattern`; empty in families whose layers are not one module each."""
    if not family.single:
        return ""
    if raw.fields.get("time_step_limit") not in (None, *UNLIMITED):
        raw.refuse("time_step_limit", "0 and infinity: steps without bounds")
    if raw.fields.get("hybrid_override_pattern") is not None:
        pattern = raw.text("hybrid_override_pattern")
        if not pattern or set(pattern) - set(PATTERN):
            raw.refuse("hybrid_override_pattern", f"one of {' '.join(PATTERN)} for each layer")
        return pattern
    kinds = raw.texts("layers_block_type")
    if not kinds or set(kinds) - set(BLOCKS):
        raw.refuse("layers_block_type", f"one of {', '.join(BLOCKS)} for each layer")
    return "".join(BLOCKS[kind] for kind in kinds)


def _keys_in(raw: JsonObject, family: Family) -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
    """Return fields of ModelConfig, and of its sections, by the family's `keys`; null is read as 0, which means
    none."""
    names = ("", "attention", "latent", "indexer", "entries", "hyper", "linear", "moe", "scales")
    fields: dict[str, dict[str, Any]] = {name: {} for name in names}
    for ours, theirs, default in family.keys:
        section, _, name = ours.rpartition(".")
        if isinstance(default, bool):
            value: Any = raw.flag(theirs, default)
        elif theirs in raw.fields and theirs not in raw:
            value = 0
        elif isinstance(default, int):
            value = raw.integer(theirs, default, int(ours not in COUNTS), MOST_CHANNELS)
        else:
            value = raw.number(theirs, default, above=0)
        fields[section][name] = value
    return fields.pop(""), fields


def _windows_in(raw: JsonObject, family: Family, path: Path) -> dict[str, Any]:
    """Return fields of AttentionConfig for the local layers."""
    if not family.windows or (family.window_switch and not raw.flag("use_sliding_window", False)):
        return {}
    # null means no window; the default is for files without the key
    window = raw.integer("sliding_window", 0) if "sliding_window" in raw.fields else family.default_window
    if family.windows == "every" or not window:
        return {"window": window}
    layers = raw.integer("num_hidden_layers")
    kinds = _layer_types(raw, _default_layers(raw, family, layers), path, "sliding_attention")
    return (
        {"window": window} | layer_pattern([kind == "full_attention" for kind in kinds]) | _local_rope_in(raw, family)
    )


def _linear_in(raw: JsonObject, family: Family, path: Path, pattern: str, fields: dict[str, Any]) -> LinearConfig:
    """Return the fields of layers without attention."""
    if pattern and "M" not in pattern:
        fields = {}
    if family.mamba:
        fields["rule"] = "mamba2"
    if not family.default_attention_every:
        return LinearConfig(**fields)
    count, every = raw.integer("num_hidden_layers"), family.default_attention_every
    every = raw.integer("full_attention_interval", every, low=1)
    usual = ["linear_attention" if (layer + 1) % every else "full_attention" for layer in range(count)]
    kinds = _layer_types(raw, usual, path, "linear_attention")
    layers = layer_pattern([kind == "full_attention" for kind in kinds])
    return LinearConfig(**fields, **{name.replace("global", "attention"): value for name, value in layers.items()})


def _shared_layers(raw: JsonObject, family: Family) -> list[int]:
    """Return the layers that use the choice of an earlier layer's indexer."""
    if not family.shares_indexer:
        return []
    layers, every = raw.integer("num_hidden_layers"), raw.integer("index_topk_freq", 1, low=1)
    first = raw.integer("index_skip_topk_offset", 2)
    kinds = ["shared" if max(layer - first + 1, 0) % every else "full" for layer in range(layers)]
    key = "indexer_types" if "indexer_types" in raw else "index_topk_pattern"
    if isinstance(raw.fields.get(key), str):
        kinds = [{"F": "full", "S": "shared"}.get(letter, letter) for letter in raw.text(key)]
    else:
        kinds = raw.texts(key, kinds)
    if len(kinds) != layers or set(kinds) - {"full", "shared"} or kinds[0] != "full":
        raw.refuse(key, f"full or shared for each of {layers} layers, the first full")
    return [layer for layer, kind in enumerate(kinds) if kind == "shared"]


def _layer_types(raw: JsonObject, usual: list[str], path: Path, other: str) -> list[str]:
    kinds = raw.texts("layer_types", usual)
    if len(kinds) != len(usual) or set(kinds) - {other, "full_attention"}:
        expected = f"{other} or full_attention for each of {len(usual)} layers"
        raise ConfigError("model.init", str(path.parent), expected, f"layer_types: {kinds}.")
    return kinds


def _rotated_layers(raw: JsonObject, family: Family) -> list[int]:
    layers, every = raw.integer("num_hidden_layers"), raw.integer("no_rope_layer_interval", family.nope_every, low=0)
    usual = [int(not every or (layer + 1) % every != 0) for layer in range(layers)]
    return raw.integers("no_rope_layers", usual)[:layers] if family.nope_every else usual


def _default_layers(raw: JsonObject, family: Family, layers: int) -> list[str]:
    key, default = family.default_global
    if key == "no_rope_layers":
        kinds = _rotated_layers(raw, family)
        return ["full_attention" if rotated else "sliding_attention" for rotated in kinds]
    count = raw.integer(key, default)
    first = (
        [i < count for i in range(layers)]
        if key == "max_window_layers"
        else [(i + 1) % count == 0 for i in range(layers)]
    )
    return ["full_attention" if is_global else "sliding_attention" for is_global in first]


def _put_global_heads(raw: JsonObject, family: Family) -> None:
    """Put the heads of global layers, which transformers 5 writes layer by layer, where published files have them."""
    if not family.global_heads or "per_layer_config" not in raw:
        return
    layers = raw.record("per_layer_config")
    kinds, each = raw.texts("layer_types", []), [layers.record(layer).fields for layer in layers]
    wanted = [layer for layer, kind in enumerate(kinds) if kind == "full_attention"]
    names = {"head_dim": "global_head_dim", "num_key_value_heads": "num_global_key_value_heads"}
    actual = sorted(int(layer) if layer.isdecimal() else -1 for layer in layers)  # 05 in large models
    own = each[0] if each else {}  # none if both kinds have the same heads
    if each and (actual != wanted or any(fields != own for fields in each) or set(own) - set(names)):
        raw.refuse("per_layer_config", f"the same {' and '.join(names)} for each layer of full_attention, and no other")
    raw.fields.update((theirs, own.get(key)) for key, theirs in names.items())
    raw.fields["global_head_dim"] = own.get("head_dim", raw.fields.get("head_dim"))


def _local_rope_in(raw: JsonObject, family: Family) -> dict[str, Any]:
    if not family.default_local_base:
        return {}
    base = raw.number("rope_local_base_freq", family.default_local_base, above=0)
    local = raw.record("rope_parameters", NOTHING).record("sliding_attention", NOTHING)
    if local.text("rope_type", "default") != "default":
        local.refuse("rope_type", "default in local layers")
    return {"local_rope_base": local.number("rope_theta", base, above=0)}


def is_known(folder: Path) -> bool:
    """Return whether the model in a Hugging Face folder is of a supported family; True if config.json is unreadable."""
    try:
        kind = language_model(read_config(folder)).text("model_type")
    except CheckpointError:
        return True
    return find(kind) is not None


def _experts_in(raw: JsonObject, family: Family, fields: dict[str, Any]) -> MoeConfig:
    """Return the fields of experts, without the coefficient of the auxiliary loss, which a run decides."""
    keys = family.moe
    if keys is None or (keys.switch and not raw.flag(keys.switch, False)):
        return MoeConfig()
    # transformers 5 writes num_local_experts for every family
    count = keys.num_experts if keys.num_experts in raw else "num_local_experts"
    if count not in raw:
        raw.need(keys.num_experts)
    moe = MoeConfig(
        raw.integer(count, low=1, high=MOST_EXPERTS),
        raw.integer(keys.top_k, low=1),
        raw.integer(keys.ffn_hidden_size, low=1, high=MOST_CHANNELS),
        **fields,
    )
    if keys.norm_topk_prob:
        moe.norm_topk_prob = raw.flag(keys.norm_topk_prob)
    if keys.first_dense:
        moe.dense_layers = list(range(_first_dense(raw, keys.first_dense, family.lists_dense)))
    if keys.shared:
        moe.shared_ffn_hidden_size = moe.ffn_hidden_size * raw.integer(keys.shared, low=1, high=MOST_EXPERTS)
    if keys.dense_layers:
        layers = raw.integer("num_hidden_layers")
        moe.dense_layers = sorted({layer for layer in raw.integers(keys.dense_layers, []) if layer < layers})
    return moe


def _first_dense(raw: JsonObject, key: str, lists: bool) -> int:
    """Return how many layers, the first ones, have no experts."""
    kinds = raw.texts("mlp_layer_types", None) if lists else None
    if not kinds:
        return raw.integer(key, high=MOST_LAYERS)
    first = kinds.index("sparse") if "sparse" in kinds else len(kinds)
    if kinds != ["dense"] * first + ["sparse"] * (raw.integer("num_hidden_layers") - first):
        raw.refuse("mlp_layer_types", "dense for the first layers, sparse for all others")
    return first


def _family_of(raw: JsonObject, whole: JsonObject, path: Path) -> Family:
    kind = raw.text("model_type", None)
    family = find(kind or "")
    if family and INNER in whole and whole.text("model_type", None) != family.within[0]:
        outer = family.within[0] or "of a family"  # Kimi-K2.5's is none
        expected = f"model_type {outer} around {INNER}.model_type {kind}"
        raise ConfigError("model.init", str(path.parent), expected, f"It is {whole.fields.get('model_type')!r}.")
    if family is None:
        hint = f"Its model_type is {kind!r}; `aligner import` converts others where Megatron-Bridge is installed."
        raise ConfigError("model.init", str(path.parent), f"model_type {', '.join(FAMILIES | OUTSIDE)}", hint)
    wrong: dict[str, Any] = {"attention_bias": False, "mlp_bias": False, "use_sliding_window": False}
    for key in (*(theirs for _, theirs, _ in family.keys), *(["use_sliding_window"] if family.window_switch else [])):
        wrong.pop(key, None)
    wrong |= {family.activation_key: family.activation} | dict(family.constants)
    absent = dict(family.defaults)
    for key, wanted in wrong.items():
        value = raw.fields.get(key, absent.get(key))
        if value not in (None, wanted):
            hint = f"It has {value!r}." if key in raw else f"Without the key it is {value!r}."
            raise ConfigError("model.init", str(path.parent), f"{key}={wanted!r} in config.json", hint)
    return family


def float8_block(raw: JsonObject) -> tuple[int, int] | None:
    """Return the size of a block by config.json; None if it is not quantised in blocks. Raises ConfigError for another
    quantisation, which a folder by ModelOpt may name in a file of its own."""
    scheme = raw.record("quantization_config", None)
    if scheme is None or is_mxfp4(raw):
        _refuse_modelopt(Path(raw.where).with_name(MODELOPT))
        return None
    wanted = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic"}
    optional = ("fmt", "activation_scheme")
    own = scheme.fields
    other = {k: own.get(k) for k, v in wanted.items() if own.get(k, v if k in optional else None) != v}
    other |= {k: own[k] for k in ("scale_fmt",) if own.get(k, "float") not in ("float", "ue8m0")}
    other |= {k: own[k] for k in ("quant_algo", "format") if own.get(k)}  # by ModelOpt and compressed-tensors
    other |= {k: x[k] for k in ("expert_dtype",) for x in (own, raw.fields) if x.get(k) not in (None, "fp8", "fp4")}
    if other or "weight_block_size" not in scheme:
        keys = ", ".join(f"{k}={v!r}" for k, v in (other or {"weight_block_size": None}).items())
        raise _quantised(Path(raw.where).parent, f"quantization_config has {keys}")
    block = scheme.integers("weight_block_size", low=1)
    if len(block) != 2:
        scheme.refuse("weight_block_size", "two integers")
    return block[0], block[1]


def _refuse_modelopt(file: Path) -> None:
    quantisation = read_record(file, CheckpointError).record("quantization", None) if file.is_file() else None
    algorithm = quantisation and quantisation.text("quant_algo", None)  # without one only the cache is quantised
    if algorithm:
        raise _quantised(file.parent, f"{MODELOPT} has quant_algo={algorithm!r}")


def _quantised(folder: Path, what: str) -> ConfigError:
    expected = "unquantised weights, or float8 in blocks (quant_method fp8, weight_block_size; expert_dtype fp8 or fp4)"
    return ConfigError("model.init", str(folder), expected, f"Its {what}; start from the unquantised weights.")


def is_mxfp4(raw: JsonObject) -> bool:
    """Return whether config.json says that experts are packed in MXFP4."""
    quantisation = raw.record("quantization_config", None)
    packed = quantisation is not None and quantisation.text("quant_method", "") == "mxfp4"
    family = find(raw.text("model_type", ""))
    return packed and family is not None and bool(family.stacked)
