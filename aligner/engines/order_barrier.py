"""The barrier before each order. Ranks that generate arrive at it after finishing earlier ones, and no order starts
before all have arrived. So no rank enters a collective with one that has ended or hangs, unless that happens in that
very moment.

    arrive   a rank that generates, for an order
    missing  the trainer's rank 0 waits for them; a rank that does not arrive is lost once its heartbeat stops or it
             reports a failure
    admit    by rank 0: the order is carried out if all have arrived

Until a rank arrives, one of its threads writes a heartbeat to the store that all ranks share.
"""

from __future__ import annotations

import socket
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field

import torch.distributed as dist

from aligner.cluster.seal import Seal
from aligner.engines.orders import decode, encode
from aligner.errors import PeerError

BEAT_S = 0.5
POLL_S, LONGEST_S = 0.01, 0.1  # between two looks at the store: where an answer is near, and at most
REFUSED_S = 10.0  # that a message without the job's signature may be in the place of rank 0's


@dataclass
class OrderBarrier:
    """The barrier of the ranks that generate. Every method raises what torch.distributed raises where the store is
    gone."""

    store: dist.Store
    seal: Seal
    silent_s: float  # without a heartbeat, after which a rank is lost
    _why: str = field(default="", init=False)  # why this rank does not arrive any more

    # --- a rank that generates

    @contextmanager
    def beating(self, rank: int) -> Iterator[None]:
        ended, own = threading.Event(), self.store.clone()  # a thread that waits in a store blocks its connection

        def beat() -> None:
            number = 0
            try:
                while not ended.wait(BEAT_S):
                    number += 1
                    self._beat(own, rank, str(number))
            except RuntimeError:  # the store ends with rank 0
                return
            except BaseException as error:  # the trainer sees it as silence
                print(f"error: rank {rank}: its heartbeat thread has failed: {error!r}", file=sys.stderr, flush=True)

        heart = threading.Thread(target=beat, name="heart", daemon=True)
        self._beat(own, rank, "0")
        heart.start()
        try:
            yield
        finally:
            ended.set()
            heart.join()

    def fail(self, rank: int, why: str) -> None:
        """Tell the trainer why this rank will not arrive any more."""
        self._why = why
        self._beat(self.store, rank, "")

    def arrive(self, number: int, rank: int) -> bool:
        """Arrive at an order; return whether it is carried out."""
        self.store.set(_arrived(number, rank), b"")
        return self.wait(_admitted(number))

    # --- the trainer's rank 0

    def missing(self, number: int, ranks: Sequence[int]) -> str:
        """Wait for these ranks; return why the first lost ones do not arrive, "" where all have."""
        beats: dict[int, str] = {}
        silent: dict[int, float] = {}
        started = last = time.monotonic()
        lost: list[str] = []
        while not lost and not self.store.check([_arrived(number, rank) for rank in ranks]):
            now = time.monotonic()
            if now - last < BEAT_S:
                nap(started)
                continue
            # a pause of the whole job does not count as silence
            passed, last = min(now - last, 2 * BEAT_S), now
            for rank in ranks:
                if self.store.check([_arrived(number, rank)]):
                    continue
                host, beat, why = self._last_beat(rank)
                silent[rank] = silent[rank] + passed if beat == beats.get(rank) else 0.0
                beats[rank] = beat
                if why or silent[rank] > self.silent_s:
                    how = f"failed: {why}" if why else f"has ended or hangs: silent for {silent[rank]:.0f} s"
                    lost.append(f"rank {rank} on {host} {how}")
        return "; ".join(lost)

    def admit(self, number: int, all_arrived: bool) -> None:
        key = _admitted(number)
        self.store.set(key, self.seal.close(encode(all_arrived), key))

    def forget(self, number: int, ranks: Collection[int]) -> None:
        """Delete the keys of an order that all have read."""
        for key in (_admitted(number), *(_arrived(number, rank) for rank in ranks)):
            self.store.delete_key(key)

    # --- both

    def wait[T](self, key: str, read: Callable[[bytes], T] = decode) -> T:
        """Wait for a message signed by rank 0 and return it. Raises PeerError where another message stays in its
        place."""
        started, refused = time.monotonic(), 0.0
        while True:
            while not self.store.check([key]):  # not `wait`: it blocks the connection that other threads need
                nap(started)
            try:
                return read(self.seal.open(self.store.get(key), key))
            except PeerError:  # written before rank 0's, which replaces it
                refused = refused or time.monotonic()
                if time.monotonic() - refused > REFUSED_S:
                    raise
                time.sleep(POLL_S)

    def _beat(self, store: dist.Store, rank: int, beat: str) -> None:
        key = _pulse(rank)
        store.set(key, self.seal.close(encode([socket.gethostname(), beat, self._why]), key))

    def _last_beat(self, rank: int) -> tuple[str, str, str]:
        """Return (host, number of the heartbeat, why it fails); empty ones for a rank that ended before its first
        heartbeat."""
        key = _pulse(rank)
        with suppress(PeerError):
            if self.store.check([key]):
                host, beat, why = decode(self.seal.open(self.store.get(key), key))
                return host, beat, why
        return "an unknown host", "", ""


def nap(since: float) -> None:
    """Sleep before another look at the store, longer the longer the wait: a thousand idle ranks share one store."""
    time.sleep(min(LONGEST_S, 0.0005 + (time.monotonic() - since) / 100))


def _arrived(number: int, rank: int) -> str:
    return f"aligner/roll/{number}/{rank}"


def _admitted(number: int) -> str:
    return f"aligner/roll/{number}"


def _pulse(rank: int) -> str:
    return f"aligner/roll/pulse/{rank}"
