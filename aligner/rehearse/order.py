"""Order of the work of streams, of the host, and of messages. Each works by itself: who reads a tensor that another
one writes has to wait for it, or reads what was there before.

Streams count their epochs, which end where something may wait for them. A stream, and the host, know which epochs of
others have ended. The bytes of a storage have a mark of their last write, where others could come before it.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from torch import Tensor
from torch.utils._pytree import tree_leaves

from aligner.rehearse.record import source_line

UNREAD = ("_like", "record_stream", "resize_", "set_")  # ends of operations that look at no number; also `new_...`


class Released(NamedTuple):
    """End of an epoch: what those know who wait for it, and when."""

    epochs: dict[Timeline, int]
    s: float


@dataclass(eq=False)
class Timeline:
    """A stream, the host, or a message."""

    epoch: int = 0
    known: dict[Timeline, int] = field(default_factory=dict)  # other -> number of its epochs that have ended
    s: float = 0.0  # when its work so far ends, by the clock of `prices.py`

    def release(self) -> Released:
        """End an epoch."""
        self.epoch += 1
        return Released(self.known | {self: self.epoch}, self.s)

    def join(self, released: Released) -> None:
        for other, epochs in released.epochs.items():
            self.known[other] = max(epochs, self.known.get(other, 0))
        self.s = max(self.s, released.s)


class Span(NamedTuple):
    """Bytes of a storage."""

    storage: int
    start: int
    stop: int


def span_of(t: Tensor) -> Span:
    start, width = t.storage_offset() * t.element_size(), t.element_size()
    numbers = 1 + sum((n - 1) * stride for n, stride in zip(t.shape, t.stride(), strict=True)) if t.numel() else 0
    return Span(t.untyped_storage()._cdata, start, start + numbers * width)


@dataclass(eq=False)
class Communication(Timeline):
    """A collective, or a message to or from another rank, of one epoch."""

    read: list[Span] = field(default_factory=list)
    written: list[Span] = field(default_factory=list)


@dataclass(frozen=True)
class Mark:
    by: Timeline
    epoch: int
    line: str
    start: int = 0
    stop: int = 1 << 62


Marks = dict[int, list[Mark]]  # of a storage


@dataclass(frozen=True)
class StreamUse:
    """Use of a tensor by another stream than the one whose memory it is in."""

    owner: Timeline
    by: Timeline
    epoch: int
    line: str


@functools.cache
def _written(func: Any) -> tuple[tuple[int, str], ...] | None:
    """Return the arguments that an operation writes, None if it looks at no number."""
    name = func._overloadpacket.__name__
    if func.is_view or name.startswith("new_") or name.endswith(UNREAD):
        return None
    arguments = enumerate(func._schema.arguments)
    return tuple((i, a.name) for i, a in arguments if a.alias_info is not None and a.alias_info.is_write)


class Order:
    def __init__(self, made: Mapping[int, tuple[int, str]]) -> None:
        self.made = made  # storage on the device -> (bytes, the line that made it)
        self.host, self.default = Timeline(), Timeline()
        self.current = self.default
        self.streams = [self.default]
        self.writes: Marks = {}  # last writes
        self.reads: Marks = {}  # of copies and messages on their way
        self.owners: dict[int, Timeline] = {}  # storage -> the stream that made it, if that is not the default
        self.uses: dict[tuple[int, Timeline], StreamUse] = {}  # the last of a stream
        self.recorded: set[tuple[int, Timeline]] = set()
        self.freed_uses: list[StreamUse] = []  # of storages that are no more, which may not have ended
        self.unmarked: Mark | None = None  # with several streams: the last write where there is no mark

    @property
    def active(self) -> bool:
        return bool(self.writes or self.reads or self.unmarked)

    def stream(self, new: Timeline) -> None:
        self.streams.append(new)
        self.unmarked = self.unmarked or Mark(self.default, self.default.epoch, "")

    def synchronize(self) -> None:
        """Let the host wait for all streams."""
        for stream in self.streams:
            self.host.join(stream.release())
        self.writes.clear()
        self.reads.clear()

    def mark(self, marks: Marks, span: Span, by: Timeline | None = None) -> None:
        """Mark bytes in place of earlier marks."""
        key, start, stop = span
        others = [mark for mark in marks.get(key, ()) if mark.start < start or mark.stop > stop]
        by = by or self.current
        marks[key] = [*others, Mark(by, by.epoch, source_line(2), start, stop)]

    def allocate(self, t: Tensor) -> None:
        """Let the current stream make a tensor. Raises RuntimeError if its memory may be that of a freed one which
        another stream still uses."""
        if self.unmarked is None:
            return
        self.freed_uses = [use for use in self.freed_uses if not self._ended(use, use.owner)]
        for use in self.freed_uses:
            if use.owner is self.current:
                raise RuntimeError(
                    f"a stream still uses the memory of a tensor that was freed ({use.line}): call record_stream"
                )
        span = span_of(t)
        self.mark(self.writes, span)
        if self.current is not self.default:
            self.owners[span.storage] = self.current

    def forget(self, storage: int) -> None:
        """Forget a storage that is no more."""
        self.writes.pop(storage, None)
        self.reads.pop(storage, None)
        self.owners.pop(storage, None)
        for stream in self.streams if self.unmarked else ():
            use = self.uses.pop((storage, stream), None)
            if use and (storage, stream) not in self.recorded:
                self.freed_uses.append(use)
            self.recorded.discard((storage, stream))

    def send(self, read: Iterable[Tensor], written: Iterable[Tensor]) -> Communication:
        """Send a message behind the work of the current stream."""
        message = Communication(read=list(map(span_of, read)), written=list(map(span_of, written)))
        for marks, spans in ((self.reads, message.read), (self.writes, message.written)):
            for span in spans:
                self.check_written(span, self.current)
                self.mark(marks, span, message)
        return message

    def arrive(self, message: Communication) -> None:
        """Let the current stream wait for a message."""
        self.current.s = max(self.current.s, message.s)
        for marks, spans in ((self.reads, message.read), (self.writes, message.written)):
            for span in spans:
                marks[span.storage] = [mark for mark in marks.pop(span.storage, ()) if mark.by is not message]
                if self.unmarked and marks is self.writes:
                    self.mark(marks, span)
                if not marks[span.storage]:
                    del marks[span.storage]

    def touch(self, func: Any, args: tuple, kwargs: dict, tensors: list[Tensor], cuda: bool) -> None:
        """Let an operation read and write. Raises RuntimeError if it did not wait for others."""
        written = _written(func)
        if written is None:
            return
        by = self.current if cuda else self.host
        for t in tensors:
            span = span_of(t)
            self.check_written(span, by)
            owner = self.owners.get(span.storage, self.default)
            if self.unmarked and cuda and owner is not by:
                self.uses[span.storage, by] = StreamUse(owner, by, by.epoch, source_line(2))
        for number, name in written:
            for t in tree_leaves(args[number] if number < len(args) else kwargs.get(name)):
                if isinstance(t, Tensor):
                    self._check(self.reads, span_of(t), by, "still read")
                    if self.unmarked and cuda:
                        self.mark(self.writes, span_of(t))

    def check_written(self, span: Span, by: Timeline) -> None:
        """Raise RuntimeError if the last writes are not known to have ended."""
        if not self._check(self.writes, span, by, "not written yet") and self.unmarked and span.storage in self.made:
            line = self.made[span.storage][1]
            self._check({span.storage: [replace(self.unmarked, line=line)]}, span, by, "not written yet")

    def _ended(self, work: Mark | StreamUse, waiting: Timeline) -> bool:
        """Return whether work is known to have ended by who waits, or by the host."""
        return max(waiting.known.get(work.by, 0), self.host.known.get(work.by, 0)) > work.epoch

    def _check(self, marks: Marks, span: Span, by: Timeline, what: str) -> bool:
        """Return whether there are marks."""
        there = [mark for mark in marks.get(span.storage, ()) if mark.start < span.stop and mark.stop > span.start]
        for mark in there:
            if mark.by is not by and not self._ended(mark, by):
                who = "the host" if by is self.host else "a stream"
                raise RuntimeError(f"{who} uses a tensor that is {what} ({mark.line}): wait for that first")
        return bool(there)
