"""The section algorithm.preference: what it refuses, and what each recipe chooses."""

import re

import pytest

from aligner.config.resolve import compose, conf_dir
from aligner.config.sections.preference import LOSSES, PreferenceConfig
from aligner.config.validate import validate
from aligner.errors import ConfigError

RECIPES = sorted(
    p.stem
    for p in (conf_dir() / "experiment").glob("*.yaml")
    if "/stage: dpo" in p.read_text() and not p.stem.startswith("quickstart_")
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
        (["loss=[robust]", "label_smoothing=0.5"], "label_smoothing", "< 0.5 with robust"),
        (["loss=[ipo]", "label_smoothing=0.1"], "label_smoothing", "0 without a loss that reads it"),
        (["reference=copy"], "reference", "model, adapter, stored, none"),
        (["loss=[ipo]", "gamma=1"], "gamma", "0.0 with ipo"),
        (["loss=[sigmoid,bco_pair]", "gamma=1"], "gamma", "bco_pair"),
        (["loss=[apo_zero]", "f_divergence=js"], "f_divergence", "apo_zero"),
        (["loss=[nca_pair]", "margin=true"], "margin", "nca_pair"),
        (["loss=[orpo]", "reference=none", "nll_coef=1", "ld_alpha=0.5"], "ld_alpha", "orpo"),
        (["loss=[orpo]", "reference=none"], "nll_coef", "> 0 with orpo"),
        (["loss=[orpo]", "nll_coef=1"], "reference", "none with orpo"),
        (["loss=[alphapo]", "reference=none", "length=sum"], "length", "mean"),
        *(([f"loss=[{name}]", "reference=none"], "reference", name) for name in ("nca_pair", "sppo_hard", "apo_down")),
        (["loss=[sigmoid,aot]", "wpo=true"], "wpo", "false with aot"),
        (["loss=[aot_unpaired]", "row_weights=true"], "row_weights", "false with aot_unpaired"),
        (["loss=[aot]", "margin=true"], "margin", "false with aot"),
        (["loss=[aot_unpaired]", "f_divergence=js"], "f_divergence", "aot_unpaired"),
        (["loss=[aot]", "reference=none"], "reference", "model or stored with aot"),
        (["sync_every=2", "reference=stored"], "sync_every", "no model that could follow"),
        (["sync_alpha=0"], "sync_alpha", "(0, 1]"),
        (["sync_alpha=1.5"], "sync_alpha", "(0, 1]"),
        (["reference=none", "f_divergence=js"], "f_divergence", "reverse_kl"),
        (["ld_alpha=2"], "ld_alpha", "[0, 1]"),
        (["tau=0"], "tau", "> 0"),
        (["nll_aggregation=mean"], "nll_aggregation", "token_mean"),
    ],
)
def test_what_does_not_go_together_names_its_key(overrides, key, said):
    with pytest.raises(ConfigError, match=rf"^algorithm\.preference\.{key}=.*{re.escape(said)}"):
        compose(["stage=dpo", *(f"algorithm.preference.{text}" for text in overrides)])


@pytest.mark.parametrize("stage", ["dpo", "online_dpo"])
def test_a_reference_that_follows_is_a_model_of_its_own_in_memory(tmp_path, stage):
    """Refused where it could not be mixed, or not be saved."""
    data = tmp_path / "rows.jsonl"
    data.write_text("{}\n")
    start = [f"stage={stage}", f"data.train='{data}'", "algorithm.preference.sync_every=2"]
    start += ["reward.functions=[{path: math}]"] if stage == "online_dpo" else []
    validate(compose(start), 1)
    with pytest.raises(ConfigError, match=r"algorithm\.preference\.sync_every=2.*model\.lora"):
        validate(compose([*start, "model.lora.rank=4"]), 1)
    with pytest.raises(ConfigError, match=r"memory\.offload=\['weights'\].*sync_every"):
        validate(compose([*start, "memory.offload=[weights]"]), 1)


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
    found = {name: compose([f"experiment={name}"]) for name in RECIPES}
    assert {cfg.stage.name for cfg in found.values()} == {"dpo"}
    chosen = {name: cfg.algorithm.preference for name, cfg in found.items()}
    assert {name for name, c in chosen.items() if c.reference == "none"} == {"simpo", "cpo", "orpo"}
    assert {loss for c in chosen.values() for loss in c.loss} < set(LOSSES)
    assert chosen["mpo"].weighted() == {"sigmoid": 0.8, "bco_pair": 0.2} and chosen["rpo"].rewards
