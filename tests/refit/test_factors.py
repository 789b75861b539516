"""Engines that merge adapters themselves: to the bit what merged weights are, for a part of the bytes."""

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from aligner.config.sections.engine import EngineConfig, RefitConfig
from aligner.config.sections.model.config import ModelConfig
from aligner.config.sections.model.lora import ALL_LINEAR, LoraConfig
from aligner.config.sections.parallel import ParallelConfig
from aligner.errors import RefitError
from aligner.megatron.groups import neighbours
from aligner.refit.factors import FactorExchange
from aligner.refit.transfer import Refit
from tests.megatron.models import build
from tests.megatron.test_lora import FAST, shake
from tests.refit.test_exchange import Packed
from tests.tiny import LLAMA, MODELS, MOE, MORE

pytestmark = pytest.mark.multirank
LORA = LoraConfig(rank=3, alpha=6, targets=[ALL_LINEAR])
SOME = replace(LLAMA, lora=replace(LORA, targets=["q_proj", "v_proj", "up_proj", "down_proj"]))
DORA = replace(MODELS["qwen2"], lora=replace(LORA, dora=True, targets=["k_proj", "o_proj", "gate_proj", "down_proj"]))
SPARSE, SPARSE_DORA = replace(MOE, lora=LORA), replace(MOE, lora=replace(LORA, dora=True))
TP2, PP2, EP2 = ParallelConfig(tensor=2), ParallelConfig(pipeline=2), ParallelConfig(expert=2)
HALF, FULL = torch.bfloat16, torch.float32
CASES = {  # world, model, trainer's layout, engine's tensor ranks, dtype of the trainer, of the engine
    "tp2 to 2 engines, dora": (2, DORA, TP2, 1, FULL, FULL),
    "dp2 to tp2, dora": (2, DORA, ParallelConfig(), 2, HALF, HALF),
    "pp2 to tp2": (2, SOME, PP2, 2, FULL, HALF),
    "pp2 to 2 engines": (2, SOME, PP2, 1, HALF, FULL),
    "experts, ep2 to 2 engines": (2, SPARSE, EP2, 1, FULL, FULL),
    "experts, tp2 to tp2": (2, SPARSE, TP2, 2, HALF, HALF),
    "experts, ep4 tp2 to tp2": (4, SPARSE, ParallelConfig(expert=4, tensor=2), 2, FULL, FULL),
    "experts, ep2 tp2 to tp2, dora": (4, SPARSE_DORA, ParallelConfig(expert=2, tensor=2), 2, FULL, FULL),
    "tp2 to tp4, heads repeated, dora": (4, DORA, TP2, 4, FULL, FULL),
    "latent, tp2 to 2 engines": (2, replace(MORE["deepseek_v3-direct"], lora=LORA), TP2, 1, FULL, FULL),
    "linear, tp2 to 2 engines": (2, replace(MORE["qwen3_next"], lora=LORA), TP2, 1, FULL, FULL),
    "Mamba-2, tp2 to 2 engines": (2, replace(MORE["nemotron_h"], lora=LORA), TP2, 1, FULL, FULL),
    "nf4 base, pp2": (2, replace(SOME, lora=replace(SOME.lora, quantize_base="nf4")), PP2, 1, HALF, HALF),
}


class Refusing(Packed):
    """An engine that cannot be written where it is told."""

    refuses = ""

    def weight_view(self, name: str, start: int, stop: int, afresh: bool = False):
        if name == self.refuses:
            raise RuntimeError("no memory left")
        return super().weight_view(name, start, stop, afresh)


def engine_for(cfg: ModelConfig, tensor: int, dtype: torch.dtype) -> Refusing:
    return Refusing(cfg, EngineConfig(), device="cpu", dtype=dtype, pad_id=0, group=neighbours(tensor))


def both(
    cfg: ModelConfig,
    parallel: ParallelConfig,
    tensor: int,
    dtype: torch.dtype = torch.float32,
    engine_dtype: torch.dtype | None = None,
) -> list[dict]:
    """An engine that gets merged weights and one that gets factors, of the same model, before two changes of the
    adapters and after each: metrics, and all checksums."""
    model, messages = build(cfg, parallel, FAST, dtype=dtype), []
    engines = {way: engine_for(cfg, tensor, engine_dtype or dtype) for way in ("merged", "factors")}
    refits = {
        way: Refit(model, engine, RefitConfig(bucket_bytes=3000, verify="checksum", adapters=way))
        for way, engine in engines.items()
    }
    for _ in range(3):
        by_name = {way: refit() for way, refit in refits.items()}
        sums = {way: dict(engine.checksums()) for way, engine in engines.items()}
        messages.append({"metrics": by_name, "checksums": sums, "trainer": refits["factors"].checksums})
        shake(model, 0.1)
        model.step_count += 1
    return messages


