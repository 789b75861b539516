"""Agreement of all ranks of a job: that one of them failed, and what they read.

Rank 0 decides what they read; the others look until they see the same.

Ranks on other nodes may see another folder at one path: a file system that is not shared, or a shared one that caches
a folder's contents for up to a minute. Ranks of one node ask the same kernel. One of them looks at a folder for all,
or a start of 1,000 ranks would read every file 1,000 times.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch.distributed as dist

from aligner.errors import AlignerError, ViewError
from aligner.ops.reduce import first_cause, gathered

WAIT_S, EVERY_S = 90.0, 0.5  # NFS keeps attributes of folders for 60 s by default
View = Mapping[str, str]  # name of an entry -> its content or hash
ABSENT = "absent"


def fail_together(
    cause: str, kind: type[AlignerError], group: dist.ProcessGroup | None = None, form: str = "{cause}"
) -> None:
    """Raise `kind` on every rank (of the world if no `group` is given) if any has a `cause` that is not empty; the
    message is `form` with the lowest such rank and its cause. Collective."""
    first = first_cause(cause, group)
    if first is not None:
        rank = first[0] if group is None else dist.get_global_rank(group, first[0])
        raise kind(form.format(rank=rank, cause=first[1]))


@contextmanager
def raised_together(kind: type[AlignerError]) -> Iterator[None]:
    """Raise an error of this `kind` within the block on every rank, so that all stop (and save) instead of waiting
    for the one that failed, which raises its own. Collective over the world."""
    error: AlignerError | None = None
    try:
        yield
    except kind as caught:
        error = caught
    first = first_cause(str(error) if error else "")
    if first is not None:
        raise error or kind(f"on rank {first[0]}: {first[1]}")


def by_rank_0[T](work: Callable[[], T]) -> T:
    """Return `work()` of rank 0 on every rank. An AlignerError or OSError that it raises there is raised on all of
    them. Collective over the world, if there is one."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return work()
    outcome: list = [None, None]
    if dist.get_rank() == 0:
        try:
            outcome[0] = work()
        except (AlignerError, OSError) as error:
            outcome[1] = error
    dist.broadcast_object_list(outcome, src=0)
    if outcome[1] is not None:
        raise outcome[1]
    return outcome[0]


def node() -> str:
    """Return a name of this machine, equal on its ranks and on no others."""
    return f"{socket.gethostname()} {Path('/proc/sys/kernel/random/boot_id').read_text()}"


def _first_of_its_node() -> bool:
    """Return whether this rank is the first of its node; rank 0 always is. Collective over the world, if there is
    one."""
    nodes = gathered(node())
    return len(nodes) == 1 or nodes.index(nodes[dist.get_rank()]) == dist.get_rank()


def same_view(path: Path | str, look: Callable[[], View], by_node: bool = False) -> View:
    """Return what `look()` sees at `path`, once every rank sees the same as rank 0. Ranks that do not, look again for
    `WAIT_S`. With `by_node` the first rank of each node looks, for what depends on the node only: `path` must be
    equal on all ranks. Collective over the world, if there is one.

    Raises ViewError on every rank, naming the first rank that differs, the path, and the difference. Errors of `look`
    on rank 0 are raised on all.
    """
    view, cause = _look(look) if not by_node or _first_of_its_node() else (None, "")
    path, wanted = by_rank_0(lambda: (path, view if view is not None else look()))
    cause, deadline = _difference(wanted, view, cause), time.monotonic() + WAIT_S
    while cause and time.monotonic() < deadline:
        time.sleep(EVERY_S)
        cause = _difference(wanted, *_look(look))
    first = first_cause(cause)
    if first is not None:
        raise ViewError(f"rank {first[0]} sees another {path} than rank 0: {first[1]}. Is it on a shared file system?")
    return wanted


def _look(look: Callable[[], View]) -> tuple[View | None, str]:
    """Return the view, or None and why there is none."""
    try:
        return look(), ""
    except (AlignerError, OSError) as error:
        return None, str(error)


def _difference(wanted: View, view: View | None, cause: str) -> str:
    """Return the first difference of this rank's view from the wanted one, or ""."""
    if view is None:
        return cause
    for name in [*wanted, *(name for name in view if name not in wanted)]:
        there, here = wanted.get(name, ABSENT), view.get(name, ABSENT)
        if there != here:
            return f"{name} is {here}, on rank 0 {there}"
    return ""
