"""Functions of `algorithm` of the user's own: equal to built-in ones, and refused where training would not repeat."""

import re

import pytest

from aligner.algorithms.outside import check
from aligner.config.sections.algorithm import AlgorithmConfig, KLConfig
from aligner.errors import AlignerError, ConfigError
from tests import stages

EXAMPLE = "examples/own_loss.py"
SOURCE = """
import os

import torch

KEPT = []


def ppo(logprobs, old_logprobs, advantages, low=0.2, high=0.2):
    ratio = (logprobs - old_logprobs).clamp(-20, 20).exp()
    return torch.maximum(-advantages * ratio, -advantages * ratio.clamp(1 - low, 1 + high))


def baseline(rewards, group, valid):
    means = [rewards[(group == g) & valid].double().mean() for g in group]
    return torch.where(valid, rewards.double() - torch.stack(means), 0.0)


def k2(logprobs, ref_logprobs):
    return (logprobs - ref_logprobs).square() / 2


def unlearned(logprobs, ref_logprobs):
    return (logprobs - ref_logprobs).detach()


def unfinished(rewards, finished, penalty=0.25):
    return rewards - penalty * (~finished).float()


def relative_length(rewards, lengths):
    return rewards - lengths / lengths.float().mean()


def one_number(logprobs, advantages):
    return -(advantages * logprobs).sum()


def integers(rewards):
    return rewards.long()


def no_tensor(logprobs):
    return [logprobs]


def keeps(logprobs, advantages):
    KEPT.append(logprobs)
    return -advantages * logprobs


def by_rank(logprobs, advantages):
    return -advantages * logprobs * (1 + int(os.environ.get("RANK", 0)))


def draws(logprobs, advantages):
    return -advantages * logprobs * (torch.rand(()) < 2)


def counts(logprobs, advantages):
    KEPT.append(0)
    return -advantages * logprobs * len(KEPT)


def over_the_batch(logprobs, advantages):
    return -(advantages - advantages.mean(0)) * logprobs


def over_padding(logprobs, old_logprobs, advantages):
    return -(logprobs - old_logprobs).mean(1, keepdim=True).exp() * advantages


def over_masked(logprobs, old_logprobs, advantages):
    return -(logprobs - old_logprobs)[:, :9].mean(1, keepdim=True).exp() * advantages


def standardised(rewards):
    return rewards - rewards.mean()


def without_gradient(logprobs, advantages):
    return -(advantages * logprobs).detach()


def infinite(logprobs):
    return logprobs / 0


def over_nothing(logprobs, old_logprobs, advantages, mask):
    difference = ((logprobs - old_logprobs) * mask).sum(1, keepdim=True)
    return -(difference / mask.sum(1, keepdim=True)).exp() * advantages


def over_equals(rewards, group, valid):
    means = [rewards[(group == g) & valid].mean() for g in group]
    stds = [rewards[(group == g) & valid].std() for g in group]
    return (rewards - torch.stack(means)) / torch.stack(stds)


def changes_mask(logprobs, advantages, mask):
    mask *= advantages > 0
    return -advantages * logprobs


def changes_valid(rewards, valid):
    valid &= rewards > 0
    return rewards


def raises(logprobs):
    return logprob


def on_the_cpu(logprobs, advantages):
    return -advantages * logprobs * (1 + 0 * torch.arange(logprobs.shape[1]))


def waits(logprobs, advantages):
    return -advantages * logprobs * max(1.0, 0 * advantages.abs().max().item())


def unknown(logits):
    return logits


def to_reference(logprobs, ref_logprobs):
    return logprobs - ref_logprobs
"""


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    path = tmp_path_factory.mktemp("own") / "mine.py"
    path.write_text(SOURCE)
    return path


