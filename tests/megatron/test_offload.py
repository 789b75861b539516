"""What leaves the device comes back as it was, and training does not notice."""

from dataclasses import replace

import pytest
import torch

from aligner.config.sections.batch import BatchConfig
from aligner.config.sections.optim import OptimConfig
from aligner.config.sections.parallel import ParallelConfig
from aligner.megatron.model import Head
from aligner.megatron.offload import KINDS, ModelMemory, _optimizer_tensors
from aligner.roles.batching import micro_batches
from tests.megatron.models import build, nll_loss, shares
from tests.ranks import on_ranks
from tests.tiny import LLAMA, MODELS, MOE, batch

pytestmark = pytest.mark.multirank

OPTIM = OptimConfig(lr=1e-2)
PLAIN = replace(OPTIM, distributed=False)
ONE, TP, PP = ParallelConfig(), ParallelConfig(tensor=2), ParallelConfig(pipeline=2)
EP = ParallelConfig(expert=2)


def step(model, seed: int) -> dict:
    full = batch(model.cfg, seed=seed)
    parts = micro_batches(shares(model, full), BatchConfig(micro_batch_samples=8), group=model.layout.pgs.dp)
    return model.step(parts, nll_loss(model, full))


def bytes_of(tensors) -> list[bytes]:
    # cloned: what numpy has seen can no longer be freed
    return [t.detach().clone().view(-1).view(torch.uint8).numpy().tobytes() for t in tensors]


def state_of(model) -> list[bytes]:
    return bytes_of([*model.module.parameters(), *_optimizer_tensors(model.optimizer)])


@pytest.mark.parametrize(
    "world, parallel, cfg, dtype, optim, score",
    [
        (1, ONE, LLAMA, torch.float32, OPTIM, False),
        (1, ONE, LLAMA, torch.float32, PLAIN, False),
        (1, ONE, MODELS["qwen3"], torch.bfloat16, PLAIN, False),
        (1, ONE, LLAMA, torch.bfloat16, OPTIM, True),
        (2, ONE, LLAMA, torch.bfloat16, OPTIM, False),
        (2, PP, LLAMA, torch.float32, OPTIM, False),
        (2, EP, MOE, torch.float32, OPTIM, False),
    ],
)
@on_ranks()
def test_training_does_not_notice(world, parallel, cfg, dtype, optim, score):
    """Two models do the same four steps, one of them goes away and comes back before, between and after them."""
    head = Head("score") if score else Head()
    still, moved = (build(cfg, parallel, optim, head, dtype) for _ in range(2))
    memory, held = ModelMemory(moved), []
    for seed in range(4):
        before = state_of(moved)
        sizes = {kind: memory.held_bytes(kind) for kind in KINDS}
        assert {kind: memory.offload(kind) for kind in KINDS} == sizes
        assert not any(memory.held_bytes(kind) for kind in KINDS)
        assert not any(memory.offload(kind) for kind in KINDS), "offloaded twice"
        assert {kind: memory.restore(kind) for kind in KINDS} == sizes
        assert not any(memory.restore(kind) for kind in KINDS), "restored twice"
        assert before == state_of(moved) and step(still, seed) == step(moved, seed)
        for kind in ("optimizer", "gradients"):  # weights alone are enough to look at them
            memory.offload(kind)
        assert bytes_of(still.module.parameters()) == bytes_of(moved.module.parameters())
        for kind in ("optimizer", "gradients"):
            memory.restore(kind)
        assert state_of(still) == state_of(moved)
        held.append(sizes)
    for sizes in held:
        assert sizes["weights"] and sizes["gradients"]
        width = 2 if dtype == torch.bfloat16 and not score else 1  # gradients are float32
        assert score or sizes["gradients"] >= sizes["weights"] * width * 0.99
    fresh, later = held[0]["optimizer"], held[1]["optimizer"]
    moments = 2 * held[1]["gradients"] / (world if optim.distributed and parallel in (ONE, EP) else 1)
    assert later - fresh >= 0.9 * moments  # they come with the first step; padding belongs to nobody
    assert fresh == 0 or dtype != torch.float32  # the main parameters are the weights


@on_ranks(1)
def test_a_frozen_model_has_weights_alone():
    model = build(LLAMA)
    memory, before = ModelMemory(model), bytes_of(model.module.parameters())
    sizes = {kind: memory.offload(kind) for kind in KINDS}
    assert sizes["weights"] and not sizes["gradients"] and not sizes["optimizer"]
    assert memory.held_bytes("weights") == 0
    for kind in KINDS:
        memory.restore(kind)
    assert before == bytes_of(model.module.parameters())
