"""How many nodes and ranks a job has: as asked for, as Slurm gave, or the site's. Imports no torch."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import accumulate
from pathlib import Path

from aligner.cluster.site import Site
from aligner.errors import ConfigError


@dataclass(frozen=True)
class Size:
    nodes: int
    per_node: int
    engine_nodes: int = 0  # beside them: a heterogeneous job
    engine_per_node: int = 0

    @property
    def engine_ranks(self) -> int:
        return self.engine_nodes * self.engine_per_node

    @property
    def ranks(self) -> int:
        return self.nodes * self.per_node + self.engine_ranks

    def each_node(self) -> list[range]:
        """The ranks on it."""
        counts = [self.per_node] * self.nodes + [self.engine_per_node] * self.engine_nodes
        return [range(end - count, end) for end, count in zip(accumulate(counts), counts, strict=True)]


def job_size(args: argparse.Namespace, site: Site, environ: Mapping[str, str]) -> Size:
    """Nodes and ranks per node: as asked for; in a job (`environ` has SLURM_JOB_ID) what Slurm gave; the site's."""
    for key in ("nodes", "engine_nodes", "ranks_per_node", "ranks", "spare", "max_requeues", "at_once"):
        if getattr(args, key) < 0:
            raise ConfigError(f"--{key.replace('_', '-')}", getattr(args, key), "a number >= 0")
    size = _first_component(args, site, environ)
    nodes, per_node = _second_component(args, site, environ, size.per_node)
    return replace(size, engine_nodes=nodes, engine_per_node=per_node)


def _second_component(args: argparse.Namespace, site: Site, environ: Mapping[str, str], beside: int) -> tuple[int, int]:
    """Nodes with engines alone, and ranks on each; as many as `beside` them, where nobody says. Raises ConfigError for
    what Slurm does not have for heterogeneous jobs."""
    nodes = args.engine_nodes
    if args.shell:
        nodes = int(environ.get("SLURM_JOB_NUM_NODES_HET_GROUP_1", "0"))
        if environ.get("SLURM_HET_SIZE", "2") != "2":
            raise ConfigError("SLURM_HET_SIZE", environ["SLURM_HET_SIZE"], "2: nodes that train, and nodes of engines")
        if args.engine_nodes not in (0, nodes):
            expected = f"{nodes}: the nodes of the job's second component"
            raise ConfigError("--engine-nodes", args.engine_nodes, expected)
    if not nodes:
        return 0, 0
    for key, value, wrong, expected in (
        ("--spare", args.spare, args.spare > 0, "0 with --engine-nodes: spare nodes are of one kind"),
        ("--multirun", True, args.multirun, "one run with --engine-nodes: Slurm has no arrays of heterogeneous jobs"),
        ("mpi", site.mpi, site.mpi == "mpirun", "pmix, pmi2 or none with --engine-nodes: only srun starts both kinds"),
        ("node_local", site.node_local, site.node_local != "", "empty with --engine-nodes: no copies for two kinds"),
    ):
        if wrong:
            raise ConfigError(key, value, expected)
    told = _given(nodes, environ, "_HET_GROUP_1")
    return nodes, told or site.engines.ranks_per_node or site.engines.gpus_per_node or beside


def _first_component(args: argparse.Namespace, site: Site, environ: Mapping[str, str]) -> Size:
    """But for `--engine-nodes` that is all of the job."""
    if "SLURM_JOB_ID" not in environ:
        if args.shell:
            return Size(1, args.ranks or args.ranks_per_node or _local_ranks(site))
        return Size(args.nodes or 1, args.ranks_per_node or site.ranks)
    given = int(environ.get("SLURM_NNODES", environ.get("SLURM_JOB_NUM_NODES", "1")))
    nodes = args.nodes or given - args.spare
    if not 1 <= nodes <= given - args.spare:
        raise ConfigError("--nodes", nodes, f"from 1 to {given - args.spare}: the job has {given} nodes")
    component = "_HET_GROUP_0" if "SLURM_HET_SIZE" in environ else ""
    return Size(nodes, args.ranks_per_node or _given(given, environ, component) or site.ranks)


def _given(nodes: int, environ: Mapping[str, str], component: str) -> int:
    """Ranks on each of so many nodes, as Slurm was asked; 0 where it was asked for nodes alone."""
    tasks, per_node = (environ.get(f"SLURM_{name}{component}", "") for name in ("NTASKS", "NTASKS_PER_NODE"))
    if per_node.isdecimal():
        return int(per_node)
    if not tasks.isdecimal() or int(tasks) == nodes:  # of -N alone Slurm makes -n too
        return 0
    if int(tasks) % nodes:
        raise ConfigError("--ntasks", int(tasks), f"a multiple of the {nodes} nodes")
    return int(tasks) // nodes


def _local_ranks(site: Site) -> int:
    """Without a scheduler: a rank for each GPU here, or one."""
    gpus = len(list(Path("/dev").glob("nvidia[0-9]*")))
    return site.ranks_per_node or gpus or 1
