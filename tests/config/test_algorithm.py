"""The algorithm section: what it refuses, and the named recipes of conf/experiment."""

import re

import pytest

from aligner.config.resolve import compose
from aligner.config.sections.algorithm import AlgorithmConfig
from aligner.config.validate import validate
from aligner.errors import ConfigError
from aligner.files import conf_dir

# recipe -> what makes it that method
RECIPES = {
    "ppo": {"advantage": "gae", "whiten": True, "kl.placement": "reward", "kl.estimator": "k1"},
    "grpo": {"advantage": "grpo", "policy_loss": "ppo", "kl.placement": "loss", "kl.estimator": "k3"},
    "dr_grpo": {"advantage": "dr_grpo", "aggregation": "seq_mean_token_sum_norm"},
    "dapo": {"clip_high": 0.28, "filter_groups": True, "overlong.soft_fraction": 0.2, "aggregation": "token_mean"},
    "rloo": {"advantage": "rloo", "policy_loss": "reinforce", "aggregation": "seq_mean_token_sum"},
    "reinforce_pp": {"advantage": "reinforce_pp", "kl.placement": "reward", "kl.estimator": "k1"},
    "reinforce_pp_baseline": {"advantage": "reinforce_pp_baseline", "kl.placement": "loss", "kl.estimator": "k2"},
    "remax": {"advantage": "remax", "policy_loss": "reinforce"},
    "opo": {"advantage": "opo", "policy_loss": "reinforce"},
    "gpg": {"advantage": "gpg", "policy_loss": "gpg"},
    "gspo": {"policy_loss": "gspo", "clip_low": 3e-4, "clip_high": 4e-4, "aggregation": "seq_mean_token_mean"},
    "cispo": {"policy_loss": "cispo", "ratio_cap": 5.0},
    "sapo": {"policy_loss": "sapo", "sapo.tau_pos": 1.0, "sapo.tau_neg": 1.05, "aggregation": "seq_mean_token_mean"},
    "gmpo": {"policy_loss": "gmpo", "clip_low": 0.4, "aggregation": "seq_mean_token_mean"},
    "dppo": {"policy_loss": "dppo", "dppo.limit": 0.2, "dppo.penalty": 1e-3},
    "clip_cov": {"policy_loss": "clip_cov", "cov.fraction": 2e-4, "cov.low": 1.0, "cov.high": 5.0},
    "kl_cov": {"policy_loss": "kl_cov", "cov.fraction": 2e-4},
    "gdpo": {"advantage": "gdpo"},
    "maxrl": {"advantage": "maxrl", "aggregation": "token_mean"},
    "echo": {"advantage": "grpo", "aggregation": "seq_mean_token_mean", "observation_coef": 0.05},
    "vapo": {"advantage": "gae", "lam": 1.0, "lam_alpha": 0.05, "clip_high": 0.28, "positive.coef": 0.1},
}


def look(algorithm: AlgorithmConfig, key: str):
    for word in key.split("."):
        algorithm = getattr(algorithm, word)
    return algorithm


@pytest.mark.few(5)
@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_is_the_method_alone_and_on_top_of_another_experiment(name):
    stage = "ppo" if name in ("ppo", "vapo") else "grpo"
    alone, over = compose([f"experiment={name}"]), compose([f"experiment=[quickstart_{stage},{name}]"])
    plain = compose([f"experiment=quickstart_{stage}"])
    assert {key: look(over.algorithm, key) for key in RECIPES[name]} == RECIPES[name]
    assert alone.algorithm == over.algorithm and alone.stage.name == over.stage.name == stage
    over.algorithm = plain.algorithm
    assert over == plain  # a recipe chooses the algorithm and nothing else
    assert compose([f"experiment=[quickstart_{stage},{name}]", "algorithm.clip_low=0.15"]).algorithm.clip_low == 0.15


def test_every_recipe_is_listed_and_names_its_source():
    files = {p.stem: p.read_text() for p in (conf_dir() / "experiment").glob("*.yaml")}
    whole = re.compile("quickstart_|gsm8k_|tools_|agent_|.*_[0-9]+$")
    recipes = {name: text for name, text in files.items() if not whole.match(name)}
    own = {name for name, text in recipes.items() if re.search("/stage: (grpo|ppo)$", text, re.M)}
    assert own == set(RECIPES)
    assert all("arXiv:" in text for text in recipes.values())


@pytest.mark.parametrize(
    ("overrides", "key"),
    [
        (["advantage=magic"], "algorithm.advantage"),
        (["group_eps=-1"], "algorithm.group_eps"),
        (["policy_loss=magic"], "algorithm.policy_loss"),
        (["ratio_cap=0"], "algorithm.ratio_cap"),
        (["sapo.tau_pos=0"], "algorithm.sapo.tau_pos"),
        (["sapo.tau_neg=-1"], "algorithm.sapo.tau_neg"),
        (["dppo.limit=2"], "algorithm.dppo.limit"),
        (["dppo.penalty=-1"], "algorithm.dppo.penalty"),
        (["cov.fraction=2"], "algorithm.cov.fraction"),
        (["cov.low=3", "cov.high=2"], "algorithm.cov.high"),
        (["cov.kl_coef=-1"], "algorithm.cov.kl_coef"),
        (["whiten_ddof=2"], "algorithm.whiten_ddof"),
        (["filter_rounds=0"], "algorithm.filter_rounds"),
        (["overlong.soft_fraction=1.5"], "algorithm.overlong.soft_fraction"),
        (["kl.controller.measure=sum"], "algorithm.kl.controller.measure"),
        (["policy_loss=gspo"], "algorithm.aggregation"),
        (["policy_loss=gmpo"], "algorithm.aggregation"),
        (["policy_loss=sapo"], "algorithm.aggregation"),
        (["policy_loss=gmpo", "aggregation=seq_mean_token_mean", "advantage=reinforce_pp"], "algorithm.policy_loss"),
        (["advantage=remax", "kl={coef: 0.1, placement: reward}"], "algorithm.kl.placement"),
        (["advantage=gdpo", "kl={coef: 0.1, placement: reward}"], "algorithm.kl.placement"),
        (["advantage=gdpo", "whiten=true"], "algorithm.whiten"),
        (["advantage=pass_at_k", "whiten=true"], "algorithm.whiten"),
        (["advantage=gdpo", "overlong.penalty=1"], "algorithm.overlong.penalty"),
        (["advantage=gdpo", "overlong.soft_fraction=0.5"], "algorithm.overlong.soft_fraction"),
    ],
)
def test_what_the_section_refuses(overrides, key):
    with pytest.raises(ConfigError) as error:
        compose(["stage=grpo", *(f"algorithm.{o}" for o in overrides)])
    assert error.value.key == key


@pytest.fixture
def grpo(tmp_path):
    data = tmp_path / "train.jsonl"
    data.write_text("{}\n")
    return ["stage=grpo", f"data.train='{data}'", "reward.functions=[{path:math}]"]


@pytest.mark.parametrize("advantage", ["remax", "reinforce_pp"])
def test_one_sample_is_enough_where_no_group_is_compared(grpo, advantage):
    validate(compose([*grpo, "batch.group=1", f"algorithm.advantage={advantage}"]), 1)
