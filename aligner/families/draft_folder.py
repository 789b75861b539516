"""The folder of `engine.draft_model`: a smaller model with the same tokens, or an EAGLE-3 head, which reads the model's
hidden states."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from aligner.config.sections.model.config import ModelConfig
from aligner.errors import CheckpointError, ConfigError
from aligner.families.hf_config import config_from_hf
from aligner.families.within import read_config
from aligner.foreign import JsonObject

KEY = "engine.draft_model"
MARK = "Eagle3"  # at an end of a head's architecture: Eagle3LlamaForCausalLM, LlamaForCausalLMEagle3
INNER = "transformer_layer_config"  # of heads that the package `speculators` has written


@dataclass(frozen=True)
class EagleHead:
    """The shape of a head. `hidden_size`: of the model whose hidden states it reads."""

    architecture: str
    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_numbers: int  # of a token in the cache of a layer, for each of `num_kv_heads`
    vocab_size: int
    ffn_hidden_size: int
    drafted_tokens: int  # of `vocab_size`, the rows of its output matrix


def exported(folder: str) -> Path:
    """Return the Hugging Face folder of a finished run, or the folder itself. Raises ConfigError."""
    path = Path(folder).expanduser()
    for each in (path / "hf", path):
        if (each / "config.json").is_file():
            return each
    raise ConfigError(KEY, folder, "a Hugging Face folder (config.json), or a run that has exported one")


def drafting(folder: str) -> ModelConfig:
    """Return the shape of the model in a folder that is to draft. Raises ConfigError for one that cannot."""
    if (head := eagle_head(folder)) is not None:
        raise ConfigError(KEY, folder, "a whole language model", f"engine.name=vllm drafts with {head.architecture}.")
    try:
        shape = config_from_hf(exported(folder))
    except (ConfigError, CheckpointError) as error:
        raise ConfigError(KEY, folder, "a language model of a supported family", str(error)) from error
    if shape.traits.linear or shape.traits.entries:
        expected = f"a model whose states can go back to the last token that was kept, not of family {shape.family}"
        raise ConfigError(KEY, folder, expected)
    return shape


def eagle_head(folder: str) -> EagleHead | None:
    """Return the shape of the EAGLE-3 head in a folder; None for any other model. Raises ConfigError."""
    try:
        raw = read_config(exported(folder))
        names = [name for name in raw.texts("architectures", []) if name.startswith(MARK) or name.endswith(MARK)]
        return _head(names[0], raw, raw.record(INNER, raw)) if names else None
    except CheckpointError as error:
        raise ConfigError(KEY, folder, "a readable config.json", str(error)) from error


def _head(architecture: str, whole: JsonObject, raw: JsonObject) -> EagleHead:
    heads, size = raw.integer("num_attention_heads", low=1), raw.integer("hidden_size", low=1)
    latent, vocabulary = raw.integer("kv_lora_rank", 0), raw.integer("vocab_size", low=1)
    width = latent + raw.integer("qk_rope_head_dim", 0) if latent else 2 * raw.integer("head_dim", size // heads, low=1)
    return EagleHead(
        architecture,
        raw.integer("num_hidden_layers", 1, low=1),
        whole.integer("target_hidden_size", size, low=1),
        heads,
        1 if latent else raw.integer("num_key_value_heads", heads, low=1),
        width,
        vocabulary,
        raw.integer("intermediate_size", 4 * size, low=1),
        whole.integer("draft_vocab_size", vocabulary, low=1),
    )
