"""`aligner submit`: compose, validate and freeze a run, write its batch script, hand it to sbatch. Imports no torch.

With --shell the same for a job that is already running: `launchers/*.sbatch` evaluate the output.
"""

from __future__ import annotations

import argparse
import itertools
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

from aligner.cluster.lock import RunLock
from aligner.cluster.render import JobSpec, batch_script, job_lines
from aligner.cluster.site import Site, find_site
from aligner.cluster.size import Size, job_size
from aligner.cluster.versions import check_versions
from aligner.config.derived import batch_arithmetic
from aligner.config.freeze import FILE_NAME, freeze, job_file, load_frozen
from aligner.config.resolve import compose, job_labels, quoted, sweep
from aligner.config.schema import Config
from aligner.config.unread import compose_run
from aligner.config.validate import validate
from aligner.config.validate_model import check_node
from aligner.errors import AlignerError, ConfigError
from aligner.files import conf_dir
from aligner.plan.prediction import check

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = "job.sbatch"  # in the run folder
_INHERITED = ("SLURM_", "PMIX_", "PMI_", "OMPI_")  # of a job in which `submit` runs: not the new job's


def main(args: argparse.Namespace, rehearse: Callable[[Config, int, str], None]) -> int:
    """Run `aligner submit`. `rehearse(config, GPUs, their name)` raises AlignerError for errors on such GPUs.

    Raises ConfigError, or MemoryPlanError for a job that the site's GPUs cannot hold, before anything is written;
    AlignerError if sbatch fails."""
    name, site = find_site(args.site)
    configs = composed(args)
    size = job_size(args, site, os.environ if args.shell else {}, configs[0].cluster.gpus)
    for cfg in configs:
        _check_engines(cfg, size)
        validate(_with_upstream_there(cfg, args.upstream), size.ranks)
        check_versions(cfg, site)
        if site.gpu:
            check(cfg, size.ranks, size.per_node, _gpus(site, size))
    if args.rehearse and not site.gpu:
        raise ConfigError("--rehearse", True, f"a site whose file says which `gpu` it has; {name} does not")
    for cfg in configs if args.rehearse or site.rehearse else ():
        rehearse(cfg, size.ranks, site.gpu)
    runs = tuple(str(Path(cfg.run.dir).expanduser().absolute()) for cfg in configs)
    upstream = tuple(str(Path(folder).expanduser().absolute()) for folder in args.upstream)
    limits = (args.spare, args.max_requeues)
    engines = (configs[0].engine.ranks, size.engine_nodes, size.engine_per_node)
    counts = (size.nodes, size.per_node)
    job = JobSpec(configs[0].stage.name, ROOT, runs, *counts, upstream, *limits, job_file(configs), *engines)
    if not args.dry_run:
        for cfg in configs:
            with RunLock(Path(cfg.run.dir)) if args.shell else nullcontext():  # the run begins now
                _freeze(cfg, job.config)
    if args.shell:
        print("\n".join(filter(None, (batch_arithmetic(configs[0], size.ranks), job.node_purposes))), file=sys.stderr)
        print(job_lines(name, site, job), end="")
        return 0
    return _submit(args, batch_script(name, site, job), job, site)


def _check_engines(cfg: Config, size: Size) -> None:
    """Check that nodes of engines have no other ranks, and equal parts of replicas in child processes."""
    if size.engine_nodes and cfg.engine.ranks != size.engine_ranks:
        expected = f"{size.engine_ranks}: --engine-nodes {size.engine_nodes} of {size.engine_per_node} ranks each"
        raise ConfigError("engine.ranks", cfg.engine.ranks, expected)
    for node in size.each_node():
        check_node(cfg, node, size.ranks)


def _gpus(site: Site, size: Size) -> dict[str, str]:
    """Return key -> name of its GPU: first of ranks that train, then of engines' ranks if that is another."""
    return {"gpu": site.gpu} | ({"engines.gpu": site.engines.gpu} if size.engine_nodes and site.engines.gpu else {})


def composed(args: argparse.Namespace) -> list[Config]:
    """Return the config of the run, or of every run of a sweep, each in its own folder."""
    if args.frozen:
        if args.multirun or args.overrides:
            refused = "--multirun" if args.multirun else " ".join(args.overrides)
            raise ConfigError("--frozen", refused, "a frozen config as it is, without overrides")
        return [load_frozen(args.frozen)]
    if not args.multirun:
        return [compose_run(args.overrides, config_dir=args.config_dir)]
    jobs = sweep(args.overrides)
    configs = []
    for overrides, label in zip(jobs, job_labels(jobs), strict=True):
        base = compose(overrides, config_dir=args.config_dir)
        folder = str(Path(base.run.dir) / label)
        configs.append(compose_run([*overrides, f"run.dir={quoted(folder)}"], config_dir=args.config_dir))
    return configs


def _with_upstream_there(cfg: Config, upstream: list[str]) -> Config:
    """Return the config for validation, in which the future files of an upstream run count as existing."""
    folders = [Path(folder).expanduser().absolute() for folder in upstream]

    def there(path: str) -> str:
        full = Path(path).expanduser().absolute()
        return str(conf_dir()) if path and any(full.is_relative_to(folder) for folder in folders) else path

    return replace(
        cfg,
        model=replace(cfg.model, init=there(cfg.model.init)),
        critic=replace(cfg.critic, init=there(cfg.critic.init)),
        reward=replace(cfg.reward, model=there(cfg.reward.model)),
        data=replace(cfg.data, train=there(cfg.data.train)),
    )


