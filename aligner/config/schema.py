"""The typed config: every key, its type, its default, and the check of its value. Imports no torch.

Values are checked where they are born (`__post_init__`); what needs several sections is in `validate.py`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from aligner.config.attention import WINDOW_FAMILIES, AttentionConfig, check_attention_family
from aligner.config.memory import MemoryConfig
from aligner.config.moe import MOE_FAMILIES, MoeConfig, check_moe_family
from aligner.config.quantization import KINDS, settle
from aligner.config.trtllm import ONE_RANK, TrtllmConfig
from aligner.config.trtllm_engine import NAME as TRTLLM_ENGINE
from aligner.config.trtllm_engine import check_engine
from aligner.config.watchdog import WatchdogConfig
from aligner.errors import ConfigError

STAGES = ("sft", "rm", "grpo", "ppo")
ROLLOUT_STAGES = ("grpo", "ppo")
# `algorithm.advantage` of stage grpo that compare the samples of a prompt, and that do not
GROUP_BASELINES = ("grpo", "dr_grpo", "rloo", "reinforce_pp_baseline", "opo", "gpg", "gdpo", "pass_at_k")
OTHER_BASELINES = ("reinforce_pp", "remax")
WHITENED = ("reinforce_pp", "reinforce_pp_baseline")  # whitened by definition, whatever `algorithm.whiten` says
POLICY_LOSSES = ("ppo", "gspo", "cispo", "sapo", "gmpo", "dppo", "gpg", "reinforce", "clip_cov", "kl_cov")


def _one_of(key: str, value: Any, allowed: tuple) -> None:
    if value not in allowed:
        raise ConfigError(key, value, "one of " + ", ".join(map(str, allowed)))


def _at_least(key: str, value: float, low: float) -> None:
    if not value >= low:
        raise ConfigError(key, value, f"a number >= {low}")


def _above(key: str, value: float, low: float) -> None:
    if not value > low:
        raise ConfigError(key, value, f"a number > {low}")


def _within(key: str, value: float, low: float, high: float) -> None:
    if not low <= value <= high:
        raise ConfigError(key, value, f"a number in [{low}, {high}]")


@dataclass
class StopConfig:
    """End the stage early once `metric` (an eval metric) reaches `above`."""

    metric: str = ""
    above: float = 0.0


@dataclass
class RunConfig:
    dir: str = "runs/${run.name}"
    name: str = "${stage.name}"
    resume: str = "auto"  # auto, never, or a checkpoint folder
    deterministic: bool = False
    steps: int = 100  # optimizer steps for sft and rm, rollouts for ppo and grpo
    eval_every: int = 0  # 0: only at the end
    samples_every: int = 10  # print the sample table every n steps; 0: never
    stop: StopConfig = field(default_factory=StopConfig)
    export: bool = True  # write a Hugging Face folder at the end

    def __post_init__(self) -> None:
        _at_least("run.steps", self.steps, 0)
        _at_least("run.eval_every", self.eval_every, 0)
        _at_least("run.samples_every", self.samples_every, 0)


@dataclass
class StageConfig:
    name: str = "sft"

    def __post_init__(self) -> None:
        _one_of("stage.name", self.name, STAGES)


@dataclass
class RopeScalingConfig:
    """Llama-3.1 style scaling of the rotary base; factor 1 is none."""

    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position: int = 8192


@dataclass
class ModelConfig:
    family: str = "llama"
    num_layers: int = 4
    hidden_size: int = 128
    ffn_hidden_size: int = 384
    num_heads: int = 4
    num_kv_heads: int = 4
    head_dim: int = 0  # 0: hidden_size / num_heads
    vocab_size: int = 0  # 0: the tokenizer's
    rope_base: float = 10000.0
    rope_scaling: RopeScalingConfig = field(default_factory=RopeScalingConfig)
    norm_eps: float = 1e-6
    max_position: int = 4096
    tie_embeddings: bool = True
    qk_norm: bool = False
    qkv_bias: bool = False
    attention: AttentionConfig = field(default_factory=AttentionConfig)
    moe: MoeConfig = field(default_factory=MoeConfig)
    init_std: float = 0.02
    init: str = "random"  # random, a Hugging Face folder, a run folder, or a checkpoint
    tokenizer: str = ""  # a Hugging Face tokenizer folder; empty: the one in `model.init`
    dtype: str = "auto"  # auto, float32, bfloat16
    recompute: str = "none"  # none, full (recompute every layer's activations in backward)
    varlen_attention: bool = False  # on CUDA: attention of rows of any length in one call, without padding and masks

    def __post_init__(self) -> None:
        _one_of("model.family", self.family, ("llama", "qwen2", "qwen3", *WINDOW_FAMILIES, *MOE_FAMILIES))
        check_moe_family(self.family, self.moe)
        check_attention_family(self.family, self.attention)
        for name in ("num_layers", "hidden_size", "ffn_hidden_size", "num_heads", "num_kv_heads", "max_position"):
            _at_least(f"model.{name}", getattr(self, name), 1)
        _above("model.rope_base", self.rope_base, 0)
        _at_least("model.head_dim", self.head_dim, 0)
        _at_least("model.vocab_size", self.vocab_size, 0)
        _one_of("model.dtype", self.dtype, ("auto", "float32", "bfloat16"))
        _one_of("model.recompute", self.recompute, ("none", "full"))
        if self.num_heads % self.num_kv_heads:
            raise ConfigError("model.num_kv_heads", self.num_kv_heads, f"a divisor of model.num_heads={self.num_heads}")
        if not self.head_dim and self.hidden_size % self.num_heads:
            raise ConfigError(
                "model.hidden_size", self.hidden_size, f"a multiple of model.num_heads={self.num_heads}, or head_dim"
            )

    @property
    def kv_channels(self) -> int:
        return self.head_dim or self.hidden_size // self.num_heads

    @property
    def expert_ffn(self) -> int:
        return self.moe.ffn_hidden_size or self.ffn_hidden_size


@dataclass
class ParallelConfig:
    """Data parallel = what is left of the world."""

    tensor: int = 1
    pipeline: int = 1
    context: int = 1
    context_mode: str = "allgather"  # allgather (of keys and values), alltoall (over heads)
    expert: int = 1  # ranks, out of the data- and context-parallel ones, that share the experts
    sequence: bool = False

    def __post_init__(self) -> None:
        for name in ("tensor", "pipeline", "context", "expert"):
            _at_least(f"parallel.{name}", getattr(self, name), 1)
        _one_of("parallel.context_mode", self.context_mode, ("allgather", "alltoall"))
        if self.sequence and self.tensor == 1:
            raise ConfigError("parallel.sequence", True, "false when parallel.tensor=1: it shards over tensor ranks")

    @property
    def model_size(self) -> int:
        return self.tensor * self.pipeline * self.context


@dataclass
class OptimConfig:
    lr: float = 1e-4
    min_lr: float = 0.0
    schedule: str = "constant"  # constant, linear, cosine
    warmup_steps: int = 0
    decay_from: float = 0.0  # constant until this fraction of the steps, then the schedule's decay
    weight_decay: float = 0.01
    betas: list[float] = field(default_factory=lambda: [0.9, 0.95])
    eps: float = 1e-8
    clip_grad: float = 1.0  # 0: off
    distributed: bool = True  # shard optimizer state over data-parallel ranks

    def __post_init__(self) -> None:
        _above("optim.lr", self.lr, 0)
        _within("optim.min_lr", self.min_lr, 0, self.lr)
        _one_of("optim.schedule", self.schedule, ("constant", "linear", "cosine"))
        _at_least("optim.warmup_steps", self.warmup_steps, 0)
        _within("optim.decay_from", self.decay_from, 0, 1)
        _at_least("optim.weight_decay", self.weight_decay, 0)
        _above("optim.eps", self.eps, 0)
        _at_least("optim.clip_grad", self.clip_grad, 0)
        if len(self.betas) != 2 or not all(0 <= b < 1 for b in self.betas):
            raise ConfigError("optim.betas", list(self.betas), "two numbers in [0, 1)")


@dataclass
class CriticConfig:
    init: str = ""  # empty: the reward model (reward.model)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    warmup_steps: int = 0  # rollouts in which only the critic learns
    clip: float = 0.2  # of values around the old ones; 0: off

    def __post_init__(self) -> None:
        _at_least("critic.warmup_steps", self.warmup_steps, 0)
        _at_least("critic.clip", self.clip, 0)


@dataclass
class BatchConfig:
    prompts: int = 32
    group: int = 1
    minibatch_samples: int = 0  # 0: the whole rollout
    micro_batch_samples: int = 8
    micro_batch_tokens: int = 0  # > 0: as many rows as fit this many padded tokens, instead of micro_batch_samples
    epochs: int = 1
    sequences: int = 32  # sft, rm: sequences (rm: pairs) of one optimizer step
    logprob_tokens: int = 16384  # tokens per forward of passes without gradient
    logits_bytes: int = 1 << 30  # of logits, their softmax and gradient at a time; more is done in parts
    packing: bool = True  # rows end to end, without the padding between them
    share_prompts: bool = True  # compute what adjacent rows of a micro-batch begin with once (packing, context 1)
    balance: bool = True  # deal the rows of a minibatch to data-parallel ranks by their cost

    def __post_init__(self) -> None:
        names = ("prompts", "group", "micro_batch_samples", "epochs", "sequences", "logprob_tokens", "logits_bytes")
        for name in names:
            _at_least(f"batch.{name}", getattr(self, name), 1)
        _at_least("batch.minibatch_samples", self.minibatch_samples, 0)
        _at_least("batch.micro_batch_tokens", self.micro_batch_tokens, 0)


@dataclass
class SamplingConfig:
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    max_response_tokens: int = 64
    stop: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        _at_least("sampling.temperature", self.temperature, 0)
        _above("sampling.top_p", self.top_p, 0)
        _within("sampling.top_p", self.top_p, 0, 1)
        _at_least("sampling.top_k", self.top_k, 0)
        _within("sampling.min_p", self.min_p, 0, 1)
        _at_least("sampling.max_response_tokens", self.max_response_tokens, 1)


@dataclass
class KLControllerConfig:
    kind: str = "fixed"  # fixed, adaptive
    target: float = 0.1  # nats, of k1: per token for sequence_mean, per response for sequence_sum
    horizon: int = 10000  # samples
    measure: str = "sequence_mean"  # KL of the target: mean over sequences of the mean, or of the sum, over tokens

    def __post_init__(self) -> None:
        _one_of("algorithm.kl.controller.kind", self.kind, ("fixed", "adaptive"))
        _above("algorithm.kl.controller.target", self.target, 0)
        _at_least("algorithm.kl.controller.horizon", self.horizon, 1)
        _one_of("algorithm.kl.controller.measure", self.measure, ("sequence_mean", "sequence_sum"))


@dataclass
class KLConfig:
    coef: float = 0.0  # beta; 0 loads no reference model
    estimator: str = "k1"  # k1, k2, k3, abs, k1+, k3+
    placement: str = "none"  # none, reward, loss
    importance_weighted: bool = False
    controller: KLControllerConfig = field(default_factory=KLControllerConfig)

    def __post_init__(self) -> None:
        _at_least("algorithm.kl.coef", self.coef, 0)
        _one_of("algorithm.kl.estimator", self.estimator, ("k1", "k2", "k3", "abs", "k1+", "k3+"))
        _one_of("algorithm.kl.placement", self.placement, ("none", "reward", "loss"))
        if self.coef > 0 and self.placement == "none":
            raise ConfigError("algorithm.kl.placement", self.placement, "reward or loss when algorithm.kl.coef > 0")


@dataclass
class OverlongConfig:
    mask_truncated: bool = False  # samples cut by the token limit leave loss and denominators, not the baseline
    penalty: float = 0.0  # subtracted from the reward of a sample that does not end in EOS
    # soft penalty, from 0 to -1 over the last soft_fraction * sampling.max_response_tokens before the limit; 0: off
    soft_fraction: float = 0.0

    def __post_init__(self) -> None:
        _at_least("algorithm.overlong.penalty", self.penalty, 0)
        _within("algorithm.overlong.soft_fraction", self.soft_fraction, 0, 1)

    @property
    def shapes(self) -> bool:
        """Whether rewards change."""
        return bool(self.penalty or self.soft_fraction)


@dataclass
class SapoConfig:
    tau_pos: float = 1.0
    tau_neg: float = 1.05

    def __post_init__(self) -> None:
        _above("algorithm.sapo.tau_pos", self.tau_pos, 0)
        _above("algorithm.sapo.tau_neg", self.tau_neg, 0)


@dataclass
class DppoConfig:
    limit: float = 0.2  # of |pi - mu|, probabilities of a token by policy and engine
    penalty: float = 1e-3  # times (log pi - log mu)^2, on every token

    def __post_init__(self) -> None:
        _within("algorithm.dppo.limit", self.limit, 0, 1)
        _at_least("algorithm.dppo.penalty", self.penalty, 0)


@dataclass
class CovConfig:
    """clip_cov and kl_cov: tokens by the covariance of advantage and logprob over the minibatch."""

    fraction: float = 2e-4  # of the minibatch's tokens; at least one token
    low: float = 1.0  # clip_cov takes tokens with a covariance between these
    high: float = 5.0
    kl_coef: float = 1.0  # kl_cov

    def __post_init__(self) -> None:
        _within("algorithm.cov.fraction", self.fraction, 0, 1)
        _above("algorithm.cov.high", self.high, self.low)
        _at_least("algorithm.cov.kl_coef", self.kl_coef, 0)


@dataclass
class RewardLossConfig:
    """Stage rm."""

    kind: str = "bradley_terry"  # bradley_terry, regression
    center_coef: float = 0.0
    margin: bool = False  # subtract the row's `margin` column inside the sigmoid
    attributes: list[str] = field(default_factory=list)  # regression: columns with the target scores, one output each

    def __post_init__(self) -> None:
        _one_of("algorithm.reward_loss.kind", self.kind, ("bradley_terry", "regression"))
        _at_least("algorithm.reward_loss.center_coef", self.center_coef, 0)
        if self.kind == "regression" and not self.attributes:
            raise ConfigError("algorithm.reward_loss.attributes", [], "at least one column name for regression")


@dataclass
class AlgorithmConfig:
    advantage: str = "grpo"  # gae (stage ppo), GROUP_BASELINES, OTHER_BASELINES
    group_eps: float = 1e-6  # beside the group's std: grpo, gdpo, pass_at_k. TRL: 1e-4, OpenRLHF: 1e-9
    pass_at_k_std: bool = False  # divide by the group's std
    policy_loss: str = "ppo"  # POLICY_LOSSES
    old_logprobs: str = "auto"  # auto: by the update's own forward pass where that is enough; recompute: by another
    aggregation: str = "token_mean"
    clip_low: float = 0.2  # of the ratio; gspo: of the sequence's, 3e-4; gmpo: of the log-ratio, 0.4
    clip_high: float = 0.2
    dual_clip: float = 0.0  # 0: off
    ratio_cap: float = 5.0  # cispo, a raw ratio
    sapo: SapoConfig = field(default_factory=SapoConfig)
    dppo: DppoConfig = field(default_factory=DppoConfig)
    cov: CovConfig = field(default_factory=CovConfig)
    gamma: float = 1.0
    lam: float = 1.0
    whiten: bool = False
    whiten_shift: bool = True  # subtract the mean
    whiten_ddof: int = 0  # 1: the unbiased variance
    entropy_coef: float = 0.0
    filter_groups: bool = False  # dynamic sampling: replace prompts whose samples all have the same reward
    filter_rounds: int = 10  # of generation for one rollout, at most
    kl: KLConfig = field(default_factory=KLConfig)
    overlong: OverlongConfig = field(default_factory=OverlongConfig)
    reward_loss: RewardLossConfig = field(default_factory=RewardLossConfig)

    def __post_init__(self) -> None:
        _one_of("algorithm.advantage", self.advantage, ("gae", *GROUP_BASELINES, *OTHER_BASELINES))
        _at_least("algorithm.group_eps", self.group_eps, 0)
        _one_of("algorithm.policy_loss", self.policy_loss, POLICY_LOSSES)
        _one_of("algorithm.old_logprobs", self.old_logprobs, ("auto", "recompute"))
        _one_of(
            "algorithm.aggregation",
            self.aggregation,
            ("token_mean", "seq_mean_token_mean", "seq_mean_token_sum", "seq_mean_token_sum_norm"),
        )
        _within("algorithm.clip_low", self.clip_low, 0, 1)
        _at_least("algorithm.clip_high", self.clip_high, 0)
        if self.dual_clip and self.dual_clip <= 1:
            raise ConfigError("algorithm.dual_clip", self.dual_clip, "a number > 1, or 0 for off")
        _above("algorithm.ratio_cap", self.ratio_cap, 0)
        _within("algorithm.gamma", self.gamma, 0, 1)
        _within("algorithm.lam", self.lam, 0, 1)
        _one_of("algorithm.whiten_ddof", self.whiten_ddof, (0, 1))
        _at_least("algorithm.filter_rounds", self.filter_rounds, 1)
        self._together()

    def _together(self) -> None:
        """What two of the keys do not mean together."""
        mean = "seq_mean_token_mean"
        if self.policy_loss in ("gspo", "sapo", "gmpo") and self.aggregation != mean:
            expected = f"{mean} with algorithm.policy_loss={self.policy_loss}, which is a mean over sequences"
            raise ConfigError("algorithm.aggregation", self.aggregation, expected)
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


@dataclass
class EngineConfig:
    name: str = (
        "native"  # native, trtllm, trtllm_engine, recorded (from `answers`, or from debug.train_only, which sets this)
    )
    tensor_parallel: int = 1  # ranks of one replica
    ranks: int = 0  # so many last ranks of the job only generate; 0: engines stand on the trainer's ranks
    kv_cache_bytes: int = 1 << 30  # of a rank
    max_batch: int = 512  # rows decoded together
    dtype: str = "auto"  # auto: the trainer's compute dtype
    quantization: str = "none"  # none, int8, fp8: of the layers' matrices, at every refit
    cuda_graphs: bool = False  # native, on CUDA: launch a decode step's kernels at once
    answers: str = ""  # engine.name=recorded: a folder that debug.record_answers wrote
    trtllm: TrtllmConfig = field(default_factory=TrtllmConfig)

    def __post_init__(self) -> None:
        _one_of("engine.name", self.name, ("native", "trtllm", TRTLLM_ENGINE, "recorded"))
        _one_of("engine.dtype", self.dtype, ("auto", "float32", "bfloat16"))
        _one_of("engine.quantization", self.quantization, KINDS)
        _at_least("engine.kv_cache_bytes", self.kv_cache_bytes, 1)
        _at_least("engine.max_batch", self.max_batch, 1)
        _at_least("engine.tensor_parallel", self.tensor_parallel, 1)
        _at_least("engine.ranks", self.ranks, 0)
        if self.tensor_parallel != 1 and self.name == "trtllm":
            raise ConfigError("engine.tensor_parallel", self.tensor_parallel, ONE_RANK)
        if self.cuda_graphs and (self.name != "native" or self.tensor_parallel != 1):
            expected = "false unless engine.name=native and engine.tensor_parallel=1"
            raise ConfigError("engine.cuda_graphs", True, expected)
        if self.name == TRTLLM_ENGINE:
            check_engine(self)


@dataclass
class RefitConfig:
    bucket_bytes: int = 256 << 20  # of one message between ranks
    verify: str = "sentinel"  # sentinel, checksum (sentinel and a hash of every tensor on both sides)
    timeout_s: float = 600.0
    tolerance: float = (
        0.0  # mean |logprob difference| allowed on the sentinel; 0: by dtype (1e-3 float32, 5e-2 bfloat16)
    )

    def __post_init__(self) -> None:
        _at_least("refit.bucket_bytes", self.bucket_bytes, 1)
        _one_of("refit.verify", self.verify, ("sentinel", "checksum"))
        _above("refit.timeout_s", self.timeout_s, 0)
        _at_least("refit.tolerance", self.tolerance, 0)


# `mismatch.correction` -> its bounds of r = trainer's probability / engine's, where `cap`, `low` or `high` is 0
MISMATCH_BOUNDS: dict[str, dict[str, float]] = {
    "tis_token": {"cap": 2.0},
    "tis_sequence": {"cap": 5.0},
    "icepop": {"low": 0.5, "high": 5.0},
    "geometric_mask": {"low": 0.99, "high": 1.01},
    "veto": {"low": 1e-4, "high": 1e4},
}
WEIGHING = ("tis_token", "tis_sequence", "icepop")


@dataclass
class MismatchConfig:
    # none, or one or more of MISMATCH_BOUNDS joined by +, at most one of which weighs tokens. auto: tis_token with a
    # quantised engine, else none; the frozen config has the choice
    correction: str = "auto"
    cap: float = 0.0  # of a weight (tis_*); 0: the method's default
    low: float = 0.0  # r below it is left out (icepop, geometric_mask, veto); 0: the method's default
    high: float = 0.0  # r above it is left out; 0: the method's default
    warn_above: float = 1.05  # token_mult_prob_error
    stop_above: float = 0.0  # 0: never

    def __post_init__(self) -> None:
        for name in self.methods:
            _one_of("mismatch.correction", name, ("none", *MISMATCH_BOUNDS))
        if len(set(self.methods)) < len(self.methods) or ("none" in self.methods and len(self.methods) > 1):
            raise ConfigError("mismatch.correction", self.correction, "none, or different methods joined by +")
        if sum(name in WEIGHING for name in self.methods) > 1:
            raise ConfigError("mismatch.correction", self.correction, f"at most one of {', '.join(WEIGHING)}")
        for key in ("cap", "low", "high"):
            _at_least(f"mismatch.{key}", getattr(self, key), 0)
            users = [name for name in self.methods if key in MISMATCH_BOUNDS.get(name, {})]
            if getattr(self, key) and len(users) != 1:
                expected = "0 (each method's default) unless exactly one method of mismatch.correction has this bound"
                raise ConfigError(f"mismatch.{key}", getattr(self, key), expected)
        for name in self.methods:
            bounds = self.bounds(name)
            if not bounds.get("low", 0) < bounds.get("high", 1):
                raise ConfigError("mismatch.low", bounds["low"], f"a number below mismatch.high={bounds['high']:g}")
        _at_least("mismatch.warn_above", self.warn_above, 1)
        if self.stop_above and not self.stop_above > 1:
            raise ConfigError("mismatch.stop_above", self.stop_above, "a number > 1 (a perfect match), or 0 for off")

    @property
    def methods(self) -> list[str]:
        return ["none" if name.strip() == "auto" else name.strip() for name in self.correction.split("+")]

    def bounds(self, method: str) -> dict[str, float]:
        """The bounds of one method, by argument name."""
        return {key: getattr(self, key) or value for key, value in MISMATCH_BOUNDS.get(method, {}).items()}


@dataclass
class RewardFunctionConfig:
    path: str = ""  # module:function, path.py:function, or a built-in name
    name: str = ""  # in metrics; empty: the function's
    weight: float = 1.0
    args: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.path:
            raise ConfigError(
                "reward.functions[].path", self.path, "module:function, path.py:function or a built-in name"
            )


@dataclass
class RewardConfig:
    functions: list[RewardFunctionConfig] = field(default_factory=list)
    model: str = ""  # folder of a trained reward model (the `hf` folder of an rm run)
    model_weight: float = 1.0
    model_standardize: bool = True  # divide the model's centred score by its std on its own training set
    timeout_s: float = 60.0
    workers: int = 4  # reward functions and chunks of samples scored at the same time
    overlap: bool = True  # score samples while others are generated, where a function takes them one by one
    clip: float = 0.0  # |reward| limit after normalisation; 0: off
    normalize: bool = False  # subtract the running mean, divide by the running std

    def __post_init__(self) -> None:
        _above("reward.timeout_s", self.timeout_s, 0)
        _at_least("reward.workers", self.workers, 1)
        _at_least("reward.clip", self.clip, 0)


@dataclass
class DataConfig:
    train: str = ""
    eval: str = ""
    format: str = "auto"  # auto, messages, prompt_completion, preference, prompt
    columns: dict[str, str] = field(default_factory=dict)  # our name -> the file's column name
    prompt_template: str = ""  # python format string over the row's columns, makes `prompt` where there is none
    completion_template: str = ""  # likewise `completion`
    max_prompt_tokens: int = 512
    max_tokens: int = 1024  # prompt + response
    overlong: str = "drop"  # drop, truncate
    shuffle: bool = True
    loss_on: str = "assistant"  # assistant, all

    def __post_init__(self) -> None:
        _one_of("data.format", self.format, ("auto", "messages", "prompt_completion", "preference", "prompt"))
        _at_least("data.max_prompt_tokens", self.max_prompt_tokens, 1)
        _at_least("data.max_tokens", self.max_tokens, 2)
        _one_of("data.overlong", self.overlong, ("drop", "truncate"))
        _one_of("data.loss_on", self.loss_on, ("assistant", "all"))


@dataclass
class EvalConfig:
    prompts: int = 512  # at most this many held-out rows; 0: all
    generate: bool = True  # greedy answers scored by the reward functions (stages that have any)
    temperature: float = 0.0
    samples: int = 1  # > 1: pass@k
    # what counts as right; empty: reward.functions. An answer is right if every applicable function gives it full score
    functions: list[RewardFunctionConfig] = field(default_factory=list)
    full_score: float = 1.0
    max_response_tokens: int = 0  # 0: sampling.max_response_tokens

    def __post_init__(self) -> None:
        _at_least("eval.prompts", self.prompts, 0)
        _at_least("eval.temperature", self.temperature, 0)
        _at_least("eval.samples", self.samples, 1)
        if self.samples > 1 and self.temperature == 0:
            raise ConfigError(
                "eval.temperature", 0, f"a number > 0 with eval.samples={self.samples}: greedy answers are equal"
            )


@dataclass
class CheckpointConfig:
    every: int = 0  # steps; 0: only at the end
    keep_last: int = 2
    keep_best: int = 0
    metric: str = "eval/accuracy"  # for keep_best, larger is better (eval/loss: smaller)
    final: bool = True
    async_save: bool = False  # write while training goes on, from a copy in host memory
    rollouts: bool = True  # store each finished rollout until a checkpoint of its step: never generated twice

    def __post_init__(self) -> None:
        _at_least("checkpoint.every", self.every, 0)
        _at_least("checkpoint.keep_last", self.keep_last, 1)
        _at_least("checkpoint.keep_best", self.keep_best, 0)


@dataclass
class WandbConfig:
    mode: str = "disabled"  # disabled, offline, online
    project: str = "aligner"
    entity: str = ""

    def __post_init__(self) -> None:
        _one_of("logging.wandb.mode", self.mode, ("disabled", "offline", "online"))


@dataclass
class LoggingConfig:
    jsonl: bool = True
    tensorboard: bool = True
    progress: bool = True
    samples_shown: int = 4
    wandb: WandbConfig = field(default_factory=WandbConfig)


@dataclass
class ClusterConfig:
    backend: str = "auto"  # auto, gloo, nccl
    timeout_s: float = 1800.0  # of collectives
    threads: int = 0  # OMP threads per rank; 0: cores / local ranks
    signal: str = "USR1"  # besides TERM: save at the next step boundary and stop
    time_limit_s: float = (
        0.0  # stop in time for this, counted from the start of the process; 0: only Slurm's end counts
    )
    margin_s: float = 60.0  # kept free before the end, beyond the longest step and save so far
    watchdog: WatchdogConfig = field(default_factory=WatchdogConfig)

    def __post_init__(self) -> None:
        _one_of("cluster.backend", self.backend, ("auto", "gloo", "nccl"))
        _one_of("cluster.signal", self.signal, ("USR1", "USR2", "HUP"))
        _at_least("cluster.time_limit_s", self.time_limit_s, 0)
        _at_least("cluster.margin_s", self.margin_s, 0)
        _above("cluster.timeout_s", self.timeout_s, 0)
        _at_least("cluster.threads", self.threads, 0)


@dataclass
class DebugConfig:
    skip_refit: bool = False  # test hook: the engine keeps its old weights and the next refit must notice
    shuffle_rewards: bool = False  # control experiment: permute rewards within each group
    record: int = 0  # write the first n rollouts to <run.dir>/rollouts (rollout_only and 0: all of them)
    record_answers: bool = False  # write every answer of the engine to <run.dir>/answers
    rollout_only: bool = False  # generate, score, measure, record; no optimizer, no update
    train_only: str = ""  # a recorded rollout, or a folder of them, to train on instead of an engine's
    first_step_checks: bool = False  # before and at the first update: what must hold exactly, or stop

    def __post_init__(self) -> None:
        _at_least("debug.record", self.record, 0)
        if self.train_only and (self.rollout_only or self.record):
            key = "rollout_only" if self.rollout_only else "record"
            expected = "off with debug.train_only: a recording is neither generated nor recorded again"
            raise ConfigError(f"debug.{key}", getattr(self, key), expected)
        if self.first_step_checks and self.rollout_only:
            raise ConfigError("debug.first_step_checks", True, "false with debug.rollout_only: there is no update")


@dataclass
class Config:
    seed: int = 0
    run: RunConfig = field(default_factory=RunConfig)
    stage: StageConfig = field(default_factory=StageConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    critic: CriticConfig = field(default_factory=CriticConfig)
    batch: BatchConfig = field(default_factory=BatchConfig)
    sampling: SamplingConfig = field(default_factory=SamplingConfig)
    algorithm: AlgorithmConfig = field(default_factory=AlgorithmConfig)
    engine: EngineConfig = field(default_factory=EngineConfig)
    refit: RefitConfig = field(default_factory=RefitConfig)
    memory: MemoryConfig = field(default_factory=MemoryConfig)
    mismatch: MismatchConfig = field(default_factory=MismatchConfig)
    reward: RewardConfig = field(default_factory=RewardConfig)
    data: DataConfig = field(default_factory=DataConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    logging: LoggingConfig = field(default_factory=LoggingConfig)
    cluster: ClusterConfig = field(default_factory=ClusterConfig)
    debug: DebugConfig = field(default_factory=DebugConfig)

    def __post_init__(self) -> None:
        _at_least("seed", self.seed, 0)
        if self.debug.train_only:
            self.engine.name = "recorded"
        elif self.engine.name == "recorded" and not self.engine.answers:
            expected = "a recorded rollout, or a folder of them, with engine.name=recorded (or engine.answers)"
            raise ConfigError("debug.train_only", "", expected)
        if self.engine.answers and (self.engine.name != "recorded" or self.debug.train_only):
            expected = "empty but with engine.name=recorded, and with debug.train_only"
            raise ConfigError("engine.answers", self.engine.answers, expected)
        if self.debug.record_answers and self.engine.name == "recorded":
            raise ConfigError("debug.record_answers", True, "false with engine.name=recorded")
        settle(self)
