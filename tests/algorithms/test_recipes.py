"""Every recipe of conf/experiment that generates trains the quick start's task, from one SFT checkpoint.

The task is the quick start's, made small: sums of two numbers below 50 for SFT, 32 of these questions for the recipes,
so that each step asks the same questions and its mean reward has little noise. A mean of three steps has a standard
deviation of about 0.016 (256 samples a step, reward 0 or 1), the difference of two about 0.023. Over two seeds, three
for the losses without a ratio, the gain was 0.15 to 0.33; the bound is 0.07, three deviations of the noise. With
shuffled rewards the mean fell by 0.05.
"""

import re

import pytest

from aligner.files import conf_dir
from tests import stages

RECIPES = sorted(
    p.stem
    for p in (conf_dir() / "experiment").glob("*.yaml")
    if not re.match("quickstart_|gsm8k_|tools_|agent_|echo$|.*_[0-9]+$", p.stem)  # echo needs an environment
    and not re.search("/stage: (dpo|kto|distill)", p.read_text())
)
# two optimizer steps for each rollout, so that ratios, clips and bounds have something to do
OFF_POLICY = ["run.steps=10", "batch.minibatch_samples=128", "optim.lr=2e-4"]
# losses without a ratio are for on-policy updates
ON_POLICY = ["run.steps=12", "batch.minibatch_samples=0", "optim.lr=3e-4"]
CRITIC = ["reward.model=''", "critic.warmup_steps=0", "critic.optim.lr=1e-3"]
MORE = {
    **dict.fromkeys(("rloo", "opo", "gpg"), ON_POLICY),
    "online_dpo": [*ON_POLICY, "run.steps=24"],  # two of eight answers teach: slower
    "remax": [*ON_POLICY, "batch.group=16"],
    "gdpo": ["reward.functions=[{path: 'examples/sums.py:score'},{path: length, args: {limit: 4}, weight: 0.1}]"],
    "ppo": CRITIC,
    "vapo": [*CRITIC, "algorithm.lam_alpha=1"],  # of responses of four tokens
}

pytestmark = [pytest.mark.slow]


def gain(sums, run_dir, recipe: str, *overrides: str) -> float:
    """Mean reward of the last three steps less that of the first three."""
    stage = "ppo" if recipe in ("ppo", "vapo") else "grpo"
    settings = [f"experiment=[quickstart_{stage},{recipe}]", *stages.SUMS, "run.export=false", f"run.dir={run_dir}"]
    settings += [f"model.init={sums / 'sft'}", f"data.train={sums / 'few.jsonl'}", "batch.prompts=32", "batch.group=8"]
    settings += [
        "reward.functions=[{path: 'examples/sums.py:score'}]",
        "batch.epochs=1",
        "batch.micro_batch_samples=128",
    ]
    if stage == "ppo":
        settings += [f"critic.init={sums / 'sft'}"]
    run = stages.run([*settings, *OFF_POLICY, *MORE.get(recipe, []), *overrides])
    means = [record["reward/mean"] for record in stages.records(run)]
    print(recipe, [round(mean, 2) for mean in means])
    return sum(means[-3:]) / 3 - sum(means[:3]) / 3


@pytest.mark.parametrize("recipe", RECIPES)
def test_the_reward_rises(sums, tmp_path, recipe):
    assert gain(sums, tmp_path / "run", recipe) > 0.07


def test_shuffled_rewards_gain_nothing(sums, tmp_path):
    assert gain(sums, tmp_path / "run", "dr_grpo", "debug.shuffle_rewards=true") < 0.05
