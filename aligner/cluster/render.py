"""A site and a job as shell text: the variables of `launchers/body.sh`, and the whole batch script around it."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path

from aligner.cluster.site import Site
from aligner.config.derived import node_purposes

VARIABLE = re.compile(r"\$(?:\{([A-Za-z_]\w*)\}|([A-Za-z_]\w*))", re.ASCII)


@dataclass(frozen=True)
class JobSpec:
    """A batch job: a stage, or several runs of one stage as an array."""

    stage: str
    root: Path  # of the checkout
    runs: tuple[str, ...]  # run folders; several: task i of the array takes runs[i]
    nodes: int
    ranks_per_node: int
    upstream: tuple[str, ...] = ()  # run folders that must be finished
    spare: int = 0  # nodes more than `nodes`, to replace bad ones
    max_requeues: int = 20
    config: str = "config.yaml"  # in each run folder; what all starts of this job read
    engine_ranks: int = 0  # of all ranks the last ones, which only generate
    engine_nodes: int = 0  # beside `nodes`, with all of `engine_ranks`: the second component of a heterogeneous job
    engine_ranks_per_node: int = 0

    @property
    def ranks(self) -> int:
        return self.nodes * self.ranks_per_node + self.engine_nodes * self.engine_ranks_per_node

    @property
    def node_purposes(self) -> str:
        """Text about the nodes' purposes; empty if all have the same."""
        return node_purposes(self.ranks - self.engine_ranks, self.engine_ranks, self.ranks_per_node, self.engine_nodes)


def expandable(text: str) -> str:
    r"""Return a shell word: literal, but for $NAME and ${NAME}. Unset variables are errors under `set -u`.

    >>> expandable("/tmp/a b-$USER")
    "'/tmp/a b-'\"${USER}\""
    """
    parts, end = [], 0
    for match in VARIABLE.finditer(text):
        parts += [shlex.quote(text[end : match.start()])] if match.start() > end else []
        parts.append(f'"${{{match[1] or match[2]}}}"')
        end = match.end()
    parts += [shlex.quote(text[end:])] if end < len(text) or not parts else []
    return "".join(parts)


def _array(name: str, words: Iterable[str], quote: Callable[[str], str] = shlex.quote) -> str:
    return f"{name}=({' '.join(quote(word) for word in words)})"


def job_lines(site_name: str, site: Site, job: JobSpec) -> str:
    """Return the assignments and the site's set-up that `launchers/body.sh` reads. Every value is quoted."""
    lines = [f"# site {site_name}: {' '.join(site.description.split())}"]
    if site.modules:  # their functions use unset variables
        lines += ["set +u", *(f"module load {shlex.quote(name)}" for name in site.modules), "set -u"]
    lines += [f"unset {name}" for name in site.unset]
    lines += [f"export {name}={expandable(value)}" for name, value in site.env.items()]
    single = {
        "ALIGNER_ROOT": str(job.root),
        "ALIGNER_STAGE": job.stage,
        "ALIGNER_SITE": site_name,
        "ALIGNER_NODES": str(job.nodes),
        "ALIGNER_SPARE": str(job.spare),
        "ALIGNER_RANKS_PER_NODE": str(job.ranks_per_node),
        "ALIGNER_RANKS": str(job.ranks),
        "ALIGNER_MPI": site.mpi,
        "ALIGNER_SIGNAL": site.signal,
        "ALIGNER_RENDEZVOUS": site.rendezvous,
        "ALIGNER_MAX_REQUEUES": str(job.max_requeues),
    }
    if job.engine_nodes:
        single["ALIGNER_ENGINE_NODES"] = str(job.engine_nodes)
        single["ALIGNER_ENGINE_RANKS_PER_NODE"] = str(job.engine_ranks_per_node)
    lines += [f"export {name}={shlex.quote(value)}" for name, value in single.items()]
    if site.scratch:
        lines.append(f"export ALIGNER_SCRATCH={expandable(site.scratch)}")
    if site.node_local:
        lines.append(f"export ALIGNER_NODE_LOCAL={expandable(site.node_local)}")
    if site.python:
        lines.append(f"ALIGNER_RANK_PYTHON={shlex.quote(site.python)}")
    lines.append(_array("ALIGNER_RUNS", job.runs))
    lines.append(f"ALIGNER_CONFIG={shlex.quote(job.config)}")
    lines.append(_array("ALIGNER_UPSTREAM", job.upstream))
    lines.append(_array("ALIGNER_SRUN", srun_flags(site), expandable))
    if job.engine_nodes:
        lines.append(_array("ALIGNER_ENGINE_SRUN", srun_flags(site.of_engines()), expandable))
    lines.append(_array("ALIGNER_CONTAINER", container_words(site, job), expandable))
    return "\n".join(lines) + "\n"


