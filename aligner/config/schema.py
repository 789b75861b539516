"""The typed config: every key, its type, its default, and the check of its value, here or in the files of the larger
sections beside this one. Imports no torch.

Values are checked where they are born (`__post_init__`); what needs several sections is in `validate.py`.
"""

from __future__ import annotations

from dataclasses import dataclass, field, make_dataclass, replace

from aligner.config.algorithm import AlgorithmConfig
from aligner.config.attention import AttentionConfig, check_layers
from aligner.config.checks import above, at_least, one_of, within
from aligner.config.data import DataConfig
from aligner.config.engine import EngineConfig, RefitConfig
from aligner.config.families import TRAITS, check_traits
from aligner.config.latent import LatentConfig, check_latent
from aligner.config.linear import LinearConfig, check_linear
from aligner.config.memory import MemoryConfig
from aligner.config.mismatch import MismatchConfig
from aligner.config.moe import MoeConfig, check_dense_layers, check_moe_family
from aligner.config.quantization import settle
from aligner.config.rewards import EvalConfig, RewardConfig
from aligner.config.rope import RopeScalingConfig, check_rope
from aligner.config.scales import ScalesConfig
from aligner.config.stages import STAGES
from aligner.config.watchdog import WatchdogConfig
from aligner.errors import ConfigError

ROLLOUT_STAGES = tuple(name for name, stage in STAGES.items() if stage.rollouts)


@dataclass
class StopConfig:
    """End the stage early once `metric` (an eval metric) reaches `above`."""

    metric: str = ""  # empty: no early end
    above: float = 0.0  # the value that ends the stage


@dataclass
class RunConfig:
    dir: str = "runs/${run.name}"  # everything that the run writes
    name: str = "${stage.name}"  # in run.dir and on boards
    resume: str = "auto"  # auto, never, or a checkpoint folder
    accept_changes: bool = False  # go on from a checkpoint although what defines the run has changed (docs/resume.md)
    deterministic: bool = False  # no wall-clock decisions, deterministic kernels
    steps: int = 100  # optimizer steps for sft, rm and dpo, rollouts for ppo and grpo
    eval_every: int = 0  # 0: only at the end
    samples_every: int = 10  # print the sample table every n steps; 0: never
    stop: StopConfig = field(default_factory=StopConfig)
    export: bool = True  # write a Hugging Face folder at the end

    def __post_init__(self) -> None:
        if not self.dir:
            raise ConfigError("run.dir", self.dir, "a folder for the run")
        at_least("run.steps", self.steps, 0)
        at_least("run.eval_every", self.eval_every, 0)
        at_least("run.samples_every", self.samples_every, 0)


@dataclass
class _StageName:
    name: str = "sft"  # which one: a file of conf/stage

    def __post_init__(self) -> None:
        one_of("stage.name", self.name, tuple(STAGES))


# the name, and the sections of stages that have keys of their own
StageConfig = make_dataclass(
    "StageConfig",
    [(name, stage.section, field(default_factory=stage.section)) for name, stage in STAGES.items() if stage.section],
    bases=(_StageName,),
    module=__name__,
)


