"""The sections `engine` and `refit`: the engine that generates, and how it gets the weights."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from aligner.config.checks import AUTO, Auto, Switch
from aligner.config.engines import NAMES, Capabilities, entry_of
from aligner.config.key import REFUSE, Section, key, section
from aligner.config.quantization import KINDS
from aligner.config.rule import rules
from aligner.config.sections.child import ChildConfig
from aligner.config.sections.trtllm import TrtllmConfig
from aligner.config.sections.vllm import VllmConfig

CACHE_BYTES = 1 << 30  # for `auto`, if nothing is known about a machine


@dataclass
class EngineConfig(Section, key="engine"):
    name: str = key(
        "native",
        "Engine that generates. recorded: replay `answers`, or debug.train_only, which sets it.",
        choices=NAMES,
        named="EngineEntry",
    )
    tensor_parallel: int = key(1, "Ranks per replica.", least=1)
    ranks: int = key(0, "Number of last ranks that only generate. 0: engines run on the trainer's ranks.", least=0)
    lag: int = key(
        0,
        "Steps between a rollout's weights and its training, with `ranks`. Rollout k has the weights after step "
        "k - 1 - lag, and is generated while earlier rollouts are trained on.",
        least=0,
        resume=REFUSE,
    )
    window: int = key(
        0,
        "Decode steps after which samples pause and resume with newer weights, with `lag`. 0: one version each.",
        least=0,
        resume=REFUSE,
    )
    silent_s: float = key(
        60.0,
        "Seconds without a heartbeat after which a rank of `ranks` counts as lost.",
        least=5,  # heartbeats come every half second, if nothing is late
        rollouts=False,
    )
    kv_cache_bytes: Auto = key(
        AUTO,
        "Bytes of a rank's KV cache. auto: on a GPU all that `plan` leaves free, on a CPU 1 GiB "
        "(docs/explanation/memory.md).",
        auto=True,
        least=1,
        rollouts=False,
    )
    page_tokens: int = key(
        0,
        "Tokens of a page of the native engine's KV cache. Rows take pages as they grow; those that came last pause "
        "where none is free. 0: each row has room for the longest.",
        least=0,
        rollouts=False,
    )
    max_batch: int = key(512, "Maximum rows decoded together.", least=1)
    draft_tokens: int = key(
        0,
        "Tokens that native, vllm or trtllm draft for each row, to save decode steps: with the layer of "
        "model.mtp.layers (not trtllm), else from what the row repeats (prompt lookup). Samples of native stay the "
        "same, while rows x (1 + draft_tokens) <= max_batch; of others they keep their distribution.",
        least=0,
        rollouts=False,
    )
    draft_model: str = key(
        "",
        "Hugging Face or run folder of a smaller model with the same tokenizer, which drafts instead, or (vllm) of an "
        "EAGLE-3 head. It is not trained.",
        rollouts=False,
    )
    dtype: str = key("auto", "Data type of the weights. auto: the trainer's.", choices=("auto", "float32", "bfloat16"))
    quantization: str = key(
        "none", "Type to which refits round the layers' matrices. Emulated: it saves no memory or time.", choices=KINDS
    )
    cuda_graphs: Switch = key(
        AUTO,
        "Capture decode steps as CUDA graphs (vllm: also compile the model). auto: on a GPU, if the engine can; native "
        "only without experts and with engine.tensor_parallel=1.",
        auto=True,
    )
    sleep: Switch = key(
        AUTO,
        "Release the KV cache when the engine sleeps (`memory.sleep`). auto: false for vllm, which needs a GPU for it.",
        auto=True,
        rollouts=False,
    )
    sleep_weights: Switch = key(
        AUTO,
        "Release the weights, too, without a copy, in phases that a refit follows. auto: true for native, but not with "
        "refit.adapters=factors, which keeps the frozen ones there.",
        auto=True,
        rollouts=False,
    )
    answers: str = key("", "Folder written by debug.record_answers, to replay (engine.name=recorded).")
    args: dict[str, Any] = key({}, "Keys of an engine in a file of yours, typed there by its entry's args.")
    trtllm: TrtllmConfig = section(TrtllmConfig)
    vllm: VllmConfig = section(VllmConfig)

    @property
    def cache_bytes(self) -> int:
        """`kv_cache_bytes`, or a default for `auto`."""
        return CACHE_BYTES if isinstance(self.kv_cache_bytes, str) else self.kv_cache_bytes

    @property
    def child(self) -> ChildConfig | None:
        """The section of the package that runs in a child process, if one does."""
        section = entry_of(self.name).section
        return getattr(self, section) if section else None

    @property
    def can(self) -> Capabilities:
        return entry_of(self.name).can

    @property
    def reads_ahead(self) -> bool:
        """Whether it drafts with the model's layer for multi-token prediction, if there is one."""
        return bool(self.draft_tokens) and not self.draft_model

    @property
    def captures(self) -> bool:
        """`cuda_graphs`, decided, for an engine on a GPU."""
        unable = self.can.computes_here and self.tensor_parallel != 1
        return self._decided("cuda_graphs") and not (unable and self.cuda_graphs == AUTO)

    def captures_of(self, experts: int) -> bool:
        """Return `captures` of a model with so many experts. In this process the rows of an expert are not known
        ahead."""
        return self.captures and not (self.can.computes_here and experts)

    @property
    def sleeps(self) -> bool:
        """`sleep`, decided."""
        return self._decided("sleep")

    @property
    def sleeps_weights(self) -> bool:
        """`sleep_weights`, decided, where nothing else keeps them."""
        return self.sleeps and self._decided("sleep_weights")

    def _decided(self, name: str) -> bool:
        value = getattr(self, name)
        return name in entry_of(self.name).by_default if value == AUTO else bool(value)

    @property
    def section(self) -> str:
        return entry_of(self.name).section

    @property
    def why(self) -> Mapping[str, str]:
        """Capability -> why this engine lacks it."""
        return entry_of(self.name).reasons

    RULES = rules("""
!can.tensor_parallel => tensor_parallel =1 | with engine.name={name}{why.tensor_parallel}
captures !can.cuda_graphs => cuda_graphs =false | with engine.name={name}{why.cuda_graphs}
captures can.computes_here tensor_parallel!=1 => cuda_graphs =false | unless engine.tensor_parallel=1
!sleeps !section => sleep =true|auto | with engine.name={name}: memory.sleep=never keeps its cache
!can.sleep_weights => sleep_weights =false|auto | with engine.name={name}{why.sleep_weights}
section=trtllm !can.arguments => trtllm.args = | with engine.name={name}{why.arguments}
section=trtllm !can.prefix_reuse => trtllm.prefix_reuse =false | with engine.name={name}{why.prefix_reuse}
!can.computes_here => page_tokens =0 | with engine.name={name}: only native takes the key
!can.drafts => draft_tokens =0 | with engine.name={name}
draft_tokens => draft_tokens <max_batch | : a step with drafts has at most so many tokens
draft_model => draft_tokens >=1 | with engine.draft_model
name=trtllm => draft_model = | with engine.name=trtllm, which gives no logprobs where another model drafts
!sleeps => sleep_weights =false|auto | with engine.sleep={sleep}
""")


