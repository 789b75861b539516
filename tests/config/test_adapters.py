"""References beside adapters."""

import pytest

from aligner.config.adapters import shares_weights
from aligner.config.resolve import compose
from aligner.plan.devices import DEVICES, Assumptions
from aligner.plan.job import _planned_models, job_of
from aligner.plan.memory import plan_memory
from aligner.plan.shapes import rank_parameters

KEY = "algorithm.preference.reference"
LORA = ["model.lora.rank=2"]


@pytest.mark.parametrize("stage", ["dpo", "online_dpo"])
def test_the_reference_is_the_adapters_where_there_are_some(stage):
    assert compose([f"stage={stage}"]).algorithm.preference.reference == "model"
    assert compose([f"stage={stage}", *LORA]).algorithm.preference.reference == "adapter"
    assert compose([f"stage={stage}", *LORA, f"{KEY}=stored"]).algorithm.preference.reference == "stored"


@pytest.mark.parametrize("more, shares", [([], False), (LORA, True), ([*LORA, f"{KEY}=model"], False)])
def test_who_needs_weights_of_its_own(more, shares):
    assert shares_weights(compose(["stage=dpo", *more])) == shares
    assert shares_weights(compose(["stage=grpo", *more])) == bool(more)


def test_the_plan_has_no_memory_for_a_shared_reference():
    for stage in ("grpo", "ppo", "dpo", "kto"):
        for overrides in ([], LORA):
            cfg = compose(
                [
                    f"stage={stage}",
                    "algorithm.kl={coef: 0.1, placement: loss}",
                    "model.vocab_size=99",
                    "critic.init=x",
                    *overrides,
                ]
            )
            by_name = {planned.name: planned.shared for planned in _planned_models(cfg, cfg.model, 1)}
            assert by_name["reference"] == bool(overrides), stage


def test_the_plan_counts_a_trunk_once():
    """Beside the policy a critic on its trunk has what is trained of it, and its sizes whatever the reward model's."""
    ppo = ["stage=ppo", "model=llama3_8b", "reward.model=/nowhere", "model.lora.rank=16", "engine.tensor_parallel=8"]
    own, shared = (job_of(compose([*ppo, *overrides]), 8) for overrides in ([], ["critic.trunk=policy"]))
    phases = [plan_memory(job, DEVICES["h100"], Assumptions()).phases for job in (own, shared)]
    weights = [result["update"]["weights"] for result in phases]
    critic = shared.models[-1]
    whole = own.element * rank_parameters(critic.shape, own.grid, 0, "").total
    assert critic.shared and weights[0] - weights[1] == whole > 14e9
    assert phases[1]["build"]["weights"] > weights[1] + 0.9 * whole  # it has weights of its own until it shares them
