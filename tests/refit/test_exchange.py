"""Plans at work over gloo: any layouts, any ranks; what fails on one rank; what never comes."""

from dataclasses import replace
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from aligner.config.sections.engine import EngineConfig, RefitConfig
from aligner.config.sections.model.config import ModelConfig
from aligner.config.sections.parallel import ParallelConfig
from aligner.engines.native import packs
from aligner.engines.native.engine import NativeEngine
from aligner.errors import RefitError
from aligner.families.table import family_table
from aligner.megatron.offload import ModelMemory
from aligner.models.params import dtype_of, split_tp, to_hf
from aligner.models.shards import hf_tensors
from aligner.ops.kernels.checksum import tensor_checksum
from aligner.refit.exchange import Exchange
from aligner.refit.plan import EngineGrid, TrainerGrid, plan_refit
from aligner.refit.transfer import Refit
from tests.megatron.models import build, weights
from tests.ranks import on_ranks
from tests.refit.grids import trainer_of
from tests.tiny import ADAM, DEEPSEEK, LLAMA, MODELS, MOE, MORE, wild_source

pytestmark = pytest.mark.multirank


def shards(cfg: ModelConfig, trainer: TrainerGrid, rank: int) -> dict[str, torch.Tensor]:
    """What the trainer's rank holds, cut by the family table; empty for others."""
    if trainer.replica_of(rank) is None:
        return {}
    stage, source = (rank - trainer.first) // trainer.tensor // trainer.replicas, wild_source(cfg)
    held = {tensor.spec.canonical: tensor.spec for tensor in hf_tensors(cfg) if stage in trainer.stages(tensor)}
    return {
        name: source(spec).chunk(trainer.expert)[trainer.expert_rank(rank)]
        if spec.experts
        else split_tp(spec, source(spec), trainer.tensor, trainer.tensor_rank(rank))
        for name, spec in held.items()
    }


