"""The section algorithm.kto: what it refuses, and what it asks of the models."""

import re

import pytest

from aligner.config.resolve import compose
from aligner.config.sections.kto import KtoConfig
from aligner.config.stages import STAGES
from aligner.errors import ConfigError


@pytest.mark.parametrize(
    "override, key, said",
    [
        ("beta=0", "beta", "> 0"),
        ("desirable_weight=-1", "desirable_weight", "> 0"),
        ("undesirable_weight=0", "undesirable_weight", "> 0"),
        ("kl=batch", "kl", "minibatch, none"),
        ("reference=none", "reference", "model, stored"),
        ("reference=copy", "reference", "model, stored"),
    ],
)
def test_what_makes_no_sense_names_its_key(override, key, said):
    with pytest.raises(ConfigError, match=rf"^algorithm\.kto\.{key}=.*{re.escape(said)}"):
        compose(["stage=kto", f"algorithm.kto.{override}"])


@pytest.mark.parametrize(
    "kl, reference, passes",
    [
        ("minibatch", "model", {"policy": 1, "reference": 2}),
        ("minibatch", "stored", {"policy": 1, "reference": 1}),
        ("none", "model", {"policy": 0, "reference": 1}),
        ("none", "stored", {"policy": 0, "reference": 0}),
    ],
)
def test_passes_and_second_model(kl, reference, passes):
    cfg = compose(["experiment=kto", f"algorithm.kto.kl={kl}", f"algorithm.kto.reference={reference}"])
    stage = STAGES[cfg.stage.name]
    assert stage.passes(cfg) == passes and KtoConfig(kl=kl, reference=reference).second_model == bool(
        passes["reference"]
    )
    assert stage.other_models(cfg) == (("reference",) if passes["reference"] else ())
