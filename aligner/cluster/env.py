"""This process's rank: from the launcher's environment variables, or alone.

Known are torchrun and `aligner launch` (RANK ...), and Slurm's srun (SLURM_PROCID ...). So are Open MPI's mpirun
(OMPI_COMM_WORLD_RANK ...) and PMI launchers such as MPICH's and Intel's mpiexec (PMI_RANK ...)."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from aligner.errors import ConfigError

SLURM_COUNTS = ("SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE")
LAUNCHED = "ALIGNER_LAUNCHED"  # set by `aligner launch`: RANK is ours, inside any Slurm step


@dataclass(frozen=True)
class RankEnv:
    rank: int = 0
    local_rank: int = 0
    world_size: int = 1
    local_world_size: int = 1
    master_addr: str = "127.0.0.1"
    master_port: int = 29400
    launcher: str = "single"  # single, torch, slurm, openmpi, pmi
    one_host: bool = False  # all ranks are known to be on this machine


def checkout() -> Path:
    """Return the folder that this package is installed from. For a copy on a rank's node (`node_local`): the original,
    which has the history and the engines' environments that the copy lacks."""
    if "ALIGNER_NODE_LOCAL" in os.environ:
        return Path(os.environ["ALIGNER_ROOT"])
    return Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class _Source:
    """Environment variables in which one kind of launcher sets the same four numbers."""

    launcher: str
    rank: str
    world: str
    local_rank: str
    local_world: str
    active: Callable[[Mapping[str, str]], bool]


def _in_slurm_step(environ: Mapping[str, str]) -> bool:
    # A batch script sees SLURM_PROCID=0 and SLURM_NTASKS too, but is no rank: only srun's tasks have a step.
    return "SLURM_PROCID" in environ and ("SLURM_STEP_ID" in environ or environ["SLURM_PROCID"] != "0")


def _any_set(*names: str) -> Callable[[Mapping[str, str]], bool]:
    return lambda environ: any(name in environ for name in names)


def _slurm_world(environ: Mapping[str, str]) -> str:
    return "SLURM_STEP_NUM_TASKS" if "SLURM_STEP_NUM_TASKS" in environ else "SLURM_NTASKS"


