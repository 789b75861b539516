"""The section `memory`: what leaves the GPU while other phases run, and how much they may use."""

from __future__ import annotations

from dataclasses import dataclass

from aligner.config.key import Section, key

OFFLOADS = ("gradients", "optimizer", "weights")


LIMITED = tuple(f"{phase}_bytes" for phase in ("refit", "generate", "score", "logprobs", "update", "eval", "save"))


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
    limit: dict[str, int] = key(
        {},
        "Most bytes of a rank in phases, as {update_bytes: 60000000000}: of the GPU, as torch allocates them, else of "
        "the process. The phases are those of the metrics memory/*_peak_bytes. 0: no limit.",
        entries=LIMITED,
        least=0,
    )
    on_excess: str = key(
        "stop",
        "What to do when a phase exceeds its limit: stop after saving the step, or warn.",
        choices=("stop", "warn"),
    )

    def limit_of(self, phase: str) -> int:
        """0: none."""
        return self.limit.get(f"{phase}_bytes", 0)
