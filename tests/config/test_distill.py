"""The section algorithm.distill: what it refuses, and what its recipes choose."""

import pytest

from aligner.config.resolve import compose
from aligner.config.sections.distill import DistillConfig
from aligner.config.sections.parallel import ParallelConfig
from aligner.errors import ConfigError


@pytest.mark.parametrize(
    "overrides, key, message",
    [
        (["kind=kl"], "kind", "forward_kl, reverse_kl, mixed, jsd"),
        (["kind=jsd", "beta=0"], "beta", "forward_kl and reverse_kl are kinds of their own"),
        (["kind=jsd", "beta=1"], "beta", "between 0 and 1"),
        (["temperature=0"], "temperature", "> 0"),
        (["top_k=-1"], "top_k", ">= 0"),
        (["top_k=4", "outside=none"], "outside", "tail, renormalise, zero"),
        (["sft_coef=-1"], "sft_coef", ">= 0"),
        (["on_policy=1.1"], "on_policy", "[0, 1]"),
        (["tensor=-1"], "tensor", ">= 0"),
    ],
)
def test_contradicting_distillation_keys_are_refused(overrides, key, message):
    with pytest.raises(ConfigError, match=f"algorithm.distill.{key}=") as caught:
        compose(["stage=distill", *(f"algorithm.distill.{text}" for text in overrides)])
    assert message in str(caught.value)


def test_recipes_set_teacher_and_divergence():
    cfg = compose(["experiment=kd"])
    assert cfg.stage.name == "distill" and cfg.algorithm.distill == DistillConfig()
    own = compose(["experiment=kd_on_policy"]).algorithm.distill
    assert own == DistillConfig(kind="reverse_kl", on_policy=1.0)
    opsd = compose(["experiment=opsd"]).algorithm.distill
    assert (opsd.kind, opsd.beta, opsd.on_policy) == ("jsd", 0.5, 1.0) and "{answer}" in opsd.teacher_prompt
    other = compose(["experiment=kd_tokenizer"]).algorithm.distill
    assert other == DistillConfig(kind="reverse_kl", on_policy=1.0, teacher_prompt="{prompt}")
    sdpo = compose(["experiment=sdpo"])
    assert sdpo.algorithm.distill.own_teacher and sdpo.algorithm.distill.of_group and sdpo.ema.decay == 0.99
    assert (sdpo.algorithm.distill.models(), sdpo.algorithm.distill.kind, sdpo.batch.group) == ({}, "reverse_kl", 8)
    quick = compose(["experiment=quickstart_distill"])
    assert quick.algorithm.distill.teacher == "runs/quickstart/grpo" and quick.model.init == "runs/quickstart/sft"


def test_a_teachers_pipeline_of_its_own_has_even_stages():
    student = ParallelConfig(pipeline=2, stage_layers=[3, 1, 1, 1], virtual_stages=2)
    assert DistillConfig(tensor=2).layout(student).stage_layers == [3, 1, 1, 1]
    assert DistillConfig(pipeline=4).layout(student) == ParallelConfig(pipeline=4)


@pytest.mark.parametrize("share", [0.0, 0.1, 0.29, 1 / 3, 0.5, 0.7, 1.0])
def test_of_any_number_of_steps_the_share_is_on_policy(share):
    cfg = DistillConfig(on_policy=share)
    for steps in range(1, 400):
        total = sum(cfg.generates(step) for step in range(1, steps + 1))
        assert total == int(share * steps + 1e-9)
