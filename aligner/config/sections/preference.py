"""The section `algorithm.preference`: the losses of stage dpo."""

from __future__ import annotations

from dataclasses import dataclass, field

from aligner.config.checks import above, at_least, one_of, within
from aligner.errors import ConfigError

# rows of the table in ops/rl/preference.py, by what they are functions of
OF_Z = ("sigmoid", "robust", "hinge", "exo_pair", "discopop", "rpo_bwd_kl", "rpo_fwd_kl")  # z: beta h less margins
OF_H = ("ipo", "rpo_sq")  # h: the chosen answer's log-ratio less the rejected one's
SEPARABLE = ("nca_pair", "bco_pair", "sppo_hard", "apo_zero", "apo_down")  # both log-ratios
OF_MEANS = ("orpo", "alphapo")  # mean logprobs, without a reference
BY_RANK = ("aot", "aot_unpaired")  # what stands at the same rank among all pairs of the minibatch
LOSSES = (*OF_Z, *OF_H, *SEPARABLE, *OF_MEANS, *BY_RANK)
WITH_REWARDS = ("rpo_bwd_kl", "rpo_fwd_kl", "rpo_sq")
DIVERGENCES = ("reverse_kl", "forward_kl", "js", "alpha")
KEY = "algorithm.preference"


@dataclass
class PreferenceConfig:
    """Stage dpo."""

    loss: list[str] = field(default_factory=lambda: ["sigmoid"])  # rows of the table in docs/preference.md, added up
    weights: list[float] = field(default_factory=list)  # of the entries of `loss`; empty: 1 each
    beta: float = 0.1  # times the log-ratios; with means 2 to 5
    label_smoothing: float = 0.0  # share of wrong labels: sigmoid (cDPO), robust, exo_pair (0 means 1e-3), aot*
    gamma: float = 0.0  # subtracted from beta * h: the margin that SimPO wants
    margin: bool = False  # subtract the row's `margin` column from beta * h
    length: str = "auto"  # sum, mean: of an answer's log-ratios over its tokens; auto: mean for ipo, else sum
    # model: a frozen copy of model.init; adapter: the policy's own model without its adapters, or with those that it
    # started from (model.lora); stored: the copy's logprobs, computed before training; none: no log-ratios, logprobs;
    # auto: adapter with model.lora.rank > 0, else model
    reference: str = "auto"
    f_divergence: str = "reverse_kl"  # reverse_kl, forward_kl, js, alpha
    f_alpha: float = 0.5  # of f_divergence=alpha; 1 is reverse_kl
    ld_alpha: float = 1.0  # weight of an answer's tokens beyond the length of the shorter one
    wpo: bool = False  # weigh pairs by how likely both answers are to the policy
    tau: float = 0.05  # temperature of the gate of discopop
    rpo_scale: float = 1.0  # of the difference of the columns `chosen_reward` and `rejected_reward` (rpo_*)
    alphapo_alpha: float = 0.25  # of alphapo's reward (1 - p^-alpha) / alpha, p the geometric mean; 0: log p
    row_weights: bool = False  # multiply a pair's loss by its `weight` column; the denominator stays
    sync_every: int = 0  # steps after which the reference (model) follows the policy, TR-DPO; 0: it stays
    sync_alpha: float = 0.6  # of the policy's weights in the reference's new ones; 1: a copy
    nll_coef: float = 0.0  # of the negative log-likelihood of the chosen answers
    nll_aggregation: str = "token_mean"  # token_mean, seq_mean_token_mean, seq_mean_token_sum

    def __post_init__(self) -> None:
        self._values()
        self._together()

    def _values(self) -> None:
        if not self.loss or len(set(self.loss)) < len(self.loss):
            raise ConfigError(f"{KEY}.loss", self.loss, f"one or several different of {', '.join(LOSSES)}")
        for name in self.loss:
            one_of(f"{KEY}.loss", name, LOSSES)
        if self.weights and len(self.weights) != len(self.loss):
            raise ConfigError(f"{KEY}.weights", self.weights, f"{len(self.loss)} numbers as {KEY}.loss, or none")
        for weight in self.weights:
            above(f"{KEY}.weights", weight, 0)
        above(f"{KEY}.beta", self.beta, 0)
        within(f"{KEY}.label_smoothing", self.label_smoothing, 0, 0.5)
        one_of(f"{KEY}.length", self.length, ("auto", "sum", "mean"))
        one_of(f"{KEY}.reference", self.reference, ("auto", "model", "adapter", "stored", "none"))
        one_of(f"{KEY}.f_divergence", self.f_divergence, DIVERGENCES)
        at_least(f"{KEY}.f_alpha", self.f_alpha, 0)
        within(f"{KEY}.ld_alpha", self.ld_alpha, 0, 1)
        above(f"{KEY}.tau", self.tau, 0)
        above(f"{KEY}.rpo_scale", self.rpo_scale, 0)
        at_least(f"{KEY}.alphapo_alpha", self.alphapo_alpha, 0)
        at_least(f"{KEY}.nll_coef", self.nll_coef, 0)
        at_least(f"{KEY}.sync_every", self.sync_every, 0)
        above(f"{KEY}.sync_alpha", self.sync_alpha, 0)
        within(f"{KEY}.sync_alpha", self.sync_alpha, 0, 1)
        one_of(
            f"{KEY}.nll_aggregation",
            self.nll_aggregation,
            ("token_mean", "seq_mean_token_mean", "seq_mean_token_sum"),
        )

    def _together(self) -> None:
        """What several of the keys do not mean together."""
        self._read_by_all("gamma", self.gamma, 0.0, (*OF_Z, "alphapo"))
        self._read_by_all("margin", self.margin, False, OF_Z)
        self._read_by_all("f_divergence", self.f_divergence, "reverse_kl", (*OF_Z, *OF_H))
        self._read_by_all("ld_alpha", self.ld_alpha, 1.0, (*OF_Z, *OF_H, *SEPARABLE, *BY_RANK))
        for key, value in (("wpo", self.wpo), ("row_weights", self.row_weights)):
            self._read_by_all(key, value, False, (*OF_Z, *OF_H, *SEPARABLE, *OF_MEANS))
        smoothed = ("sigmoid", "robust", "exo_pair", *BY_RANK)
        if self.label_smoothing and not set(self.loss) & set(smoothed):
            expected = f"0 without a loss that reads it: {', '.join(smoothed)}"
            raise ConfigError(f"{KEY}.label_smoothing", self.label_smoothing, expected)
        if "robust" in self.loss and self.label_smoothing >= 0.5:
            raise ConfigError(f"{KEY}.label_smoothing", self.label_smoothing, "a number < 0.5 with robust")
        if "orpo" in self.loss and not self.nll_coef:
            raise ConfigError(f"{KEY}.nll_coef", self.nll_coef, "a number > 0 with orpo, which is NLL plus a penalty")
        if set(self.loss) <= set(OF_MEANS):
            if self.reference != "none":
                expected = f"none with {', '.join(self.loss)}: nothing would read a reference"
                raise ConfigError(f"{KEY}.reference", self.reference, expected)
            if self.length == "sum":
                raise ConfigError(f"{KEY}.length", "sum", f"auto or mean with {', '.join(self.loss)}")
        if self.sync_every and self.reference not in ("auto", "model"):
            expected = f"0 with {KEY}.reference={self.reference}: there is no model that could follow"
            raise ConfigError(f"{KEY}.sync_every", self.sync_every, expected)
        if self.reference == "none":
            compared = [name for name in self.loss if name in (*SEPARABLE, *BY_RANK)]
            if compared:
                expected = f"model or stored with {', '.join(compared)}: 0 is where the reference stands"
                raise ConfigError(f"{KEY}.reference", "none", expected)
            if self.f_divergence != "reverse_kl":
                expected = f"reverse_kl with {KEY}.reference=none: a divergence from what?"
                raise ConfigError(f"{KEY}.f_divergence", self.f_divergence, expected)

    def _read_by_all(self, key: str, value: object, default: object, rows: tuple[str, ...]) -> None:
        others = [name for name in self.loss if name not in rows]
        if value != default and others:
            expected = f"{str(default).lower()} with {', '.join(others)}, which do not read it"
            raise ConfigError(f"{KEY}.{key}", value, expected)

    @property
    def rewards(self) -> bool:
        """Whether the rows of the data need rewards."""
        return bool(set(self.loss) & set(WITH_REWARDS))

    @property
    def by_rank(self) -> list[str]:
        """The entries of `loss` that are functions of the whole minibatch."""
        return [name for name in self.loss if name in BY_RANK]

    def weighted(self) -> dict[str, float]:
        """Loss -> weight."""
        return dict(zip(self.loss, self.weights or [1.0] * len(self.loss), strict=True))

    def over_mean(self, name: str) -> bool:
        """Whether the log-ratios of this entry of `loss` are means over an answer's tokens."""
        return name in OF_MEANS or self.length == "mean" or (self.length == "auto" and name == "ipo")