@dataclass
class ModelConfig:
    family: str = "llama"  # `model_type` of config.json (docs/models.md)
    num_layers: int = 4  # decoder layers
    hidden_size: int = 128  # width of the residual stream
    ffn_hidden_size: int = 384  # of the gated MLP
    num_heads: int = 4  # query heads
    num_kv_heads: int = 4  # heads of keys and values; a divisor of num_heads
    head_dim: int = 0  # 0: hidden_size / num_heads
    vocab_size: int = 0  # 0: the tokenizer's
    rope_base: float = 10000.0  # of the rotary frequencies
    rope_scaling: RopeScalingConfig = field(default_factory=RopeScalingConfig)
    norm_eps: float = 1e-6  # of RMSNorm
    max_position: int = 4096  # the longest row, in tokens
    tie_embeddings: bool = True  # the output layer is the embedding
    qk_norm: bool = False  # norms of queries and keys
    qkv_bias: bool = False  # of most families with it also the projection behind attention
    mlp_bias: bool = False  # in the MLP
    attention: AttentionConfig = field(default_factory=AttentionConfig)
    latent: LatentConfig = field(default_factory=LatentConfig)
    linear: LinearConfig = field(default_factory=LinearConfig)
    scales: ScalesConfig = field(default_factory=ScalesConfig)
    moe: MoeConfig = field(default_factory=MoeConfig)
    init_std: float = 0.02  # of random weights
    init: str = "random"  # random, a Hugging Face folder, a run folder, or a checkpoint
    tokenizer: str = ""  # a Hugging Face tokenizer folder; empty: the one in `model.init`
    dtype: str = "auto"  # auto, float32, bfloat16
    recompute: str = "none"  # none, full (recompute every layer's activations in backward)
    varlen_attention: bool = False  # on CUDA: attention of rows of any length in one call, without padding and masks

    def __post_init__(self) -> None:
        one_of("model.family", self.family, tuple(TRAITS))
        check_moe_family(self.family, self.moe)
        check_traits(self)
        check_latent(self, TRAITS[self.family].latent)
        check_layers(self.attention, self.num_layers)
        check_dense_layers(self.moe, self.num_layers)
        check_linear(self.linear, self.num_layers, self.family, TRAITS[self.family].linear)
        for name in ("num_layers", "hidden_size", "ffn_hidden_size", "num_heads", "num_kv_heads", "max_position"):
            at_least(f"model.{name}", getattr(self, name), 1)
        above("model.rope_base", self.rope_base, 0)
        at_least("model.head_dim", self.head_dim, 0)
        at_least("model.vocab_size", self.vocab_size, 0)
        one_of("model.dtype", self.dtype, ("auto", "float32", "bfloat16"))
        one_of("model.recompute", self.recompute, ("none", "full"))
        if self.num_heads % self.num_kv_heads:
            raise ConfigError("model.num_kv_heads", self.num_kv_heads, f"a divisor of model.num_heads={self.num_heads}")
        if not (self.head_dim or self.latent.kv_rank) and self.hidden_size % self.num_heads:
            raise ConfigError(
                "model.hidden_size", self.hidden_size, f"a multiple of model.num_heads={self.num_heads}, or head_dim"
            )
        check_rope(self.rope_scaling, self.rotary_dim)

    @property
    def kv_channels(self) -> int:
        """Numbers of a head of queries, and of keys."""
        return self.head_dim or self.latent.head_dim or self.hidden_size // self.num_heads

    @property
    def value_channels(self) -> int:
        """Numbers of a head of values."""
        return self.latent.value_dim or self.kv_channels

    @property
    def latent_queries(self) -> bool:
        return self.latent.query_rank > 0

    @property
    def direct_queries(self) -> bool:
        return not self.latent_queries

    @property
    def rotary_dim(self) -> int:
        """Numbers of a head that are rotated."""
        return self.latent.rotary_dim or int(self.kv_channels * self.attention.rotary_fraction)

    @property
    def output_bias(self) -> bool:
        return self.qkv_bias and TRAITS[self.family].output_bias

    @property
    def expert_ffn(self) -> int:
        return self.moe.ffn_hidden_size or self.ffn_hidden_size

    @property
    def queries_per_group(self) -> int:
        """Heads that the queries' product makes for each of keys: queries and, in some families, their gates."""
        return self.num_heads * (2 if TRAITS[self.family].gated_attention else 1) // self.num_kv_heads

    def layer_kinds(self, layer: int) -> tuple[str, ...]:
        """Layer 0, 1, ... has the rows of the family's table that are of one of these kinds, or of none. Its MLP:
        "dense", or "sparse" with experts. Before it: "attention", or "linear"."""
        sparse = self.moe.num_experts and layer not in self.moe.dense_layers
        return "sparse" if sparse else "dense", "linear" if self.linear.is_linear(layer) else "attention"

    def layers_of(self, kind: str) -> list[int]:
        return [layer for layer in range(self.num_layers) if kind in self.layer_kinds(layer)]

    @property
    def mixed_layers(self) -> bool:
        """Whether not all layers have the same parameters."""
        return len({self.layer_kinds(layer) for layer in range(self.num_layers)}) > 1


