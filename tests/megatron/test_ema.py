"""The average of the weights: the sum that its definition says, on any layout, kept by checkpoints."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from aligner.config.schema import ModelConfig, ParallelConfig
from aligner.megatron.checkpoint import load_model, save_model
from aligner.megatron.ema import Ema
from aligner.megatron.offload import ModelMemory
from aligner.plan.shapes import Grid, rank_parameters
from aligner.plan.sizes import optimizer_bytes
from tests.megatron.models import build, equal_shares, one_more, same, stepped, weights
from tests.ranks import on_ranks
from tests.tiny import ADAM, LLAMA, MOE, wild_source

ONE, PLAIN = ParallelConfig(), replace(ADAM, distributed=False)
BF16, FP32 = torch.bfloat16, torch.float32
TIED = replace(LLAMA, tie_embeddings=True)
CASES = [
    (1, ONE, LLAMA, FP32, ADAM),
    (2, ONE, LLAMA, FP32, ADAM),
    (2, ParallelConfig(pipeline=2), TIED, FP32, PLAIN),
    (2, ParallelConfig(expert=2), MOE, FP32, ADAM),
    (2, ParallelConfig(tensor=2), LLAMA, BF16, ADAM),
]


def mean_of(model) -> dict[str, torch.Tensor]:
    with model.ema.in_place():
        return weights(model)


def train(folder: Path, cfg: ModelConfig, parallel: ParallelConfig, decay: float = 0.75, **kwargs) -> dict:
    """The weights before each step and after the last, and their mean; saved before the last step."""
    model = build(cfg, parallel, **kwargs)
    model.ema = Ema(model, decay)
    each = [weights(model)]
    for step in range(3):
        if step == 2:
            save_model(model, folder)
        one_more(model, equal_shares)
        each.append(weights(model))
    out = {"each": each, "mean": mean_of(model), "own": weights(model), "bytes": sum(m.nbytes for m in model.ema.means)}
    with_it, model.ema = ModelMemory(model).held_bytes("optimizer"), None
    return out | {"leaves": with_it - ModelMemory(model).held_bytes("optimizer"), "stage": model.layout.pp_rank}


def go_on(folder: Path, cfg: ModelConfig, parallel: ParallelConfig, decay: float = 0.75, **kwargs) -> dict:
    """From the checkpoint, the last step: mean before it and after."""
    model = build(cfg, parallel, source=wild_source(cfg, seed=7), **kwargs)
    model.ema = Ema(model, decay)
    load_model(model, folder)
    loaded = mean_of(model)
    one_more(model, equal_shares)
    return {"loaded": loaded, "mean": mean_of(model), "own": weights(model)}


@pytest.mark.few(3)
@pytest.mark.parametrize(("world", "parallel", "cfg", "dtype", "optim"), CASES)
def test_the_mean_is_the_sum_of_its_definition_and_goes_through_a_checkpoint(
    ranks, tmp_path, world, parallel, cfg, dtype, optim
):
    job = {"cfg": cfg, "parallel": parallel, "dtype": dtype, "optim": optim, "folder": tmp_path / "c"}
    results = ranks.run(train, world=world, **job)
    actual, bound = results[0], 1e-6 if dtype == FP32 else 2e-2  # the means are of the float32 copies
    first, *rest = actual["each"]
    assert any(not torch.equal(t, actual["own"][name]) for name, t in actual["mean"].items())
    for name, mean in actual["mean"].items():
        wanted = 0.75**3 * first[name].double() + sum(0.25 * 0.75**k * w[name] for k, w in enumerate(reversed(rest)))
        assert torch.allclose(mean.double(), wanted, rtol=bound, atol=bound), name
        assert torch.equal(actual["own"][name], rest[-1][name])  # in their place again

    grid = Grid(parallel.tensor, parallel.pipeline, parallel.context, parallel.expert)
    grid = replace(grid, data=world // grid.gpus)
    planned = 0.0
    for out in results:
        assert out["leaves"] == out["bytes"]  # with memory.offload
        count = rank_parameters(cfg, grid, out["stage"])
        sizes = (optimizer_bytes(count, grid, dtype.itemsize, optim.distributed, on) for on in (True, False))
        planned += next(sizes) - next(sizes)
    assert sum(out["bytes"] for out in results) == pytest.approx(planned, rel=1e-6)

    same = ranks.run(go_on, world=world, **job)[0]
    assert all(torch.equal(actual["mean"][name], t) for name, t in same["mean"].items())
    if world > 1 and parallel != ParallelConfig(expert=2):
        other = ranks.run(go_on, **job | {"parallel": ONE})[0]
        assert all(torch.equal(same["loaded"][name], t) for name, t in other["loaded"].items())


@pytest.mark.few(1)
@pytest.mark.parametrize("dtype", [FP32, BF16])
@on_ranks(1)
def test_a_mean_that_the_checkpoint_lacks_begins_with_its_weights(tmp_path, dtype):
    first = stepped(LLAMA, 1, dtype=dtype, optim=ADAM)
    save_model(first, tmp_path / "c")
    model = build(LLAMA, source=wild_source(LLAMA, seed=7), dtype=dtype, optim=ADAM)
    model.ema = Ema(model, 0.5)
    load_model(model, tmp_path / "c")
    assert same(mean_of(model), weights(first))
