"""GRPO of large models on many GPUs: `aligner plan` and `aligner rehearse` beside published step times.

    python -m benchmarks.scale [--cases "DeepSeek;Llama"] [--rehearse] [--json FILE]

Layouts, rows and lengths are those of NeMo-RL's published runs where there are any. It does not run on GPUs.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from contextlib import redirect_stdout
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from typing import Any

from aligner import __main__ as aligner
from aligner.plan.devices import GIB
from benchmarks.common import write_json

COMMON = ["stage=grpo", "algorithm.kl={coef: 0.01, placement: loss}", "model.recompute=full"]
COMMON += ["memory.offload=[gradients,optimizer,weights]"]
MODELS = {
    "DeepSeek-V3": ["model=deepseek_v3", "batch.group=16", "sampling.max_response_tokens=1024", "parallel.expert=16"],
    "Qwen3-235B": [
        "model=qwen3_235b_a22b",
        "batch.group=32",
        "sampling.max_response_tokens=7680",
        "parallel.expert=16",
    ],
    "Llama-3-70B": ["model=llama3_70b", "batch.group=8", "sampling.max_response_tokens=3072"],
}
MEANS = {"DeepSeek-V3": (109, 701), "Qwen3-235B": (121, 5713), "Llama-3-70B": (512, 1536)}  # of prompts and responses


@dataclass(frozen=True)
class Case:
    model: str
    gpus: int
    device: str
    tensor: int
    pipeline: int
    context: int
    engine: int  # ranks of an engine
    prompts: int
    published_s: float | None = None

    @property
    def name(self) -> str:
        return f"{self.model}, {self.gpus} {self.device.upper()}"

    def arguments(self) -> list[str]:
        sizes = {"tensor": self.tensor, "pipeline": self.pipeline, "context": self.context}
        layout = [f"parallel.{name}={size}" for name, size in sizes.items() if size > 1]
        layout += ["parallel.sequence=true"] * (self.tensor > 1) + [f"engine.tensor_parallel={self.engine}"]
        node = [
            "--gpus",
            str(self.gpus),
            "--device",
            self.device,
            "--gpus-per-node",
            "4" if "gb" in self.device else "8",
        ]
        rows = [f"batch.prompts={self.prompts}", "data.max_prompt_tokens=512"]
        return [*node, *COMMON, *MODELS[self.model], *layout, *rows]


def cases() -> list[Case]:
    return [
        Case("DeepSeek-V3", 256, "h100", 1, 16, 1, 32, 32, 134.0),
        Case("DeepSeek-V3", 512, "h100", 1, 16, 1, 32, 32, 111.0),
        Case("DeepSeek-V3", 1024, "h100", 1, 16, 1, 32, 64),
        *(Case("DeepSeek-V3", gpus, "gb200", 1, 8, 1, 32, gpus // 8) for gpus in (256, 512, 1024)),
        Case("Qwen3-235B", 256, "h100", 2, 8, 2, 16, 16, 312.0),
        Case("Qwen3-235B", 512, "h100", 2, 8, 2, 16, 16),
        Case("Qwen3-235B", 1024, "h100", 2, 8, 2, 16, 32),
        *(Case("Qwen3-235B", gpus, "gb200", 2, 4, 2, 8, gpus // 16) for gpus in (256, 512, 1024)),
        *(Case("Llama-3-70B", gpus, "h100", 4, 4, 1, 4, 128) for gpus in (128, 512)),
    ]


def plan(case: Case) -> dict[str, Any]:
    prompt, response = MEANS[case.model]
    means = ["--prompt-tokens", str(prompt), "--response-tokens", str(response)]
    out = StringIO()
    with redirect_stdout(out):
        aligner.main(["plan", "--json", *means, *case.arguments()])  # 1: it does not fit
    data = json.loads(out.getvalue())
    memory = {name: phase["total_bytes"] / GIB for name, phase in data["memory"].items()}
    phase = max(memory, key=memory.__getitem__)
    seconds = {name: phase["seconds"] for name, phase in data["time"].items()}
    return {"step_s": data["step_s"], "gib": memory[phase], "phase": phase, "fits": data["fits"], "seconds": seconds}


def rehearse(case: Case) -> dict[str, Any] | None:
    """Rehearse the first rank and the last stage's. None: this machine could not, and the command has said why."""
    last = case.gpus - case.gpus // case.pipeline
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        command = [sys.executable, "-m", "aligner", "rehearse", "--json", str(report), "--ranks", f"0,{last}"]
        subprocess.run([*command, *case.arguments()], stdout=subprocess.DEVNULL, check=False)  # 1: it has faults
        if not report.exists():
            return None
        data = json.loads(report.read_text())
    phases = [rank["phases"] for rank in data["ranks"].values()]
    gib = {
        name: max(p[name]["peak_bytes"] for p in phases if name in p) / GIB for name in ("refit", "generate", "update")
    }
    print(*data["faults"], sep="\n", end="\n" if data["faults"] else "", file=sys.stderr)
    return {"faults": data["faults"], "gib": gib, "update_s": data["update_s"]}


def line(case: Case, planned: dict[str, Any], rehearsed: dict[str, Any] | None) -> str:
    seconds = " + ".join(f"{value:.1f}" for value in planned["seconds"].values())
    cells = [case.name, f"{case.published_s:.0f}" if case.published_s else "", f"{planned['step_s']:.0f} ({seconds})"]
    cells.append(f"{planned['gib']:.1f} in {planned['phase']}{'' if planned['fits'] else ', too much'}")
    if rehearsed is not None:
        gib = ", ".join(f"{value:.1f}" for value in rehearsed["gib"].values())
        cells += [gib, f"{rehearsed['update_s']:.1f}", str(len(rehearsed["faults"]))]
    return f"| {' | '.join(cells)} |"


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.scale", description=__doc__.splitlines()[0])
    parser.add_argument("--cases", default="", help="beginnings of names, with ; between them")
    parser.add_argument("--rehearse", action="store_true", help="minutes each")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    head = ["run", "published s", "plan s (refit, generate, logprobs, update)", "GiB"]
    head += ["rehearsed GiB: refit, generate, update", "rehearsed update s", "faults"] * options.rehearse
    print(f"| {' | '.join(head)} |\n|{'---|' * len(head)}")
    rows = {}
    for case in cases():
        if case.name.startswith(tuple(options.cases.split(";"))):
            rows[case.name] = planned, rehearsed = plan(case), rehearse(case) if options.rehearse else None
            print(line(case, planned, rehearsed), flush=True)
    write_json(options.json, {"rows": rows})
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