def torn(cfg: ModelConfig, parallel: ParallelConfig, name: str) -> dict:
    """The last rank's engine refuses a tensor in the first refit and in the second one, and then loses a factor; after
    each a refit without it. Messages, numbers of bytes, and versions of the engine in between."""
    model = build(cfg, parallel, FAST)
    engine, last = engine_for(cfg, 1, torch.float32), dist.get_rank() == dist.get_world_size() - 1
    refit = Refit(model, engine, RefitConfig(bucket_bytes=3000, verify="checksum", adapters="factors"))
    by_name = {"messages": [], "bytes": [], "versions": [], "right": []}

    def fails() -> None:
        with pytest.raises(RefitError) as caught:
            refit()
        by_name["messages"].append(str(caught.value))
        if last:
            with pytest.raises(RefitError, match="no complete weights"):
                engine.generate([[1, 2]], [[0]], None)
        by_name["versions"].append(engine.weight_version)

    def works() -> None:
        by_name["bytes"].append(refit()["refit/bytes"])
        by_name["right"].append(dict(engine.checksums()) == refit.checksums)

    for _ in range(2):
        engine.refuses = name if last else ""
        fails()
        engine.refuses = ""
        works()
        shake(model, 0.1)
        model.step_count += 1
    exchange = refit.exchange
    assert isinstance(exchange, FactorExchange)
    share = exchange._merger.factors
    whole, lost = share.weight_view, "model.layers.1.mlp.up_proj.lora_B.weight" if last else ""
    share.weight_view = lambda n, a, *b: torch.empty(b[0] - a, cfg.lora.rank) if n == lost else whole(n, a, *b)
    fails()
    share.weight_view = whole
    works()
    return by_name


@pytest.mark.parametrize("name", CASES)
def test_an_engine_that_merges_has_the_merged_weights_to_the_bit(ranks, name):
    world, cfg, parallel, tensor, dtype, engine_dtype = CASES[name]
    job = {"cfg": cfg, "parallel": parallel, "tensor": tensor, "dtype": dtype, "engine_dtype": engine_dtype}
    for results in ranks.run(both, world=world, **job):
        sums = [turn["checksums"] for turn in results]
        for turn in results:
            assert turn["checksums"]["factors"] == turn["checksums"]["merged"] == turn["trainer"]
        changed = [name for name, value in sums[1]["merged"].items() if sums[0]["merged"][name] != value]
        assert changed and all("_proj" in name for name in changed), "the test has to tell turns apart"
        first, *others = [turn["metrics"] for turn in results]
        assert first["factors"]["refit/bytes"] > first["merged"]["refit/bytes"] / 2
        for result in others:
            wired = {way: metrics["refit/wire_bytes"] for way, metrics in result.items()}
            if wired["merged"]:  # else each rank holds what its engine needs of W
                assert 0 < wired["factors"] < wired["merged"]
            assert result["factors"]["refit/version"] == result["merged"]["refit/version"]


@pytest.mark.parametrize("name", ["model.layers.1.mlp.up_proj.weight", "model.layers.1.self_attn.o_proj.weight"])
def test_a_torn_update_is_of_no_use_and_the_next_one_mends_it(ranks, name):
    """Of a matrix with adapters, and of one without. Until a refit has succeeded on every rank the frozen weights
    travel again; from then on factors are enough."""
    one, other = ranks.run(torn, world=2, cfg=SOME, parallel=PP2, name=name)
    for result in (one, other):
        assert result["right"] == [True] * 3
        whole, *later = result["bytes"]
        assert later[0] == later[1] < whole / 3
        *refused, lost = result["messages"]
        assert refused == ["refit failed on rank 1: no memory left"] * 2
        message = "did not arrive complete: missing: model.layers.1.mlp.up_proj.lora_B.weight"
        assert lost.startswith("refit failed on rank 1: ") and lost.endswith(message)
    assert other["versions"] == [-1, 0, 1]
