"""What the ranks run for the tests of this folder."""

from __future__ import annotations

import json
import weakref
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from aligner.config.sections.batch import BatchConfig
from aligner.config.sections.engine import EngineConfig, RefitConfig
from aligner.config.sections.model.config import ModelConfig
from aligner.config.sections.optim import OptimConfig
from aligner.config.sections.parallel import ParallelConfig
from aligner.engines.native import packs
from aligner.engines.native.engine import NativeEngine
from aligner.engines.native.load import engine_from_folder
from aligner.errors import RefitError
from aligner.megatron.groups import build_layout
from aligner.megatron.model import Head
from aligner.megatron.train import ShardedModel
from aligner.models.params import split_tp
from aligner.models.shards import hf_tensors
from aligner.refit.exchange import Exchange
from aligner.refit.export import export_hf
from aligner.refit.plan import EngineGrid, TrainerGrid, plan_refit
from aligner.refit.transfer import Refit, WeightStream, fail_together
from aligner.refit.verify import Verifier
from aligner.roles.batching import micro_batches
from aligner.roles.model_init import resolve
from aligner.roles.policy import Policy
from aligner.roles.reward_model import RewardModel
from aligner.types import TrainBatch
from tests.megatron.models import ONE, build, nll_loss, plain_logits, shares
from tests.tiny import batch, wild_source


def stream(
    cfg: ModelConfig, parallel: ParallelConfig, bucket_bytes: int, outputs: int = 0, dtype=torch.float32
) -> dict:
    model = build(cfg, parallel, head=Head("score", outputs) if outputs else Head(), dtype=dtype)
    weights = WeightStream(model, bucket_bytes)
    runs = [[[(name, t.clone()) for name, t in bucket] for bucket in weights] for _ in range(2)]
    again = [[(n, t.tolist()) for n, t in b] for b in runs[1]]
    return {"buckets": runs[0], "repeats": again == [[(n, t.tolist()) for n, t in b] for b in runs[0]]}


def native(cfg: ModelConfig, dtype: torch.dtype) -> NativeEngine:
    return NativeEngine(cfg, EngineConfig(), device="cpu", dtype=dtype, pad_id=0)


def sentinel(model: ShardedModel, refit: Refit, rows: TrainBatch) -> Verifier:
    def logprobs(tokens, lengths):
        return Policy(model, BatchConfig()).logprobs(TrainBatch(tokens, lengths, torch.zeros(len(tokens), 0)))

    return Verifier(refit, rows.tokens, rows.lengths, logprobs)


def one_step(model: ShardedModel, rows: TrainBatch) -> None:
    model.step(micro_batches(shares(model, rows), BatchConfig(micro_batch_samples=8)), nll_loss(model, rows))


def follow(
    cfg: ModelConfig,
    parallel: ParallelConfig,
    dtype: torch.dtype,
    verify: str,
    optim: OptimConfig,
    steps: int,
    engine_dtype: torch.dtype | None = None,
) -> list[dict]:
    """Refit, check, step, again and again; the last round without a step before it."""
    model, engine = build(cfg, parallel, optim, dtype=dtype), native(cfg, engine_dtype or dtype)
    refit = Refit(model, engine, RefitConfig(bucket_bytes=5000, verify=verify))
    rows = batch(cfg)
    verifier, told = sentinel(model, refit, rows), []
    for round_ in range(steps + 2):
        metrics = refit() | verifier.check()
        real = torch.arange(rows.tokens.shape[1])[None] < rows.lengths[:, None]
        gap = engine.logprobs(rows.tokens, rows.lengths) - Policy(model, BatchConfig()).logprobs(rows)
        told.append(metrics | {"gap": float((gap * real).abs().max()), "engine": engine.weight_version})
        if round_ < steps:
            one_step(model, rows)
    return told


def skipped(cfg: ModelConfig, parallel: ParallelConfig, dtype: torch.dtype, verify: str, optim: OptimConfig) -> dict:
    """The engine keeps its weights through one optimizer step. Returns the message of the check."""
    model, engine = build(cfg, parallel, optim, dtype=dtype), native(cfg, dtype)
    refit = Refit(model, engine, RefitConfig(bucket_bytes=5000, verify=verify), skip=True)
    rows = batch(cfg)
    verifier = sentinel(model, refit, rows)
    refit()
    first = verifier.check()
    one_step(model, rows)
    refit()
    with pytest.raises(RefitError) as caught:
        verifier.check()
    return {"message": str(caught.value), "first": first}


