"""From the start of ranks to the end of their first step, by phase: seconds, CPU seconds, files and bytes.

    python -m benchmarks.startup [--ranks 1,2,4,8] [--apart | --srun] [--json FILE]

GRPO of the quick start's model from a Hugging Face folder, ranks by `aligner launch`; `apart`: each imports for itself;
`srun`: by a Slurm on this machine (slurm/localslurm). Interpreter: until a rank's own code begins. Seconds and, in
brackets, CPU seconds are the most of any rank; the last column are CPU seconds of all ranks and of what they are forked
from. Bytes are those that system calls read: weights and libraries are mapped instead.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from importlib import import_module
from pathlib import Path
from typing import Any

BEGAN = "STARTUP_BEGAN"  # time.time() just before ranks were started
SETTINGS = ["run.steps=1", "run.export=false", "checkpoint.final=false", "batch.prompts=16", "batch.group=4"]
PHASES = {  # phase -> the function that is timed
    "rendezvous": "aligner.builders.job:init_distributed",
    "tokenizer": "aligner.builders.job:resolve",
    "groups": "aligner.builders.job:build_layout",
    "weights": "aligner.megatron.train:load_weights",
    "engine": "aligner.stages.grpo:make_rollouts",
    "first step": "aligner.stages.grpo:grpo",
}


class Clock:
    """Seconds and CPU seconds of this process, by phase."""

    def __init__(self) -> None:
        self.phases = {"interpreter": (time.time() - float(os.environ[BEGAN]), time.process_time())}

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        start = time.time(), time.process_time()
        yield
        self.phases[name] = time.time() - start[0], time.process_time() - start[1]

    def wrap(self, name: str, target: str) -> None:
        module, function = target.split(":")
        real: Callable[..., Any] = getattr(import_module(module), function)

        def timed(*arguments: Any, **options: Any) -> Any:
            with self.phase(name):
                return real(*arguments, **options)

        setattr(import_module(module), function, timed)


def rank(frozen: Path) -> int:
    """Run one rank, which records its phases."""
    clock, opened = Clock(), []
    sys.addaudithook(lambda event, record: opened.append(record[0]) if event == "open" else None)
    with clock.phase("imports"):
        from aligner.__main__ import main
        from aligner.cluster.threads import reserve
        from aligner.loading import for_good

        reserve()
        with for_good():
            import aligner.builders.stage
            import aligner.stages.grpo  # noqa: F401
    for name, target in PHASES.items():
        clock.wrap(name, target)
    code = main(["run", "--frozen", str(frozen)])
    mapped = {line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines() if ".so" in line}
    read = re.search(r"rchar: (\d+)", Path("/proc/self/io").read_text())
    assert read is not None
    record = {
        "phases": clock.phases,
        "cpu_s": time.process_time(),
        "opened": len(opened),
        "libraries": len(mapped),
        "read_bytes": int(read[1]),
    }
    number = os.environ.get("RANK") or os.environ.get("SLURM_PROCID", "0")
    (frozen.parent / f"startup-{number}.json").write_text(json.dumps(record), encoding="utf-8")
    return code


def make_task(folder: Path) -> None:
    """Write data, a tokenizer, and a model of one step, as a Hugging Face folder."""
    from benchmarks.busy import arguments
    from examples.quickstart import make_data

    make_data(folder, seed=0)
    settings = [
        *arguments(folder, "sft"),
        f"run.dir={folder}/sft",
        "run.steps=1",
        "run.stop.metric=",
        "batch.sequences=64",
    ]
    subprocess.run([sys.executable, "-m", "aligner", "run", *settings], stdout=subprocess.DEVNULL, check=True)


@contextmanager
def slurm(folder: Path) -> Iterator[None]:
    """Run a Slurm whose single node pretends to have enough CPUs."""
    tool = Path(__file__).parents[1] / "slurm" / "localslurm"
    variables = {"LOCALSLURM_ROOT": f"{folder}/slurm", "SLURM_CONF": f"{folder}/slurm/etc/slurm.conf"}
    os.environ |= variables | {"PATH": f"{os.environ['PATH']}:/usr/sbin:/sbin"}
    try:
        subprocess.run([tool, "up", "--nodes", "1", "--cpus", "16"], check=True, stdout=subprocess.DEVNULL)
        yield
    finally:
        subprocess.run([tool, "down"], check=True, stdout=subprocess.DEVNULL)


def by_srun(command: list[str], ranks: int, run: Path) -> int:
    options = ["--overlap", "--ntasks", str(ranks), "--output", f"{run}/rank-%t.log"]
    return subprocess.run(["srun", *options, *command], env=os.environ | {"OMP_NUM_THREADS": "1"}).returncode


def measure(folder: Path, ranks: int, way: str) -> tuple[list[dict[str, Any]], float]:
    """Return each rank's record, and the CPU seconds of all."""
    from aligner.cluster.launch import launch
    from aligner.config.freeze import FILE_NAME, freeze
    from aligner.config.resolve import compose
    from aligner.run.launched import imports
    from benchmarks.busy import arguments

    run = folder / f"grpo-{ranks}"
    overrides = [*arguments(folder, "grpo"), f"run.dir={run}", f"model.init={folder}/sft/hf", *SETTINGS]
    cfg = compose(overrides)
    frozen = freeze(cfg, str(run), FILE_NAME)
    command = [sys.executable, "-m", "benchmarks.startup", "--rank", str(frozen)]
    before = children_cpu_s()
    os.environ[BEGAN] = repr(time.time())
    if way == "srun":
        code = by_srun(command, ranks, run)
    else:
        code = launch(frozen, ranks, run, argv=command, imports=imports(cfg) if way == "launch" else ())
    if code:
        raise SystemExit(f"{ranks} ranks ended with exit code {code}: {run}")
    each = [json.loads((run / f"startup-{number}.json").read_text()) for number in range(ranks)]
    return each, sum(record["cpu_s"] for record in each) if way == "srun" else children_cpu_s() - before


