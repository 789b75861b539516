"""`cluster.watchdog.*`: how long a phase may last."""

from __future__ import annotations

from dataclasses import dataclass, fields

from aligner.config.key import Section, key

IDLE = "idle"  # a rank that only generates waits for the trainer's ranks, which have limits of their own

WAIT = "wait"  # of the trainer's ranks for those that generate (engine.lag)


@dataclass
class WatchdogConfig(Section, key="cluster.watchdog"):
    """Seconds that a phase may last before the run counts as hanging; 0: for ever. The phases are those of the metrics
    time/*_s: of one within another (eval/generate) the outer one's limit counts, anew for each."""

    startup_s: float = key(3600.0, "Seconds until the first phase: models, data. 0: no limit.", least=0)
    refit_s: float = key(1200.0, "Seconds for the weights to reach the engine. 0: no limit.", least=0)
    generate_s: float = key(3600.0, "Seconds to generate a rollout. 0: no limit.", least=0)
    score_s: float = key(1500.0, "Seconds to score a rollout. 0: no limit.", least=0)
    logprobs_s: float = key(1200.0, "Seconds for the logprobs of a rollout. 0: no limit.", least=0)
    update_s: float = key(1200.0, "Seconds for one minibatch. 0: no limit.", least=0)
    eval_s: float = key(3600.0, "Seconds for an evaluation. 0: no limit.", least=0)
    save_s: float = key(1800.0, "Seconds for a checkpoint. 0: no limit.", least=0)
    other_s: float = key(1200.0, "Seconds for anything else: between phases, the export. 0: no limit.", least=0)

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
