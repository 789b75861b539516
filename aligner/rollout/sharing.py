"""How ranks share the samples of a rollout, and what an engine's failure says."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from aligner.errors import EngineError


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
