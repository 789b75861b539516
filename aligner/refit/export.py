"""Write a sharded model as a Hugging Face folder, one tensor in memory at a time."""

from __future__ import annotations

import json
from itertools import chain
from pathlib import Path
from typing import Any

import torch.distributed as dist

from aligner.data.tokenizer import stop_token_ids
from aligner.errors import CheckpointError, WriteError
from aligner.families.within import stored_name
from aligner.foreign import read_record
from aligner.megatron.train import ShardedModel
from aligner.models.beside import Beside
from aligner.models.fused import joined, parts_of
from aligner.models.safetensors_io import write_hf
from aligner.models.small_files import carry, exported_config, write_generation
from aligner.ops.agree import by_rank_0
from aligner.refit.stream import WeightStream

EXTRA_FILE = "aligner.json"  # values without a key in config.json: a reward model's bias and scale


def export_hf(
    model: ShardedModel, folder: Path, tokenizer, extra: dict[str, Any] | None = None, origin: Path | None = None
) -> Path:
    """Write weights, config.json and tokenizer, loadable with `from_pretrained`. From `origin` come the generation
    config, the model card and unknown keys of config.json. Collective; rank 0 writes.

    Raises WriteError on every rank if the folder cannot be written.
    """
    stream = WeightStream(model, bucket_bytes=256 << 20)
    error = ""
    if dist.get_rank() == 0:
        cfg, head, dtype = model.cfg, model.head, str(model.dtype).removeprefix("torch.")

        def add_files(path: Path) -> None:
            carry(origin, path)
            if head.kind == "lm":
                write_generation(path, config, stop_token_ids(tokenizer))
            tokenizer.save_pretrained(str(path))
            (path / EXTRA_FILE).write_text(json.dumps(extra or {}, indent=2) + "\n", encoding="utf-8")

        buckets = iter(stream)
        try:
            beside = Beside.of(origin, cfg, head.kind)
            config = exported_config(cfg, tokenizer, beside, head.kind, head.outputs, dtype)
            tensors = joined(((name, t.cpu()) for bucket in buckets for name, t in bucket), parts_of(cfg))
            others = ((name, beside.read(name, model.dtype)) for name in beside.names)
            every = ((stored_name(name, cfg.traits, config), t) for name, t in chain(tensors, others))
            write_hf(folder, every, config, extra=add_files)
        except (OSError, CheckpointError) as cause:
            for _ in buckets:  # the other ranks take part in every bucket
                pass
            error = f"cannot write {folder}: {cause}. The checkpoints are untouched; free space or change run.dir"
    else:
        for _ in stream:
            pass
    if failure := by_rank_0(lambda: error):
        raise WriteError(failure)
    return folder


def read_extra(folder: Path) -> dict[str, Any]:
    """Return the content of `EXTRA_FILE`; empty for folders of other origin."""
    path = folder / EXTRA_FILE
    if not path.is_file():
        return {}
    content = read_record(path, CheckpointError)
    for name in ("bias", "std"):
        content.number(name, None)
    content.text("separator", "")  # a process reward model's
    content.texts("attributes", [])
    for name in ("biases", "stds"):
        content.numbers(name, [])
    return content.fields
