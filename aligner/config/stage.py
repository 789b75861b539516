"""What the rest of the program asks about a stage before it is built: `STAGE` in the stage's file. Imports no torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from aligner.config.schema import Config

# what stages with rollouts read and others do not
ROLLOUTS = (
    "sampling",
    "engine",
    "mismatch",
    "reward",
    "algorithm",
    "batch.prompts",
    "batch.group",
    "batch.minibatch_samples",
    "batch.epochs",
)
SEQUENCES = ("batch.sequences",)  # likewise stages without
# what scores generated answers to data.eval, in stages that can have it: read beside a stage's own keys, and no part of
# what its training is
EVALUATION = (
    "sampling.max_response_tokens",
    "sampling.stop",
    "sampling.special_tokens",
    "engine",
    "refit",
    "reward.functions",
    "reward.timeout_s",
    "reward.max_invalid_fraction",
    "reward.workers",
    "reward.overlap",
    "eval.generate",
    "eval.temperature",
    "eval.samples",
    "eval.functions",
    "eval.full_score",
    "eval.max_response_tokens",
)
# of `data`, which all stages read: for rows whose answers are learned token by token, and for answers compared
LEARNED = ("data.loss_on", "data.across_documents")
COMPARED = ("data.empty_answers",)
# what only training reads
TRAINING = (
    "optim",
    "ema",
    "ptx",
    "eval",
    "data.eval",
    "run.epochs",
    "run.eval_every",
    "run.stop",
    "run.export",
    "batch.micro_batch_samples",
    "batch.micro_batch_tokens",
    "batch.balance",
)


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
    reads: tuple[str, ...]  # of the sections and keys that not every stage reads (config/identity.py)
    unread: tuple[str, ...] = ()  # of those that all others read: what it does not
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
    check: Callable[[Config], None] = _fine  # of its own, raises ConfigError
    section: type | None = None  # its own keys, as stage.<name>.<key>: a dataclass that checks its values
