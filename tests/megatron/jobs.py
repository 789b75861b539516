"""What the ranks run for the tests of this folder (and the builders that other folders' jobs use)."""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint import FileSystemReader, LoadPlan, LoadPlanner

from aligner.config.sections.batch import BatchConfig
from aligner.config.sections.model.config import ModelConfig
from aligner.config.sections.optim import OptimConfig
from aligner.config.sections.parallel import ParallelConfig
from aligner.errors import CheckpointError, LayoutError
from aligner.megatron import checkpoint, cpu, groups
from aligner.megatron.attention import RMSNorm
from aligner.megatron.checkpoint import load_model, save_model
from aligner.megatron.checkpoint_index import read_index
from aligner.megatron.model import Head
from aligner.megatron.train import ShardedModel
from aligner.megatron.weights import OUTPUT
from aligner.models.families import family_table
from aligner.models.hf_config import config_from_hf
from aligner.models.params import from_hf
from aligner.models.safetensors_io import open_hf
from aligner.ops.kernels.logprobs import token_logprobs
from aligner.refit.transfer import WeightStream
from aligner.roles.batching import micro_batches
from aligner.roles.policy import Policy
from aligner.roles.reward_model import last_token_scores
from aligner.types import LossOutput, TrainBatch
from tests.tiny import ADAM, LLAMA, batch, wild_source

ONE = ParallelConfig()


def build(
    cfg: ModelConfig,
    parallel: ParallelConfig = ONE,
    optim: OptimConfig | None = None,
    head: Head = Head(),  # noqa: B008 (frozen)
    dtype: torch.dtype = torch.float32,
    total_steps: int = 10,
    source=None,
    packed: bool = True,
    share: bool = False,
) -> ShardedModel:
    layout = groups.build_layout(parallel)
    source = source or wild_source(cfg)
    return ShardedModel(cfg, layout, head, dtype, torch.device("cpu"), source, optim, total_steps, packed, share)


def build_on(trunk: ShardedModel, optim: OptimConfig = ADAM) -> ShardedModel:
    """A critic on the frozen weights of a model with adapters, with the head of one that `build` makes."""
    cfg, how = trunk.cfg, (trunk.total_steps, trunk.packed, trunk.share)
    model = ShardedModel(cfg, trunk.layout, Head("score"), trunk.dtype, trunk.device, trunk, optim, *how)
    if trunk.layout.is_last_stage:
        (head,) = (spec for spec in family_table(cfg, "score") if spec.canonical == OUTPUT)
        model.module.output_layer.weight.data.copy_(wild_source(cfg)(head))
    model.optimizer.reload_model_params()
    return model


def from_folder(folder: str, parallel: ParallelConfig = ONE, head: Head = Head(), **kwargs) -> ShardedModel:  # noqa: B008
    cfg, tensors = config_from_hf(folder), open_hf(folder)
    return build(cfg, parallel, head=head, source=lambda spec: from_hf(spec, tensors, cfg), **kwargs)


def weights(model: ShardedModel) -> dict[str, torch.Tensor]:
    return {name: t.clone() for bucket in WeightStream(model, 1 << 20) for name, t in bucket}


