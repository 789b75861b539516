"""Conversion of layers with entries, and of their rotary embeddings, between `ModelConfig` and config.json.

transformers names them by kinds of layers and of rotation. Published files have numbers instead, and one rotation with
a second base.
"""

from __future__ import annotations

from typing import Any

from aligner.config.sections.model.config import ModelConfig
from aligner.families.family import Family
from aligner.families.hf_rope import NOTHING
from aligner.foreign import JsonObject

LOCAL, SPARSE, HEAVY = KINDS = "sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"
_RATIOS = {0: LOCAL, 4: SPARSE, 128: HEAVY}
_RATES = {"compress_rate_csa": SPARSE, "compress_rate_hca": HEAVY}
FAR_BASE = 1.6e5  # of layers with entries


def heavy_layers_in(raw: JsonObject, family: Family) -> list[int]:
    """Return the layers with heavy entries, and put all other facts where other families have them."""
    fields = raw.fields
    for key, kind in _RATES.items():
        rate = raw.record("compress_rates", NOTHING).integer(kind, None, low=1)
        fields[key] = fields.get(key) if rate is None else rate
        if fields[key] is None:
            del fields[key]
    kinds = _kinds_in(raw)
    fields["layer_types"] = [kind if kind == LOCAL else "full_attention" for kind in kinds]
    count = len(kinds)
    if "mlp_layer_types" in raw:
        experts = raw.texts("mlp_layer_types")
        fields["num_hash_layers"] = experts.count("hash_moe")
        if experts != ["hash_moe"] * experts.count("hash_moe") + ["moe"] * (count - experts.count("hash_moe")):
            raw.refuse("mlp_layer_types", f"hash_moe for the first of {count} layers, moe for all others")
    _put_rotations(raw, family)
    return [layer for layer, kind in enumerate(kinds) if kind == HEAVY]


def _kinds_in(raw: JsonObject) -> list[str]:
    count = raw.integer("num_hidden_layers", low=1)
    usual = [HEAVY if layer < 2 or layer % 2 == 0 else SPARSE for layer in range(count)]
    if "layer_types" not in raw and "compress_ratios" in raw:
        usual = [_RATIOS.get(ratio, "") for ratio in raw.integers("compress_ratios")[:count]]
    kinds = raw.texts("layer_types", usual)
    if len(kinds) != count or set(kinds) - set(KINDS):
        key = "layer_types" if "layer_types" in raw else "compress_ratios"
        raw.refuse(key, f"{', '.join(KINDS)} (0, 4 or 128) for each of {count} layers")
    return kinds


def _put_rotations(raw: JsonObject, family: Family) -> None:
    fields, new = raw.fields, raw.record("rope_parameters", NOTHING)
    fraction = raw.number("partial_rotary_factor", family.default_rotary_fraction, above=0)
    if "qk_rope_head_dim" in raw and "partial_rotary_factor" not in raw:
        fraction = raw.integer("qk_rope_head_dim") / raw.integer("head_dim", family.default_head_dim, low=1)
    if "main" in new and "compress" in new:
        near, far = new.record("main").fields, new.record("compress").fields
    else:
        near = {"rope_theta": raw.number("rope_theta", family.default_local_base, above=0)}
        far = raw.record("rope_scaling", NOTHING).fields | new.fields
        far = {**far, "rope_theta": raw.number("compress_rope_theta", FAR_BASE, above=0)}
        if "yarn" in (far.get("rope_type"), far.get("type")):
            far.setdefault("attention_factor", 1.0)
    shares = [each.get("partial_rotary_factor") or fraction for each in (near, far)]
    if shares[0] != shares[1]:
        new.refuse("main", f"partial_rotary_factor={shares[1]}, as in compress")
    fields["rope_parameters"] = {
        "sliding_attention": near,
        "full_attention": far | {"partial_rotary_factor": fraction if shares[1] is None else shares[1]},
    }
    for key in ("rope_theta", "rope_scaling", "partial_rotary_factor"):
        fields.pop(key, None)


def entries_out(cfg: ModelConfig, out: dict[str, Any]) -> dict[str, Any]:
    """Return the keys of a config.json whose layers with entries are called global so far."""
    near, far = (out["rope_parameters"][kind] for kind in ("sliding_attention", "full_attention"))
    fraction = {"partial_rotary_factor": cfg.attention.rotary_fraction}
    # without a factor transformers reads 1 in `rope_scaling`, and YaRN's own below `rope_parameters`
    unlike = ["rope_scaling"] * (cfg.rope_scaling.type == "yarn" and not cfg.rope_scaling.attention_factor)
    for key in ("rope_local_base_freq", "sliding_window_pattern", *unlike):
        out.pop(key, None)
    kinds = {(): LOCAL, ("entries", "indexer"): SPARSE, ("entries", "heavy"): HEAVY}
    hashed = cfg.moe.hash_layers
    return (
        out
        | fraction
        | {
            "layer_types": [kinds[cfg.entries_of(layer)] for layer in range(cfg.num_layers)],
            "mlp_layer_types": ["hash_moe"] * hashed + ["moe"] * (cfg.num_layers - hashed),
            "rope_theta": near["rope_theta"],
            "compress_rope_theta": far["rope_theta"],
            "rope_parameters": {"main": near | fraction, "compress": far | fraction},
        }
    )
