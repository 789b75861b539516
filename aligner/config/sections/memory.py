"""The section `memory`: what leaves the device while a phase does not use it, and what each phase may use of it."""

from __future__ import annotations

from dataclasses import dataclass, field, fields

from aligner.config.checks import at_least, one_of
from aligner.errors import ConfigError

OFFLOADS = ("gradients", "optimizer", "weights")


@dataclass
class MemoryLimitConfig:
    """Bytes that a phase may use at its peak, on each rank: of the GPU, as torch allocates them; without one, the
    resident memory of the process. 0: no limit. The phases are those of the metrics memory/*_peak_bytes."""

    refit_bytes: int = 0  # 0: no limit
    generate_bytes: int = 0  # 0: no limit
    score_bytes: int = 0  # 0: no limit
    logprobs_bytes: int = 0  # 0: no limit
    update_bytes: int = 0  # 0: no limit
    eval_bytes: int = 0  # 0: no limit
    save_bytes: int = 0  # 0: no limit

    def __post_init__(self) -> None:
        for f in fields(self):
            at_least(f"memory.limit.{f.name}", getattr(self, f.name), 0)

    def of(self, phase: str) -> int:
        return getattr(self, f"{phase}_bytes", 0)


@dataclass
class MemoryConfig:
    offload: list[str] = field(default_factory=list)  # OFFLOADS: what goes to host memory where no phase needs it
    pin: bool = True  # page-locked host memory, where there is a GPU
    # the engine gives its KV cache back while it does not generate: always, never, or auto: on a GPU, and wherever
    # something is offloaded or limited (else, on a CPU, getting fresh pages costs more than other phases gain by them)
    sleep: str = "auto"
    limit: MemoryLimitConfig = field(default_factory=MemoryLimitConfig)
    on_excess: str = "stop"  # a phase went over its limit: stop (after saving the step), warn

    def __post_init__(self) -> None:
        for name in self.offload:
            if name not in OFFLOADS:
                raise ConfigError("memory.offload", name, f"a list of {', '.join(OFFLOADS)}")
        one_of("memory.sleep", self.sleep, ("auto", "always", "never"))
        one_of("memory.on_excess", self.on_excess, ("stop", "warn"))