def _freeze(cfg: Config, name: str) -> None:
    """Freeze the config for this job only. A folder that was used before keeps its config until the run has accepted
    the folder's content."""
    folder = Path(cfg.run.dir)
    freeze(cfg, folder, name)
    if not (folder / FILE_NAME).exists():
        freeze(cfg, folder)
    (folder / "logs").mkdir(exist_ok=True)


def _submit(args: argparse.Namespace, script: str, job: JobSpec, site: Site) -> int:
    # The script lies in the run's folder, a sweep's in the folder that its runs share.
    _check_time(args, site)
    home = Path(job.runs[0]) if len(job.runs) == 1 else Path(job.runs[0]).parent
    path = home / SCRIPT
    command = sbatch_command(args, path, home / "logs", len(job.runs))
    if args.dry_run:
        print(script, end="")
        print(f"# {shlex.join(command)}")
        if job.node_purposes:
            print(f"# {job.node_purposes}")
        for text in site.quirks:
            print(f"# note: {text}")
        return 0
    (home / "logs").mkdir(parents=True, exist_ok=True)
    path.write_text(script, encoding="utf-8")
    try:
        done = subprocess.run(command, env=clean_environment(os.environ), capture_output=True, text=True)
    except FileNotFoundError:
        hint = "Without a scheduler: bash launchers/<stage>.sbatch, or `aligner launch`."
        raise AlignerError(f"sbatch: not found on this machine. {hint}") from None
    if done.returncode:
        raise AlignerError(f"sbatch failed ({done.returncode}): {done.stderr.strip()}\n  {shlex.join(command)}")
    if args.test_only:
        print(done.stderr.strip())
        return 0
    number = done.stdout.strip().split(";")[0]
    ranks = ", ".join(filter(None, (f"{job.ranks} ranks", job.node_purposes)))
    print(number if args.parsable else f"job {number}: {job.stage}, {ranks}, {home}")
    return 0


def sbatch_command(args: argparse.Namespace, script: Path, logs: Path, runs: int) -> list[str]:
    """Return the command line of sbatch. Paths and the user's flags are arguments, so nothing needs quoting; a % is
    sbatch's own escape."""
    if "\\" in str(logs):
        raise ConfigError("run.dir", str(logs.parent), "a path without backslashes, which sbatch reads in --output")
    plain = str(logs).replace("%", "%%")
    asked = flag_value(args.sbatch, "job-name", "J") or os.environ.get("SBATCH_JOB_NAME", "")
    # a / would name a folder that does not exist
    name = asked.replace("/", "_").replace("%", "%%") if "/" in asked else "%x"
    command = ["sbatch", "--parsable", f"--output={plain}/{name}-{'%A_%a' if runs > 1 else '%j'}.log"]
    if args.after:
        command += [f"--dependency=afterok:{':'.join(args.after)}", "--kill-on-invalid-dep=yes"]
    if runs > 1:
        command.append(f"--array=0-{runs - 1}" + (f"%{args.at_once}" if args.at_once else ""))
    command += ["--test-only"] if args.test_only else []
    return [*command, *args.sbatch, str(script)]


def flag_value(flags: Sequence[str], name: str, letter: str) -> str:
    """Return the value of the last of sbatch's flags --NAME=VALUE, --NAME VALUE, -L VALUE or -LVALUE; empty without
    one."""
    value = ""
    for flag, following in itertools.zip_longest(flags, flags[1:], fillvalue=""):
        if flag in (f"--{name}", f"-{letter}"):
            value = following
        elif flag.startswith(f"--{name}="):
            value = flag.partition("=")[2]
        elif flag.startswith(f"-{letter}") and not flag.startswith("--"):
            value = flag[2:]
    return value


def time_limit_s(text: str) -> int | None:
    """Parse Slurm's notations of a time limit: M, M:S, H:M:S, D-H, D-H:M, D-H:M:S; None for others (UNLIMITED)."""
    match = re.fullmatch(r"(?:(\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?", text)
    if match is None:
        return None
    days, first, second, third = (None if number is None else int(number) for number in match.groups())
    if days is None and third is None:  # M or M:S
        return first * 60 + (second or 0)
    return (days or 0) * 86400 + first * 3600 + (second or 0) * 60 + (third or 0)


def _check_time(args: argparse.Namespace, site: Site) -> None:
    text = flag_value(args.sbatch, "time", "t") or os.environ.get("SBATCH_TIMELIMIT", "") or site.time
    limit_s = time_limit_s(text)
    if limit_s is not None and limit_s <= site.signal_s:
        warning = f"the time limit {text} is not more than the site's signal_s={site.signal_s}: the run must stop"
        print(f"WARNING: {warning} as soon as it starts. Ask for more time, or lower signal_s", file=sys.stderr)


def clean_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment without the variables of a surrounding job; outside of a job SBATCH_* are the user's
    wishes."""
    gone = (*_INHERITED, "SBATCH_") if "SLURM_JOB_ID" in environ else _INHERITED
    return {k: v for k, v in environ.items() if k == "SLURM_CONF" or not k.startswith(gone)}
