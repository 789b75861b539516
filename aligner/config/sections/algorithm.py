"""The section `algorithm`: advantages, losses, KL, and the losses of pairs and of a reward model."""

from __future__ import annotations

from dataclasses import dataclass, field

from aligner.config.checks import above, at_least, one_of, within
from aligner.config.sections.distill import DistillConfig
from aligner.config.sections.kto import KtoConfig
from aligner.config.sections.preference import PreferenceConfig
from aligner.errors import ConfigError

# `algorithm.advantage` of stage grpo that compare the samples of a prompt, and that do not
GROUP_BASELINES = ("grpo", "dr_grpo", "rloo", "reinforce_pp_baseline", "opo", "gpg", "gdpo", "pass_at_k")
OTHER_BASELINES = ("reinforce_pp", "remax")
WHITENED = ("reinforce_pp", "reinforce_pp_baseline")  # whitened by definition, whatever `algorithm.whiten` says
POLICY_LOSSES = ("ppo", "gspo", "cispo", "sapo", "gmpo", "dppo", "gpg", "reinforce", "clip_cov", "kl_cov")


@dataclass
class KLControllerConfig:
    kind: str = "fixed"  # fixed, adaptive
    target: float = 0.1  # nats, of k1: per token for sequence_mean, per response for sequence_sum
    horizon: int = 10000  # samples
    measure: str = "sequence_mean"  # KL of the target: mean over sequences of the mean, or of the sum, over tokens

    def __post_init__(self) -> None:
        one_of("algorithm.kl.controller.kind", self.kind, ("fixed", "adaptive"))
        above("algorithm.kl.controller.target", self.target, 0)
        at_least("algorithm.kl.controller.horizon", self.horizon, 1)
        one_of("algorithm.kl.controller.measure", self.measure, ("sequence_mean", "sequence_sum"))


@dataclass
class KLConfig:
    coef: float = 0.0  # beta; 0 loads no reference model
    estimator: str = "k1"  # k1, k2, k3, abs, k1+, k3+
    placement: str = "none"  # none, reward, loss
    importance_weighted: bool = False  # the KL in the loss is multiplied by the token's ratio
    controller: KLControllerConfig = field(default_factory=KLControllerConfig)

    def __post_init__(self) -> None:
        at_least("algorithm.kl.coef", self.coef, 0)
        one_of("algorithm.kl.estimator", self.estimator, ("k1", "k2", "k3", "abs", "k1+", "k3+"))
        one_of("algorithm.kl.placement", self.placement, ("none", "reward", "loss"))
        if self.coef > 0 and self.placement == "none":
            raise ConfigError("algorithm.kl.placement", self.placement, "reward or loss when algorithm.kl.coef > 0")


@dataclass
class OverlongConfig:
    mask_truncated: bool = False  # samples cut by the token limit leave loss and denominators, not the baseline
    penalty: float = 0.0  # subtracted from the reward of a sample that does not end in EOS
    # soft penalty, from 0 to -1 over the last soft_fraction * sampling.max_response_tokens before the limit; 0: off
    soft_fraction: float = 0.0

    def __post_init__(self) -> None:
        at_least("algorithm.overlong.penalty", self.penalty, 0)
        within("algorithm.overlong.soft_fraction", self.soft_fraction, 0, 1)

    @property
    def shapes(self) -> bool:
        """Whether rewards change."""
        return bool(self.penalty or self.soft_fraction)


@dataclass
class SapoConfig:
    tau_pos: float = 1.0  # temperature of the gate where the advantage is positive
    tau_neg: float = 1.05  # and where it is negative

    def __post_init__(self) -> None:
        above("algorithm.sapo.tau_pos", self.tau_pos, 0)
        above("algorithm.sapo.tau_neg", self.tau_neg, 0)


@dataclass
class DppoConfig:
    limit: float = 0.2  # of |pi - mu|, probabilities of a token by policy and engine
    penalty: float = 1e-3  # times (log pi - log mu)^2, on every token

    def __post_init__(self) -> None:
        within("algorithm.dppo.limit", self.limit, 0, 1)
        at_least("algorithm.dppo.penalty", self.penalty, 0)


@dataclass
class CovConfig:
    """clip_cov and kl_cov: tokens by the covariance of advantage and logprob over the minibatch."""

    fraction: float = 2e-4  # of the minibatch's tokens; at least one token
    low: float = 1.0  # clip_cov takes tokens with a covariance between these
    high: float = 5.0  # the upper one
    kl_coef: float = 1.0  # kl_cov

    def __post_init__(self) -> None:
        within("algorithm.cov.fraction", self.fraction, 0, 1)
        above("algorithm.cov.high", self.high, self.low)
        at_least("algorithm.cov.kl_coef", self.kl_coef, 0)


@dataclass
class RewardLossConfig:
    """Stage rm."""

    kind: str = "bradley_terry"  # bradley_terry, regression, process
    center_coef: float = 0.0  # of (chosen + rejected score) squared, which keeps scores near 0
    margin: bool = False  # subtract the row's `margin` column inside the sigmoid
    attributes: list[str] = field(default_factory=list)  # regression: columns with the target scores, one output each
    separator: str = "\n"  # process: the text behind each step of an answer, where its label stands
    last_step_only: bool = False  # process: of each row only the last step's label is learned

    def __post_init__(self) -> None:
        one_of("algorithm.reward_loss.kind", self.kind, ("bradley_terry", "regression", "process"))
        if not self.separator:
            raise ConfigError("algorithm.reward_loss.separator", "", "a text that ends a step")
        at_least("algorithm.reward_loss.center_coef", self.center_coef, 0)
        if self.kind == "regression" and not self.attributes:
            raise ConfigError("algorithm.reward_loss.attributes", [], "at least one column name for regression")