def srun_flags(site: Site) -> list[str]:
    """Return the flags by which srun starts and binds the ranks, without their number."""
    flags = [] if site.mpi == "mpirun" else [f"--mpi={site.mpi}"]
    bind = {
        "cpu-bind": site.bind.cpu,
        "mem-bind": site.bind.memory,
        "gpu-bind": site.bind.gpu,
        "distribution": site.bind.distribution,
    }
    flags += [f"--{name}={value}" for name, value in bind.items() if value]
    flags += [f"--cpus-per-task={site.cpus_per_rank}"] if site.cpus_per_rank else []
    return flags + site.srun


def container_words(site: Site, job: JobSpec) -> list[str]:
    """Return the container's words: for pyxis further flags of srun, for Apptainer the words before the command. The
    checkout and the folders of the runs are mounted at their own paths."""
    box = site.container
    if box.runtime == "none":
        return []
    own = dict.fromkeys([str(job.root), *(str(Path(run).parent) for run in (*job.runs, *job.upstream))])
    mounts = [*box.mounts, *(f"{path}:{path}" for path in own)]
    if box.runtime == "pyxis":
        return [f"--container-image={box.image}", f"--container-mounts={','.join(mounts)}", *box.flags]
    return ["apptainer", "exec", *box.flags, *(word for mount in mounts for word in ("--bind", mount)), box.image]


def sbatch_flags(site: Site, job: JobSpec) -> list[str]:
    """Return the requests of the site and the job to Slurm. The user's own flags and SBATCH_* variables override
    these."""
    asked = {
        "job-name": f"aligner-{job.stage}",
        "partition": site.partition,
        "account": site.account,
        "qos": site.qos,
        "constraint": site.constraint,
        "reservation": site.reservation,
        "time": site.time,
        "mem": site.memory,
        "nodes": str(job.nodes + job.spare),
        "ntasks-per-node": str(job.ranks_per_node),
        "cpus-per-task": str(site.cpus_per_rank or ""),
        "signal": f"B:{site.signal}@{site.signal_s}",
        "open-mode": "append",
    }
    flags = [f"--{name}={value}" for name, value in asked.items() if value]
    if site.gpus_per_node and site.gpu_flag != "none":
        kind = "gpu:" if site.gpu_flag == "gres" else ""
        flags.append(f"--{site.gpu_flag}={kind}{site.gpus_per_node}")
    flags += ["--exclusive"] if site.exclusive else []
    flags += ["--no-kill"] if job.spare else []
    return [*flags, "--requeue", *site.sbatch]


def batch_script(site_name: str, site: Site, job: JobSpec) -> str:
    """Return the whole script that `aligner submit` hands to sbatch. It starts `launchers/body.sh`, like the
    launchers."""
    flags = sbatch_flags(site, job)
    if job.engine_nodes:
        engines = replace(job, nodes=job.engine_nodes, ranks_per_node=job.engine_ranks_per_node)
        flags += ["hetjob", *sbatch_flags(site.of_engines(), engines)]
    parts = [
        "#!/usr/bin/env bash",
        *(f"#SBATCH {flag}" for flag in flags),
        "# shellcheck disable=SC2034  # body.sh reads these",
        "set -euo pipefail",
        "",
        job_lines(site_name, site, job),
        "# shellcheck source=/dev/null",
        'source "$ALIGNER_ROOT/launchers/body.sh"',
        "aligner_job",
    ]
    return "\n".join(parts) + "\n"
