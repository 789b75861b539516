"""Facts about a stage that the program needs before it is built: `STAGE` in the stage's file. It imports no torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from aligner.config.rule import Rule

if TYPE_CHECKING:
    from aligner.config.schema import Config


OWN = "own stage"  # purpose of the keys that only a stage in a user's file reads


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
    """Facts about a stage, by which it is configured, planned and refused before it is built."""

    # purposes of keys (`read_for` in the schema), in addition to those that follow from the other fields
    reads: tuple[str, ...] = ()
    rollouts: bool = False  # it generates; else it takes sequences of data.train
    generates: Callable[[Config], bool] = _no  # without rollouts, it has an engine that answers rows of data.train
    trains: bool = True  # otherwise no weight changes
    pairs: bool = False  # it trains on the best and the worst sample of each group
    scores: bool = False  # the trained model has a head of scores; otherwise it is a language model
    unit: str = "sequences"  # what batch.sequences counts
    rows: Callable[[Config], int] = _one  # rows per unit
    other_models: Callable[[Config], tuple[str, ...]] = _none  # models besides model.init's: reference, teacher, critic
    # model -> how often it reads the rows of a step, without gradient, before the update
    passes: Callable[[Config], dict[str, float]] = _once
    answers: bool = True  # its evaluation may generate answers to data.eval, to be scored
    debug: tuple[str, ...] = ()  # shuffle_rewards, first_step_checks: those that it supports
    rules: tuple[Rule, ...] = ()  # of its own, between keys
    check: Callable[[Config], None] = _fine  # of files, raises ConfigError
    section: type | None = None  # its own keys, as stage.<name>.<key>: a dataclass that checks its values
    # of a stage in a user's file, whose own keys are stage.args.<key>: key -> default, as files of conf/stage have them
    defaults: dict[str, Any] = field(default_factory=dict)

    @property
    def purposes(self) -> set[str]:
        """The purposes for which it reads keys, except its evaluation."""
        named = {"samples", "generation"} if self.rollouts else {"rows"}
        if self.trains:
            named |= {"training"} | ({"trajectories"} if self.rollouts else set()) | (set() if self.scores else {"ptx"})
        return named | set(self.reads)
