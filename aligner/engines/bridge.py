"""Orders from the ranks that train to the last ranks of the job, which only generate, and their answers.

    order    by the trainer's rank 0, through the store: ranks that only generate wait for it without a time limit, and
             come to it (`order_barrier.py`)
    answer   of those that generate, to all ranks
    dismiss  the last order; `well` tells how the trainer's ranks ended

Both are plain data (`orders.py`), signed, and bound to the number of the order: the store takes messages from anyone
who reaches its port, and an old one must not count again.

A rank that fails writes down why (`tell`); ranks that then wait for it in vain raise that (`contact`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import groupby
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from aligner import errors
from aligner.cluster.seal import Seal
from aligner.engines.order_barrier import POLL_S, OrderBarrier
from aligner.engines.orders import decode, encode
from aligner.errors import AlignerError, EngineError, LayoutError, PeerError
from aligner.ops.agree import by_rank_0, node
from aligner.ops.reduce import gathered

DISMISS = "dismiss"
LAST_WORDS_S = 10.0  # that those that generate wait for the end of trainer's ranks that fail


class Answer(NamedTuple):
    """The answer of a rank that generates."""

    error: str  # name of an AlignerError, empty if all is well
    text: str
    version: int  # of its weights
    signal: int  # that asked this rank to stop, else 0
    value: Any = None


@dataclass
class Bridge:
    """The connection between trainer ranks and generation ranks. `group`, `store`: of all ranks of the job. The
    first `trainers` ranks train; each `width` of the others are a replica, and each `filled_together` of these share
    the weights that a refit sends. Ranks are always those of the job."""

    group: dist.ProcessGroup
    store: dist.Store
    seal: Seal
    trainers: int
    width: int = 1
    silent_s: float = 60.0  # without a heartbeat, after which a rank counts as lost
    signal: Callable[[], int] = lambda: 0  # received by this rank
    on_signal: Callable[[int], None] = lambda number: None  # called with a signal that a generation rank received
    filled_together: int = field(default=0, init=False)  # `width` unless `fill_by_node`
    _orders: int = field(default=0, init=False)
    _refused: str = field(default="", init=False)  # by rank 0: why the run has failed
    _doing: str = field(default="start", init=False)  # by rank 0: the last order
    _heart: ExitStack = field(default_factory=ExitStack, init=False)

    def __post_init__(self) -> None:
        self.rank = self.group.rank()
        self.engines = tuple(range(self.trainers, self.group.size()))  # ranks that generate
        self.filled_together = self.width
        self.barrier = OrderBarrier(self.store, self.seal, self.silent_s)

    def fill_by_node(self) -> None:
        """Let each node of a replica get all weights, which its ranks read in memory that they share. Raises
        LayoutError where nodes have unequal parts of replicas. Collective over all ranks."""
        nodes = gathered(node(), self.group)[self.trainers :]
        replicas = [nodes[first : first + self.width] for first in range(0, len(nodes), self.width)]
        sizes = sorted({len(list(same)) for replica in replicas for _, same in groupby(replica)})
        if len(sizes) > 1:
            expected = f"equal parts of replicas on all nodes with engine.ranks: of {sizes} ranks"
            raise LayoutError("engine.tensor_parallel", self.width, expected)
        self.filled_together = sizes[0]

    @property
    def generates(self) -> bool:
        return self.rank >= self.trainers

    def begin(self) -> None:
        """Send heartbeats until `dismiss` or `leave`, if this rank generates."""
        if self.generates:
            self._heart.enter_context(self.barrier.beating(self.rank))

    # --- the trainer's side: every rank calls these together

    def order(self, name: str, *arguments: Any) -> None:
        """Have the ranks that generate do `name` after all earlier orders; rank 0's arguments count. Raises
        EngineError on every rank if some were lost until then."""
        self._orders += 1
        if self.rank == 0:
            with self.contact():
                key = _key(self._orders)
                self.store.set(key, self.seal.close(encode((name, arguments)), key))
        if name != DISMISS:
            by_rank_0(partial(self._call, name))

    def _call(self, name: str) -> None:
        """Wait until all ranks that generate have come. On rank 0."""
        if self._refused:  # the others have left
            raise EngineError(self._refused)
        number = self._orders
        with self.contact():
            lost = self.barrier.missing(number, self.engines)
            self.barrier.admit(number, not lost)
            # all have read the order before: they have come
            self.store.delete_key(_key(number - 1))
            self.barrier.forget(number - 1, self.engines)
        if lost:
            self._refused = f"{lost} (`{self._doing}`)"
            raise EngineError(self._refused)
        self._doing = name

    def answers(self) -> list[Answer]:
        """Return the answers of the ranks that generate, by rank. Raises the first error among them."""
        with self.contact():
            answers = [Answer(*fields) for fields in self._gather(None)[self.trainers :]]
        for answer in answers:
            if answer.signal:
                self.on_signal(answer.signal)
        for rank, answer in zip(self.engines, answers, strict=True):
            if answer.error:
                kind = getattr(errors, answer.error)
                # not by `kind(...)`: some errors take other arguments than a text
                raise kind.__new__(kind, f"on rank {rank}: {answer.text}")
        return answers

    def dismiss(self, well: bool) -> None:
        """Give the last order, without an answer: the others may be gone already."""
        self._heart.close()
        if self.rank != 0:
            return
        deadline = time.monotonic() + (self.silent_s if well else 1.0)
        with suppress(EngineError, RuntimeError):
            self.order(DISMISS, well)
            # the store ends with this process
            while not self.store.check([_left(rank) for rank in self.engines]) and time.monotonic() < deadline:
                time.sleep(POLL_S)

    # --- the side of the generation ranks

    def next_order(self) -> tuple[str, tuple[Any, ...]]:
        """Wait for the next order and come to it; return (name, arguments). An order that is not carried out is a
        dismissal. Raises EngineError when the trainer's rank 0 is gone, PeerError when a stranger's order is in its
        place."""
        self._orders += 1
        with self.contact():
            name, arguments = self.barrier.wait(_key(self._orders))
            if name == DISMISS:
                return name, tuple(arguments)
            carried_out = self.barrier.arrive(self._orders, self.rank)
        return (name, tuple(arguments)) if carried_out else (DISMISS, (False,))

    def answer(self, work: Callable[[], Any], version: Callable[[], int]) -> bool:
        """Do `work` and send the trainers its value or its error; return whether it went well on all ranks."""
        error, value = None, None
        try:
            value = work()
        except AlignerError as caught:
            error = caught
        name = "" if error is None else type(error).__name__
        own = Answer(name, str(error or ""), version(), self.signal(), value)
        with self.contact():
            answers = [Answer(*fields) for fields in self._gather(own)[self.trainers :]]
        return not any(answer.error for answer in answers)

    def leave(self, well: bool) -> None:
        """Leave after the last order. Unless it was `well`, the trainer's ranks end first: their error is the cause."""
        self._heart.close()
        with suppress(RuntimeError):
            self.store.set(_left(self.rank), b"")
            deadline = time.monotonic() + LAST_WORDS_S
            while not well and time.monotonic() < deadline:
                self.store.check([_left(self.rank)])  # raises when rank 0 is gone
                time.sleep(0.05)

    # --- both

    def _gather(self, answer: Any) -> list[Any]:
        """Return every rank's answer to the last order, on every rank. Collective over all ranks."""
        what = [f"answer {self._orders} of rank {rank}" for rank in range(self.group.size())]
        own = torch.frombuffer(bytearray(self.seal.close(encode(answer), what[self.group.rank()])), dtype=torch.uint8)
        sizes = [torch.zeros(1, dtype=torch.int64) for _ in what]
        dist.all_gather(sizes, torch.tensor([len(own)]), group=self.group)
        longest = max(int(size) for size in sizes)
        parts = [torch.zeros(longest, dtype=torch.uint8) for _ in what]
        dist.all_gather(parts, torch.nn.functional.pad(own, (0, longest - len(own))), group=self.group)
        signed = zip(parts, sizes, what, strict=True)
        return [decode(self.seal.open(shard[: int(size)].numpy().tobytes(), name)) for shard, size, name in signed]

    def tell(self, error: BaseException) -> None:
        """Write down the error that ends this rank, for the others to raise. The first one counts."""
        with suppress(RuntimeError):  # the store lives on rank 0, which may be gone
            why = f"rank {self.rank} failed: {error}"
            self.store.compare_set(CAUSE, "", self.seal.close(why.encode(), CAUSE).hex())
            if self.generates:
                self.barrier.fail(self.rank, str(error))

    @contextmanager
    def contact(self) -> Iterator[None]:
        """Raise an error of torch.distributed as the failure that another rank wrote down, if one did."""
        try:
            yield
        except RuntimeError as error:
            raise EngineError(self._cause() or self._lost(error)) from error

    def _cause(self) -> str:
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
