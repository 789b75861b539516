"""Rows of a second stream in the policy's own steps: their gradient is added, their numbers stay apart."""

import pytest
import torch

from aligner.config.sections.batch import BatchConfig
from aligner.config.sections.model.config import ModelConfig
from aligner.config.sections.parallel import ParallelConfig
from aligner.roles.policy import Policy, Reference
from aligner.roles.ptx import Ptx
from aligner.types import LossOutput
from tests.invariance_jobs import Repeated
from tests.megatron.models import build, equal_shares, shares, weights
from tests.tiny import LLAMA, MOE, SGD, batch, relative

LAYOUTS = [
    (1, LLAMA, ParallelConfig()),
    (2, LLAMA, ParallelConfig()),
    (2, LLAMA, ParallelConfig(pipeline=2)),
    (2, MOE, ParallelConfig(expert=2)),
]


def ptx_update(cfg: ModelConfig, parallel: ParallelConfig, coef: float | None, own: float = 1.0) -> dict:
    """A step of gradient descent on `own` times a loss at another temperature, with rows of another stream beside it;
    the weights before and after it."""
    model = build(cfg, parallel, SGD)
    deal = equal_shares if cfg.moe.num_experts else shares
    policy, full = Policy(model, BatchConfig(micro_batch_samples=2), temperature=0.7), batch(cfg)
    if coef is not None:
        policy.ptx = Ptx(Repeated(deal(model, batch(cfg, rows=6, width=9, seed=2))), coef, model.layout)

    def loss(out, b):
        real = b.loss_mask
        value = -own * (out.logprobs * real).sum() / full.loss_mask.sum()
        return LossOutput(value, {"seen": (real.sum(), torch.tensor(1.0))}, {"top": out.logprobs.detach().min()})

    before = weights(model)
    stats = policy.update(deal(model, full), loss)
    return {"stats": stats, "before": before, "after": weights(model)}


def nll_at_one(cfg: ModelConfig) -> float:
    """Of the rows that `ptx_update` learns beside its own, by a pass without gradient."""
    rows = batch(cfg, rows=6, width=9, seed=2)
    logprobs = Reference(build(cfg), BatchConfig()).logprobs(rows)
    return float(-(logprobs * rows.loss_mask).sum() / rows.loss_mask.sum())


@pytest.mark.few(2)
@pytest.mark.parametrize("world, cfg, parallel", LAYOUTS)
def test_the_gradient_is_the_sum_and_the_loss_stays_the_stages_own(ranks, world, cfg, parallel):
    def step(**options):
        return ranks.run(ptx_update, world=world, cfg=cfg, parallel=parallel, **options)[0]

    both, own, alone = step(coef=0.25), step(coef=None), step(coef=1.0, own=0.0)
    for name, start in both["before"].items():
        wanted = own["after"][name] - start + 0.25 * (alone["after"][name] - start)
        assert relative(both["after"][name] - start, wanted) <= 2e-5, name
    assert both["stats"]["policy/loss"] == pytest.approx(own["stats"]["policy/loss"], rel=1e-5)
    assert {name: both["stats"][name] for name in ("seen", "top")} == pytest.approx(
        {name: own["stats"][name] for name in ("seen", "top")}, rel=1e-6
    )
    assert both["stats"]["ptx/loss"] == pytest.approx(ranks.run(nll_at_one, cfg=cfg)[0], rel=1e-5)
    assert "ptx/loss" not in own["stats"]
