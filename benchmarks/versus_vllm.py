"""The native engine beside engine=vllm on the CPU: whole rollouts, alternating, same weights, prompts and lengths.

    python -m benchmarks.versus_vllm [--sizes 3m,30m,120m] [--dtypes float32,bfloat16] [--steps 5] [--json FILE]

A rollout is 8 samples of each prompt of 64 tokens, all of 128 tokens: no row ends early. A ratio is vLLM's seconds over
the native engine's of two neighbouring rollouts; the table has their median. Seconds are of the CPU, of all threads: on
a machine that others use the clock would tell who got its cores, and vLLM's child, a session of its own, gets more of
them. Memory is the largest resident set of the native engine's process, and of vLLM's child (the caller's is not
counted). Needs `launchers/engine_env.sh vllm`.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import tempfile
from pathlib import Path

from rich.console import Console

from benchmarks.common import write_json
from benchmarks.versus.workload import SIZES, Work
from benchmarks.versus_trl import WORK, compare, table


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.versus_vllm", description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--sizes", default="3m,30m,120m", help=f"of {','.join(SIZES)}")
    parser.add_argument("--dtypes", default="float32,bfloat16")
    parser.add_argument("--response", type=int, default=128, help="tokens of a response")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    console, results = Console(), {}
    for dtype, size in itertools.product(options.dtypes.split(","), options.sizes.split(",")):
        with tempfile.TemporaryDirectory(prefix="versus-") as folder, console.status("") as status:
            work = Work("generate", size, dtype, 64, folder, options.threads, max_response=options.response)
            step = [sys.executable, "-W", "ignore", "-m", "benchmarks.versus.engines", f"{folder}/{WORK}"]
            sides = {"ours": [*step, "native"], "peer": [*step, "vllm"]}
            try:
                results[work.key] = comparison = compare(work, sides, 1, options.steps, float("inf"), status.update)
            except RuntimeError as error:
                results[work.key] = {"error": str(error)}
                console.print(f"[red]{work.key}[/]: {error}")
            else:
                tokens = work.samples * options.response
                each = (
                    f"{name} {tokens / comparison[f'{side}_s']:.0f}"
                    for side, name in (("ours", "native"), ("peer", "vLLM"))
                )
                console.print(f"{work.key}: {comparison['ratio']:.2f}; tokens/s: {', '.join(each)}")
    console.print(table(results, "vLLM"))
    write_json(options.json, results)
    return int(any("error" in r for r in results.values()))


if __name__ == "__main__":
    sys.exit(main())
