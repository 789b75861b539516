"""aligner beside TRL on the CPU: whole steps of each stage, alternating, on the same weights, rows and lengths.

    python -m benchmarks.versus_trl [--only grpo,sft] [--sizes 3m,30m] [--dtypes float32,bfloat16]
                                    [--prompts 64,256] [--steps 5] [--minutes 40] [--json FILE]

TRL is installed into an environment of its own under --peers, from which torch and transformers are the ones in use
here. A ratio is TRL's seconds over ours of two neighbouring steps (sft: of seconds per token, as the packed rows
differ), with --threads 1 CPU seconds, so that what else runs does not count; the table has their median. Memory is
the largest resident set of each side's process. Exits 1 if a comparison could not be made. dpo and kto are compared
on long-tailed answers, of which TRL pads each micro-batch, and (`.even`) on answers of one length. Steps before the
first measured one (--warmup) are not counted. A comparison takes fewer steps, but at least one, when its share of
what is left of --minutes is over. bfloat16 comes last, and where the CPU has no instructions for it only the smallest
size, prompts of 64 tokens, without ppo: TRL's steps take minutes there.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import itertools
import json
import os
import platform
import statistics
import subprocess
import sys
import sysconfig
import tempfile
import time
import venv
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from aligner.ops.kernels.bfloat16_products import widened
from benchmarks.versus.workload import SIZES, Work, build

HERE = Path(__file__).parent
STAGES = ("grpo", "generate", "sft", "rm", "ppo", "dpo", "kto")
VERSIONS = {"ppo": "1.12.0"}  # the last with PPO
VERSION = "1.16.0"
ACCELERATE = "1.12.0"
LONG_PROMPTS = ("grpo", "generate")  # the stages for which the prompt's length is varied
WORK = "work.json"  # in its folder
EVEN = ("dpo", "kto")  # the stages that are also compared on answers of one length


@dataclass
class Side:
    """A contestant's process, idle until it gets an order to step."""

    name: str
    process: subprocess.Popen
    log: Path

    @classmethod
    def start(cls, name: str, command: list[str], folder: Path, threads: int) -> Side:
        log = folder / f"{name}.log"
        environ = {
            **os.environ,
            "OMP_NUM_THREADS": str(threads),
            "HF_HUB_OFFLINE": "1",
            "TOKENIZERS_PARALLELISM": "false",
        }
        environ.pop("PYTHONPATH", None)
        if command[0] == sys.executable:
            environ["PYTHONPATH"] = str(HERE.parent)
        process = subprocess.Popen(
            [os.path.abspath(command[0]), *command[1:]],  # relative where PATH is, and the child is in another folder
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log.open("w"),
            text=True,
            env=environ,
            cwd=HERE,
        )
        return cls(name, process, log)

    def step(self) -> dict[str, Any]:
        """Step, and return the report. Raises RuntimeError with the end of the log if the process has died."""
        assert self.process.stdin and self.process.stdout
        try:
            self.process.stdin.write("go\n")
            self.process.stdin.flush()
            line = self.process.stdout.readline()
        except BrokenPipeError:
            line = ""
        if not line:
            self.process.wait()
            tail = "\n".join(self.log.read_text(errors="replace").strip().splitlines()[-15:])
            raise RuntimeError(f"{self.name} ended with exit code {self.process.returncode}:\n{tail}")
        return json.loads(line)

    def end(self) -> None:
        self.process.kill()
        self.process.wait()


def ours(work: Path) -> list[str]:
    start = "from aligner.cluster.threads import reserve; reserve(); from benchmarks.versus.ours import main; main()"
    return [sys.executable, "-W", "ignore", "-c", start, str(work)]  # reserve() first, as `aligner run` does


def peer_python(peers: Path, version: str) -> Path:
    """Return the Python of an environment with that TRL. Its other packages are this environment's, so both sides run
    the same torch and transformers."""
    folder = peers / f"trl-{version}"
    python = folder / "bin" / "python"
    if not (folder / "ready").exists():
        print(f"installing TRL {version} into {folder}", flush=True)
        venv.create(folder, with_pip=True, clear=True)
        command = [python, "-m", "pip", "install", "-q", "--no-deps", f"trl=={version}", f"accelerate=={ACCELERATE}"]
        subprocess.run(command, check=True)
        tag = f"python{sys.version_info.major}.{sys.version_info.minor}"
        (folder / "lib" / tag / "site-packages" / "shared.pth").write_text(sysconfig.get_paths()["purelib"] + "\n")
        (folder / "ready").touch()
    return python