class Packed(NativeEngine):
    """When an update begins, its matrices in float32 are laid out as rows are computed with them, on any machine."""

    def __init__(self, *arguments, **more):
        with mock.patch.object(packs, "worth_packing", lambda m: m.dtype == torch.float32 and m.numel() > 0):
            super().__init__(*arguments, **more)

    def begin_update(self, version: int) -> None:
        super().begin_update(version)
        with torch.inference_mode():
            self.model.packs.pack()


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
    held = shards(cfg, trainer, rank)
    for version in range(rounds):
        if rounds > 1:  # the last ones are the true ones again
            for shard in held.values():
                shard.neg_()
        bring(exchange, held, engine, version)
        exchange.commit()
    moved = {"copied": exchange.copied_bytes, "received": exchange.wire_bytes, "buffers": exchange.buffer_bytes}
    buffers = [buffer for side in exchange.buffers for buffer in side]
    moved |= {"made": sum(b.nbytes for b in buffers), "kept": sum(b.untyped_storage().nbytes() for b in buffers)}
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

    def weight_view(self, name: str, start: int, stop: int, afresh: bool = False):
        if name == "model.layers.1.mlp.up_proj.weight":
            elsewhere = torch.empty(stop - start, self.model.cfg.hidden_size)
            if self.fault == "missing":
                return elsewhere
            if self.fault == "doubled":
                super().weight_view(name, start, stop, afresh)
            if self.fault == "half":
                super().weight_view(name, start, (start + stop) // 2, afresh)
                return elsewhere
            if self.fault == "broken":
                raise RuntimeError("no memory left")
        return super().weight_view(name, start, stop, afresh)


class Late(NativeEngine):
    """An engine that fails in a way nobody expects, or hangs."""

    how = ""

    def begin_update(self, version: int) -> None:
        super().begin_update(version)
        if self.how == "raises":
            raise ZeroDivisionError("someone divided by zero")
        if self.how == "hangs":
            the_store().get("the other rank is done")


def the_store() -> dist.Store:
    return dist.distributed_c10d._get_default_store()


def stuck(cfg: ModelConfig, how: str) -> str:
    """The last rank's engine is `Late`, and its process lives on until the other one is done; what each is told."""
    model, last = build(cfg, ParallelConfig(pipeline=2)), dist.get_rank() == 1
    engine = Late(cfg, EngineConfig(), device="cpu", dtype=torch.float32, pad_id=0)
    engine.how = how if last else ""
    refit = Refit(model, engine, RefitConfig(timeout_s=1.0))
    if how == "raises" and not last:
        the_store().get("it was raised")
    with pytest.raises(ZeroDivisionError if last and how == "raises" else RefitError) as caught:
        refit()
    if last and how == "raises":
        the_store().set("it was raised", b"")
        the_store().get("the other rank is done")
    if not last:
        the_store().set("the other rank is done", b"")
    return str(caught.value)


def truth(cfg, dtype=torch.float32) -> dict[str, int]:
    source = wild_source(cfg)
    full = {name: t for spec in family_table(cfg) for name, t in to_hf(spec, source(spec), cfg).items()}
    kept = {name: dtype_of(spec, dtype) for spec in family_table(cfg) for name in spec.hf}
    return {name: tensor_checksum(t.to(kept[name])) for name, t in full.items()}


LINEAR, OLMO, HASHED = MORE["qwen3_5"], MORE["olmo2"], MORE["deepseek_v4"]
UNTIED, QWEN2 = (replace(cfg, tie_embeddings=False) for cfg in (LLAMA, MODELS["qwen2"]))
CASES = {  # world, model, trainer, engines, bucket bytes, engine's dtype
    "tp2 to 2 engines": (2, QWEN2, trainer_of(2, 2), EngineGrid((0, 1)), 3000, torch.float32),
    "pp2 to tp2": (2, MODELS["qwen3"], trainer_of(2, 1, 2), EngineGrid((0, 1), 2), 20, torch.float32),
    "dp2 to tp2, nothing on the wire": (2, LLAMA, trainer_of(2, data=2), EngineGrid((0, 1), 2), 99, torch.bfloat16),
    "tp2 pp2 to 2 x tp2": (4, MODELS["qwen3"], trainer_of(2, 2, 2), EngineGrid((0, 1, 2, 3), 2), 9999, torch.float32),
    "ep4 tp2 to tp2": (4, MOE, trainer_of(2, 2, data=2, expert=4), EngineGrid((0, 1, 2, 3), 2), 5000, torch.float32),
    "ep2 tp2 to 4": (4, MOE, trainer_of(2, 2, data=2, expert=2), EngineGrid((0, 1, 2, 3)), 5000, torch.float32),
    # the bias of the choice stays float32 on the way to an engine in bfloat16
    "latent, pp2 to 2": (2, DEEPSEEK, trainer_of(3, 1, 2), EngineGrid((0, 1)), 5000, torch.bfloat16),
    # so do the integers that name experts
    "hashed, pp2 to 2": (2, HASHED, TrainerGrid(((0,), (1, 2, 3))), EngineGrid((0, 1)), 5000, torch.bfloat16),
    # and how fast states are forgotten
    "linear, tp2 to 2": (2, LINEAR, trainer_of(2, 2), EngineGrid((0, 1)), 5000, torch.bfloat16),
    "tp2 to tp4, heads repeated": (4, OLMO, trainer_of(2, 2, data=2), EngineGrid((0, 1, 2, 3), 4), 999, torch.float32),
    "linear, pp2 to tp4, heads repeated": (
        4,
        LINEAR,
        trainer_of(4, 1, 2, data=2),
        EngineGrid((0, 1, 2, 3), 4),
        999,
        torch.bfloat16,
    ),
    "other ranks, tp2 to tp2": (4, LLAMA, trainer_of(2, 2), EngineGrid((2, 3), 2), 5000, torch.bfloat16),
    "other ranks, dp2 to 2": (4, UNTIED, trainer_of(2, data=2, first=1), EngineGrid((3, 0)), 4000, torch.float32),
}


@pytest.mark.parametrize("name", CASES)
def test_engines_hold_the_trainers_weights(ranks, name):
    world, cfg, trainer, engines, bucket_bytes, dtype = CASES[name]
    job = {"cfg": cfg, "trainer": trainer, "engines": engines, "bucket_bytes": bucket_bytes, "dtype": dtype}
    results = ranks.run(placed, world=world, rounds=2, **job)
    wanted = truth(cfg, dtype)
    for rank, result in enumerate(results):
        assert (result is not None) == (rank in engines.ranks)
        if result is not None:
            assert result["checksums"] == wanted and result["version"] == 1
            assert result["buffers"] <= 4 * max(bucket_bytes, 4096), "two to send, two to receive"
            assert result["made"] == result["buffers"] and not result["kept"]
            apart = rank not in range(trainer.first, trainer.first + trainer.size)
            assert (result["copied"] == 0) == apart and (result["received"] > 0 or not apart)
    if "nothing" in name:
        assert all(result["received"] == result["buffers"] == 0 for result in results)


@pytest.mark.parametrize(
    "fault, text",
    [
        ("doubled", "doubled: model.layers.1.mlp.up_proj.weight"),
        ("missing", "missing: model.layers.1.mlp.up_proj.weight"),
        ("half", "incomplete: model.layers.1.mlp.up_proj.weight [24:48]"),
        ("broken", "no memory left"),
    ],
)
@on_ranks(2)
def test_a_fault_on_one_rank_stops_all(fault, text):
    """The last rank's engine has it."""
    engine = Losing(LLAMA, EngineConfig(), device="cpu", dtype=torch.float32, pad_id=0)
    engine.fault = fault if dist.get_rank() == 1 else ""
    refit = Refit(build(LLAMA, ParallelConfig(pipeline=2)), engine, RefitConfig(bucket_bytes=5000))
    with pytest.raises(RefitError) as caught:
        refit()
    assert str(caught.value).startswith("refit failed on rank 1: ") and text in str(caught.value)
    engine.fault = ""
    refit()  # nothing was left behind


class Copies(TorchDispatchMode):
    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func is torch.ops.aten.copy_.default
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("parallel", [ParallelConfig(), ParallelConfig(expert=2)], ids=["local", "ep2"])
@on_ranks(2)
def test_experts_are_copied_together(parallel):
    """And whatever memory the parameters have: offloaded in between, or another."""
    cfg = replace(MOE, moe=replace(MOE.moe, num_experts=8))
    model = build(cfg, parallel, ADAM)
    engine = NativeEngine(cfg, EngineConfig(), device="cpu", dtype=torch.float32, pad_id=0)
    refit, memory, counts = Refit(model, engine, RefitConfig()), ModelMemory(model), []
    for moved in (False, False, True):
        for p in model.module.parameters():
            p.data = p.data * 1.5 if moved else p.data.mul_(1.5)
        model.step_count += 1
        memory.offload("weights")
        memory.restore("weights")
        with Copies() as copies:
            refit()
        assert engine.checksums() == {name: tensor_checksum(t) for name, t in weights(model).items()}
        counts.append(copies.count)
    experts = 3 * cfg.moe.num_experts * cfg.num_layers
    assert counts[0] == counts[1] == counts[2] < len(hf_tensors(cfg)) - experts // 2


@pytest.mark.slow
@pytest.mark.parametrize("how", ["raises", "hangs"])
def test_a_rank_that_never_comes_is_not_waited_for(ranks, how):
    """Within refit.timeout_s, and with the cause if the rank told one."""
    message = ranks.run(stuck, world=2, cfg=LLAMA, how=how)[0]
    if how == "raises":
        assert message == "refit failed on rank 1: someone divided by zero"
    else:
        assert message.startswith("refit failed on rank 0: weights did not arrive: a rank (one of 1) has ended")
