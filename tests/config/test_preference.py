"""The section algorithm.preference: what it refuses, and what each recipe chooses."""

import re

import pytest

from aligner.config.resolve import compose
from aligner.config.sections.preference import LOSSES, PreferenceConfig
from aligner.errors import ConfigError
from aligner.files import conf_dir

RECIPES = sorted(
    p.stem
    for p in (conf_dir() / "experiment").glob("*.yaml")
    if "/stage: dpo" in p.read_text() and not re.match(".*_[0-9]+$|quickstart_", p.stem)
)


@pytest.mark.parametrize(
    "overrides, key, said",
    [
        (["loss=[]"], "loss", "one or several"),
        (["loss=[sigmoid,sigmoid]"], "loss", "different"),
        (["loss=[dpo]"], "loss", "sigmoid, robust"),
        (["loss=[sigmoid,ipo]", "weights=[1.0]"], "weights", "2 numbers"),
        (["weights=[-1.0]"], "weights", "> 0"),
        (["beta=0"], "beta", "> 0"),
        (["label_smoothing=0.6"], "label_smoothing", "[0, 0.5]"),
        (["reference=copy"], "reference", "model, adapter, stored, none"),
        (["sync_alpha=0"], "sync_alpha", "(0, 1]"),
        (["sync_alpha=1.5"], "sync_alpha", "(0, 1]"),
        (["ld_alpha=2"], "ld_alpha", "[0, 1]"),
        (["tau=0"], "tau", "> 0"),
        (["nll_aggregation=mean"], "nll_aggregation", "token_mean"),
    ],
)
def test_what_does_not_go_together_names_its_key(overrides, key, said):
    with pytest.raises(ConfigError, match=rf"^algorithm\.preference\.{key}=.*{re.escape(said)}"):
        compose(["stage=dpo", *(f"algorithm.preference.{text}" for text in overrides)])


def test_the_length_is_a_mean_where_the_loss_is_made_for_it():
    c = PreferenceConfig(loss=["sigmoid", "ipo", "orpo"], nll_coef=1.0)
    assert [c.over_mean(name) for name in c.loss] == [False, True, True]
    assert PreferenceConfig(length="mean").over_mean("sigmoid")
    assert not PreferenceConfig(loss=["ipo"], length="sum").over_mean("ipo")


@pytest.mark.slow
def test_recipes_of_the_stage():
    assert {"apo", "cdpo", "cpo", "dpo", "dpo_norm", "hinge", "ipo", "mpo", "orpo", "robust", "rpo", "simpo"} == set(
        RECIPES
    )
    composed = {name: compose([f"experiment={name}"]) for name in RECIPES}
    assert {cfg.stage.name for cfg in composed.values()} == {"dpo"}
    chosen = {name: cfg.algorithm.preference for name, cfg in composed.items()}
    assert {name for name, c in chosen.items() if c.reference == "none"} == {"simpo", "cpo", "orpo"}
    assert {loss for c in chosen.values() for loss in c.loss} < set(LOSSES)
    assert chosen["mpo"].weighted() == {"sigmoid": 0.8, "bco_pair": 0.2} and chosen["rpo"].rewards
