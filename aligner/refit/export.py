"""Write a sharded model as a Hugging Face folder. Each rank sends what it has of a bucket of tensors to rank 0, which
puts these together and writes them before it gets the next."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from itertools import chain
from math import prod
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from aligner.data.tokenizer import stop_token_ids
from aligner.engines.base import RolloutEngine
from aligner.errors import CheckpointError, RefitError, WriteError
from aligner.families.within import stored_name
from aligner.foreign import read_record
from aligner.megatron.train import ShardedModel
from aligner.models.beside import Beside
from aligner.models.copies import with_copies
from aligner.models.fused import joined, parts_of
from aligner.models.params import dtype_of
from aligner.models.safetensors_io import write_hf
from aligner.models.shards import HfTensor, hf_tensors
from aligner.models.small_files import carry, exported_config, write_generation
from aligner.ops.agree import by_rank_0, fail_together
from aligner.refit.exchange import Exchange
from aligner.refit.plan import EngineGrid, TrainerGrid, buckets, plan_refit

EXTRA_FILE = "aligner.json"  # values without a key in config.json: a reward model's bias and scale
BUCKET_BYTES = 128 << 20  # all that a rank sends of a bucket is one message


class WholeTensors(RolloutEngine):
    """What an exchange fills on the rank that writes: all of some tensors."""

    def __init__(self, tensors: Sequence[HfTensor], dtype: torch.dtype, device: torch.device):
        self.axes = {t.name: t.axis for t in tensors}
        self.tensors = {t.name: torch.empty(t.shape, dtype=dtype_of(t.spec, dtype), device=device) for t in tensors}

    def weight_view(self, name: str, start: int, stop: int, afresh: bool = False) -> Tensor:
        return self.tensors[name].narrow(self.axes[name], start, stop - start)


def whole_weights(model: ShardedModel, bucket_bytes: int = BUCKET_BYTES) -> Iterator[dict[str, Tensor]]:
    """Yield all weights by their Hugging Face names, a bucket at a time, on rank 0; other ranks send what they have
    to it, and get empty buckets. Collective. Raises RefitError on every rank, at the end if any could not send."""
    rank, cause, named = dist.get_rank(), "", model.weights()
    tensors = hf_tensors(model.cfg, model.head.kind, model.head.outputs)
    sizes = [prod(t.shape) * dtype_of(t.spec, model.dtype).itemsize for t in tensors]
    trainer, writer = TrainerGrid.of(model.cfg, model.layout, model.layout.data), EngineGrid((0,))
    dist.all_reduce(torch.zeros(1, device=model.device))  # NCCL wants all in a group's first call
    for bucket in buckets(sizes, bucket_bytes):
        some = tensors[bucket.start : bucket.stop]
        plan = plan_refit(trainer, writer, some, model.dtype.itemsize, bucket_bytes, messages_of_pair=1)
        exchange = Exchange(plan, rank, model.device, model.dtype)
        exchange.lasting = False
        whole = WholeTensors(some if rank == 0 else (), model.dtype, model.device)
        exchange(named, whole, cause)
        cause = exchange.cause
        yield whole.tensors
    fail_together(cause, RefitError, form="weights did not arrive from rank {rank}: {cause}")


def export_hf(
    model: ShardedModel, folder: Path, tokenizer, extra: dict[str, Any] | None = None, origin: Path | None = None
) -> Path:
    """Write weights, config.json and tokenizer, loadable with `from_pretrained`. From `origin` come the generation
    config, the model card and unknown keys of config.json. Collective; rank 0 writes.

    Raises WriteError on every rank if the folder cannot be written.
    """
    received, error = whole_weights(model), ""
    if dist.get_rank() == 0:
        cfg, head, dtype = model.cfg, model.head, str(model.dtype).removeprefix("torch.")

        def add_files(path: Path) -> None:
            carry(origin, path)
            if head.kind == "lm":
                write_generation(path, config, stop_token_ids(tokenizer))
            tokenizer.save_pretrained(str(path))
            (path / EXTRA_FILE).write_text(json.dumps(extra or {}, indent=2) + "\n", encoding="utf-8")

        try:
            beside = Beside.of(origin, cfg, head.kind)
            config = exported_config(cfg, tokenizer, beside, head.kind, head.outputs, dtype)
            tensors = joined(((name, t.cpu()) for bucket in received for name, t in bucket.items()), parts_of(cfg))
            others = ((name, beside.read(name, model.dtype)) for name in beside.names)
            every = chain(with_copies(tensors, cfg), others)
            every = ((stored_name(name, cfg.traits, config), t) for name, t in every)
            write_hf(folder, every, config, extra=add_files)
        except (OSError, CheckpointError) as cause:
            for _ in received:  # the other ranks take part in every bucket
                pass
            error = f"cannot write {folder}: {cause}. The checkpoints are untouched; free space or change run.dir"
    else:
        for _ in received:
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