def resumed(cfg: ModelConfig, optim: OptimConfig) -> dict:
    """A step, then a verifier that knows only what a checkpoint kept, before an engine that missed the step."""
    model, engine = build(cfg, ParallelConfig(), optim), native(cfg, torch.float32)
    refit = Refit(model, engine, RefitConfig(tolerance=9.0), skip=True)  # the verdict alone
    rows = batch(cfg)
    before = sentinel(model, refit, rows)
    refit()
    before.check()
    kept = json.loads(json.dumps(before.state_dict()))
    one_step(model, rows)
    refit()
    engine._ledger.version = model.step_count  # an engine that lies about its version
    after, other = sentinel(model, refit, rows), sentinel(model, refit, batch(cfg, seed=2))
    forgetful = sentinel(model, refit, rows).check()
    after.load_state_dict(kept)
    with pytest.raises(RefitError) as caught:
        after.check()
    other.load_state_dict(kept)
    fresh = sentinel(model, refit, rows)
    fresh.load_state_dict(fresh.state_dict())
    return {"message": str(caught.value), "forgetful": forgetful, "other": other.previous, "fresh": fresh.previous}


class Refusing:
    """An engine that refuses on one rank, at one moment."""

    weight_version = -1
    dtype = torch.float32

    def __init__(self, rank: int, moment: str):
        self.moment, self.calls = moment if dist.get_rank() == rank else "", 0

    def begin_update(self, version: int) -> None:
        self._maybe("begin")

    def update_weights(self, tensors) -> None:
        self.calls += 1
        if self.calls == 2:
            self._maybe("second bucket")

    def finish_update(self) -> None:
        self._maybe("finish")

    def _maybe(self, moment: str) -> None:
        if moment == self.moment:
            raise RefitError(f"{moment} does not suit me")


def refused(cfg: ModelConfig, parallel: ParallelConfig, rank: int, moment: str) -> str:
    refit = Refit(build(cfg, parallel), Refusing(rank, moment), RefitConfig(bucket_bytes=3000))
    with pytest.raises(RefitError) as caught:
        refit()
    refit.engine.moment = ""
    refit()  # nothing was left behind in the groups
    return str(caught.value)


def first_cause() -> list[str]:
    messages, rank = [], dist.get_rank()
    for causes in (["", ""], ["", "b"], ["a", "b"]):
        try:
            fail_together(causes[rank])
            messages.append("")
        except RefitError as error:
            messages.append(str(error))
    return messages


def through_folders(folder: Path, out: Path, head: str, tokens: torch.Tensor, lengths: torch.Tensor) -> tuple:
    """(logits or scores of the trainer, logprobs of the native engine); the model goes on to the folder `out`."""
    initial = resolve(ModelConfig(dtype="float32"), str(folder), 0)
    scored = Head() if head == "lm" else Head("score", 3)
    source = initial.source(scored)
    model = ShardedModel(initial.config, build_layout(ONE), scored, torch.float32, torch.device("cpu"), source)
    export_hf(model, out, initial.tokenizer, None, initial.origin)
    if head == "score":
        rows = TrainBatch(tokens, lengths, torch.zeros(len(tokens), 0))
        return RewardModel(model, BatchConfig()).raw_scores(rows), None
    engine = engine_from_folder(out, EngineConfig(), device="cpu", dtype=torch.float32, pad_id=0)
    return plain_logits(model, tokens, lengths), engine.logprobs(tokens, lengths)


def shards(cfg: ModelConfig, trainer: TrainerGrid, rank: int) -> dict[str, torch.Tensor]:
    """What the trainer's rank holds, cut by the family table; empty for others."""
    if trainer.replica_of(rank) is None:
        return {}
    stage, source = (rank - trainer.first) // trainer.tensor // trainer.replicas, wild_source(cfg)
    held = {tensor.spec.canonical: tensor.spec for tensor in hf_tensors(cfg) if stage in trainer.stages(tensor)}
    cut = {name: split_tp(spec, source(spec), trainer.tensor, trainer.tensor_rank(rank)) for name, spec in held.items()}
    return {
        name: t.chunk(trainer.expert)[trainer.expert_rank(rank)] if held[name].experts else t for name, t in cut.items()
    }


class Packed(NativeEngine):
    """When an update begins, its matrices in float32 are laid out as rows are computed with them, on any machine."""

    def __init__(self, *arguments, **more):
        with mock.patch.object(packs, "worth_packing", lambda m: m.dtype == torch.float32 and m.numel() > 0):
            super().__init__(*arguments, **more)

    def begin_update(self, version: int) -> None:
        with torch.inference_mode():
            self.model.packs.pack()
        super().begin_update(version)


