"""References beside adapters."""

import pytest

from aligner.config.adapters import shares_weights
from aligner.config.resolve import compose
from aligner.config.stages import STAGES
from aligner.config.validate import validate
from aligner.errors import ConfigError
from aligner.plan.devices import DEVICES, Assumptions
from aligner.plan.job import _parts, job_of
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


@pytest.mark.parametrize(
    "more, told",
    [
        ([f"{KEY}=adapter"], "model.lora.rank=0: there is no adapter to leave out"),
        ([*LORA, "model.lora.init=x", f"{KEY}=stored"], "own model with model.lora.init"),
        ([*LORA, "model.lora.quantize_base=nf4", f"{KEY}=model"], "own model with model.lora.quantize_base"),
    ],
)
def test_a_reference_that_is_not_what_training_starts_from(more, told):
    cfg = compose(["stage=dpo", *more])
    with pytest.raises(ConfigError, match=rf"^{KEY}=.*{told}"):
        STAGES["dpo"].check(cfg)


@pytest.mark.parametrize("key, value", [("init", "x"), ("quantize_base", "nf4")])
def test_without_a_rank_nothing_is_adapted(key, value):
    with pytest.raises(ConfigError, match=f"^model.lora.{key}=.*model.lora.rank=0"):
        compose([f"model.lora.{key}={value}"])
    with pytest.raises(ConfigError, match=r"quantize_base=.nf3.: expected one of none, int8, fp8, nf4"):
        compose([*LORA, "model.lora.quantize_base=nf3"])


def test_stage_kto_has_the_same_references():
    with pytest.raises(ConfigError, match=r"^algorithm\.kto\.reference='stored'.*own model with model\.lora\.init"):
        STAGES["kto"].check(compose(["stage=kto", *LORA, "model.lora.init=x", "algorithm.kto.reference=stored"]))
    STAGES["kto"].check(compose(["stage=kto", *LORA, "model.lora.init=x"]))


def test_the_plan_has_no_memory_for_a_shared_reference():
    for stage in ("grpo", "ppo", "dpo", "kto"):
        for more in ([], LORA):
            cfg = compose(
                [
                    f"stage={stage}",
                    "algorithm.kl={coef: 0.1, placement: loss}",
                    "model.vocab_size=99",
                    "critic.init=x",
                    *more,
                ]
            )
            found = {part.name: part.shared for part in _parts(cfg, cfg.model, 1)}
            assert found["reference"] == bool(more), stage


def test_the_plan_counts_a_trunk_once():
    """Beside the policy a critic on its trunk has what is trained of it, and its sizes whatever the reward model's."""
    ppo = ["stage=ppo", "model=llama3_8b", "reward.model=/nowhere", "model.lora.rank=16", "engine.tensor_parallel=8"]
    own, shared = (job_of(compose([*ppo, *more]), 8) for more in ([], ["critic.trunk=policy"]))
    phases = [plan_memory(job, DEVICES["h100"], Assumptions()).phases for job in (own, shared)]
    weights = [found["update"]["weights"] for found in phases]
    critic = shared.parts[-1]
    whole = own.element * rank_parameters(critic.shape, own.grid, 0, "").total
    assert critic.shared and weights[0] - weights[1] == whole > 14e9
    assert phases[1]["build"]["weights"] > weights[1] + 0.9 * whole  # it has weights of its own until it shares them


@pytest.mark.parametrize("more", [["stage=grpo", "debug.rollout_only=true"], ["stage=sample"]])
def test_an_adapter_is_not_left_out_in_silence(tmp_path, more):
    adapter, data = str(tmp_path), ["model.init=random", f"data.train={tmp_path}"]
    with pytest.raises(ConfigError, match=r"^model\.lora\.init=.*empty where nothing is trained"):
        validate(compose([*more, *data, *LORA, f"model.lora.init={adapter}"]), 1)


@pytest.mark.parametrize(
    "more, told",
    [
        ([], "model.lora.rank=0, which has no factors"),
        ([*LORA, "debug.rollout_only=true"], "trains nothing"),
        ([*LORA, "engine.name=trtllm"], "engine.name=trtllm: the native engine alone merges"),
        ([*LORA, "engine.quantization=int8"], "engine.quantization=int8"),
        ([*LORA, "debug.record_answers=true"], "debug.record_answers"),
    ],
)
def test_who_cannot_merge_is_told(tmp_path, more, told):
    (tmp_path / "train.jsonl").write_text("{}")
    settings = ["stage=grpo", f"data.train={tmp_path / 'train.jsonl'}", *more]
    validate(compose([*settings, "reward.functions=[{path: math}]"]), 1)
    with pytest.raises(ConfigError, match=rf"^refit\.adapters='factors': expected merged with .*{told}"):
        validate(compose([*settings, "refit.adapters=factors"]), 1)
    with pytest.raises(ConfigError, match=r"refit\.adapters='both': expected one of merged, factors"):
        compose(["refit.adapters=both"])
