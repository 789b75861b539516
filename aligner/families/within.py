"""Language models within models that also see: how config.json and the files name them there.

Everywhere else a tensor has the name that it has in the language model alone.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from aligner.errors import CheckpointError
from aligner.families import SAME
from aligner.families.family import Family, Names
from aligner.foreign import JsonObject, read_record

INNER = "text_config"  # of config.json: the language model's part
OWN = re.compile(r"(model\.(layers|embed_tokens\w*|norm|per_layer_\w+)|lm_head|score)\.")  # names in it
# prefixes of its body and its head there, by transformers' versions
_BODIES = {"model.language_model.": "model.", "language_model.model.": "model.", "language_model.lm_head.": "lm_head."}
_HEADS = {"language_model.model.": "language_model.lm_head."}


def own_name(name: str, published: Names = ()) -> str:
    """Return the name of a tensor of a file in the language model alone; a tensor of another part keeps its name.

    `published` is `Family.published`.
    """
    for outer, own in (*_BODIES.items(), *published):
        if name.startswith(outer):
            name = own + name.removeprefix(outer)
            break
    for inner, own in published if name.startswith("model.") else ():
        name = name.replace(inner, own) if inner.startswith(".") else name
    return name


def stored_name(name: str, family: Family, config: dict[str, Any]) -> str:
    """Return the name of a tensor in files with this config.json; one of another part keeps its name."""
    if INNER not in config or not OWN.match(name):
        return name
    prefix = family.within[1]
    outer = {"model.": prefix, "lm_head.": _HEADS.get(prefix, "lm_head.")}
    start = name[: name.index(".") + 1]
    return outer[start] + name.removeprefix(start)


def read_config(folder: Path) -> JsonObject:
    """Read config.json, whose numbers may be infinite. Raises CheckpointError."""
    return read_record(folder / "config.json", CheckpointError, nan=True)


def language_model(raw: JsonObject) -> JsonObject:
    """Return the language model's part of config.json, or all of it if that is all, with its family's `model_type`."""
    inner, outer = raw, dict[str, Any]()
    if INNER in raw:
        inner = raw.record(INNER)
        outer = {key: raw.fields[key] for key in ("tie_word_embeddings", "quantization_config") if key in raw}
    same = SAME.get(inner.text("model_type", ""))
    for key, value in outer.items():
        if key in inner and inner.fields[key] != value:
            inner.refuse(key, f"{value!r}, as beside {INNER}")
    return JsonObject(outer | inner.fields | ({"model_type": same} if same else {}), raw.where, raw.error, inner.prefix)


def put_within(outer: dict[str, Any], inner: dict[str, Any]) -> dict[str, Any]:
    """Return config.json of the larger model with this language model."""
    both = {key: inner[key] for key in ("tie_word_embeddings", "torch_dtype", "dtype")}
    return outer | both | {INNER: {key: value for key, value in inner.items() if key != "architectures"}}
