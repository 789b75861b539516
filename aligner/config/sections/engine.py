"""The sections `engine` and `refit`: what generates, and how it gets the weights."""

from __future__ import annotations

from dataclasses import dataclass, field

from aligner.config.checks import AUTO, Auto, Switch, above, at_least, auto_or, auto_or_switch, one_of
from aligner.config.engines import ENGINES, NAMES, Capabilities, check_options
from aligner.config.quantization import KINDS
from aligner.config.sections.child import ChildConfig
from aligner.config.sections.trtllm import TrtllmConfig
from aligner.config.sections.vllm import VllmConfig

CACHE_BYTES = 1 << 30  # in place of `auto`, where nothing is known of a machine


@dataclass
class EngineConfig:
    name: str = (
        "native"  # native, vllm, trtllm, trtllm_engine, recorded (`answers`, or debug.train_only, which sets this)
    )
    tensor_parallel: int = 1  # ranks of one replica
    ranks: int = 0  # so many last ranks of the job only generate; 0: engines stand on the trainer's ranks
    # with `ranks`: rollout k has the weights after step k - 1 - lag, and is generated while earlier ones are trained on
    lag: int = 0
    # with `lag`: decode steps after which samples pause, and go on with newer weights; 0: they have one version
    window: int = 0
    # with `ranks`: without a sign of life, after which one of them counts as lost (Python that cannot run gives none)
    silent_s: float = 60.0
    kv_cache_bytes: Auto = AUTO  # of a rank; auto: of a GPU what `plan` leaves, on a CPU 1 GiB (docs/memory.md)
    max_batch: int = 512  # rows decoded together
    dtype: str = "auto"  # auto: the trainer's compute dtype
    quantization: str = "none"  # none, int8, fp8: emulated: at every refit matrices are rounded, nothing is saved
    # on CUDA: launch a decode step's kernels at once (vllm: compile the model, too); auto: true of trtllm alone
    cuda_graphs: Switch = AUTO
    # give back the KV cache when it sleeps (`memory.sleep`); auto: false of vllm, where it is of GPUs alone
    sleep: Switch = AUTO
    answers: str = ""  # engine.name=recorded: a folder that debug.record_answers wrote
    trtllm: TrtllmConfig = field(default_factory=TrtllmConfig)
    vllm: VllmConfig = field(default_factory=VllmConfig)

    @property
    def cache_bytes(self) -> int:
        """`kv_cache_bytes` as far as it is known."""
        return CACHE_BYTES if isinstance(self.kv_cache_bytes, str) else self.kv_cache_bytes

    @property
    def child(self) -> ChildConfig | None:
        """The section of the package that runs in a child process, if one does."""
        section = ENGINES[self.name].section
        return getattr(self, section) if section else None

    @property
    def can(self) -> Capabilities:
        return ENGINES[self.name].can

    @property
    def captures(self) -> bool:
        """`cuda_graphs`, decided."""
        return self._decided("cuda_graphs")

    @property
    def sleeps(self) -> bool:
        """`sleep`, decided."""
        return self._decided("sleep")

    def _decided(self, key: str) -> bool:
        value = getattr(self, key)
        return key in ENGINES[self.name].by_default if value == AUTO else bool(value)

    def __post_init__(self) -> None:
        one_of("engine.name", self.name, NAMES)
        one_of("engine.dtype", self.dtype, ("auto", "float32", "bfloat16"))
        one_of("engine.quantization", self.quantization, KINDS)
        self.kv_cache_bytes = auto_or("engine.kv_cache_bytes", self.kv_cache_bytes, 1)
        at_least("engine.max_batch", self.max_batch, 1)
        at_least("engine.tensor_parallel", self.tensor_parallel, 1)
        at_least("engine.ranks", self.ranks, 0)
        at_least("engine.lag", self.lag, 0)
        at_least("engine.window", self.window, 0)
        at_least("engine.silent_s", self.silent_s, 5)  # signs come every half second, where nothing is late
        self.cuda_graphs = auto_or_switch("engine.cuda_graphs", self.cuda_graphs)
        self.sleep = auto_or_switch("engine.sleep", self.sleep)
        check_options(self)


MESSAGES, FLOOR_BYTES = 8, 1 << 20  # at least so many messages for a pair of ranks, if they are no smaller than that


def message_bytes(total_bytes: int, bucket_bytes: int) -> int:
    """The most in one message of a refit, of all that one rank sends another: one is packed while another travels."""
    return min(bucket_bytes, max(FLOOR_BYTES, -(-total_bytes // MESSAGES)))


@dataclass
class RefitConfig:
    bucket_bytes: int = 256 << 20  # of one message between ranks
    verify: str = "sentinel"  # sentinel, checksum (sentinel and a hash of every tensor on both sides)
    # of a policy with model.lora: merged (weights), factors (the frozen weights once, then A and B, which the engine
    # merges)
    adapters: str = "merged"
    timeout_s: float = 600.0  # that ranks wait for each other
    tolerance: float = (
        0.0  # mean |logprob difference| allowed on the sentinel; 0: by dtype (1e-3 float32, 5e-2 bfloat16)
    )

    def __post_init__(self) -> None:
        at_least("refit.bucket_bytes", self.bucket_bytes, 1)
        one_of("refit.verify", self.verify, ("sentinel", "checksum"))
        one_of("refit.adapters", self.adapters, ("merged", "factors"))
        above("refit.timeout_s", self.timeout_s, 0)
        at_least("refit.tolerance", self.tolerance, 0)
