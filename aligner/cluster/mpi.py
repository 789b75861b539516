"""Bootstrap by MPI: ranks, rendezvous address, and hosts.

Tensors and messages do not use MPI but torch.distributed. mpi4py and an MPI library are optional; without them the
ranks take the same numbers from the launcher's variables (`env.py`).
"""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from aligner.cluster.env import RankEnv, rank_env
from aligner.errors import ConfigError

KIND = "ALIGNER_MPI"  # set by the launchers: pmix, pmi2, mpirun; none or unset: no MPI
EXPECTED = "ALIGNER_RANKS"  # the number of ranks that the job was made for


@dataclass(frozen=True)
class World:
    env: RankEnv
    hosts: tuple[str, ...]  # of every rank; empty without MPI
    comm: Any | None  # MPI's communicator of all ranks

    def leave(self, well: bool) -> None:
        """Finalize MPI after a good end. It waits for all ranks, so a failing rank must not do it."""
        if self.comm is not None and well:
            from mpi4py import MPI

            if not MPI.Is_finalized():
                MPI.Finalize()


def join(environ: Mapping[str, str] = os.environ) -> World:
    """Return this process's world. Raises ConfigError if MPI, the launcher and the job's plan disagree."""
    env = rank_env(environ)
    expected = environ.get(EXPECTED, "") if env.launcher != "single" else ""
    if environ.get(KIND, "none") == "none" or env.launcher in ("single", "torch"):
        check_sizes(None, env, expected)
        return World(env, (), None)
    comm = _world_communicator(env)
    check_sizes(comm.Get_size() if comm else None, env, expected)
    if comm is None:
        return World(env, (), None)
    return meet(comm, env, environ)


def _world_communicator(env: RankEnv) -> Any | None:
    """Return COMM_WORLD, or None (and print a line on rank 0) if mpi4py or an MPI library is missing."""
    try:
        import mpi4py

        mpi4py.rc.finalize = False  # see World.leave
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        if env.rank == 0:
            reason = str(error).splitlines()[0]
            print(f"no MPI ({reason}): ranks from {env.launcher}'s variables", file=sys.stderr, flush=True)
        return None
    return MPI.COMM_WORLD


def check_sizes(mpi: int | None, env: RankEnv, expected: str) -> None:
    """Check that MPI, the launcher and the plan count the same ranks. Raises one ConfigError with all three numbers."""
    counts = {"MPI": mpi, env.launcher: env.world_size, "the job": int(expected) if expected.isdecimal() else None}
    known = {name: count for name, count in counts.items() if count is not None}
    if len(set(known.values())) <= 1:
        return
    counted = ", ".join(f"{name} {count}" for name, count in known.items())
    hint = "The plan is nodes x ranks per node; give it to `submit`, or as sbatch's --nodes and --ntasks-per-node."
    if mpi == 1:
        hint = (
            "The MPI library did not join the launcher's ranks: the site's `mpi` must be one that it knows"
            " (srun --mpi=list), or MPI4PY_MPIABI must name the library that srun serves."
        )
    raise ConfigError("number of ranks", counted, "the same number from all", hint)


def meet(comm: Any, env: RankEnv, environ: Mapping[str, str]) -> World:
    """Agree on the rendezvous address, which rank 0 chooses, and on the ranks of each host."""
    rank = comm.Get_rank()
    if rank != env.rank:
        expected = f"the same as MPI's rank {rank}"
        raise ConfigError("rank", env.rank, expected, f"{env.launcher} and MPI number the ranks differently.")
    address_and_port = None
    if rank == 0:
        known = "MASTER_ADDR" in environ or env.launcher == "slurm"
        address_and_port = (env.master_addr if known else host_address(), free_port(env.master_port))
    address, port = comm.bcast(address_and_port, root=0)
    hosts = tuple(comm.allgather(environ.get("SLURMD_NODENAME") or socket.gethostname()))
    here = [rank for rank, host in enumerate(hosts) if host == hosts[env.rank]]
    local = {"local_rank": here.index(env.rank), "local_world_size": len(here), "one_host": len(set(hosts)) == 1}
    return World(replace(env, master_addr=address, master_port=port, **local), hosts, comm)


def host_address() -> str:
    """Return this host's name if it resolves, else its loopback address: then all ranks must be on this host."""
    name = socket.gethostname()
    try:
        socket.getaddrinfo(name, None)
    except OSError:
        return "127.0.0.1"
    return name


def free_port(first: int, tries: int = 200) -> int:
    """Return the first port from `first` on that can be bound on this host; below the ephemeral range if `first` is."""
    for port in range(first, first + tries):
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("", port))
            except OSError:
                continue
            return port
    raise ConfigError("MASTER_PORT", first, f"a free port within {tries} of it")