def shares(model: ShardedModel, full: TrainBatch) -> TrainBatch:
    """This data-parallel rank's rows: unequal shares, so ranks run different numbers of micro-batches."""
    size, rank = model.layout.data, model.layout.dp_rank
    rows = torch.arange(len(full.lengths))
    bounds = [0, *(len(rows) * (i + 1) // size - 1 for i in range(size - 1)), len(rows)]
    return full.select(rows[bounds[rank] : bounds[rank + 1]])


def nll_loss(model: ShardedModel, full: TrainBatch, logits_bytes: int = 1 << 30):
    """Negative log-likelihood over the tokens of the whole minibatch; scores: squared error over its rows (small, so
    that gradient descent with learning rate 1 does not run away)."""
    tokens, rows = full.loss_mask.sum(), len(full.lengths)
    group = model.layout.pgs.tp if model.layout.tensor > 1 else None

    def read(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return token_logprobs(logits, targets, vocab_size=model.cfg.vocab_size, group=group)[0]

    def lm(hidden: torch.Tensor, b: TrainBatch) -> LossOutput:
        logprobs = model.over_logits(hidden, b, read, logits_bytes)
        nll = -(logprobs * b.loss_mask).sum()
        return LossOutput(nll / tokens, {"nll": (nll, b.loss_mask.sum())}, {"worst": (-logprobs * b.loss_mask).max()})

    def score(output: torch.Tensor, b: TrainBatch) -> LossOutput:
        error = (last_token_scores(model, output, b).sum(-1) - b.labels).square()
        return LossOutput(
            0.01 * error.sum() / rows, {"nll": (error.sum(), torch.tensor(len(error)))}, {"worst": error.max()}
        )

    return lm if model.head.kind == "lm" else score


def train(
    cfg: ModelConfig,
    parallel: ParallelConfig = ONE,
    optim: OptimConfig = ADAM,
    bc: BatchConfig = BatchConfig(),  # noqa: B008
    head: Head = Head(),  # noqa: B008
    dtype: torch.dtype = torch.float32,
    steps: int = 2,
) -> dict:
    """Some steps on one fixed minibatch: metrics of each, logprobs, and full weights at the end."""
    model = build(cfg, parallel, optim, head, dtype, packed=bc.packing, share=bc.share_prompts)
    full = batch(cfg)
    mine, loss = shares(model, full), nll_loss(model, full, bc.logits_bytes)
    metrics = [model.step(micro_batches(mine, bc), loss) for _ in range(steps)]
    logprobs = Policy(model, bc).logprobs(full) if head.kind == "lm" else None
    return {"metrics": metrics, "weights": weights(model), "logprobs": logprobs, "version": model.step_count}


def logits(folder: str, tokens: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    model = from_folder(folder)
    assert model.head.kind == "lm"
    return plain_logits(model, tokens, lengths)


def plain_logits(model: ShardedModel, tokens: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    """[B, T, V] of the token after each; rows get one more token, because a last one predicts nothing."""
    rows = TrainBatch(torch.nn.functional.pad(tokens, (0, 1)), lengths + 1, torch.zeros(len(tokens), 0))
    (found,) = model.forward([rows], lambda hidden, b: model.over_logits(hidden, b, lambda z, _: z.float(), 1 << 30))
    return found[:, 1:]


def trajectory(folder: str, optim: OptimConfig, batches: list[TrainBatch], total: int) -> dict:
    """One optimizer step per batch from the weights of a folder."""
    model = from_folder(folder, optim=optim, total_steps=total)
    metrics = [model.step(micro_batches(b, BatchConfig(micro_batch_samples=3)), nll_loss(model, b)) for b in batches]
    return {"metrics": metrics, "weights": weights(model)}


# ---- cpu.py


def cpu_lies() -> dict:
    t = torch.zeros(2)
    told = {}
    for name in ("megatron.core.optimizer.made_up", "somebody.else"):
        scope = {"__name__": name, "t": t}
        exec("kind = t.type()", scope)
        told[name] = scope["kind"]
    return told | {
        "again": cpu.install(),
        "cast": t.type(torch.float64).dtype,
        "made": [f(2, device="cuda").device.type for f in (torch.zeros, torch.empty, torch.arange)],
        "moved": [t.to("cuda").device.type, t.cuda().device.type, t.to(device="cuda:0", dtype=torch.int8).device.type],
        "world": dist.get_world_size(),
    }


# ---- groups.py


def layout_ranks(parallel: ParallelConfig) -> dict:
    layout = groups.build_layout(parallel)
    names = ("tp", "pp", "dp", "mp", "dp_cp", "embd", "pos_embd", "intra_dist_opt", "cp")
    found = {n: getattr(layout.pgs, n) for n in names}
    return {n: g and dist.get_process_group_ranks(g) for n, g in found.items()} | {
        "rank": (layout.pp_rank, layout.dp_rank, layout.tp_rank),
        "stages": (layout.is_first_stage, layout.is_last_stage, layout.last_stage_rank),
        "data": layout.data,
    }


def sockets_of_layout(parallel: ParallelConfig) -> dict:
    """Sizes and time-outs of the new groups of a layout; sockets opened with them, and once each has done what CPU
    tensors do."""
    known = _groups_of(groups.build_layout(ONE))  # and those of the job before are gone
    for _ in range(2):  # the first time a peer may still be connecting to this rank when it has all that it needs
        dist.all_gather_object([None] * dist.get_world_size(), 0)
        dist.barrier()
    before, now = -1, _open_sockets()
    while before != now:  # those of the job before it close by and by
        time.sleep(0.3)
        before, now = now, _open_sockets()
    dist.barrier()
    layout = groups.build_layout(parallel)
    new = [g for g in _groups_of(layout) if g not in known]
    made = _open_sockets()
    dist.barrier()  # a peer that speaks already would connect to this rank before it has counted
    for group in new:
        dist.all_gather_object([None] * group.size(), 0, group=group)
        dist.broadcast_object_list([0], group_src=0, group=group)
    limits = {g._get_backend(torch.device("cpu")).options._timeout.total_seconds() for g in new}
    sizes = [g.size() for g in new]
    return {"sizes": sizes, "limits": limits, "made": made - before, "used": _open_sockets() - before}


def _groups_of(layout: groups.Layout) -> list[dist.ProcessGroup]:
    """In an order that all ranks share: each may wait for the other of a pair otherwise, all round the world."""
    return list(dict.fromkeys(g for g in (*vars(layout.pgs).values(), layout.peers) if g is not None))


def _open_sockets() -> int:
    links = []
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # that of the listing
            links.append(os.readlink(f"/proc/self/fd/{number}"))
    return sum(link.startswith("socket:") for link in links)


def refused_layout(parallel: ParallelConfig) -> str:
    with pytest.raises(LayoutError) as caught:
        groups.build_layout(parallel)
    return str(caught.value)


# ---- checkpoint.py


def save_and_go_on(folder: Path, parallel: ParallelConfig, cfg: ModelConfig = LLAMA, **kwargs) -> dict:
    """Two steps, save, one step more; then a new model loads and takes that step too."""
    first, out = build(cfg, parallel, **kwargs), {}
    full = batch(cfg)
    mine, parts = shares(first, full), BatchConfig(micro_batch_samples=2)
    for _ in range(2):
        first.step(micro_batches(mine, parts), nll_loss(first, full))
    save_model(first, folder)
    out["saved"] = weights(first)
    out["went_on"] = first.step(micro_batches(mine, parts), nll_loss(first, full))
    out["after"] = weights(first)
    second = build(cfg, parallel, source=wild_source(cfg, seed=7), **kwargs)
    load_model(second, folder)
    out["loaded"], out["version"] = weights(second), second.step_count
    out["resumed"] = second.step(micro_batches(mine, parts), nll_loss(second, full))
    out["after_resumed"] = weights(second)
    return out


def weights_read(folder: Path, parallel: ParallelConfig, cfg: ModelConfig, **kwargs) -> tuple[set[str], bool]:
    """The weights that this rank reads of a checkpoint; whether its own are then those that were saved."""
    first, second = build(cfg, parallel, **kwargs), build(cfg, parallel, source=wild_source(cfg, seed=7), **kwargs)
    save_model(first, folder)
    read, real = set[str](), FileSystemReader.read_data

    def noted(self: FileSystemReader, plan: LoadPlan, planner: LoadPlanner):
        read.update(item.storage_index.fqn for item in plan.items)
        return real(self, plan, planner)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FileSystemReader, "read_data", noted)
        load_model(second, folder)
    pairs = zip(first.module.parameters(), second.module.parameters(), strict=True)
    named = {name for name in read if not name.startswith(("optimizer.", "common_state"))}
    return named, all(torch.equal(a, b) for a, b in pairs)


def load_and_step(
    folder: Path, parallel: ParallelConfig, cfg: ModelConfig = LLAMA, again: Path | None = None, **kwargs
) -> dict:
    model = build(cfg, parallel, source=wild_source(cfg, seed=8), **kwargs)
    load_model(model, folder)
    out = {"loaded": weights(model), "version": model.step_count}
    if again:
        save_model(model, again)
    full = batch(cfg)
    parts = micro_batches(shares(model, full), BatchConfig(micro_batch_samples=2))
    return out | {"resumed": model.step(parts, nll_loss(model, full)), "after_resumed": weights(model)}


def load_with_settings(folder: Path, other: OptimConfig, optim: OptimConfig, **kwargs) -> dict:
    """A step after a save, with settings changed in place; and after a load into a model that was built with them."""
    first, full = build(LLAMA, optim=optim, **kwargs), batch(LLAMA)
    parts = micro_batches(full, BatchConfig())
    first.step(parts, nll_loss(first, full))
    save_model(first, folder)
    second = build(LLAMA, optim=other, source=wild_source(LLAMA, seed=7), **kwargs)
    load_model(second, folder)
    first.optim = other
    for group in first.optimizer.param_groups:
        group.update(betas=tuple(other.betas), eps=other.eps)
    first.optimizer.config.clip_grad = other.clip_grad
    went_on, resumed = (model.step(parts, nll_loss(model, full)) for model in (first, second))
    return {"went_on": went_on, "resumed": resumed, "after": weights(first), "after_resumed": weights(second)}


def load_weights_only(folder: Path, cfg: ModelConfig = LLAMA, frozen: bool = True, **kwargs) -> dict:
    """As a reference does (frozen), or as a stage that starts from another's weights does."""
    model = build(cfg, ONE, None if frozen else kwargs.pop("optim", ADAM), source=wild_source(cfg, seed=9), **kwargs)
    load_model(model, folder, with_optimizer=False)
    out = {"loaded": weights(model), "version": model.step_count}
    if not frozen:
        full = batch(cfg)
        out["resumed"] = model.step(micro_batches(full, BatchConfig()), nll_loss(model, full))
        out["after"] = weights(model)
    return out


def refused_checkpoint(folder: Path, cfg: ModelConfig = LLAMA, **kwargs) -> str:
    model = build(cfg, ONE, **kwargs)
    with pytest.raises(CheckpointError) as caught:
        load_model(model, folder)
    return str(caught.value)


def unreadable_checkpoint(folder: Path) -> str:
    """What each rank is told where a file system fails the one that reads the weights."""
    real = FileSystemReader.read_data

    def fails(self: FileSystemReader, plan: LoadPlan, planner: LoadPlanner):
        if any(item.storage_index.fqn.startswith("decoder.") for item in plan.items):
            raise OSError("Stale file handle")
        return real(self, plan, planner)

    with pytest.MonkeyPatch.context() as patch:
        if dist.get_rank() == 0:
            patch.setattr(FileSystemReader, "read_data", fails)
        return refused_checkpoint(folder)


def extra_state(folder: Path) -> tuple[bool, list]:
    """With modules that have some, as TransformerEngine's do, and a checkpoint by a version that saved it: whether one
    by this version holds some, and what was taken from the other one."""
    taken: list = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RMSNorm, "get_extra_state", lambda self: torch.ones(3, dtype=torch.uint8), raising=False)
        patch.setattr(RMSNorm, "set_extra_state", lambda self, state: taken.append(state), raising=False)
        model = build(LLAMA, ONE)
        save_model(model, folder / "new")
        with pytest.MonkeyPatch.context() as earlier:
            told = {"dp_cp_group": model.layout.pgs.dp_cp}
            earlier.setattr(checkpoint, "weight_state", lambda model: model.module.sharded_state_dict(metadata=told))
            save_model(model, folder / "old")
        assert any("_extra_state" in key for key in read_index(folder / "old").state_dict_metadata)
        load_model(model, folder / "old")
    return any("_extra_state" in key for key in read_index(folder / "new").state_dict_metadata), taken


def train_with(outputs: int = 0, **kwargs) -> dict:
    """`train` with a score head of this many outputs (0: language-model head)."""
    return train(head=Head("score", outputs) if outputs else Head(), **kwargs)


def save_score(folder: Path, parallel: ParallelConfig, optim: OptimConfig) -> dict:
    return save_and_go_on(folder, parallel, head=Head("score", 2), dtype=torch.bfloat16, optim=optim)


def load_score(folder: Path, parallel: ParallelConfig, optim: OptimConfig) -> dict:
    return load_and_step(folder, parallel, head=Head("score", 2), dtype=torch.bfloat16, optim=optim)


def load_score_alone(folder: Path) -> dict:
    return load_weights_only(folder, head=Head("score", 2), dtype=torch.bfloat16)
