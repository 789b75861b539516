"""The section `cluster`."""

from __future__ import annotations

from dataclasses import dataclass, field

from aligner.config.checks import above, at_least, one_of
from aligner.config.sections.watchdog import WatchdogConfig


@dataclass
class ClusterConfig:
    backend: str = "auto"  # auto, gloo, nccl
    timeout_s: float = 1800.0  # of collectives; longer where a child of an engine may take longer (docs/resume.md)
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
