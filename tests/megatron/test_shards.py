"""What each rank writes and reads of a checkpoint: its own numbers, once, and but for weights nothing that another rank
must send."""

import itertools
import math
from collections import Counter
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest
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

from aligner.config.sections.model.config import ModelConfig
from aligner.config.sections.optim import OptimConfig
from aligner.config.sections.parallel import ParallelConfig
from aligner.families.table import parameters
from aligner.megatron.checkpoint import ModelSave, load_model
from aligner.megatron.optimizer_state import give_state
from aligner.megatron.shards import boxes
from aligner.plan.host import checkpoint_bytes
from aligner.plan.shapes import Grid, rank_parameters
from tests.megatron.models import build, equal_shares, load_and_step, one_more, save_and_go_on, stepped
from tests.tiny import ADAM, LLAMA, MODELS, MOE, wild_source

PLAIN = replace(ADAM, distributed=False)
ONE, TP, PP, CP, EP = (ParallelConfig(**{k: 2} if k else {}) for k in ("", "tensor", "pipeline", "context", "expert"))
BF16, FP32 = torch.bfloat16, torch.float32


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


def storages(tensors) -> dict[int, int]:
    return {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}


def optimizer_tensors(model):
    for optimizer in model.optimizer.chained_optimizers:
        for main, state in optimizer.optimizer.state.items():
            yield from (main, state["exp_avg"], state["exp_avg_sq"])


def save_and_load(folder: Path, cfg: ModelConfig, parallel: ParallelConfig, **kwargs) -> dict:
    """Counts bytes of both, on this rank."""
    model = stepped(cfg, 1, equal_shares, parallel=parallel, **kwargs)
    out = {"stage": model.layout.pp_rank}
    theirs, inputs = dist_checkpointing.save, []

    def listening(state, *args, **options):
        inputs.extend(x.data for x in nested_values(state) if not isinstance(x, ShardedObject) and hasattr(x, "data"))
        return theirs(state, *args, **options)

    folder.mkdir(exist_ok=True)
    with Wire() as wire, mock.patch.object(dist_checkpointing, "save", listening):
        save = ModelSave(model, folder, copy=False)
        files = save._arguments[1] if save._arguments else []
        out["written"] = sum(t.nbytes for _, _, (_, items) in files for _, t in items)
        save.write()
        save.finish()
    out["save"] = dict(wire.bytes)
    own = storages([*model.module.parameters(), *optimizer_tensors(model)])
    out["copied"] = sum(size for pointer, size in storages(inputs).items() if pointer not in own)
    stored = FileSystemReader(folder).read_metadata().state_dict_metadata
    out["stored"] = {
        key: (tuple(result.size), result.properties.dtype.itemsize)
        for key, result in stored.items()
        if isinstance(result, TensorStorageMetadata)
    }
    read, narrow = [], filesystem.narrow_tensor_by_index

    def reading(tensor, *args):
        read.append(tensor.nbytes)
        return narrow(tensor, *args)

    other = build(cfg, parallel, source=wild_source(cfg, seed=7), **kwargs)
    with Wire() as wire, mock.patch.object(filesystem, "narrow_tensor_by_index", reading):
        load_model(other, folder)
    state = [*optimizer_tensors(model)]
    kept = [t for t in state if t.untyped_storage().data_ptr() not in storages(model.module.parameters())]
    out |= {"load": dict(wire.bytes), "read": sum(read), "optimizer": sum(t.nbytes for t in kept)}
    copies = {p: model.layout.copies(not getattr(p, "allreduce", True)) for p in model.module.parameters()}
    out["first"] = sum(p.nbytes for p, group in copies.items() if group.rank() == 0)
    out["told"] = sum(p.nbytes for p, group in copies.items() if group.size() > 1)
    out["same"] = all(torch.equal(a, b) for a, b in zip(state, optimizer_tensors(other), strict=True))
    return out


def save_as_before(folder: Path, cfg: ModelConfig, parallel: ParallelConfig, optim: OptimConfig, **kwargs) -> dict:
    """By Megatron's own optimizer format, `fully_reshardable`, as earlier versions did."""
    model = stepped(cfg, 1, equal_shares, parallel=parallel, optim=optim, **kwargs)
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
    return one_more(model, equal_shares)


@pytest.mark.parametrize("shape", [(7,), (3, 4), (1, 5), (5, 1), (2, 3, 2), (2, 2, 3, 2)])
def test_boxes_are_the_range(shape):
    size = math.prod(shape)
    numbers = torch.arange(size).view(shape)
    for start, stop in itertools.combinations_with_replacement(range(size + 1), 2):
        actual = list(boxes(shape, start, stop))
        assert len(actual) <= 2 * len(shape) - 1
        parts = [numbers[tuple(slice(a, a + n) for a, n in zip(*box, strict=True))].flatten() for box in actual]
        assert torch.equal(torch.cat([torch.arange(0), *parts]), torch.arange(start, stop)), (start, stop, actual)
        assert all(len(piece) for piece in parts)


