"""The section `algorithm`: advantages, losses, KL, and the losses of pairs and of a reward model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from aligner.config.key import REPORT, Section, key, section
from aligner.config.rule import rules, value_of
from aligner.config.sections.distill import DistillConfig
from aligner.config.sections.kto import KtoConfig
from aligner.config.sections.preference import PreferenceConfig
from aligner.user_code import is_path

# `algorithm.advantage` of stage grpo that compare the samples of a prompt, and that do not
GROUP_BASELINES = ("grpo", "dr_grpo", "rloo", "reinforce_pp_baseline", "opo", "gpg", "gdpo", "pass_at_k", "maxrl")
OTHER_BASELINES = ("reinforce_pp", "remax")
WHITENED = ("reinforce_pp", "reinforce_pp_baseline")  # whitened by definition, whatever `algorithm.whiten` says
POLICY_LOSSES = ("ppo", "gspo", "cispo", "sapo", "gmpo", "dppo", "gpg", "reinforce", "clip_cov", "kl_cov")

OWN_FUNCTIONS = ("policy_loss", "advantage", "kl.estimator", "shaping")  # keys that take a function of the user's


@dataclass
class KLControllerConfig(Section, key="algorithm.kl.controller"):
    kind: str = key(
        "fixed", "Rule of kl.coef. fixed: constant; adaptive: by the target.", choices=("fixed", "adaptive")
    )
    target: float = key(
        0.1, "Target of the k1 estimate, in nats per token (sequence_mean) or per response (sequence_sum).", above=0
    )
    horizon: int = key(10000, "Samples over which the coefficient adapts.", least=1)
    measure: str = key(
        "sequence_mean",
        "KL that follows the target: mean over sequences of the mean, or of the sum, over tokens.",
        choices=("sequence_mean", "sequence_sum"),
    )


@dataclass
class KLConfig(Section, key="algorithm.kl"):
    coef: float = key(0.0, "Factor of the KL to the reference (beta). 0: no reference model.", least=0)
    estimator: str = key(
        "k1",
        "Estimator of the KL (docs/reference/algorithms.md), or a function of yours.",
        choices=("k1", "k2", "k3", "abs", "k1+", "k3+"),
        function=True,
    )
    placement: str = key("none", "Place of the KL: none, the reward or the loss.", choices=("none", "reward", "loss"))
    importance_weighted: bool = key(False, "Multiply the KL in the loss by the token's ratio.")
    controller: KLControllerConfig = section(KLControllerConfig)

    RULES = rules("coef>0 => placement =reward|loss | when algorithm.kl.coef > 0")


@dataclass
class OverlongConfig(Section, key="algorithm.overlong"):
    mask_truncated: bool = key(
        False, "Leave samples that the token limit cut out of loss and denominators. The baseline still counts them."
    )
    penalty: float = key(0.0, "Penalty, subtracted from the reward of a sample that does not end in EOS.", least=0)
    soft_fraction: float = key(
        0.0,
        "Last fraction of sampling.max_response_tokens, over which a penalty grows from 0 to -1. 0: off.",
        least=0,
        most=1,
    )


@dataclass
class SapoConfig(Section, key="algorithm.sapo"):
    tau_pos: float = key(1.0, "Temperature of the gate where the advantage is positive.", above=0)
    tau_neg: float = key(1.05, "Temperature of the gate where it is negative.", above=0)


@dataclass
class DppoConfig(Section, key="algorithm.dppo"):
    limit: float = key(0.2, "Largest |pi - mu|, the probabilities of a token by policy and engine.", least=0, most=1)
    penalty: float = key(1e-3, "Factor of (log pi - log mu)^2 on every token.", least=0)


@dataclass
class CovConfig(Section, key="algorithm.cov"):
    """Choice of tokens for clip_cov and kl_cov, by the covariance of advantage and logprob over the minibatch."""

    fraction: float = key(2e-4, "Fraction of the minibatch's tokens, at least one token.", least=0, most=1)
    low: float = key(1.0, "Least covariance of the tokens that clip_cov drops.")
    high: float = key(5.0, "Largest covariance of these tokens.")
    kl_coef: float = key(1.0, "Factor of the KL of kl_cov.", least=0)

    RULES = rules("=> high >low")


@dataclass
class PositiveConfig(Section, key="algorithm.positive"):
    """Likelihood of the rollout's own good samples, in the policy's loss."""

    coef: float = key(0.0, "Factor of the mean negative log-likelihood of these samples' tokens. 0: off.", least=0)
    above: float = key(0.0, "Reward above which a sample is one of them.")


@dataclass
class RewardLossConfig(Section, key="algorithm.reward_loss"):
    """Keys of stage rm."""

    kind: str = key("bradley_terry", "Loss of a reward model.", choices=("bradley_terry", "regression", "process"))
    center_coef: float = key(0.0, "Factor of (chosen + rejected score) squared, which keeps scores near 0.", least=0)
    margin: bool = key(False, "Subtract the row's `margin` column inside the sigmoid.")
    attributes: list[str] = key([], "Columns with the target scores, one output each (regression).")
    separator: str = key(
        "\n",
        "Text after each step of an answer, where the step's label applies (process).",
        valid=(bool, "a text that ends a step"),
    )
    last_step_only: bool = key(False, "Learn only the last step's label of each row (process).")

    RULES = rules("kind=regression !attributes => attributes | at least one column name for regression")


@dataclass
class AlgorithmConfig(Section, key="algorithm"):
    advantage: str = key(
        "grpo",
        "Estimator of advantages, or a function of yours. gae: for stage ppo only.",
        choices=("gae", *GROUP_BASELINES, *OTHER_BASELINES),
        function=True,
    )
    group_eps: float = key(
        1e-6, "Constant added to the group's std (grpo, gdpo, pass_at_k). TRL: 1e-4, OpenRLHF: 1e-9.", least=0
    )
    pass_at_k_std: bool = key(False, "Divide by the group's std (pass_at_k).")
    policy_loss: str = key(
        "ppo",
        "Loss of the policy (docs/reference/algorithms.md), or a function of yours.",
        choices=POLICY_LOSSES,
        function=True,
    )
    shaping: str = key(
        "none",
        "Change of each sample's reward before advantages, or a choice: none, or a function of yours.",
        choices=("none",),
        function=True,
        read_for=("samples",),
    )
    args: dict[str, Any] = key({}, "Arguments of functions of yours by name.", read_for=("policy", "samples"))
    old_logprobs: str = key(
        "auto",
        "Logprobs to which the ratio compares. auto: those of the policy before the step, from the update's own "
        "forward pass if that suffices (then, with engine.lag, the engine's); recompute: from another pass; engine: "
        "the engine's; proxy: between the engine's and the update's own, by their versions.",
        choices=("auto", "recompute", "engine", "proxy"),
        resume=REPORT,
    )
    aggregation: str = key(
        "token_mean",
        "Aggregation of the tokens' losses.",
        choices=("token_mean", "seq_mean_token_mean", "seq_mean_token_sum", "seq_mean_token_sum_norm"),
    )
    clip_low: float = key(
        0.2,
        "Largest decrease of the ratio (gspo: of the sequence's, 3e-4; gmpo: of the log-ratio, 0.4).",
        least=0,
        most=1,
    )
    clip_high: float = key(0.2, "Largest increase of the ratio.", least=0)
    dual_clip: float = key(
        0.0, "Bound of the loss, in advantages, where the advantage is negative. 0: off.", above=1, off=0
    )
    ratio_cap: float = key(5.0, "Largest ratio (cispo).", above=0)
    sapo: SapoConfig = section(SapoConfig)
    dppo: DppoConfig = section(DppoConfig)
    cov: CovConfig = section(CovConfig)
    gamma: float = key(1.0, "Discount of a token.", least=0, most=1)
    lam: float = key(1.0, "Lambda of GAE.", least=0, most=1)
    lam_alpha: float = key(
        0.0,
        "Alpha of a lambda for each response, 1 - 1 / (alpha tokens), of the advantages; returns keep lam. 0: off.",
        least=0,
    )
    positive: PositiveConfig = section(PositiveConfig)
    observation_coef: float = key(
        0.0,
        "Factor of the negative log-likelihood of what tools and the environment answered, in the policy's loss. "
        "ECHO: 0.05. 0: off.",
        least=0,
    )
    whiten: bool = key(False, "Whiten advantages over the rollout.")
    whiten_shift: bool = key(True, "Subtract the mean when whitening.")
    whiten_ddof: int = key(0, "1: whiten by the unbiased variance.", choices=(0, 1))
    entropy_coef: float = key(0.0, "Factor of the entropy bonus in the objective.")
    filter_groups: bool = key(
        False,
        "Dynamic sampling: replace prompts whose samples all have the same reward.",
        read_for=("trajectories",),
    )
    filter_rounds: int = key(10, "Maximum rounds of generation per rollout.", least=1, read_for=("trajectories",))
    kl: KLConfig = section(KLConfig)
    overlong: OverlongConfig = section(OverlongConfig, read_for=("samples",))
    sft_loss: str = key(
        "nll",
        "Loss of a token. nll: negative log-likelihood; dft: the same times the token's probability.",
        choices=("nll", "dft"),
        read_for=("sft",),
    )
    reward_loss: RewardLossConfig = section(RewardLossConfig, read_for=("reward_loss",))
    preference: PreferenceConfig = section(PreferenceConfig, read_for=("preference",))
    distill: DistillConfig = section(DistillConfig, read_for=("distill",))
    kto: KtoConfig = section(KtoConfig, read_for=("kto",))

    RULES = rules("""
