"""The section algorithm.distill: what it refuses, and what its recipes choose."""

import pytest

from aligner.config.resolve import compose
from aligner.config.sections.distill import DistillConfig
from aligner.errors import ConfigError


@pytest.mark.parametrize(
    "overrides, key, said",
    [
        (["kind=kl"], "kind", "forward_kl, reverse_kl, mixed, jsd"),
        (["kind=jsd", "beta=0"], "beta", "forward_kl and reverse_kl are kinds of their own"),
        (["kind=jsd", "beta=1"], "beta", "between 0 and 1"),
        (["temperature=0"], "temperature", "> 0"),
        (["top_k=-1"], "top_k", ">= 0"),
        (["top_k=4", "outside=none"], "outside", "tail, renormalise, zero"),
        (["top_k=4", "outside=zero", "kind=jsd"], "outside", "no KL to what is impossible"),
        (["outside=renormalise"], "outside", "nothing is outside"),
        (["sft_coef=-1"], "sft_coef", ">= 0"),
    ],
)
def test_what_it_refuses(overrides, key, said):
    with pytest.raises(ConfigError, match=f"algorithm.distill.{key}=") as caught:
        compose(["stage=distill", *(f"algorithm.distill.{text}" for text in overrides)])
    assert said in str(caught.value)


def test_the_recipe():
    cfg = compose(["experiment=kd"])
    assert cfg.stage.name == "distill" and cfg.algorithm.distill == DistillConfig()