def engines_of(cfg: ModelConfig, engines: EngineGrid, dtype: torch.dtype, count: int) -> list[NativeEngine | None]:
    """So many alike on this rank, None where there is to be none."""
    rank, replicas = dist.get_rank(), len(engines.ranks) // engines.tensor
    groups = [dist.new_group(list(engines.ranks[i * engines.tensor :][: engines.tensor])) for i in range(replicas)]
    if rank not in engines.ranks:
        return [None] * count
    group = groups[engines.ranks.index(rank) // engines.tensor]
    return [Packed(cfg, EngineConfig(), device="cpu", dtype=dtype, pad_id=0, group=group) for _ in range(count)]


def placed(
    cfg: ModelConfig, trainer: TrainerGrid, engines: EngineGrid, bucket_bytes: int, dtype=torch.float32, rounds: int = 1
) -> dict | None:
    """Run a plan between any ranks of the world; checksums of this rank's engine, None where there is none."""
    rank = dist.get_rank()
    (engine,) = engines_of(cfg, engines, dtype, 1)
    plan = plan_refit(trainer, engines, hf_tensors(cfg), dtype.itemsize, bucket_bytes)
    exchange = Exchange(plan, rank, torch.device("cpu"), dtype, 30.0)
    held, made = shards(cfg, trainer, rank), []
    make = exchange._buffers

    def buffers(side: int) -> list[torch.Tensor]:
        found = make(side)
        made.extend((buffer.nbytes, weakref.ref(buffer)) for buffer in found)
        return found

    exchange._buffers = buffers
    for version in range(rounds):
        bring(exchange, held, engine, version)
    moved = {"copied": exchange.copied_bytes, "received": exchange.wire_bytes, "buffers": exchange.buffer_bytes}
    moved |= {"made": sum(size for size, _ in made), "kept": sum(size for size, buffer in made if buffer() is not None)}
    return None if engine is None else moved | {"checksums": engine.checksums(), "version": engine.weight_version}


def bring(exchange: Exchange, held: dict[str, torch.Tensor], engine: NativeEngine | None, version: int) -> None:
    """One refit, which no rank has a cause against."""
    if engine is not None:
        engine.begin_update(version)
    exchange(held, engine)
    assert not exchange.cause
    if engine is not None:
        engine.finish_update()


class Losing(Packed):
    """An engine whose rank writes a tensor twice, leaves one out, or one half of one."""

    fault = ""

    def place(self, name: str, start: int, stop: int, afresh: bool = False):
        if name == "model.layers.1.mlp.up_proj.weight":
            elsewhere = torch.empty(stop - start, self.model.cfg.hidden_size)
            if self.fault == "missing":
                return elsewhere
            if self.fault == "doubled":
                super().place(name, start, stop, afresh)
            if self.fault == "half":
                super().place(name, start, (start + stop) // 2, afresh)
                return elsewhere
            if self.fault == "broken":
                raise RuntimeError("no memory left")
        return super().place(name, start, stop, afresh)


def faulty(cfg: ModelConfig, parallel: ParallelConfig, fault: str) -> str:
    """The last rank's engine has the fault; the message on this rank."""
    last = dist.get_rank() == dist.get_world_size() - 1
    engine = Losing(cfg, EngineConfig(), device="cpu", dtype=torch.float32, pad_id=0)
    engine.fault = fault if last else ""
    refit = Refit(build(cfg, parallel), engine, RefitConfig(bucket_bytes=5000))
    with pytest.raises(RefitError) as caught:
        refit()
    engine.fault = ""
    refit()  # nothing was left behind
    return str(caught.value)


class Late(NativeEngine):
    """An engine that fails in a way nobody expects, or hangs."""

    how = ""

    def begin_update(self, version: int) -> None:
        super().begin_update(version)
        if self.how == "raises":
            raise ZeroDivisionError("someone divided by zero")
        if self.how == "hangs":
            _store().get("the other rank is done")


def _store() -> dist.Store:
    return dist.distributed_c10d._get_default_store()


def stuck(cfg: ModelConfig, how: str) -> str:
    """The last rank's engine is `Late`, and its process lives on until the other one is done; what each is told."""
    model, last = build(cfg, ParallelConfig(pipeline=2)), dist.get_rank() == 1
    engine = Late(cfg, EngineConfig(), device="cpu", dtype=torch.float32, pad_id=0)
    engine.how = how if last else ""
    refit = Refit(model, engine, RefitConfig(timeout_s=1.0))
    if how == "raises" and not last:
        _store().get("it was raised")
    with pytest.raises(ZeroDivisionError if last and how == "raises" else RefitError) as caught:
        refit()
    if last and how == "raises":
        _store().set("it was raised", b"")
        _store().get("the other rank is done")
    if not last:
        _store().set("the other rank is done", b"")
    return str(caught.value)
