"""The section `cluster`."""

from __future__ import annotations

from dataclasses import dataclass

from aligner.config.key import Section, key, section
from aligner.config.sections.watchdog import WatchdogConfig


@dataclass
class ClusterConfig(Section, key="cluster"):
    backend: str = key("auto", "Library of collectives.", choices=("auto", "gloo", "nccl"))
    timeout_s: float = key(
        1800.0, "Seconds that a collective may take; longer where an engine's child may (docs/resume.md).", above=0
    )
    threads: int = key(0, "Threads of a rank. 0: OMP_NUM_THREADS, else cores / local ranks.", least=0)
    signal: str = key(
        "USR1", "Signal, besides TERM, to save at the next step boundary and stop.", choices=("USR1", "USR2", "HUP")
    )
    time_limit_s: float = key(
        0.0, "Seconds from the start of the process before which to stop. 0: only Slurm's end counts.", least=0
    )
    margin_s: float = key(60.0, "Seconds to keep free before the end, beyond the longest step and save.", least=0)
    watchdog: WatchdogConfig = section(WatchdogConfig)
