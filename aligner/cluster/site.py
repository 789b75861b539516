"""Settings of a computing site, as data: `slurm/sites/<name>.yaml`. Imports no torch."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import yaml

from aligner.config.checks import one_of
from aligner.config.options import from_plain
from aligner.errors import ConfigError, SiteCodeError, UnknownKeyError
from aligner.plan.devices import find_device
from aligner.user_code import is_path, load_instance

FOLDER = Path(__file__).resolve().parents[2] / "slurm" / "sites"
VARIABLE = "ALIGNER_SITE"  # a site's name, or the path of a file
DEFAULT = "generic"
MPI = ("none", "pmix", "pmi2", "mpirun")
RUNTIMES = ("none", "pyxis", "apptainer")


@dataclass
class Container:
    """The container in which ranks run."""

    runtime: str = "none"  # none, pyxis (srun's flags of pyxis/enroot), apptainer
    image: str = ""
    mounts: list[str] = field(default_factory=list)  # host:container[:options]; the checkout and run folders are added
    flags: list[str] = field(default_factory=list)  # further flags of srun (pyxis) or `apptainer exec`

    def __post_init__(self) -> None:
        one_of("container.runtime", self.runtime, RUNTIMES)
        if (self.runtime == "none") != (self.image == ""):
            raise ConfigError("container.image", self.image, "an image exactly where container.runtime is not none")


@dataclass
class Binding:
    """Values of srun's --cpu-bind, --mem-bind, --gpu-bind and --distribution; empty: Slurm's default."""

    cpu: str = ""
    memory: str = ""
    gpu: str = ""
    distribution: str = ""


@dataclass
class Engines:
    """Requests of `submit --engine-nodes` on the nodes of ranks that only generate; empty or 0: as on the others."""

    partition: str = ""
    constraint: str = ""
    memory: str = ""
    gpus_per_node: int = 0
    gpu: str = ""
    ranks_per_node: int = 0  # 0: one per GPU, if gpus_per_node is set here
    cpus_per_rank: int = 0

    def __post_init__(self) -> None:
        if self.gpu:
            find_device(self.gpu, "engines.gpu")
        _none_below_0(self, "engines.", "gpus_per_node", "ranks_per_node", "cpus_per_rank")


@dataclass
class Site:
    """A cluster, as the files of `slurm/sites` describe it."""

    description: str = ""
    cluster_name: str = ""  # ClusterName in slurm.conf, by which a job knows where it is
    # requests to Slurm; empty or 0: none
    partition: str = ""
    account: str = ""
    qos: str = ""
    constraint: str = ""
    reservation: str = ""
    time: str = ""
    memory: str = ""  # per node; "0" means all of it
    exclusive: bool = False
    gpus_per_node: int = 0
    gpu: str = ""  # of aligner/plan/devices.py: a job that cannot fit its memory is refused; empty: not checked
    rehearse: bool = False  # every job first (docs/how-to/rehearse.md); needs `gpu`
    gpu_flag: str = "gpus-per-node"  # gpus-per-node, gres, none
    ranks_per_node: int = 0  # 0: one per GPU, or one
    cpus_per_rank: int = 0
    signal: str = "USR1"  # the signal on which a run saves and stops
    signal_s: int = 300  # seconds before the time limit at which it is sent
    sbatch: list[str] = field(default_factory=list)  # further flags
    engines: Engines = field(default_factory=Engines)
    # how ranks start
    mpi: str = "none"  # none (ranks from Slurm's variables), pmix, pmi2, mpirun
    srun: list[str] = field(default_factory=list)  # further flags
    bind: Binding = field(default_factory=Binding)
    rendezvous: str = "hostname"  # hostname, or address (NodeAddr) where node names do not resolve
    # environment of a rank. `$NAME` in values of env, in scratch, node_local and in the container is the job's variable
    modules: list[str] = field(default_factory=list)
    unset: list[str] = field(default_factory=list)
    env: dict[str, str] = field(default_factory=dict)
    scratch: str = ""  # a folder on each node, for compilation caches
    node_local: str = ""  # a folder on each node that ranks import from copies in; empty: from the .venv and checkout
    python: str = ""  # the command; empty: the .venv that the launchers make
    container: Container = field(default_factory=Container)
    quirks: list[str] = field(default_factory=list)  # notes for users; shown by `submit --dry-run`

    def __post_init__(self) -> None:
        one_of("mpi", self.mpi, MPI)
        one_of("signal", self.signal, ("USR1", "USR2"))
        one_of("gpu_flag", self.gpu_flag, ("gpus-per-node", "gres", "none"))
        one_of("rendezvous", self.rendezvous, ("hostname", "address"))
        if self.gpu:
            find_device(self.gpu, "gpu")
        if self.rehearse and not self.gpu:
            raise ConfigError("rehearse", True, "false without `gpu`, the device to rehearse on")
        _none_below_0(self, "", "gpus_per_node", "ranks_per_node", "cpus_per_rank", "signal_s")
        for name in [*self.env, *self.unset]:
            if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
                raise ConfigError("env", name, "the name of an environment variable")
        if self.container.runtime != "none" and self.mpi == "mpirun":
            raise ConfigError("mpi", self.mpi, "pmix, pmi2 or none with a container: mpirun would run outside of it")
        if self.node_local and (self.python or self.container.runtime != "none"):
            expected = "empty with `python` or a container: only the .venv is copied"
            raise ConfigError("node_local", self.node_local, expected)

    @property
    def ranks(self) -> int:
        """Number of ranks on each node."""
        return self.ranks_per_node or self.gpus_per_node or 1

    def of_engines(self) -> Site:
        """Return the site with the settings for the nodes of `submit --engine-nodes`."""
        return replace(self, **{key: value for key, value in vars(self.engines).items() if value})


def _none_below_0(section: object, prefix: str, *keys: str) -> None:
    for key in keys:
        if getattr(section, key) < 0:
            raise ConfigError(prefix + key, getattr(section, key), "a number >= 0")


def load_site(name: str) -> Site:
    """Load a site by its name in slurm/sites, by the path of a YAML file, or a `Site` of a user's Python by its path.

    Raises ConfigError (UnknownKeyError for keys that do not exist), naming the file."""
    path: Path | str = name
    data = asdict(load_instance(name, "--site", Site, SiteCodeError)) if is_path(name) else None
    if data is None:
        path = Path(name).expanduser() if "/" in name or name.endswith((".yaml", ".yml")) else FOLDER / f"{name}.yaml"
        data = _read(path, name)
    try:
        return from_plain(Site, data or {}, root=Site)
    except UnknownKeyError as error:
        error.args = (f"{error} (in {path})",)
        raise
    except ConfigError as error:
        raise ConfigError(error.key, error.value, error.expected, f"(in {path})") from None


def _read(path: Path, name: str) -> Any:
    try:
        return yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError:
        expected = f"one of {', '.join(names())}, the path of a YAML file, or module:Site, path.py:Site"
        raise ConfigError("--site", name, expected) from None
    except yaml.YAMLError as error:
        raise ConfigError("--site", str(path), "a YAML file", " ".join(str(error).split())) from None


def names() -> list[str]:
    return sorted(path.stem for path in FOLDER.glob("*.yaml"))


def find_site(name: str | None, environ: Mapping[str, str] = os.environ) -> tuple[str, Site]:
    """Return the site asked for; else $ALIGNER_SITE; else, in a job, the one with this cluster's name; else
    `generic`."""
    chosen = name or environ.get(VARIABLE)
    cluster = environ.get("SLURM_CLUSTER_NAME")
    if not chosen and cluster:
        chosen = next((known for known in names() if load_site(known).cluster_name == cluster), None)
    return chosen or DEFAULT, load_site(chosen or DEFAULT)
