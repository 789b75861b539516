"""Stage distill: a student learns a teacher's distributions."""

from __future__ import annotations

from typing import TYPE_CHECKING

from aligner.config.checks import exists
from aligner.config.sections.distill import KEY
from aligner.config.stage import COMPARED, SEQUENCES, Stage
from aligner.errors import ConfigError

if TYPE_CHECKING:
    from aligner.config.schema import Config


def beside(cfg: Config) -> tuple[str, ...]:
    return () if cfg.algorithm.distill.store else ("teacher",)


def check(cfg: Config) -> None:
    teachers, store = cfg.algorithm.distill.models(), cfg.algorithm.distill.store
    if not teachers and not store:
        raise ConfigError(f"{KEY}.teacher", "", "a folder with the model to learn from, for stage distill")
    if cfg.algorithm.distill.on_policy and cfg.sampling.temperature <= 0:
        expected = f"a number > 0 with {KEY}.on_policy: answers to learn from are sampled"
        raise ConfigError("sampling.temperature", cfg.sampling.temperature, expected)
    for name, path in teachers.items():
        if not path:
            raise ConfigError(f"{KEY}.{name}", path, "a folder with the model to learn from")
        exists(f"{KEY}.{name}", path)
    if store and not teachers:
        exists(f"{KEY}.store", store)
    if cfg.algorithm.distill.teachers and "text" in [data.format for data in (cfg.data, *cfg.data.sources)]:
        expected = f"rows with answers, with {KEY}.teachers: documents go on from row to row"
        raise ConfigError("data.format", "text", expected)


def passes(cfg: Config) -> dict[str, float]:
    """Of several teachers each reads an equal share of the rows."""
    return {"teacher": 1.0, "teachers": 1 / max(1, len(cfg.algorithm.distill.teachers))}


def generates(cfg: Config) -> bool:
    return cfg.algorithm.distill.on_policy > 0


STAGE = Stage(
    reads=(*SEQUENCES, KEY, "sampling", "engine"),
    unread=COMPARED,
    generates=generates,
    beside=beside,
    passes=passes,
    debug=("first_step_checks",),
    check=check,
)
