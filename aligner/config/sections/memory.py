"""The section `memory`: state moved off the GPU while other phases run, and limits of memory."""

from __future__ import annotations

from dataclasses import dataclass

from aligner.config.key import Section, key

OFFLOADS = ("gradients", "optimizer", "weights")


LIMITED = tuple(f"{phase}_bytes" for phase in ("refit", "generate", "score", "logprobs", "update", "eval", "save"))


@dataclass
class MemoryConfig(Section, key="memory"):
    offload: list[str] = key([], "State to offload to host memory while no phase needs it.", choices=OFFLOADS)
    pin: bool = key(True, "Page-lock host memory of offloaded state, on a machine with a GPU.")
    sleep: str = key(
        "auto",
        "Release of the engine's KV cache while it does not generate. auto: on a GPU, and wherever state is "
        "offloaded or limited (otherwise fresh pages cost a CPU more than other phases gain).",
        choices=("auto", "always", "never"),
    )
    limit: dict[str, int] = key(
        {},
        "Maximum bytes per rank by phase, such as {update_bytes: 60000000000}: torch's allocations on a GPU, else the "
        "process's memory. The phases are those of the metrics memory/*_peak_bytes. 0: no limit.",
        entries=LIMITED,
        least=0,
    )
    on_excess: str = key(
        "stop",
        "Reaction to a phase that exceeds its limit. stop: stop after saving the step; warn: only warn.",
        choices=("stop", "warn"),
    )

    def limit_of(self, phase: str) -> int:
        """Return a phase's limit in bytes, 0 for none."""
        return self.limit.get(f"{phase}_bytes", 0)
