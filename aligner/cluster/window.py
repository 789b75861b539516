"""Memory of each rank that all others may read, by MPI's one-sided calls. No wait is without a limit."""

from __future__ import annotations

import time
from typing import Any

from aligner.cluster.mpi import communicator, on_leaving
from aligner.errors import ConfigError

POLL_S = 1e-4  # at most, between two looks: they also drive MPI on ranks whose memory is read


class Window:
    """`memory`: a buffer of bytes, which may be empty. Made by all ranks of the job together, and closed with MPI.
    Raises ConfigError where MPI has no one-sided calls between them."""

    def __init__(self, memory: Any):
        from mpi4py import MPI

        self._comm, self._byte = communicator(), MPI.BYTE
        assert self._comm is not None, "no MPI: `builders/job.py` refuses what needs it"
        try:
            self._win = MPI.Win.Create(memory, 1, comm=self._comm)
        except MPI.Exception as error:
            expected = f"messages, or an MPI with one-sided calls between these ranks ({error})"
            hint = "Open MPI 4.1 over TCP: OMPI_MCA_osc=pt2pt MPI4PY_RC_THREAD_LEVEL=serialized"
            raise ConfigError("refit.transport", "mpi_window", expected, hint) from error
        self._win.Lock_all()  # for good: readers read between two meetings, owners write before the first
        on_leaving(self._close)

    def meet(self, timeout_s: float) -> None:
        """All ranks are here, and what each wrote into its memory before may be read. Raises TimeoutError."""
        self._win.Sync()
        self.wait(self._comm.Ibarrier(), timeout_s)
        self._win.Sync()

    def get(self, rank: int, start: int, into: Any) -> Any:
        """Begin to read bytes of `rank` into a buffer; `wait` for what it returns."""
        return self._win.Rget(into, rank, (start, len(into), self._byte))

    def wait(self, request: Any, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        while not request.Test():
            if time.monotonic() > deadline:
                raise TimeoutError(f"MPI: nothing for {timeout_s:g} s")
            time.sleep(POLL_S)

    def _close(self) -> None:
        self._win.Unlock_all()
        self._win.Free()