policy_loss=gspo|sapo|gmpo => aggregation =seq_mean_token_mean
    | with algorithm.policy_loss={policy_loss}, which is a mean over sequences
old_logprobs=engine policy_loss=gpg|reinforce => old_logprobs =auto|recompute|proxy
    | with algorithm.policy_loss={policy_loss}, which has no ratio
policy_loss=gmpo advantage=gae|reinforce_pp => policy_loss
    | a loss per token with algorithm.advantage={advantage}, which differs between tokens
advantage=remax|gdpo kl.coef>0 kl.placement=reward => kl.placement
    | loss with algorithm.advantage={advantage}, which compares rewards without a KL term
lam_alpha>0 => advantage =gae | with algorithm.lam_alpha, which is of GAE
advantage=gdpo|pass_at_k => whiten =false | with algorithm.advantage={advantage}, which has a scale of its own
advantage=gdpo => overlong.penalty, overlong.soft_fraction =0
    | with algorithm.advantage=gdpo, which uses only the reward's components | Use mask_truncated.
""")

    def own_functions(self, reads: Callable[[str], bool] = bool) -> dict[str, str]:
        """Return key -> path of each function of the user's own. `reads` says which keys the stage has."""
        keys = (f"algorithm.{name}" for name in OWN_FUNCTIONS)
        values = {key: value_of(self, key.removeprefix("algorithm.")) for key in keys if reads(key)}
        return {key: path for key, path in values.items() if is_path(path)}

    @property
    def ratio_to_engine(self) -> bool:
        """Whether the policy loss compares the policy with the engine itself: weights would count that twice."""
        return self.policy_loss == "dppo" or self.old_logprobs == "engine"
