"""torch's Adam in one pass: its update, and checkpoints of one that was not fused."""

from dataclasses import replace

import pytest
import torch

from aligner.config.sections.optim import OptimConfig
from aligner.megatron.checkpoint import save_model
from tests.megatron.models import build, loaded, one_more, same
from tests.ranks import on_ranks
from tests.tiny import MODELS, relative

pytestmark = pytest.mark.multirank

OPTIM = OptimConfig(lr=1e-2, weight_decay=0.1, schedule="linear", warmup_steps=2)
QWEN3 = MODELS["qwen3"]
KINDS = pytest.mark.parametrize("distributed, dtype", [(True, torch.bfloat16), (False, torch.float32)])


def inner(model) -> list[torch.optim.Optimizer]:
    parts = getattr(model.optimizer, "chained_optimizers", [model.optimizer])
    return [part.optimizer for part in parts]


class Twin:
    """AdamW in float64 (arXiv:1711.05101, algorithm 2), on the gradients that torch's gets."""

    def __init__(self, optimizer: torch.optim.Optimizer):
        self.optimizer, self.steps = optimizer, 0
        self.state = [[(p.detach().double().clone(), 0.0, 0.0) for p in g["params"]] for g in optimizer.param_groups]
        optimizer.register_step_pre_hook(lambda *unused: self.step())

    def step(self) -> None:
        self.steps += 1
        for group, state in zip(self.optimizer.param_groups, self.state, strict=True):
            lr, decay, eps, (b1, b2) = (group[name] for name in ("lr", "weight_decay", "eps", "betas"))
            for i, (p, (x, m, v)) in enumerate(zip(group["params"], state, strict=True)):
                grad = p.grad.double()
                m, v = b1 * m + (1 - b1) * grad, b2 * v + (1 - b2) * grad.square()
                move = (m / (1 - b1**self.steps)) / ((v / (1 - b2**self.steps)).sqrt() + eps)
                state[i] = x - lr * (move + decay * x), m, v

    def gap(self) -> float:
        """Largest difference of a parameter or moment, in roundings of float32 of the largest number beside it."""
        worst = 0.0
        for group, state in zip(self.optimizer.param_groups, self.state, strict=True):
            for p, wanted in zip(group["params"], state, strict=True):
                own = self.optimizer.state[p]
                for a, b in zip((p.detach(), own["exp_avg"], own["exp_avg_sq"]), wanted, strict=True):
                    worst = max(worst, float((a - b).abs().max() / b.abs().max()) * 2**24)
        return worst


@KINDS
@on_ranks(1)
def test_its_update_is_that_of_the_paper(distributed, dtype):
    model = build(QWEN3, optim=replace(OPTIM, distributed=distributed), dtype=dtype)
    twins = [Twin(optimizer) for optimizer in inner(model)]
    for _ in range(5):
        one_more(model)
    assert all(group["fused"] for twin in twins for group in twin.optimizer.param_groups)
    assert {float(state["step"]) for twin in twins for state in twin.optimizer.state.values()} == {5.0}
    assert 0 < max(twin.gap() for twin in twins) <= 10  # two roundings a step


@KINDS
@on_ranks(1)
def test_a_checkpoint_of_one_that_was_not_fused_resumes(tmp_path, distributed, dtype):
    """Two steps of torch's default Adam and a checkpoint; then one more, there and by a model that loads it."""
    job = {"optim": replace(OPTIM, distributed=distributed), "dtype": dtype}
    first = build(QWEN3, **job)
    for optimizer in inner(first):
        for group in optimizer.param_groups:
            group["fused"] = None
    for _ in range(2):
        one_more(first)
    save_model(first, tmp_path / "c")
    second = loaded(tmp_path / "c", QWEN3, **job)
    wanted, got = one_more(first), one_more(second)
    assert same(got["weights"], wanted["weights"])
    for name, value in wanted["after"].items():
        assert relative(got["after"][name], value) <= (1e-6 if dtype == torch.float32 else 1e-2), name
    assert all(group["fused"] for optimizer in inner(second) for group in optimizer.param_groups)
    steps = [(p, state["step"]) for optimizer in inner(second) for p, state in optimizer.state.items()]
    assert {(float(n), n.dtype, n.device == p.device) for p, n in steps} == {(3.0, torch.float32, True)}
    assert len({n.data_ptr() for _, n in steps}) == len(steps)
