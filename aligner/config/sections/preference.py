"""The section `algorithm.preference`: the losses of stage dpo."""

from __future__ import annotations

from dataclasses import dataclass

from aligner.config.checks import different
from aligner.config.key import Section, key
from aligner.config.rule import rules
from aligner.errors import ConfigError

# rows of the table in ops/rl/preference.py, by what they are functions of
OF_Z = ("sigmoid", "robust", "hinge", "exo_pair", "discopop", "rpo_bwd_kl", "rpo_fwd_kl")  # z: beta h less margins
OF_H = ("ipo", "rpo_sq")  # h: the chosen answer's log-ratio less the rejected one's
SEPARABLE = ("nca_pair", "bco_pair", "sppo_hard", "apo_zero", "apo_down")  # both log-ratios
OF_MEANS = ("orpo", "alphapo")  # mean logprobs, without a reference
BY_RANK = ("aot", "aot_unpaired")  # the answer of the same rank among all pairs of the minibatch
LOSSES = (*OF_Z, *OF_H, *SEPARABLE, *OF_MEANS, *BY_RANK)
WITH_REWARDS = ("rpo_bwd_kl", "rpo_fwd_kl", "rpo_sq")
DIVERGENCES = ("reverse_kl", "forward_kl", "js", "alpha")
KEY = "algorithm.preference"


@dataclass
class PreferenceConfig(Section, key=KEY):
    """Keys of stage dpo."""

    loss: list[str] = key(
        ["sigmoid"],
        "Losses to add up: rows of the table in docs/how-to/preferences.md.",
        choices=LOSSES,
        valid=(different, f"one or several different of {', '.join(LOSSES)}"),
    )
    weights: list[float] = key([], "Weights of the entries of `loss`. Empty: 1 each.", above=0)
    beta: float = key(0.1, "Factor of the log-ratios. Use 2 to 5 with means.", above=0)
    label_smoothing: float = key(
        0.0, "Share of wrong labels. For sigmoid (cDPO), robust, exo_pair (0 means 1e-3), aot*.", least=0, most=0.5
    )
    gamma: float = key(0.0, "Margin of SimPO, subtracted from beta * h.")
    margin: bool = key(False, "Subtract the row's `margin` column from beta * h.")
    length: str = key(
        "auto",
        "Aggregation of an answer's log-ratios. auto: mean for ipo, else sum.",
        choices=("auto", "sum", "mean"),
    )
    reference: str = key(
        "auto",
        "Reference model. model: a frozen copy of model.init; adapter: the policy without its adapters, or with its "
        "initial ones (model.lora); stored: the copy's logprobs, computed before training; none: logprobs instead of "
        "log-ratios; auto: adapter with model.lora.rank > 0, else model.",
        choices=("auto", "model", "adapter", "stored", "none"),
    )
    f_divergence: str = key("reverse_kl", "Divergence from the reference.", choices=DIVERGENCES)
    f_alpha: float = key(0.5, "Alpha of f_divergence=alpha. 1 is reverse_kl.", least=0)
    ld_alpha: float = key(1.0, "Weight of an answer's tokens beyond the length of the shorter one.", least=0, most=1)
    wpo: bool = key(False, "Weight pairs by the policy's likelihood of both answers.")
    tau: float = key(0.05, "Temperature of the gate of discopop.", above=0)
    rpo_scale: float = key(
        1.0, "Factor of the difference of the columns `chosen_reward` and `rejected_reward` (rpo_*).", above=0
    )
    alphapo_alpha: float = key(
        0.25, "Alpha of alphapo's reward (1 - p^-alpha) / alpha, p the geometric mean. 0: log p.", least=0
    )
    row_weights: bool = key(False, "Multiply a pair's loss by its `weight` column. The denominator does not change.")
    sync_every: int = key(
        0, "Steps between updates of the reference (model) towards the policy (TR-DPO). 0: never.", least=0
    )
    sync_alpha: float = key(0.6, "Share of the policy's weights in such an update.", above=0, most=1)
    nll_coef: float = key(0.0, "Factor of the negative log-likelihood of the chosen answers.", least=0)
    nll_aggregation: str = key(
        "token_mean",
        "Aggregation of the tokens' negative log-likelihood.",
        choices=("token_mean", "seq_mean_token_mean", "seq_mean_token_sum"),
    )

    RULES = rules(
        """
loss~$NO_GAMMA => gamma =0.0 | with {~}, which do not read it
loss~$NO_MARGIN => margin =false | with {~}, which do not read it
loss~$NO_DIVERGENCE => f_divergence =reverse_kl | with {~}, which do not read it
loss~$NO_LENGTHS => ld_alpha =1.0 | with {~}, which do not read it
loss~$BY_RANK => wpo, row_weights =false | with {~}, which do not read it
!loss~$SMOOTHED => label_smoothing =0 | without a loss that reads it: $SMOOTHED
loss~robust => label_smoothing <0.5 | with robust
loss~orpo => nll_coef >0 | with orpo, which is NLL plus a penalty
!loss~$WITH_REFERENCE => reference =none | with {loss}: no loss reads a reference
!loss~$WITH_REFERENCE => length =auto|mean | with {loss}
reference!=auto|model => sync_every =0
    | with algorithm.preference.reference={reference}: there is no model to update
reference=none loss~$COMPARED => reference =model|stored | with {~}, whose zero point is the reference
reference=none => f_divergence =reverse_kl | with algorithm.preference.reference=none, which has nothing to diverge from
""",
        NO_GAMMA=(*OF_H, *SEPARABLE, *BY_RANK, "orpo"),
        NO_MARGIN=(*OF_H, *SEPARABLE, *OF_MEANS, *BY_RANK),
        NO_DIVERGENCE=(*SEPARABLE, *OF_MEANS, *BY_RANK),
        NO_LENGTHS=OF_MEANS,
        BY_RANK=BY_RANK,
        SMOOTHED=("sigmoid", "robust", "exo_pair", *BY_RANK),
        WITH_REFERENCE=(*OF_Z, *OF_H, *SEPARABLE, *BY_RANK),
        COMPARED=(*SEPARABLE, *BY_RANK),
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.weights and len(self.weights) != len(self.loss):
            raise ConfigError(f"{KEY}.weights", self.weights, f"{len(self.loss)} numbers as {KEY}.loss, or none")

    @property
    def rewards(self) -> bool:
        """Whether the rows of the data need rewards."""
        return bool(set(self.loss) & set(WITH_REWARDS))

    @property
    def by_rank(self) -> list[str]:
        """The entries of `loss` that are functions of the whole minibatch."""
        return [name for name in self.loss if name in BY_RANK]

    def weighted(self) -> dict[str, float]:
        """Return loss -> weight."""
        return dict(zip(self.loss, self.weights or [1.0] * len(self.loss), strict=True))

    def over_mean(self, name: str) -> bool:
        """Return whether the log-ratios of this entry of `loss` are means over an answer's tokens."""
        return name in OF_MEANS or self.length == "mean" or (self.length == "auto" and name == "ipo")