@dataclass
class ParallelConfig:
    """Data parallel = what is left of the world."""

    tensor: int = 1  # ranks that share each matrix
    pipeline: int = 1  # ranks that share the layers
    context: int = 1  # ranks that share the tokens of a row
    context_mode: str = "allgather"  # allgather (of keys and values), alltoall (over heads)
    expert: int = 1  # ranks, out of the data- and context-parallel ones, that share the experts
    sequence: bool = False  # between matrices, tensor ranks share the tokens

    def __post_init__(self) -> None:
        for name in ("tensor", "pipeline", "context", "expert"):
            at_least(f"parallel.{name}", getattr(self, name), 1)
        one_of("parallel.context_mode", self.context_mode, ("allgather", "alltoall"))
        if self.sequence and self.tensor == 1:
            raise ConfigError("parallel.sequence", True, "false when parallel.tensor=1: it shards over tensor ranks")

    @property
    def model_size(self) -> int:
        return self.tensor * self.pipeline * self.context


@dataclass
class OptimConfig:
    lr: float = 1e-4  # peak learning rate
    min_lr: float = 0.0  # at the end of the decay
    schedule: str = "constant"  # constant, linear, cosine
    warmup_steps: int = 0  # linear, from 0
    decay_from: float = 0.0  # constant until this fraction of the steps, then the schedule's decay
    weight_decay: float = 0.01  # of AdamW; not of norms and biases
    betas: list[float] = field(default_factory=lambda: [0.9, 0.95])  # of AdamW
    eps: float = 1e-8  # of AdamW
    clip_grad: float = 1.0  # 0: off
    distributed: bool = True  # shard optimizer state over data-parallel ranks

    def __post_init__(self) -> None:
        above("optim.lr", self.lr, 0)
        within("optim.min_lr", self.min_lr, 0, self.lr)
        one_of("optim.schedule", self.schedule, ("constant", "linear", "cosine"))
        at_least("optim.warmup_steps", self.warmup_steps, 0)
        within("optim.decay_from", self.decay_from, 0, 1)
        at_least("optim.weight_decay", self.weight_decay, 0)
        above("optim.eps", self.eps, 0)
        at_least("optim.clip_grad", self.clip_grad, 0)
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
        at_least("critic.warmup_steps", self.warmup_steps, 0)
        at_least("critic.clip", self.clip, 0)


@dataclass
class BatchConfig:
    prompts: int = 32  # of a rollout
    group: int = 1  # samples of a prompt
    minibatch_samples: int = 0  # 0: the whole rollout
    micro_batch_samples: int = 8  # rows of a forward and backward pass on a rank
    micro_batch_tokens: int = 0  # > 0: as many rows as fit this many padded tokens, instead of micro_batch_samples
    epochs: int = 1  # passes over a rollout
    sequences: int = 32  # sft, rm, dpo: sequences (rm, dpo: pairs) of one optimizer step
    logprob_tokens: int = 16384  # tokens per forward of passes without gradient
    logits_bytes: int = 1 << 30  # of logits, their softmax and gradient at a time; more is done in parts
    packing: bool = True  # rows end to end, without the padding between them
    share_prompts: bool = True  # compute what adjacent rows of a micro-batch begin with once (packing, context 1)
    balance: bool = True  # deal the rows of a minibatch to data-parallel ranks by their cost

    def __post_init__(self) -> None:
        names = ("prompts", "group", "micro_batch_samples", "epochs", "sequences", "logprob_tokens", "logits_bytes")
        for name in names:
            at_least(f"batch.{name}", getattr(self, name), 1)
        at_least("batch.minibatch_samples", self.minibatch_samples, 0)
        at_least("batch.micro_batch_tokens", self.micro_batch_tokens, 0)


@dataclass
class SamplingConfig:
    temperature: float = 1.0  # 0: greedy
    top_p: float = 1.0  # 1: off
    top_k: int = 0  # 0: off
    min_p: float = 0.0  # 0: off
    max_response_tokens: int = 64  # the token limit of a response
    stop: list[str] = field(default_factory=list)  # texts that end a response

    def __post_init__(self) -> None:
        at_least("sampling.temperature", self.temperature, 0)
        above("sampling.top_p", self.top_p, 0)
        within("sampling.top_p", self.top_p, 0, 1)
        at_least("sampling.top_k", self.top_k, 0)
        within("sampling.min_p", self.min_p, 0, 1)
        at_least("sampling.max_response_tokens", self.max_response_tokens, 1)
        if "" in self.stop:
            raise ConfigError(
                "sampling.stop", self.stop, "texts of at least one character: every text has an empty one"
            )


