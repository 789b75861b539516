"""The bootstrap by MPI: with a stand-in communicator here, with Open MPI under srun in tests/slurm."""

import threading

import pytest

from aligner.cluster import mpi
from aligner.cluster.env import RankEnv
from aligner.errors import ConfigError


class Comm:
    """Ranks as threads of this process."""

    def __init__(self, rank, size, shared):
        self.rank, self.size, self.shared = rank, size, shared

    def Get_rank(self):
        return self.rank

    def Get_size(self):
        return self.size

    def Barrier(self):
        self.shared["barrier"].wait(600)

    def allgather(self, value):
        self.shared["values"][self.rank] = value
        self.Barrier()
        results = [self.shared["values"][rank] for rank in range(self.size)]
        self.Barrier()
        return results

    def bcast(self, value, root=0):
        return self.allgather(value)[root]

    def Split(self, color, key):
        colors = self.allgather(color)
        members = [rank for rank in range(self.size) if colors[rank] == color]
        groups = self.shared.setdefault("groups", {})
        with self.shared["lock"]:
            shared = groups.setdefault(color, _shared(len(members)))
        return Comm(members.index(self.rank), len(members), shared)


def _shared(size):
    return {"values": {}, "barrier": threading.Barrier(size), "lock": threading.Lock()}


def on_ranks(size, function):
    shared, results, errors = _shared(size), [None] * size, []

    def run(rank):
        try:
            results[rank] = function(Comm(rank, size, shared))
        except Exception as error:  # shown by the assert below
            errors.append(error)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors, errors
    return results


def test_ranks_agree_on_the_place_and_on_who_shares_a_host():
    def job(comm):
        env = RankEnv(comm.rank, 0, 4, 4, "wrong", 29400 + comm.rank, "openmpi")
        return mpi.meet(comm, env, {"SLURMD_NODENAME": f"n{comm.rank // 2}", "MASTER_ADDR": "x"})

    worlds = on_ranks(4, job)
    assert {world.hosts for world in worlds} == {("n0", "n0", "n1", "n1")}
    assert [(w.env.local_rank, w.env.local_world_size) for w in worlds] == [(0, 2), (1, 2), (0, 2), (1, 2)]
    assert {(w.env.master_addr, w.env.master_port) for w in worlds} == {("wrong", worlds[0].env.master_port)}
    assert 29400 <= worlds[0].env.master_port < 29600


def test_sizes_that_differ_are_one_clear_error():
    env = RankEnv(rank=1, world_size=4, launcher="slurm")
    mpi.check_sizes(4, env, "4")
    mpi.check_sizes(None, env, "")
    with pytest.raises(ConfigError, match=r"MPI 1, slurm 4, the job 4.*did not join"):
        mpi.check_sizes(1, env, "4")
    with pytest.raises(ConfigError, match=r"slurm 4, the job 8.*nodes x ranks per node"):
        mpi.check_sizes(None, env, "8")


def test_ranks_numbered_differently_are_refused():
    env = RankEnv(rank=1, world_size=2, launcher="slurm")
    with pytest.raises(ConfigError, match="number the ranks differently"):
        mpi.meet(Comm(0, 1, _shared(1)), env, {})


def test_without_mpi_the_launchers_numbers_count(monkeypatch, capsys):
    step = {"SLURM_PROCID": "0", "SLURM_NTASKS": "2", "SLURM_STEP_ID": "0", "SLURM_TASKS_PER_NODE": "2"}
    world = mpi.join(step)
    assert (world.env.world_size, world.env.launcher, world.comm, world.hosts) == (2, "slurm", None, ())
    assert mpi.join({}).env.launcher == "single"
    # several ranks were planned, but this is no rank: a command typed inside the job
    assert mpi.join({"ALIGNER_RANKS": "8", "ALIGNER_MPI": "pmix"}).env.world_size == 1
    monkeypatch.setitem(__import__("sys").modules, "mpi4py", None)
    assert mpi.join(step | {"ALIGNER_MPI": "pmix", "ALIGNER_RANKS": "2"}).comm is None
    assert "no MPI" in capsys.readouterr().err
    with pytest.raises(ConfigError, match="slurm 2, the job 4"):
        mpi.join(step | {"ALIGNER_RANKS": "4"})


def test_a_taken_port_is_stepped_over():
    import socket

    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert port < mpi.free_port(port) < port + 200
