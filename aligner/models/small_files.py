"""The small files of a Hugging Face folder that are copied with its weights."""

from __future__ import annotations

import json
import shutil
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

from aligner.config.sections.model.config import ModelConfig
from aligner.errors import CheckpointError
from aligner.families.hf_config import hf_config
from aligner.families.within import INNER, language_model, put_within, read_config
from aligner.foreign import read_record
from aligner.models.beside import Beside

GENERATION, CARD = "generation_config.json", "README.md"
# besides the files that `save_pretrained` of a tokenizer writes
TOKENIZER = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "vocab.txt",
    "chat_template.jinja",
    "chat_template.json",
)
# of config.json: valid only for that folder
NOT_CARRIED = ("quantization_config", "expert_dtype", "auto_map", "_name_or_path")
# of config.json: 0 here means that this training did not use it, which need not hold for the next
OF_TRAINING = ("attention_dropout", "router_aux_loss_coef")
LICENSES = ("LICENSE", "LICENSE.txt", "LICENSE.md", "NOTICE", "USE_POLICY.md")


def carry(origin: Path | None, folder: Path, *extra: str) -> None:
    """Copy the generation config, the model card, licenses and files named `extra`, if `origin` has them."""
    for name in (GENERATION, CARD, *LICENSES, *extra):
        if origin is not None and (origin / name).is_file():
            shutil.copyfile(origin / name, folder / name)


def write_generation(folder: Path, config: dict[str, Any], stops: Sequence[int]) -> None:
    """Write the stop tokens of training into the generation config of `folder`, a model with this config.json."""
    path, config = folder / GENERATION, config.get(INNER, config)
    ids = {name: config[name] for name in ("bos_token_id", "pad_token_id") if config.get(name) is not None}
    fields = read_record(path, CheckpointError).fields if path.is_file() else ids
    before = fields.get("eos_token_id")
    if set(before if isinstance(before, list) else [before]) != set(stops):
        fields = fields | {"eos_token_id": list(stops) if len(stops) > 1 else stops[0]}
        path.write_text(json.dumps(fields, indent=2) + "\n", encoding="utf-8")


def carry_tokenizer(tokenizer: Any, folder: Path) -> None:
    """Copy the files the tokenizer was loaded from, which saving it again might not give; save it if there are none."""
    origin = Path(tokenizer.name_or_path)
    if not (origin / TOKENIZER[0]).is_file():
        tokenizer.save_pretrained(str(folder))
    for name in TOKENIZER:
        if (origin / name).is_file():
            shutil.copyfile(origin / name, folder / name)


def carried_config(origin: Path | None, own: dict[str, Any], unchanged: Collection[str] = ()) -> dict[str, Any]:
    """Return config.json of a model from `origin`: its tokens and keys unknown to this project, and this project's
    values except for the keys `unchanged`, which it may lack. A language model goes back to the parts beside it,
    without which it scores."""
    path = None if origin is None else origin / "config.json"
    if path is None or not path.is_file():
        return own
    whole = read_config(path.parent)
    before = language_model(whole).fields
    if before.get("model_type") != own["model_type"]:
        return own
    before = {key: value for key, value in before.items() if key not in NOT_CARRIED}
    scores = "ForSequenceClassification" in own["architectures"][0]
    if not scores:
        before = {key: value for key, value in before.items() if key not in ("id2label", "label2id", "num_labels")}
    kept = {key: before[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id") if before.get(key) is not None}
    own = {key: value for key, value in own.items() if key not in unchanged or key in before}
    kept |= {key: before[key] for key in unchanged if key in before}
    kept |= {key: before[key] for key in OF_TRAINING if before.get(key) is not None and not own.get(key)}
    config = before | own | kept
    images = {key: value for key, value in (before.get("rope_parameters") or {}).items() if key.startswith("mrope_")}
    if images:
        config["rope_parameters"] = own["rope_parameters"] | images
    outer = {key: value for key, value in whole.fields.items() if key not in NOT_CARRIED}
    return config if scores or INNER not in whole else put_within(outer, config)


def exported_config(
    cfg: ModelConfig, tokenizer: Any, beside: Beside, head: str, outputs: int, dtype: str
) -> dict[str, Any]:
    """Return config.json of a model of this shape with its tokenizer and the keys of its origin. Arguments as of
    `hf_config`."""
    ids = {name: getattr(tokenizer, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    unchanged = [key for key, _ in cfg.traits.constants]  # for the parts beside it another value may mean another thing
    unchanged += [cfg.traits.predicts_ahead] if beside.names else []
    own = hf_config(cfg, **ids, head=head, num_labels=outputs, dtype=dtype)
    return carried_config(beside.folder, own, unchanged)
