"""Between the ranks that train and the last ones of the job, which only generate: what to do, and what came of it.

    order    by the trainer's rank 0, through the store: ranks that only generate wait for it as long as it takes
    answer   of those that generate, to all ranks
    dismiss  the last order; `well` tells how the trainer's ranks ended

Both are plain data (`orders.py`), signed, and bound to the number of the order: the store takes messages from whoever
reaches its port, and an old one must not count again.

A rank that cannot go on writes down why (`tell`); those that then wait for it in vain raise that (`contact`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from aligner import errors
from aligner.cluster.seal import Seal
from aligner.engines.orders import decode, encode
from aligner.errors import AlignerError, EngineError, PeerError

DISMISS = "dismiss"
POLL_S = 0.01  # at most: how long an order may lie before it is seen
REFUSED_S = 10.0  # that an order which nobody of the job has signed may stand where rank 0's should
LAST_WORDS_S = 10.0  # that the ranks of one side wait for the other's at the end


class Answer(NamedTuple):
    """Of a rank that generates."""

    error: str  # name of an AlignerError, empty if all is well
    text: str
    version: int  # of its weights
    signal: int  # that asked this rank to stop, else 0
    value: Any = None


@dataclass
class Bridge:
    """`group`, `store`: of all ranks of the job, of which the first `trainers` train."""

    group: dist.ProcessGroup
    store: dist.Store
    seal: Seal
    trainers: int
    signal: Callable[[], int] = lambda: 0  # received by this rank
    on_signal: Callable[[int], None] = lambda number: None  # told of a signal that a rank with an engine received
    _orders: int = field(default=0, init=False)

    @property
    def rank(self) -> int:
        """Of this rank in the job."""
        return self.group.rank()

    @property
    def generates(self) -> bool:
        return self.rank >= self.trainers

    @property
    def engines(self) -> tuple[int, ...]:
        """Ranks that generate."""
        return tuple(range(self.trainers, self.group.size()))

    # --- the trainer's side: every rank calls these together

    def order(self, name: str, *arguments: Any) -> None:
        """Have the ranks that generate do `name`; rank 0's arguments count."""
        self._orders += 1
        if self.rank == 0:
            with self.contact():
                key = _key(self._orders)
                self.store.set(key, self.seal.close(encode((name, arguments)), key))
                if name != DISMISS:
                    self.store.delete_key(_key(self._orders - 1))  # all have read it: they answered, or took requests

    def answers(self) -> list[Answer]:
        """What the ranks that generate answered, by rank. Raises the first error among them."""
        with self.contact():
            found = [Answer(*fields) for fields in self._gather(None)[self.trainers :]]
        for answer in found:
            if answer.signal:
                self.on_signal(answer.signal)
        for rank, answer in zip(self.engines, found, strict=True):
            if answer.error:
                kind = getattr(errors, answer.error)
                raise kind.__new__(kind, f"on rank {rank}: {answer.text}")  # not every one is made of a text alone
        return found

    def dismiss(self, well: bool) -> None:
        """The last order, without an answer: the others may be gone already."""
        if self.rank != 0:
            return
        deadline = time.monotonic() + (LAST_WORDS_S if well else 1.0)
        with suppress(EngineError, RuntimeError):
            self.order(DISMISS, well)
            # the store ends with this process
            while not self.store.check([_left(rank) for rank in self.engines]) and time.monotonic() < deadline:
                time.sleep(POLL_S)

    # --- the side of those that generate

    def next_order(self) -> tuple[str, tuple[Any, ...]]:
        """Wait for the next order: (name, arguments). Raises EngineError when the trainer's rank 0 is gone, PeerError
        when somebody else's order stands where its own should."""
        self._orders += 1
        since, key, refused = time.monotonic(), _key(self._orders), 0.0
        while True:
            with self.contact():
                while not self.store.check([key]):  # not `wait`: it keeps the connection that other threads need too
                    time.sleep(min(POLL_S, 0.0005 + (time.monotonic() - since) / 50))
                sealed = self.store.get(key)
            try:
                name, arguments = decode(self.seal.open(sealed, key))
                return name, tuple(arguments)
            except PeerError:  # written before rank 0's, which replaces it
                refused = refused or time.monotonic()
                if time.monotonic() - refused > REFUSED_S:
                    raise
                time.sleep(POLL_S)

    def answer(self, work: Callable[[], Any], version: Callable[[], int]) -> bool:
        """Do it and tell the trainers what came of it, the value or the error; whether it went well everywhere."""
        error, value = None, None
        try:
            value = work()
        except AlignerError as caught:
            error = caught
        name = "" if error is None else type(error).__name__
        mine = Answer(name, str(error or ""), version(), self.signal(), value)
        with self.contact():
            found = [Answer(*fields) for fields in self._gather(mine)[self.trainers :]]
        return not any(answer.error for answer in found)

    def leave(self, well: bool) -> None:
        """After the last order. If it was not `well`, the trainer's ranks end first: what they say is the cause."""
        with suppress(RuntimeError):
            self.store.set(_left(self.rank), b"")
            deadline = time.monotonic() + LAST_WORDS_S
            while not well and time.monotonic() < deadline:
                self.store.check([_left(self.rank)])  # raises when rank 0 is gone
                time.sleep(0.05)

    # --- both

    def _gather(self, mine: Any) -> list[Any]:
        """What every rank says to the last order, on every rank. Collective over all ranks."""
        what = [f"answer {self._orders} of rank {rank}" for rank in range(self.group.size())]
        own = torch.frombuffer(bytearray(self.seal.close(encode(mine), what[self.rank])), dtype=torch.uint8)
        sizes = [torch.zeros(1, dtype=torch.int64) for _ in what]
        dist.all_gather(sizes, torch.tensor([len(own)]), group=self.group)
        longest = max(int(size) for size in sizes)
        parts = [torch.zeros(longest, dtype=torch.uint8) for _ in what]
        dist.all_gather(parts, torch.nn.functional.pad(own, (0, longest - len(own))), group=self.group)
        told = zip(parts, sizes, what, strict=True)
        return [decode(self.seal.open(part[: int(size)].numpy().tobytes(), name)) for part, size, name in told]

    def tell(self, error: BaseException) -> None:
        """This rank cannot go on: what the others will then say. The first one counts."""
        with suppress(RuntimeError):  # the store lives on rank 0, which may be gone
            self.store.compare_set(
                CAUSE, "", self.seal.close(f"rank {self.rank} failed: {error}".encode(), CAUSE).hex()
            )

    @contextmanager
    def contact(self) -> Iterator[None]:
        """What torch.distributed raises within is told as the failure that another rank wrote down, if one did."""
        try:
            yield
        except RuntimeError as error:
            raise EngineError(self._told() or self._lost(error)) from error

    def _told(self) -> str:
        with suppress(RuntimeError, ValueError, PeerError):
            if self.store.check([CAUSE]):
                return self.seal.open(bytes.fromhex(self.store.get(CAUSE).decode()), CAUSE).decode()
        return ""

    def _lost(self, error: RuntimeError) -> str:
        others = "the trainer's ranks" if self.generates else f"engine.ranks={len(self.engines)}"
        return f"rank {self.rank} has lost {others}: one has ended or hangs ({str(error).splitlines()[0]})"


CAUSE = "aligner/bridge/cause"  # in the store


def _key(number: int) -> str:
    return f"aligner/bridge/order/{number}"


def _left(rank: int) -> str:
    return f"aligner/bridge/left/{rank}"
