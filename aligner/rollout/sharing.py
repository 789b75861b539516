"""Shares of the samples of a rollout, and the context in an engine's error."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from aligner.errors import EngineError


def share(count: int, parts: int, index: int) -> slice:
    """Return the `index`-th of `parts` contiguous shares of `count` elements, sizes differing by at most one."""
    return slice(count * index // parts, count * (index + 1) // parts)


@contextmanager
def during(what: str) -> Iterator[None]:
    """Name in an EngineError, on every rank, the work of the engines during it."""
    try:
        yield
    except EngineError as error:
        raise EngineError(f"{what}: {error}") from error
