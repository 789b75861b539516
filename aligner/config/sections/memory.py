"""The section `memory`: what leaves the GPU while other phases run, and how much they may use."""

from __future__ import annotations

from dataclasses import dataclass

from aligner.config.key import Section, key, section

OFFLOADS = ("gradients", "optimizer", "weights")


@dataclass
class MemoryLimitConfig(Section, key="memory.limit"):
    """Bytes that a phase may use at its peak, on each rank: of the GPU, as torch allocates them; without one, the
    resident memory of the process. The phases are those of the metrics memory/*_peak_bytes."""

    refit_bytes: int = key(0, "Most bytes of a rank in refits. 0: no limit.", least=0)
    generate_bytes: int = key(0, "Most bytes of a rank while it generates. 0: no limit.", least=0)
    score_bytes: int = key(0, "Most bytes of a rank while samples are scored. 0: no limit.", least=0)
    logprobs_bytes: int = key(0, "Most bytes of a rank in passes for logprobs. 0: no limit.", least=0)
    update_bytes: int = key(0, "Most bytes of a rank in updates. 0: no limit.", least=0)
    eval_bytes: int = key(0, "Most bytes of a rank in evaluations. 0: no limit.", least=0)
    save_bytes: int = key(0, "Most bytes of a rank while it saves. 0: no limit.", least=0)

    def of(self, phase: str) -> int:
        return getattr(self, f"{phase}_bytes", 0)


@dataclass
class MemoryConfig(Section, key="memory"):
    offload: list[str] = key([], "What to move to host memory where no phase needs it.", choices=OFFLOADS)
    pin: bool = key(True, "Page-lock the host memory of what is moved, where there is a GPU.")
    sleep: str = key(
        "auto",
        "Whether the engine gives its KV cache back while it does not generate. auto: on a GPU, and wherever something "
        "is offloaded or limited (else fresh pages cost a CPU more than other phases gain).",
        choices=("auto", "always", "never"),
    )
    limit: MemoryLimitConfig = section(MemoryLimitConfig)
    on_excess: str = key(
        "stop",
        "What to do when a phase exceeds its limit: stop after saving the step, or warn.",
        choices=("stop", "warn"),
    )