@dataclass
class CheckpointConfig:
    every: int = 0  # steps; 0: only at the end
    keep_last: int = 2  # checkpoints
    keep_best: int = 0  # by `metric`; 0: none
    metric: str = "eval/accuracy"  # for keep_best, larger is better (eval/loss: smaller)
    final: bool = True  # save at the end
    async_save: bool = False  # write while training goes on, from a copy in host memory
    rollouts: bool = True  # store each finished rollout until a checkpoint of its step: never generated twice

    def __post_init__(self) -> None:
        at_least("checkpoint.every", self.every, 0)
        at_least("checkpoint.keep_last", self.keep_last, 1)
        at_least("checkpoint.keep_best", self.keep_best, 0)


@dataclass
class WandbConfig:
    mode: str = "disabled"  # disabled, offline, online
    project: str = "aligner"  # of W&B
    entity: str = ""  # a team; empty: the default one

    def __post_init__(self) -> None:
        one_of("logging.wandb.mode", self.mode, ("disabled", "offline", "online"))


@dataclass
class LoggingConfig:
    jsonl: bool = True  # <run.dir>/metrics.jsonl
    tensorboard: bool = True  # <run.dir>/tensorboard
    progress: bool = True  # a bar, or a line per step, on rank 0
    samples_shown: int = 4  # of a rollout, on the terminal and in samples.jsonl
    wandb: WandbConfig = field(default_factory=WandbConfig)


@dataclass
class ClusterConfig:
    backend: str = "auto"  # auto, gloo, nccl
    timeout_s: float = 1800.0  # of collectives
    threads: int = 0  # of a rank's main thread; 0: OMP_NUM_THREADS, else cores / local ranks
    signal: str = "USR1"  # besides TERM: save at the next step boundary and stop
    time_limit_s: float = (
        0.0  # stop in time for this, counted from the start of the process; 0: only Slurm's end counts
    )
    margin_s: float = 60.0  # kept free before the end, beyond the longest step and save so far
    watchdog: WatchdogConfig = field(default_factory=WatchdogConfig)

    def __post_init__(self) -> None:
        one_of("cluster.backend", self.backend, ("auto", "gloo", "nccl"))
        one_of("cluster.signal", self.signal, ("USR1", "USR2", "HUP"))
        at_least("cluster.time_limit_s", self.time_limit_s, 0)
        at_least("cluster.margin_s", self.margin_s, 0)
        above("cluster.timeout_s", self.timeout_s, 0)
        at_least("cluster.threads", self.threads, 0)


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
        at_least("debug.record", self.record, 0)
        if self.train_only and (self.rollout_only or self.record):
            key = "rollout_only" if self.rollout_only else "record"
            expected = "off with debug.train_only: a recording is neither generated nor recorded again"
            raise ConfigError(f"debug.{key}", getattr(self, key), expected)
        if self.first_step_checks and self.rollout_only:
            raise ConfigError("debug.first_step_checks", True, "false with debug.rollout_only: there is no update")


@dataclass
class Config:
    seed: int = 0  # of data order, weights and sampling; every draw is derived from it by what it is for
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
        at_least("seed", self.seed, 0)
        if self.debug.train_only:
            self.engine = replace(self.engine, name="recorded", cuda_graphs=False)
        elif self.engine.name == "recorded" and not self.engine.answers:
            expected = "a recorded rollout, or a folder of them, with engine.name=recorded (or engine.answers)"
            raise ConfigError("debug.train_only", "", expected)
        if self.engine.answers and (self.engine.name != "recorded" or self.debug.train_only):
            expected = "empty but with engine.name=recorded, and with debug.train_only"
            raise ConfigError("engine.answers", self.engine.answers, expected)
        if self.debug.record_answers and self.engine.name == "recorded":
            raise ConfigError("debug.record_answers", True, "false with engine.name=recorded")
        settle(self)
