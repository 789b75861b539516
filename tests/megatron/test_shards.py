"""What each rank writes and reads of a checkpoint: its own numbers, once, and but for weights nothing that another rank
must send."""

import itertools
import math
from dataclasses import replace

import pytest
import torch

from aligner.config.sections.parallel import ParallelConfig
from aligner.megatron.shards import boxes
from aligner.plan.host import checkpoint_bytes
from aligner.plan.shapes import Grid, parameters, rank_parameters
from tests.tiny import ADAM, LLAMA, MODELS, MOE

PLAIN = replace(ADAM, distributed=False)
ONE, TP, PP, CP, EP = (ParallelConfig(**{k: 2} if k else {}) for k in ("", "tensor", "pipeline", "context", "expert"))
BF16, FP32 = torch.bfloat16, torch.float32


@pytest.mark.parametrize("shape", [(7,), (3, 4), (1, 5), (5, 1), (2, 3, 2), (2, 2, 3, 2)])
def test_boxes_are_the_range(shape):
    size = math.prod(shape)
    numbers = torch.arange(size).view(shape)
    for start, stop in itertools.combinations_with_replacement(range(size + 1), 2):
        found = list(boxes(shape, start, stop))
        assert len(found) <= 2 * len(shape) - 1
        parts = [numbers[tuple(slice(a, a + n) for a, n in zip(*box, strict=True))].flatten() for box in found]
        assert torch.equal(torch.cat([torch.arange(0), *parts]), torch.arange(start, stop)), (start, stop, found)
        assert all(len(part) for part in parts)


@pytest.mark.multirank
@pytest.mark.few(3)
@pytest.mark.parametrize(
    ("world", "parallel", "cfg", "dtype"),
    [
        (4, ONE, LLAMA, BF16),
        (4, TP, MODELS["qwen3"], BF16),
        (4, ParallelConfig(expert=2), MOE, BF16),
        (4, ONE, LLAMA, FP32),
        (4, PP, replace(LLAMA, tie_embeddings=True), BF16),
        (4, CP, MODELS["qwen2"], BF16),
        (2, ONE, replace(LLAMA, tie_embeddings=True), BF16),
        (1, ONE, LLAMA, BF16),
    ],
)
def test_every_rank_writes_and_reads_its_own_share(ranks, tmp_path, world, parallel, cfg, dtype):
    found = ranks.run(
        "tests.megatron.shard_jobs:save_and_load",
        world=world, folder=tmp_path / "c", cfg=cfg, parallel=parallel, dtype=dtype, optim=ADAM,
    )  # fmt: skip
    stored, kinds = found[0]["stored"], 3 if dtype == BF16 else 2
    state = {key for key in stored if key.startswith("optimizer.state.")}
    assert len(state) == kinds * (len(stored) - len(state))
    padding = (-cfg.vocab_size % parallel.tensor) * cfg.hidden_size * (1 if cfg.tie_embeddings else 2)
    numbers = sum(math.prod(size) for key, (size, _) in stored.items() if key not in state)
    assert numbers == parameters(cfg) + padding

    whole = sum(math.prod(size) * itemsize for size, itemsize in stored.values())
    assert whole == numbers * (dtype.itemsize + 4 * kinds)
    assert sum(out["written"] for out in found) == whole  # once
    grid = Grid(parallel.tensor, parallel.pipeline, parallel.context, parallel.expert)
    grid = replace(grid, data=world // grid.gpus)
    for out in found:
        share = checkpoint_bytes(rank_parameters(cfg, grid, out["stage"]), grid, dtype.itemsize, distributed=True)
        assert out["written"] <= 1.02 * share  # buffers are cut at multiples of 64 numbers
        assert out["same"]
        assert out["copied"] == 0  # what is handed to the writer is the optimizer's and the model's own memory
        assert out["save"].get("numbers", 0) == 0 and out["load"].get("numbers", 0) == out["told"]
        # of the optimizer its own, and the weights by the first of the ranks that have the same
        assert out["read"] == out["first"] + out["optimizer"]
    assert sum(out["told"] > 0 for out in found) == (world if world > parallel.tensor * parallel.pipeline else 0)


@pytest.mark.multirank
@pytest.mark.few(3)
@pytest.mark.parametrize(
    ("world", "parallel", "dtype", "optim"),
    [(2, ONE, BF16, ADAM), (2, TP, FP32, ADAM), (1, ONE, BF16, PLAIN), (1, ONE, FP32, PLAIN), (2, PP, BF16, PLAIN)],
)
def test_checkpoints_of_earlier_versions_load(ranks, tmp_path, world, parallel, dtype, optim):
    job = {"world": world, "folder": tmp_path / "c", "cfg": LLAMA, "dtype": dtype, "parallel": parallel}
    before = ranks.run("tests.megatron.shard_jobs:save_as_before", optim=optim, **job)[0]
    for other in (ADAM, PLAIN):
        found = ranks.run("tests.megatron.shard_jobs:load_and_step", optim=other, **job)[0]
        check(before, found, exactly=optim == other)


@pytest.mark.multirank
@pytest.mark.few(2)
@pytest.mark.parametrize("dtype", [BF16, FP32])
@pytest.mark.parametrize(("cfg", "parallel"), [(LLAMA, ONE), (MOE, EP)], ids=["dense", "experts"])
@pytest.mark.parametrize("optim", [ADAM, PLAIN], ids=["sharded", "plain"])
def test_the_optimizer_may_become_distributed_or_plain(ranks, tmp_path, optim, cfg, parallel, dtype):
    job = {"world": 2, "folder": tmp_path / "c", "cfg": cfg, "parallel": parallel, "dtype": dtype}
    before = ranks.run("tests.megatron.shard_jobs:save_new", optim=optim, **job)[0]
    other = PLAIN if optim == ADAM else ADAM
    check(before, ranks.run("tests.megatron.shard_jobs:load_and_step", optim=other, **job)[0], exactly=False)


def check(before: dict, found: dict, exactly: bool) -> None:
    """The other kind of optimizer sums gradients in another order."""
    assert found["version"] == before["version"] == 1
    assert all(torch.equal(found["weights"][name], t) for name, t in before["weights"].items())
    assert found["metrics"]["loss"] == pytest.approx(before["metrics"]["loss"], rel=1e-6)
    for name, t in before["after"].items():
        assert torch.equal(found["after"][name], t) if exactly else torch.allclose(found["after"][name], t, atol=2e-6)
