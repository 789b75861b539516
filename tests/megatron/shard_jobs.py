"""What the ranks run for test_shards.py: the bytes that a save and a load move, and checkpoints as earlier versions
wrote them."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedObject
from megatron.core.dist_checkpointing.validation import save_integrity_manifest
from torch.distributed.checkpoint import FileSystemReader, filesystem
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from aligner.config.sections.batch import BatchConfig
from aligner.config.sections.model.config import ModelConfig
from aligner.config.sections.optim import OptimConfig
from aligner.config.sections.parallel import ParallelConfig
from aligner.megatron.checkpoint import ModelSave, load_model
from aligner.megatron.optimizer_state import give_state
from aligner.roles.batching import micro_batches
from tests.megatron.jobs import build, nll_loss, weights
from tests.megatron.moe_jobs import equal_shares
from tests.tiny import batch, wild_source


class Wire(TorchDispatchMode):
    """Bytes of the tensors that collectives work on: numbers of a model are floating, pickled objects are not."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes: Counter = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func._schema.name.startswith("c10d::"):
            for t in tree_leaves(args):
                if isinstance(t, torch.Tensor):
                    self.bytes["numbers" if t.is_floating_point() else "objects"] += t.nbytes
        return func(*args, **(kwargs or {}))


def stepped(cfg: ModelConfig, parallel: ParallelConfig, **kwargs):
    model, full = build(cfg, parallel, **kwargs), batch(cfg)
    model.step(micro_batches(equal_shares(model, full), BatchConfig()), nll_loss(model, full))
    return model


def _storages(tensors) -> dict[int, int]:
    return {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}


def _optimizer_tensors(model):
    for part in model.optimizer.chained_optimizers:
        for main, state in part.optimizer.state.items():
            yield from (main, state["exp_avg"], state["exp_avg_sq"])


def save_and_load(folder: Path, cfg: ModelConfig, parallel: ParallelConfig, **kwargs) -> dict:
    """Counts bytes of both, on this rank."""
    model = stepped(cfg, parallel, **kwargs)
    out = {"stage": model.layout.pp_rank}
    theirs, given = dist_checkpointing.save, []

    def listening(state, *args, **options):
        given.extend(x.data for x in nested_values(state) if not isinstance(x, ShardedObject) and hasattr(x, "data"))
        return theirs(state, *args, **options)

    folder.mkdir(exist_ok=True)
    with Wire() as wire, mock.patch.object(dist_checkpointing, "save", listening):
        save = ModelSave(model, folder, copy=False)
        files = save._arguments[1] if save._arguments else []
        out["written"] = sum(t.nbytes for _, _, (_, items) in files for _, t in items)
        save.write()
        save.finish()
    out["save"] = dict(wire.bytes)
    own = _storages([*model.module.parameters(), *_optimizer_tensors(model)])
    out["copied"] = sum(size for pointer, size in _storages(given).items() if pointer not in own)
    stored = FileSystemReader(folder).read_metadata().state_dict_metadata
    out["stored"] = {
        key: (tuple(found.size), found.properties.dtype.itemsize)
        for key, found in stored.items()
        if isinstance(found, TensorStorageMetadata)
    }
    read, narrow = [], filesystem.narrow_tensor_by_index

    def reading(tensor, *args):
        read.append(tensor.nbytes)
        return narrow(tensor, *args)

    other = build(cfg, parallel, source=wild_source(cfg, seed=7), **kwargs)
    with Wire() as wire, mock.patch.object(filesystem, "narrow_tensor_by_index", reading):
        load_model(other, folder)
    state = [*_optimizer_tensors(model)]
    kept = [t for t in state if t.untyped_storage().data_ptr() not in _storages(model.module.parameters())]
    out |= {"load": dict(wire.bytes), "read": sum(read), "optimizer": sum(t.nbytes for t in kept)}
    copies = {p: model.layout.copies(not getattr(p, "allreduce", True)) for p in model.module.parameters()}
    out["first"] = sum(p.nbytes for p, group in copies.items() if group.rank() == 0)
    out["told"] = sum(p.nbytes for p, group in copies.items() if group.size() > 1)
    out["same"] = all(torch.equal(a, b) for a, b in zip(state, _optimizer_tensors(other), strict=True))
    return out


def save_as_before(folder: Path, cfg: ModelConfig, parallel: ParallelConfig, optim: OptimConfig, **kwargs) -> dict:
    """By Megatron's own optimizer format, `fully_reshardable`, as earlier versions did."""
    model = stepped(cfg, parallel, optim=optim, **kwargs)
    give_state(model.optimizer)
    metadata = {
        "distrib_optim_sharding_type": "fully_reshardable",
        "chained_optim_avoid_prefix": True,
        "dp_cp_group": model.layout.pgs.dp_cp,
    }
    state = {"model": model.module.sharded_state_dict(metadata=metadata), "step_count": model.step_count}
    state["optimizer"] = model.optimizer.sharded_state_dict(state["model"], metadata=metadata)
    if dist.get_rank() == 0:
        folder.mkdir()
    dist.barrier()
    dist_checkpointing.save(state, str(folder))
    if dist.get_rank() == 0:
        save_integrity_manifest(str(folder))
    dist.barrier()
    return _one_more(model, cfg)


def _one_more(model, cfg: ModelConfig) -> dict:
    out, full = {"weights": weights(model), "version": model.step_count}, batch(cfg)
    out["metrics"] = model.step(micro_batches(equal_shares(model, full), BatchConfig()), nll_loss(model, full))
    return out | {"after": weights(model)}


def load_and_step(folder: Path, cfg: ModelConfig, parallel: ParallelConfig, **kwargs) -> dict:
    model = build(cfg, parallel, source=wild_source(cfg, seed=7), **kwargs)
    load_model(model, folder)
    return _one_more(model, cfg)


def save_new(folder: Path, cfg: ModelConfig, parallel: ParallelConfig, **kwargs) -> dict:
    model = stepped(cfg, parallel, **kwargs)
    folder.mkdir(exist_ok=True)
    save = ModelSave(model, folder, copy=True)
    save.write()
    save.finish()
    return _one_more(model, cfg)
