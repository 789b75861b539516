"""The sections `engine` and `refit`: what generates, and how it gets the weights."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from aligner.config.checks import AUTO, Auto, Switch
from aligner.config.engines import ENGINES, NAMES, Capabilities
from aligner.config.key import REFUSE, Section, key, section
from aligner.config.quantization import KINDS
from aligner.config.rule import rules
from aligner.config.sections.child import ChildConfig
from aligner.config.sections.trtllm import TrtllmConfig
from aligner.config.sections.vllm import VllmConfig

CACHE_BYTES = 1 << 30  # in place of `auto`, where nothing is known of a machine


@dataclass
class EngineConfig(Section, key="engine"):
    name: str = key(
        "native",
        "Engine that generates. recorded: `answers`, or debug.train_only, which sets this.",
        choices=NAMES,
    )
    tensor_parallel: int = key(1, "Ranks of one replica.", least=1)
    ranks: int = key(0, "Last ranks of the job that only generate. 0: engines stand on the trainer's ranks.", least=0)
    lag: int = key(
        0,
        "Steps by which a rollout's weights lag, with `ranks`: rollout k has those after step k - 1 - lag, and is "
        "generated while earlier ones are trained on.",
        least=0,
        resume=REFUSE,
    )
    window: int = key(
        0,
        "Decode steps after which samples pause and go on with newer weights, with `lag`. 0: one version each.",
        least=0,
        resume=REFUSE,
    )
    silent_s: float = key(
        60.0,
        "Seconds without a sign of life after which a rank of `ranks` counts as lost.",
        least=5,  # signs come every half second, where nothing is late
        rollouts=False,
    )
    kv_cache_bytes: Auto = key(
        AUTO,
        "Bytes of a rank's KV cache. auto: on a GPU what `plan` leaves, on a CPU 1 GiB (docs/memory.md).",
        auto=True,
        least=1,
        rollouts=False,
    )
    max_batch: int = key(512, "Rows decoded together.", least=1)
    dtype: str = key("auto", "Type of the weights. auto: the trainer's.", choices=("auto", "float32", "bfloat16"))
    quantization: str = key(
        "none", "Type to which refits round the layers' matrices: emulated, which saves nothing.", choices=KINDS
    )
    cuda_graphs: Switch = key(
        AUTO,
        "Capture decode steps as CUDA graphs (vllm: compile the model, too). auto: true of trtllm; of native on a GPU "
        "where it can: without experts, engine.tensor_parallel=1.",
        auto=True,
    )
    sleep: Switch = key(
        AUTO,
        "Give back the KV cache when the engine sleeps (`memory.sleep`). auto: false of vllm, which can on GPUs alone.",
        auto=True,
        rollouts=False,
    )
    answers: str = key("", "Folder that debug.record_answers wrote (engine.name=recorded).")
    trtllm: TrtllmConfig = section(TrtllmConfig)
    vllm: VllmConfig = section(VllmConfig)

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
        """`cuda_graphs`, decided, for an engine on a GPU."""
        unable = self.can.computes_here and self.tensor_parallel != 1
        return self._decided("cuda_graphs") and not (unable and self.cuda_graphs == AUTO)

    def captures_of(self, experts: int) -> bool:
        """`captures`, of a model with so many experts: of how many rows one gets is not known ahead where this process
        computes."""
        return self.captures and not (self.can.computes_here and experts)

    @property
    def sleeps(self) -> bool:
        """`sleep`, decided."""
        return self._decided("sleep")

    def _decided(self, name: str) -> bool:
        value = getattr(self, name)
        return name in ENGINES[self.name].by_default if value == AUTO else bool(value)

    @property
    def section(self) -> str:
        return ENGINES[self.name].section

    @property
    def why(self) -> Mapping[str, str]:
        """Capability -> why this engine lacks it."""
        return ENGINES[self.name].reasons

    RULES = rules("""
!can.tensor_parallel => tensor_parallel =1 | with engine.name={name}{why.tensor_parallel}
captures !can.cuda_graphs => cuda_graphs =false | with engine.name={name}{why.cuda_graphs}
captures can.computes_here tensor_parallel!=1 => cuda_graphs =false | unless engine.tensor_parallel=1
!sleeps !section => sleep =true|auto | with engine.name={name}: memory.sleep=never keeps its cache
section=trtllm !can.sleep_weights => trtllm.sleep_weights =false | with engine.name={name}{why.sleep_weights}
section=trtllm !can.prefix_reuse => trtllm.prefix_reuse =false | with engine.name={name}{why.prefix_reuse}
section=trtllm !sleeps => trtllm.sleep_weights =false | with engine.sleep={sleep}
section=vllm !sleeps => vllm.sleep_weights =false | with engine.sleep={sleep}
""")


MESSAGES, FLOOR_BYTES = 8, 1 << 20  # at least so many messages for a pair of ranks, if they are no smaller than that


def message_bytes(total_bytes: int, bucket_bytes: int) -> int:
    """The most in one message of a refit, of all that one rank sends another: one is packed while another travels."""
    return min(bucket_bytes, max(FLOOR_BYTES, -(-total_bytes // MESSAGES)))


@dataclass
class RefitConfig(Section, key="refit"):
    bucket_bytes: int = key(256 << 20, "Most bytes of one message between ranks.", least=1)
    verify: str = key(
        "sentinel",
        "How a refit is verified. sentinel: logprobs of some prompts; checksum: also a hash of every tensor.",
        choices=("sentinel", "checksum"),
    )
    adapters: str = key(
        "merged",
        "What travels of a policy with model.lora. merged: its weights; factors: the frozen weights once, then A and "
        "B, which the engine merges.",
        choices=("merged", "factors"),
    )
    timeout_s: float = key(600.0, "Seconds that ranks wait for each other.", above=0)
    tolerance: float = key(
        0.0, "Largest mean |logprob difference| on the sentinel. 0: by dtype (1e-3 float32, 5e-2 bfloat16).", least=0
    )
