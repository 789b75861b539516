"""Conversion of rotary embeddings between `ModelConfig` and config.json, for transformers 4 and 5."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from aligner.config.sections.model.rope import ROPE_TYPES, RopeScalingConfig
from aligner.errors import CheckpointError, ConfigError
from aligner.foreign import JsonObject

NOTHING = JsonObject({}, "config.json", CheckpointError)
# our field -> config.json's, by type; fields at their default are omitted if the type does not need them
_NEEDED = {
    "llama3": {
        "factor": "factor",
        "low_freq_factor": "low_freq_factor",
        "high_freq_factor": "high_freq_factor",
        "original_max_position": "original_max_position_embeddings",
    },
    "linear": {"factor": "factor"},
    "dynamic": {"factor": "factor"},
    "proportional": {},
    "yarn": {
        "factor": "factor",
        "original_max_position": "original_max_position_embeddings",
        **{name: name for name in ("beta_fast", "beta_slow")},  # which vLLM wants
    },
    "longrope": {
        "short_factor": "short_factor",
        "long_factor": "long_factor",
        "factor": "factor",
        "original_max_position": "original_max_position_embeddings",
    },
}
_YARN = "attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim"
_OPTIONAL = {
    "yarn": (*_YARN, "truncate", "llama_4_scaling_beta"),
    "longrope": ("attention_factor",),
    "proportional": ("factor",),
}
_OLD_NAMES = {"su": "longrope"}  # of Phi-3's first files


def scaling_out(scaling: RopeScalingConfig) -> dict[str, Any] | None:
    """Return config.json's `rope_scaling`, also used in transformers 5's `rope_parameters`; None without scaling."""
    if not scaling.scales:
        return None
    out: dict[str, Any] = {"rope_type": scaling.type}
    out |= {theirs: getattr(scaling, ours) for ours, theirs in _NEEDED[scaling.type].items()}
    plain = RopeScalingConfig()
    for name in _OPTIONAL.get(scaling.type, ()):
        if getattr(scaling, name) != getattr(plain, name):
            out[name] = getattr(scaling, name)
    return out


def rope_in(
    raw: JsonObject, path: Path, default: dict[str, Any], default_base: float, max_position: int
) -> tuple[float, RopeScalingConfig]:
    """Return base and scaling of the rotary embeddings; of the global layers if local ones have their own.

    transformers 4 has rope_theta and rope_scaling, transformers 5 both in rope_parameters; if a file has both, all must
    agree. `default`: scaling of a file with neither.
    """
    new = raw.record("rope_parameters", NOTHING)
    new = new.record("full_attention") if "full_attention" in new else new
    values: dict[str, Any] = {}
    beside = {key: raw.fields.get(key) for key in ("rope_theta", "original_max_position_embeddings")}
    for section in (new, raw.record("rope_scaling", NOTHING), JsonObject(beside, raw.where, raw.error)):
        for key in section:
            if key in section and values.setdefault(key, section.fields[key]) != section.fields[key]:
                section.refuse(key, f"{values[key]!r}, as another key of the file says")
    if not ("rope_parameters" in raw or "rope_scaling" in raw):
        values = default | values
    rope = JsonObject(values, raw.where, raw.error, "rope_parameters.")
    base = rope.number("rope_theta", default_base, above=0)
    kind = rope.text("rope_type", rope.text("type", "default"))
    kind = "longrope" if kind == "yarn" and "short_factor" in rope else _OLD_NAMES.get(kind, kind)
    if kind == "default":
        return base, RopeScalingConfig()
    if kind not in ROPE_TYPES:
        expected = f"rope_type default, {', '.join(ROPE_TYPES)}"
        raise ConfigError("model.init", str(path.parent), expected, f"It has {kind!r}.")
    return base, _scaling_in(rope, kind, max_position)


def rotary_fraction_in(raw: JsonObject, default: float) -> float:
    """Return the rotated fraction of a head, in global layers if local ones have angles of their own."""
    new = raw.record("rope_parameters", NOTHING)
    if "full_attention" in new:
        new, default = new.record("full_attention"), 1.0
    beside = raw.number("partial_rotary_factor", default, above=0)
    return new.number("partial_rotary_factor", beside, above=0)


def _scaling_in(rope: JsonObject, kind: str, max_position: int) -> RopeScalingConfig:
    fields: dict[str, Any] = {"type": kind}
    original = max_position
    if "original_max_position" in _NEEDED[kind]:
        original = rope.integer("original_max_position_embeddings", max_position, low=1)
        fields["original_max_position"] = original
    # Phi-3 and DeepSeek name the two lengths instead of a factor
    ratio = None if original == max_position else max_position / original
    if "factor" in _NEEDED[kind]:
        fields["factor"] = rope.number("factor", above=0) if ratio is None else rope.number("factor", ratio, above=0)
    for name in ("low_freq_factor", "high_freq_factor"):
        if name in _NEEDED[kind]:
            fields[name] = rope.number(name, above=0)
    for name in ("short_factor", "long_factor"):
        if name in _NEEDED[kind]:
            fields[name] = rope.numbers(name)
    for name in _OPTIONAL.get(kind, ()):
        if name in rope:
            fields[name] = rope.flag(name) if name == "truncate" else rope.number(name)
    return RopeScalingConfig(**fields)
