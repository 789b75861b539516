"""What the rest of the program asks about a stage before it is built: `STAGE` in the stage's file. Imports no torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from aligner.config.rule import Rule

if TYPE_CHECKING:
    from aligner.config.schema import Config


def _one(cfg: Config) -> int:
    return 1


def _none(cfg: Config) -> tuple[str, ...]:
    return ()


def _once(cfg: Config) -> dict[str, float]:
    return {"reference": 1.0, "teacher": 1.0}


def _no(cfg: Config) -> bool:
    return False


def _fine(cfg: Config) -> None:
    pass


@dataclass(frozen=True)
class Stage:
    # purposes of keys (`read_for` in the schema) that it has, beside those that follow from the rest
    reads: tuple[str, ...] = ()
    rollouts: bool = False  # it generates; else it takes sequences of data.train
    generates: Callable[[Config], bool] = _no  # without rollouts, it has an engine that answers rows of data.train
    trains: bool = True  # else no weight changes
    pairs: bool = False  # of each group of samples it trains on two, the best and the worst
    scores: bool = False  # what it trains has a head of scores, else it is a language model
    unit: str = "sequences"  # what batch.sequences counts
    rows: Callable[[Config], int] = _one  # in one of them
    beside: Callable[[Config], tuple[str, ...]] = _none  # models beside model.init's: reference, teacher, critic
    # model -> how often it reads the rows of a step, without gradient, before the update
    passes: Callable[[Config], dict[str, float]] = _once
    answers: bool = True  # its evaluation may generate answers to data.eval, to be scored
    debug: tuple[str, ...] = ()  # shuffle_rewards, first_step_checks: where they mean something
    rules: tuple[Rule, ...] = ()  # of its own, between keys
    check: Callable[[Config], None] = _fine  # of files, raises ConfigError
    section: type | None = None  # its own keys, as stage.<name>.<key>: a dataclass that checks its values

    @property
    def purposes(self) -> set[str]:
        """For what it reads keys, but for its evaluation."""
        found = {"samples", "generation"} if self.rollouts else {"rows"}
        if self.trains:
            found |= {"training"} | ({"trajectories"} if self.rollouts else set()) | (set() if self.scores else {"ptx"})
        return found | set(self.reads)