@pytest.mark.multirank
@pytest.mark.few(3)
@pytest.mark.parametrize(
    ("world", "parallel", "cfg", "dtype"),
    [
        (4, ONE, LLAMA, BF16),
        (4, TP, MODELS["qwen3"], BF16),
        (4, ParallelConfig(expert=2), MOE, BF16),
        (4, ParallelConfig(expert=2, tensor=2), MOE, BF16),
        (4, ONE, LLAMA, FP32),
        (4, PP, replace(LLAMA, tie_embeddings=True), BF16),
        (4, CP, MODELS["qwen2"], BF16),
        (2, ONE, replace(LLAMA, tie_embeddings=True), BF16),
        (1, ONE, LLAMA, BF16),
    ],
)
def test_every_rank_writes_and_reads_its_own_share(ranks, tmp_path, world, parallel, cfg, dtype):
    results = ranks.run(
        save_and_load,
        world=world, folder=tmp_path / "c", cfg=cfg, parallel=parallel, dtype=dtype, optim=ADAM,
    )  # fmt: skip
    stored, kinds = results[0]["stored"], 3 if dtype == BF16 else 2
    state = {key for key in stored if key.startswith("optimizer.state.")}
    assert len(state) == kinds * (len(stored) - len(state))
    padding = (-cfg.vocab_size % parallel.tensor) * cfg.hidden_size * (1 if cfg.tie_embeddings else 2)
    numbers = sum(math.prod(size) for key, (size, _) in stored.items() if key not in state)
    assert numbers == parameters(cfg) + padding

    whole = sum(math.prod(size) * itemsize for size, itemsize in stored.values())
    assert whole == numbers * (dtype.itemsize + 4 * kinds)
    assert sum(out["written"] for out in results) == whole  # once
    grid = Grid(parallel.tensor, parallel.pipeline, parallel.context, parallel.expert)
    grid = replace(grid, data=world // grid.gpus)
    for out in results:
        share = checkpoint_bytes(rank_parameters(cfg, grid, out["stage"]), grid, dtype.itemsize, distributed=True)
        assert out["written"] <= 1.02 * share  # buffers are cut at multiples of 64 numbers
        assert out["same"]
        assert out["copied"] == 0  # what is handed to the writer is the optimizer's and the model's own memory
        assert out["save"].get("numbers", 0) == 0 and out["load"].get("numbers", 0) == out["told"]
        # of the optimizer its own, and the weights by the first of the ranks that have the same
        assert out["read"] == out["first"] + out["optimizer"]
    assert sum(out["told"] > 0 for out in results) == (world if world > parallel.tensor * parallel.pipeline else 0)


@pytest.mark.multirank
@pytest.mark.few(3)
@pytest.mark.parametrize(
    ("world", "parallel", "dtype", "optim"),
    [(2, ONE, BF16, ADAM), (2, TP, FP32, ADAM), (1, ONE, BF16, PLAIN), (1, ONE, FP32, PLAIN), (2, PP, BF16, PLAIN)],
)
def test_checkpoints_of_earlier_versions_load(ranks, tmp_path, world, parallel, dtype, optim):
    job = {"world": world, "folder": tmp_path / "c", "cfg": LLAMA, "dtype": dtype, "parallel": parallel}
    before = ranks.run(save_as_before, optim=optim, **job)[0]
    for other in (ADAM, PLAIN):
        results = ranks.run(load_and_step, share=equal_shares, optim=other, **job)[0]
        check(before, results, exactly=optim == other)


@pytest.mark.multirank
@pytest.mark.few(2)
@pytest.mark.parametrize("dtype", [BF16, FP32])
@pytest.mark.parametrize(("cfg", "parallel"), [(LLAMA, ONE), (MOE, EP)], ids=["dense", "experts"])
@pytest.mark.parametrize("optim", [ADAM, PLAIN], ids=["sharded", "plain"])
def test_the_optimizer_may_become_distributed_or_plain(ranks, tmp_path, optim, cfg, parallel, dtype):
    job = {"world": 2, "folder": tmp_path / "c", "cfg": cfg, "parallel": parallel, "dtype": dtype}
    before = ranks.run(save_and_go_on, steps=1, share=equal_shares, optim=optim, **job)[0]
    other = PLAIN if optim == ADAM else ADAM
    check(before, ranks.run(load_and_step, share=equal_shares, optim=other, **job)[0], exactly=False)


def check(before: dict, actual: dict, exactly: bool) -> None:
    """The other kind of optimizer sums gradients in another order."""
    assert actual["version"] == before["version"] == 1
    assert all(torch.equal(actual["weights"][name], t) for name, t in before["weights"].items())
    assert actual["metrics"]["loss"] == pytest.approx(before["metrics"]["loss"], rel=1e-6)
    for name, t in before["after"].items():
        assert torch.equal(actual["after"][name], t) if exactly else torch.allclose(actual["after"][name], t, atol=2e-6)
