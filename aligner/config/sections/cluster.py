"""The section `cluster`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from aligner.config.key import Section, key

IDLE = "idle"  # a rank that only generates waits for the trainer's ranks, which have their own limits

WAIT = "wait"  # the trainer's ranks wait for those that generate (engine.lag)

# seconds; until the first phase, in the phases of the metrics time/*_s, and in anything else
SECONDS = {
    "startup_s": 3600.0,
    "refit_s": 1200.0,
    "generate_s": 3600.0,
    "score_s": 1500.0,
    "logprobs_s": 1200.0,
    "update_s": 1200.0,
    "eval_s": 3600.0,
    "save_s": 1800.0,
    "other_s": 1200.0,
}
SCALE = "scale"


class Limits:
    """Seconds that a phase may last before the run counts as hanging, 0: no limit. For a phase within another
    (eval/generate) the outer one's limit counts, anew for each."""

    def __init__(self, overrides: Mapping[str, float]):
        self.seconds = {name: overrides.get(name, overrides.get(SCALE, 1.0) * usual) for name, usual in SECONDS.items()}
        self.shortest = min(filter(None, self.seconds.values()), default=0.0)  # 0 where there is none

    def of(self, phase: str) -> tuple[str, float]:
        """Return (key, seconds) of a phase, by its name in the metrics."""
        if phase == IDLE:
            return "", 0.0
        name = f"{'generate' if phase == WAIT else phase.partition('/')[0]}_s"
        name = name if name in SECONDS else "other_s"
        return f"cluster.watchdog.{name}", self.seconds[name]


@dataclass
class ClusterConfig(Section, key="cluster"):
    gpus: int = key(
        0, "GPUs that the job is made for: what plan, rehearse and submit take by default. 0: unknown.", least=0
    )
    backend: str = key("auto", "Library for collectives.", choices=("auto", "gloo", "nccl"))
    timeout_s: float = key(
        3900.0, "Maximum seconds of a collective. An engine's child may extend it (docs/how-to/resume.md).", above=0
    )
    threads: int = key(0, "Threads per rank. 0: OMP_NUM_THREADS, else cores / local ranks.", least=0)
    signal: str = key(
        "USR1", "Signal, besides TERM, to save at the next step boundary and stop.", choices=("USR1", "USR2", "HUP")
    )
    time_limit_s: float = key(
        0.0, "Seconds after the start of the process by which to stop. 0: only Slurm's time limit counts.", least=0
    )
    margin_s: float = key(60.0, "Seconds to keep free before the end, beyond the longest step and save.", least=0)
    watchdog: dict[str, float] = key(
        {},
        "Time limits of phases that differ from the default, in seconds: {score_s: 600} (docs/how-to/resume.md). "
        "scale: factor of the defaults. 0: no limit.",
        entries=(SCALE, *SECONDS),
        least=0,
    )