@dataclass
class AlgorithmConfig:
    advantage: str = "grpo"  # gae (stage ppo), GROUP_BASELINES, OTHER_BASELINES
    group_eps: float = 1e-6  # beside the group's std: grpo, gdpo, pass_at_k. TRL: 1e-4, OpenRLHF: 1e-9
    pass_at_k_std: bool = False  # divide by the group's std
    policy_loss: str = "ppo"  # POLICY_LOSSES
    # what the ratio is to. auto: the policy before the step, by the update's own forward pass where that is enough, and
    # there with engine.lag the engine; recompute: by another; engine: the engine's; proxy: between the engine's and
    # the update's own, by their versions
    old_logprobs: str = "auto"
    aggregation: str = "token_mean"  # token_mean, seq_mean_token_mean, seq_mean_token_sum, seq_mean_token_sum_norm
    clip_low: float = 0.2  # of the ratio; gspo: of the sequence's, 3e-4; gmpo: of the log-ratio, 0.4
    clip_high: float = 0.2  # likewise, upwards
    dual_clip: float = 0.0  # 0: off
    ratio_cap: float = 5.0  # cispo, a raw ratio
    sapo: SapoConfig = field(default_factory=SapoConfig)
    dppo: DppoConfig = field(default_factory=DppoConfig)
    cov: CovConfig = field(default_factory=CovConfig)
    gamma: float = 1.0  # discount of a token
    lam: float = 1.0  # lambda of GAE
    whiten: bool = False  # advantages, over the rollout
    whiten_shift: bool = True  # subtract the mean
    whiten_ddof: int = 0  # 1: the unbiased variance
    entropy_coef: float = 0.0  # of the entropy that is added to the objective
    filter_groups: bool = False  # dynamic sampling: replace prompts whose samples all have the same reward
    filter_rounds: int = 10  # of generation for one rollout, at most
    kl: KLConfig = field(default_factory=KLConfig)
    overlong: OverlongConfig = field(default_factory=OverlongConfig)
    reward_loss: RewardLossConfig = field(default_factory=RewardLossConfig)
    preference: PreferenceConfig = field(default_factory=PreferenceConfig)
    distill: DistillConfig = field(default_factory=DistillConfig)
    kto: KtoConfig = field(default_factory=KtoConfig)

    def __post_init__(self) -> None:
        one_of("algorithm.advantage", self.advantage, ("gae", *GROUP_BASELINES, *OTHER_BASELINES))
        at_least("algorithm.group_eps", self.group_eps, 0)
        one_of("algorithm.policy_loss", self.policy_loss, POLICY_LOSSES)
        one_of("algorithm.old_logprobs", self.old_logprobs, ("auto", "recompute", "engine", "proxy"))
        one_of(
            "algorithm.aggregation",
            self.aggregation,
            ("token_mean", "seq_mean_token_mean", "seq_mean_token_sum", "seq_mean_token_sum_norm"),
        )
        within("algorithm.clip_low", self.clip_low, 0, 1)
        at_least("algorithm.clip_high", self.clip_high, 0)
        if self.dual_clip and self.dual_clip <= 1:
            raise ConfigError("algorithm.dual_clip", self.dual_clip, "a number > 1, or 0 for off")
        above("algorithm.ratio_cap", self.ratio_cap, 0)
        within("algorithm.gamma", self.gamma, 0, 1)
        within("algorithm.lam", self.lam, 0, 1)
        one_of("algorithm.whiten_ddof", self.whiten_ddof, (0, 1))
        at_least("algorithm.filter_rounds", self.filter_rounds, 1)
        self._together()

    @property
    def ratio_to_engine(self) -> bool:
        """Whether the policy loss compares the policy with the engine itself: weights would count that twice."""
        return self.policy_loss == "dppo" or self.old_logprobs == "engine"

    def _together(self) -> None:
        """What two of the keys do not mean together."""
        mean = "seq_mean_token_mean"
        if self.policy_loss in ("gspo", "sapo", "gmpo") and self.aggregation != mean:
            expected = f"{mean} with algorithm.policy_loss={self.policy_loss}, which is a mean over sequences"
            raise ConfigError("algorithm.aggregation", self.aggregation, expected)
        if self.old_logprobs == "engine" and self.policy_loss in ("gpg", "reinforce"):
            expected = f"auto, recompute or proxy with algorithm.policy_loss={self.policy_loss}, which has no ratio"
            raise ConfigError("algorithm.old_logprobs", "engine", expected)
        if self.policy_loss == "gmpo" and self.advantage in ("gae", "reinforce_pp"):
            expected = f"a loss per token with algorithm.advantage={self.advantage}, which differs between tokens"
            raise ConfigError("algorithm.policy_loss", self.policy_loss, expected)
        if self.advantage in ("remax", "gdpo") and self.kl.coef > 0 and self.kl.placement == "reward":
            expected = f"loss with algorithm.advantage={self.advantage}, which compares rewards without a KL term"
            raise ConfigError("algorithm.kl.placement", self.kl.placement, expected)
        if self.advantage in ("gdpo", "pass_at_k") and self.whiten:
            expected = f"false with algorithm.advantage={self.advantage}, which has a scale of its own"
            raise ConfigError("algorithm.whiten", self.whiten, expected)
        if self.advantage == "gdpo" and self.overlong.shapes:
            key = "penalty" if self.overlong.penalty else "soft_fraction"
            expected = "0 with algorithm.advantage=gdpo, which sees the reward's components alone"
            raise ConfigError(f"algorithm.overlong.{key}", getattr(self.overlong, key), expected, "Use mask_truncated.")