@pytest.mark.parametrize(
    "key, name, message",
    [
        ("policy_loss", "one_number", "a result of floating point numbers [12, 9], not torch.float32 []"),
        ("policy_loss", "no_tensor", "not list"),
        ("advantage", "integers", "[12] or [12, 9], not torch.int64 [12]"),
        ("policy_loss", "keeps", "no tensor kept after the call"),
        ("policy_loss", "by_rank", "do not depend on the rank"),
        ("policy_loss", "draws", "no use of the process's random state"),
        ("policy_loss", "counts", "do not depend on earlier calls"),
        ("policy_loss", "over_the_batch", "do not depend on other prompts' rows"),
        ("policy_loss", "over_padding", "do not depend on padding"),
        ("policy_loss", "over_masked", "do not depend on tokens where mask is 0"),
        ("advantage", "standardised", "do not depend on other prompts' rows"),
        ("policy_loss", "without_gradient", "a gradient of logprobs"),
        ("policy_loss", "infinite", "finite results"),
        ("policy_loss", "over_nothing", "finite gradients, also of rows without a token"),
        ("advantage", "over_equals", "finite results"),
        ("policy_loss", "changes_mask", "it changes `mask`"),
        ("advantage", "changes_valid", "it changes `valid`"),
        ("policy_loss", "raises", "it raised NameError: name 'logprob'"),
        ("policy_loss", "on_the_cpu", "it makes some on the CPU"),
        ("policy_loss", "unknown", "it has `logits`"),
        ("policy_loss", "to_reference", "ref_logprobs need algorithm.kl.coef > 0"),
        ("policy_loss", "absent", "which has ppo, baseline"),
        ("shaping", "relative_length", "do not depend on other prompts' rows"),
        ("shaping", "integers", "a result of floating point numbers [12], not torch.int64 [12]"),
        ("kl.estimator", "unlearned", "a gradient of logprobs"),
        ("kl.estimator", "infinite", "finite results"),
        ("kl.estimator", "over_padding", "it has `old_logprobs`"),
    ],
)
def test_functions_that_training_must_not_use_are_refused(source, key, name, message):
    with pytest.raises(AlignerError, match=re.escape(message)) as refused:
        check(config(**{key: f"{source}:{name}"}))
    assert str(refused.value).startswith(f"algorithm.{key}='{source}:{name}'")


def config(**paths):
    """The section with these functions, and a KL in the loss where one estimates it."""
    kl = (
        KLConfig(coef=0.1, placement="loss", estimator=paths.pop("kl.estimator"))
        if "kl.estimator" in paths
        else KLConfig()
    )
    return AlgorithmConfig(kl=kl, **paths)


def test_an_estimator_of_the_kl_is_differentiated_where_it_is_in_the_loss(source):
    notes = check(config(**{"kl.estimator": f"{source}:k2"}))
    assert notes[-1].endswith("its gradient equals finite differences at 63 tokens")
    in_the_reward = KLConfig(coef=0.1, placement="reward", estimator=f"{source}:unlearned")
    assert len(check(AlgorithmConfig(kl=in_the_reward))) == 1


def test_gradients_are_compared_with_finite_differences():
    notes = check(AlgorithmConfig(policy_loss=f"{EXAMPLE}:capped_sequence", advantage=f"{EXAMPLE}:over_median"))
    assert len(notes) == 3 and "differs from finite differences at" in notes[1]  # its ratio is detached


def test_the_gradient_of_a_loss_without_detached_parts_is_its_own(source):
    assert check(AlgorithmConfig(policy_loss=f"{source}:ppo"))[1].endswith(
        "equals finite differences at 62 tokens"
    )  # one is at a kink


def test_a_loss_that_waits_for_the_device_is_noticed(source):
    assert any("the host waits" in note for note in check(AlgorithmConfig(policy_loss=f"{source}:waits")))


def test_arguments_go_to_the_functions_that_take_them(source):
    own = AlgorithmConfig(policy_loss=f"{source}:ppo", args={"low": 0.1})
    assert len(check(own)) == 2
    with pytest.raises(ConfigError, match=r"algorithm.args.lower=0.1: expected an entry that .*mine.py:ppo takes"):
        check(AlgorithmConfig(policy_loss=f"{source}:ppo", args={"lower": 0.1}))
    with pytest.raises(ConfigError, match=r"algorithm.args.mask=1: expected no entry"):
        check(AlgorithmConfig(policy_loss=f"{source}:ppo", args={"mask": 1}))


def test_a_run_with_own_functions_equals_the_built_in_ones(tiny_data, tmp_path, source):
    common = ["run.steps=3", "batch.minibatch_samples=8", "algorithm.aggregation=seq_mean_token_mean"]
    common += ["algorithm.kl.coef=0.1", "algorithm.kl.placement=loss"]
    settings = ["algorithm.advantage=dr_grpo", "algorithm.kl.estimator=k2", "algorithm.overlong.penalty=0.25"]
    built = stages.stage("grpo", tiny_data, tmp_path / "built", *common, *settings)
    own = [f"algorithm.policy_loss={source}:ppo", f"algorithm.advantage={source}:baseline"]
    own += [f"algorithm.kl.estimator={source}:k2", f"algorithm.shaping={source}:unfinished"]
    run = stages.stage("grpo", tiny_data, tmp_path / "own", *common, *own)
    clipped = {"policy/clip_fraction", "policy/clip_fraction_low", "policy/clip_fraction_high"}
    assert {name for _, name, *_ in stages.differences(built, run)} <= clipped
    assert stages.same_weights(built, run)