MESSAGES, FLOOR_BYTES = 8, 1 << 20  # minimum messages for a pair of ranks, and minimum bytes of one


def message_bytes(total_bytes: int, bucket_bytes: int, messages: int = MESSAGES) -> int:
    """Return the most bytes of one message of a refit, from all that one rank sends another: one message is packed
    while another is sent."""
    return min(bucket_bytes, max(FLOOR_BYTES, -(-total_bytes // messages)))


@dataclass
class RefitConfig(Section, key="refit"):
    bucket_bytes: int = key(256 << 20, "Maximum bytes of one message between ranks.", least=1)
    verify: str = key(
        "sentinel",
        "Verification of each refit. sentinel: logprobs of some prompts; checksum: also a hash of every tensor.",
        choices=("sentinel", "checksum"),
    )
    adapters: str = key(
        "merged",
        "Content of a refit with model.lora. merged: the policy's weights; factors: the frozen weights once, then A "
        "and B, which the engine merges.",
        choices=("merged", "factors"),
    )
    timeout_s: float = key(600.0, "Maximum seconds that ranks wait for each other.", above=0)
    tolerance: float = key(
        0.0, "Largest mean |logprob difference| on the sentinel prompts. 0: 1e-3 (float32), 5e-2 (bfloat16).", least=0
    )