def children_cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def main(arguments: list[str]) -> int:
    if arguments[:1] == ["--rank"]:  # one of those that are measured, before torch is imported
        return rank(Path(arguments[1]))
    from benchmarks.busy import numbers
    from benchmarks.common import write_json

    parser = argparse.ArgumentParser(prog="python -m benchmarks.startup", description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=numbers, default=[1, 2, 4, 8])
    ways = parser.add_mutually_exclusive_group()
    ways.add_argument("--apart", dest="way", action="store_const", const="apart", help="each rank imports for itself")
    ways.add_argument("--srun", dest="way", action="store_const", const="srun", help="ranks by a Slurm of its own")
    parser.set_defaults(way="launch")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    folder = Path(tempfile.mkdtemp(prefix="startup-"))
    print(f"runs and logs: {folder}", flush=True)
    make_task(folder)
    with slurm(folder) if options.way == "srun" else nullcontext():
        measured = {ranks: measure(folder, ranks, options.way) for ranks in options.ranks}
    names = ["interpreter", "imports", *PHASES]
    print("| ranks | " + " | ".join([*names, "files opened", "libraries", "MB read", "CPU s of all"]) + " |")
    for ranks, (each, cpu_s) in measured.items():
        phases = (tuple(max(record["phases"][name][k] for record in each) for k in (0, 1)) for name in names)
        cells = [f"{wall:.2f} ({cpu:.2f})" for wall, cpu in phases]
        cells += [f"{max(record[key] for record in each):,}" for key in ("opened", "libraries")]
        cells.append(f"{max(record['read_bytes'] for record in each) / 1e6:.0f}")
        cells.append(f"{cpu_s:.1f}")
        print(f"| {ranks} | " + " | ".join(cells) + " |")
    write_json(
        options.json,
        {"ranks": {str(ranks): {"each": each, "cpu_s": cpu_s} for ranks, (each, cpu_s) in measured.items()}},
    )
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
