"""How ranks share the samples of a rollout, and that all of them stop where one cannot go on."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from aligner.errors import AlignerError, EngineError, RewardError
from aligner.ops.reduce import first_cause


def share(count: int, parts: int, index: int) -> slice:
    """The `index`-th of `parts` contiguous shares of `count` things, sizes differing by at most one."""
    return slice(count * index // parts, count * (index + 1) // parts)


@contextmanager
def during(what: str) -> Iterator[None]:
    """What the engines did that fail within, on every rank."""
    try:
        yield
    except EngineError as error:
        raise EngineError(f"{what}: {error}") from error


@contextmanager
def raised_together(kind: type[AlignerError] = RewardError) -> Iterator[None]:
    """Each rank generates and scores its own samples: an error of this `kind` on one of them is raised on every rank,
    so that all of them stop (and save) instead of waiting for the one. Collective over the world."""
    error: AlignerError | None = None
    try:
        yield
    except kind as caught:
        error = caught
    first = first_cause(str(error) if error else "")
    if error is not None:
        raise error
    if first is not None:
        raise kind(f"on rank {first[0]}: {first[1]}")