def compare(
    work: Work, commands: dict[str, list[str]], warmup: int, steps: int, seconds: float, tell: Callable[[str], None]
) -> dict[str, Any]:
    """Alternate the steps of two sides ("ours" and "peer"), in about so many `seconds`; which goes first alternates
    too."""
    began = time.monotonic()
    folder = Path(work.folder)
    work.write(folder / WORK)
    sides = [Side.start(name, command, folder, work.threads) for name, command in commands.items()]
    taken: dict[str, list[dict[str, Any]]] = {"ours": [], "peer": []}
    try:
        for n in range(warmup + steps):
            round_began = time.monotonic()
            for side in sides if n % 2 else sides[::-1]:
                reports = side.step()
                if n >= warmup:
                    taken[side.name].append(reports)
            tell(f"{work.key}: {n + 1}/{warmup + steps}")
            now = time.monotonic()
            if n >= warmup and 2 * now - round_began - began > seconds:  # another round would end too late
                break
    finally:
        for side in sides:
            side.end()
    each = {name: [t["seconds"] / t.get("tokens", 1) for t in reports] for name, reports in taken.items()}
    ratios = [b / a for a, b in zip(each["ours"], each["peer"], strict=True)]
    peak = {name: max(t["peak_bytes"] for t in reports) for name, reports in taken.items()}
    return {
        "ratio": statistics.median(ratios),
        "ratios": ratios,
        "ours_s": statistics.median(t["seconds"] for t in taken["ours"]),
        "peer_s": statistics.median(t["seconds"] for t in taken["peer"]),
        "ours_peak_bytes": peak["ours"],
        "peer_peak_bytes": peak["peer"],
    }


def works(options: argparse.Namespace, root: Path) -> list[Work]:
    comparisons = []
    smallest, *_ = sizes = options.sizes.split(",")
    for dtype, size in itertools.product(options.dtypes.split(","), sizes):
        slow = dtype == "bfloat16" and widened(torch.device("cpu"), torch.bfloat16)
        if slow and size != smallest:
            continue
        for stage in options.only.split(","):
            if slow and stage == "ppo":
                continue
            for prompt in map(int, options.prompts.split(",") if stage in LONG_PROMPTS and not slow else ["64"]):
                folder = str(root / size)
                one = Work(stage, size, dtype, prompt, folder, options.threads, max_response=options.response)
                comparisons += [one, replace(one, even=True)] if stage in EVEN and not slow else [one]
    return comparisons


def table(results: dict[str, dict[str, Any]], peer: str = "TRL") -> Table:
    shown = Table("stage.size.dtype.prompt", "ours s", f"{peer} s", "ratio", "ours GiB", f"{peer} GiB")
    for key, r in results.items():
        if "error" in r:
            shown.add_row(key, "-", "-", "failed", "-", "-")
            continue
        memory = (f"{r[f'{side}_peak_bytes'] / 2**30:.2f}" for side in ("ours", "peer"))
        shown.add_row(key, f"{r['ours_s']:.3f}", f"{r['peer_s']:.3f}", f"{r['ratio']:.2f}", *memory)
    return shown


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.versus_trl", description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--only", default=",".join(STAGES), help=f"of {','.join(STAGES)}")
    parser.add_argument("--sizes", default="3m,30m", help=f"of {','.join(SIZES)}")
    parser.add_argument("--dtypes", default="float32,bfloat16")
    parser.add_argument("--prompts", default="64,256", help="tokens of a prompt")
    parser.add_argument("--response", type=int, default=128, help="longest response")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--warmup", type=int, default=1)
    parser.add_argument("--minutes", type=float, default=40, help="for all comparisons")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--peers", type=Path, default=Path("runs/benchmarks/peers"))
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    unknown = set(options.only.split(",")) - set(STAGES) or set(options.sizes.split(",")) - set(SIZES)
    if unknown:
        parser.error(f"unknown: {', '.join(sorted(unknown))}")
    results: dict[str, dict[str, Any]] = {}
    console = Console()
    with tempfile.TemporaryDirectory(prefix="versus-") as root, console.status("") as status:
        todo = works(options, Path(root))
        end = time.monotonic() + 60 * options.minutes
        for n, work in enumerate(todo):
            Path(work.folder).mkdir(exist_ok=True)
            build(work)
            python = peer_python(options.peers.resolve(), VERSIONS.get(work.stage, VERSION))
            try:
                share = (end - time.monotonic()) / (len(todo) - n)
                path = Path(work.folder) / WORK
                peer = [str(python), "-W", "ignore", str(HERE / "versus" / "peer.py"), str(path)]
                sides = {"ours": ours(path), "peer": peer}
                results[work.key] = compare(work, sides, options.warmup, options.steps, share, status.update)
            except RuntimeError as error:
                results[work.key] = {"error": str(error)}
                console.print(f"[red]{work.key}[/]: {error}", markup=True)
            else:
                console.print(f"{work.key}: {results[work.key]['ratio']:.2f}")
    console.print(table(results))
    versions = {name: importlib.metadata.version(name) for name in ("torch", "transformers", "megatron-core")}
    about = {"trl": VERSION, "trl_ppo": VERSIONS["ppo"], "machine": platform.processor(), "threads": options.threads}
    if options.json:
        options.json.write_text(json.dumps({"versions": versions | about, **results}, indent=2))
    return int(any("error" in r for r in results.values()))


if __name__ == "__main__":
    sys.exit(main())
