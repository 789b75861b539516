"""The section `cluster.watchdog`."""

from __future__ import annotations

from dataclasses import dataclass, fields

from aligner.config.checks import at_least

IDLE = "idle"  # a rank that only generates waits for the trainer's ranks, which have limits of their own

WAIT = "wait"  # of the trainer's ranks for those that generate (engine.lag)


@dataclass
class WatchdogConfig:
    """Seconds that a phase may last before the run counts as hanging; 0: for ever. The phases are those of the metrics
    time/*_s: of one within another (eval/generate) the outer one's limit counts, anew for each."""

    startup_s: float = 3600.0  # until the first phase: models, data
    refit_s: float = 1200.0  # weights to the engine
    generate_s: float = 3600.0  # a rollout
    score_s: float = 1500.0  # a rollout
    logprobs_s: float = 1200.0  # a rollout
    update_s: float = 1200.0  # one minibatch
    eval_s: float = 3600.0  # an evaluation
    save_s: float = 1800.0  # a checkpoint
    other_s: float = 1200.0  # anything else: between phases, the export

    def __post_init__(self) -> None:
        for f in fields(self):
            at_least(f"cluster.watchdog.{f.name}", getattr(self, f.name), 0)

    def limit(self, phase: str) -> tuple[str, float]:
        """(key, seconds) of a phase, by its name in the metrics."""
        if phase == IDLE:
            return "", 0.0
        phase = phase.partition("/")[0]
        name = f"{'generate' if phase == WAIT else phase}_s"
        name = name if hasattr(self, name) else "other_s"
        return f"cluster.watchdog.{name}", getattr(self, name)

    @property
    def shortest(self) -> float:
        """The smallest limit; 0 where there is none."""
        return min((value for f in fields(self) if (value := getattr(self, f.name))), default=0.0)
