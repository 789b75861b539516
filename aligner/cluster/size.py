"""Number of nodes and ranks of a job: as asked for, as allocated by Slurm, or the site's. Imports no torch."""

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
        """Return the ranks on each node."""
        counts = [self.per_node] * self.nodes + [self.engine_per_node] * self.engine_nodes
        return [range(end - count, end) for end, count in zip(accumulate(counts), counts, strict=True)]


def job_size(args: argparse.Namespace, site: Site, environ: Mapping[str, str], gpus: int = 0) -> Size:
    """Return nodes and ranks per node: as asked for; in a job (`environ` has SLURM_JOB_ID) as allocated by Slurm; else
    those of `gpus` (`cluster.gpus`) on the site's nodes, or of one node."""
    for key in ("nodes", "engine_nodes", "ranks_per_node", "ranks", "spare", "max_requeues", "at_once"):
        if getattr(args, key) < 0:
            raise ConfigError(f"--{key.replace('_', '-')}", getattr(args, key), "a number >= 0")
    size = _first_component(args, site, environ, gpus)
    nodes, per_node = _second_component(args, site, environ, size.per_node)
    return replace(size, engine_nodes=nodes, engine_per_node=per_node)


def _second_component(args: argparse.Namespace, site: Site, environ: Mapping[str, str], beside: int) -> tuple[int, int]:
    """Return (nodes with engines only, ranks on each), the latter by default as many as `beside`. Raises ConfigError
    for options that Slurm lacks for heterogeneous jobs."""
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
    requested = _requested_ranks(nodes, environ, "_HET_GROUP_1")
    return nodes, requested or site.engines.ranks_per_node or site.engines.gpus_per_node or beside


def _first_component(args: argparse.Namespace, site: Site, environ: Mapping[str, str], gpus: int) -> Size:
    """Return the size without `--engine-nodes`."""
    if "SLURM_JOB_ID" not in environ:
        if args.shell:
            return Size(1, args.ranks or args.ranks_per_node or _local_ranks(site))
        known = gpus and site.gpus_per_node and not (args.nodes or args.engine_nodes or args.ranks_per_node)
        return _nodes_of(gpus, site) if known else Size(args.nodes or 1, args.ranks_per_node or site.ranks)
    allocated = int(environ.get("SLURM_NNODES", environ.get("SLURM_JOB_NUM_NODES", "1")))
    nodes = args.nodes or allocated - args.spare
    if not 1 <= nodes <= allocated - args.spare:
        raise ConfigError("--nodes", nodes, f"from 1 to {allocated - args.spare}: the job has {allocated} nodes")
    component = "_HET_GROUP_0" if "SLURM_HET_SIZE" in environ else ""
    return Size(nodes, args.ranks_per_node or _requested_ranks(allocated, environ, component) or site.ranks)


def _nodes_of(gpus: int, site: Site) -> Size:
    """Return as many whole nodes as have these GPUs, or a part of one. Raises ConfigError."""
    if gpus > site.ranks and gpus % site.ranks:
        raise ConfigError("cluster.gpus", gpus, f"a multiple of the {site.ranks} ranks of a node", "Or give --nodes.")
    return Size(max(1, gpus // site.ranks), min(gpus, site.ranks))


def _requested_ranks(nodes: int, environ: Mapping[str, str], component: str) -> int:
    """Return the ranks on each of so many nodes that Slurm was asked for; 0 if it was asked only for nodes."""
    tasks, per_node = (environ.get(f"SLURM_{name}{component}", "") for name in ("NTASKS", "NTASKS_PER_NODE"))
    if per_node.isdecimal():
        return int(per_node)
    if not tasks.isdecimal() or int(tasks) == nodes:  # of -N alone Slurm makes -n too
        return 0
    if int(tasks) % nodes:
        raise ConfigError("--ntasks", int(tasks), f"a multiple of the {nodes} nodes")
    return int(tasks) // nodes


def _local_ranks(site: Site) -> int:
    """Return the ranks without a scheduler: one for each GPU here, or one."""
    gpus = len(list(Path("/dev").glob("nvidia[0-9]*")))
    return site.ranks_per_node or gpus or 1