def _sources(environ: Mapping[str, str]) -> list[_Source]:
    openmpi = "OMPI_COMM_WORLD_"
    sources = (
        _Source("torch", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", _any_set("RANK", "WORLD_SIZE")),
        _Source(
            "openmpi",
            openmpi + "RANK",
            openmpi + "SIZE",
            openmpi + "LOCAL_RANK",
            openmpi + "LOCAL_SIZE",
            _any_set(openmpi + "RANK"),
        ),
        _Source("slurm", "SLURM_PROCID", _slurm_world(environ), "SLURM_LOCALID", "", _in_slurm_step),
        _Source("pmi", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS", _any_set("PMI_RANK")),
    )
    return [source for source in sources if source.active(environ)]


def rank_env(environ: Mapping[str, str] = os.environ) -> RankEnv:
    """Return this process's rank. Raises ConfigError for variables that are missing, no numbers, or contradict each
    other."""
    sources = _sources(environ)
    if not sources:
        return RankEnv(master_port=_master_port(environ))
    chosen = sources[0]
    for name, other in ((chosen.rank, chosen.world), (chosen.world, chosen.rank)):
        if name not in environ:
            raise ConfigError(name, None, f"a number, because {other}={environ.get(other)} is set")
    _agree(chosen, sources[1:], environ)
    rank, world = _number(environ, chosen.rank), _number(environ, chosen.world)
    if not 0 <= rank < world:
        raise ConfigError(chosen.rank, rank, f"a number from 0 to {world - 1} ({chosen.world}={world})")
    local_world = _local_world(chosen, environ, world)
    local_rank = _number(environ, chosen.local_rank, default=rank % local_world)
    if not 0 <= local_rank < local_world:
        raise ConfigError(chosen.local_rank, local_rank, f"a number from 0 to {local_world - 1}")
    master = _master_addr(environ), _master_port(environ)
    local_counts = [chosen.local_world] if chosen.local_world else SLURM_COUNTS
    one_host = local_world == world and any(name in environ for name in local_counts)
    return RankEnv(rank, local_rank, world, local_world, *master, chosen.launcher, one_host)


def _agree(chosen: _Source, others: list[_Source], environ: Mapping[str, str]) -> None:
    """Check that two launchers that both have several ranks have the same ones.

    torchrun and mpirun start their own processes inside srun's, so there the inner numbers count."""
    if chosen.launcher == "torch" and (LAUNCHED in environ or "TORCHELASTIC_RUN_ID" in environ):
        return
    for other in others:
        if (chosen.launcher, other.launcher) == ("openmpi", "slurm") or _number(environ, other.world) == 1:
            continue
        for own, theirs in ((chosen.world, other.world), (chosen.rank, other.rank)):
            if _number(environ, own) != _number(environ, theirs):
                raise ConfigError(
                    own,
                    environ[own],
                    f"the same as {theirs}={environ[theirs]}",
                    f"Launchers contradict each other ({chosen.launcher}, {other.launcher}): unset one's variables.",
                )


def _number(environ: Mapping[str, str], name: str, default: int | None = None) -> int:
    text = environ.get(name)
    if text is None:
        if default is None:
            raise ConfigError(name, None, "a number beside the launcher's other variables")
        return default
    if not text.isdecimal():
        raise ConfigError(name, text, "a number >= 0")
    return int(text)


def _local_world(source: _Source, environ: Mapping[str, str], world: int) -> int:
    if source.launcher == "slurm":
        if "SLURM_HET_SIZE" in environ and environ.get("SLURM_GTIDS"):
            # of two components: counts are in the order of nodes' names, SLURM_NODEID in that of components
            return len(environ["SLURM_GTIDS"].split(","))
        name = next((name for name in SLURM_COUNTS if environ.get(name)), SLURM_COUNTS[-1])
        counts, node = _expand_counts(environ.get(name) or str(world)), _number(environ, "SLURM_NODEID", default=0)
        if node >= len(counts):
            expected = f"the tasks of each node, at least {node + 1} counts, because SLURM_NODEID={node} is set"
            raise ConfigError(name, environ.get(name), expected, "Hand all variables of srun's on to its tasks.")
        return counts[node]
    return _number(environ, source.local_world, default=world)


def _expand_counts(text: str) -> list[int]:
    """Expand Slurm's counts per node: `2(x3),1` -> [2, 2, 2, 1]."""
    counts: list[int] = []
    for entry in text.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", entry)
        if match is None:
            raise ConfigError("SLURM_TASKS_PER_NODE", text, "counts such as 2(x3),1")
        counts += [int(match[1])] * int(match[2] or 1)
    return counts


def first_host(nodelist: str) -> str:
    """Return the first host of a Slurm list: `gpu[07-09,12],login` -> `gpu07`."""
    head, bracket, rest = nodelist.partition("[")
    if not bracket or "," in head:
        return head.split(",")[0]
    inside, _, tail = rest.partition("]")
    suffix = re.match(r"[^,\[]*", tail)
    return head + re.split(r"[-,]", inside)[0] + (suffix[0] if suffix else "")


def _master_addr(environ: Mapping[str, str]) -> str:
    # in a heterogeneous job rank 0 is in the first component, with any names of nodes
    names = ("SLURM_JOB_NODELIST_HET_GROUP_0", "SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST")
    nodes = next((environ[name] for name in names if environ.get(name)), "")
    return environ.get("MASTER_ADDR") or (first_host(nodes) if nodes else "127.0.0.1")


def _master_port(environ: Mapping[str, str]) -> int:
    """Return a port below the ephemeral range, from the job (and step) id, so that jobs on one host use different
    ones."""
    if "MASTER_PORT" in environ:
        return _number(environ, "MASTER_PORT")
    job, step = environ.get("SLURM_JOB_ID", ""), environ.get("SLURM_STEP_ID", "")
    return 20000 + (int(job) * 7 + (int(step) if step.isdecimal() else 0)) % 10000 if job.isdecimal() else 29400
