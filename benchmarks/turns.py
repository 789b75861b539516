"""Trajectories whose tools take 0.2 to 2 s beside the same ones with instant tools: tokens a second, and tokens
prefilled.

    python -m benchmarks.turns [--size 3m] [--trajectories 128] [--batch 16] [--repeats 3] [--json FILE]

Four turns each: prompts of 64 tokens, answers of 48 on average (random weights, at most 96), tools in worker processes,
32 tokens more for each of their answers. Turns are admitted as their tools answer, and by counts (`run.deterministic`).
With counts all tokens and bits of logprobs must be the same with any delay of tools. Runs alternate; a ratio is of
neighbours, the table has medians. Fails below 0.8."""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from aligner.answers import AnswerLog
from aligner.config.sections.engine import EngineConfig
from aligner.config.sections.environment import EnvironmentConfig
from aligner.config.sections.model.config import ModelConfig
from aligner.engines.native.fleet import FleetEngine
from aligner.environments.pool import Pool, Session
from aligner.environments.tools import load_tools, schemas
from aligner.rollout.turn_pool import TurnPool
from aligner.types import Generations, SamplingParams
from benchmarks.common import write_json
from benchmarks.versus.workload import SIZES

TURNS, PROMPT, ANSWER, MOST, TOLD = 4, 64, 48, 96, 32
LEAST_S, MOST_S, GOAL = 0.2, 2.0, 0.8
TOOL = str(Path(__file__).with_name("wait_tool.py")) + ":wait"


@dataclass(eq=False)
class Talk:
    """A trajectory with the attributes of `rollout.sample_state.SampleState` that `TurnPool` reads."""

    group: int
    session: Session
    next_prompt: Any
    turns: list[list[int]] = field(default_factory=list)
    asked: Any = None
    paused_tokens = ()  # of a turn that pauses

    @property
    def input_tokens(self) -> tuple[int, ...]:
        return self.next_prompt.tokens

    @property
    def open(self) -> bool:
        return len(self.turns) < TURNS


@dataclass(frozen=True)
class Given:
    tokens: tuple[int, ...]


def engine_of(size: str, batch: int) -> FleetEngine:
    s = SIZES[size]
    sizes = {"num_layers": s.layers, "hidden_size": s.hidden, "ffn_hidden_size": s.ffn, "num_heads": s.heads}
    model = ModelConfig(**sizes, num_kv_heads=s.kv_heads, vocab_size=s.vocab, max_position=1024)
    engine = FleetEngine(
        model, EngineConfig(max_batch=batch, kv_cache_bytes=2 << 30), device="cpu", dtype=torch.float32, pad_id=0
    )
    torch.manual_seed(0)
    engine.begin_update(0)
    engine.update_weights(
        (name, torch.ones(shape) if len(shape) == 1 else torch.randn(shape) * 0.02)
        for name, shape in engine.model.shapes.items()
    )
    engine.finish_update()
    return engine


def some(vocabulary: int, count: int, *seed: int) -> tuple[int, ...]:
    draw = random.Random(repr(seed))
    return tuple(draw.randrange(vocabulary // ANSWER, vocabulary) for _ in range(count))


def played(
    engine: FleetEngine, pool: Pool, talks: int, slow: bool, counted: bool, progress: Progress
) -> tuple[float, Generations]:
    """Return the seconds, and the rows in the order of trajectories and turns."""
    vocabulary = engine.model.cfg.vocab_size
    name = f"{'late' if slow else 'instant'} tools, {'by counts' if counted else 'as they answer'}"
    task = progress.add_task(name, total=talks * TURNS)

    def take_response(talk: Talk, tokens: list[int], logprobs: list[float], stopped: bool) -> None:
        talk.turns.append(tokens)
        progress.advance(task)
        if talk.open:
            wait_s = random.Random(f"{talk.group} {len(talk.turns)}").uniform(LEAST_S, MOST_S) if slow else 0.0
            calls = [{"name": "wait", "arguments": {"seconds": wait_s}}]
            talk.asked = pool.ask(talk.session, "turn", calls=calls)

    def take_result(talk: Talk) -> None:
        answer, talk.asked = talk.asked.result(), None
        assert answer["value"]["texts"] == ["done"], answer
        told = some(vocabulary, TOLD, talk.group, len(talk.turns))
        talk.next_prompt = Given((*talk.next_prompt.tokens, *talk.turns[-1], *told))

    ready: list[Any] = [
        Talk(i, Session(str(i), 0, {}, logged=False), Given(some(vocabulary, PROMPT, i))) for i in range(talks)
    ]
    longest = PROMPT + (TURNS - 1) * (MOST + TOLD)
    seed = lambda talk: 1000 * talk.group + len(talk.turns)  # noqa: E731
    turns = TurnPool(longest, talks, talks, ready, take_result, take_response, seed, counted)  # type: ignore[arg-type]
    since = time.perf_counter()
    stops = tuple(range(vocabulary // ANSWER))
    generations = engine.serve(turns, turns.asked, turns.finished, SamplingParams(MOST, stop_token_ids=stops))
    seconds = time.perf_counter() - since
    progress.remove_task(task)
    order = sorted(range(len(turns.taken)), key=lambda row: (turns.taken[row][0].group, turns.taken[row][1]))  # type: ignore[attr-defined]
    rows = torch.tensor(order)
    return seconds, Generations(
        *(t[rows] for t in (generations.tokens, generations.lengths, generations.logprobs)),
        generations.finish_reason,
        0,
    )


def measure(engine: FleetEngine, pool: Pool, talks: int, repeats: int, progress: Progress) -> dict[str, Any]:
    played(engine, pool, 8, False, False, progress)  # starts processes, makes memory
    results: dict[str, Any] = {}
    for counted in (False, True):
        rates: list[tuple[float, float]] = []
        same = True
        for _ in range(repeats):
            (instant_s, a), (late_s, b) = (
                played(engine, pool, talks, slow, counted, progress) for slow in (False, True)
            )
            tokens = int(a.lengths.sum())
            rates.append((tokens / instant_s, int(b.lengths.sum()) / late_s))
            same &= torch.equal(a.tokens, b.tokens) and torch.equal(a.logprobs, b.logprobs)
        results["by counts" if counted else "as they answer"] = {
            "instant_tokens_per_s": statistics.median(a for a, _ in rates),
            "late_tokens_per_s": statistics.median(b for _, b in rates),
            "ratio": statistics.median(b / a for a, b in rates),
            "same_bits": same,
        }
    for keeps in (True, False):
        engine.keeps_rows = keeps
        seconds, _ = played(engine, pool, talks, False, True, progress)
        stats = engine.stats
        results["kept" if keeps else "read again"] = {
            "seconds": seconds,
            "prompt_tokens": stats.prompt_tokens,
            "prefilled_tokens": stats.prompt_tokens - stats.held_tokens,
        }
    return results


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.turns", description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--size", default="3m", choices=SIZES)
    parser.add_argument("--trajectories", type=int, default=128)
    parser.add_argument("--batch", type=int, default=16, help="engine.max_batch")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    cfg, console = EnvironmentConfig(tools=[TOOL], workers=1), Console()
    with tempfile.TemporaryDirectory(prefix="turns-") as folder, Progress(console=console) as progress:
        pool = Pool(cfg, schemas(load_tools(cfg)), AnswerLog(Path(folder), 0))
        engine = engine_of(options.size, options.batch)
        results = measure(engine, pool, options.trajectories, options.repeats, progress)
    table = Table("turns are admitted", "tokens/s, instant tools", "0.2 to 2 s", "ratio", "same bits")
    for mode in ("as they answer", "by counts"):
        r = results[mode]
        rates = (f"{r[name]:.0f}" for name in ("instant_tokens_per_s", "late_tokens_per_s"))
        table.add_row(mode, *rates, f"{r['ratio']:.2f}", "yes" if r["same_bits"] else "no")
    console.print(table)
    for name in ("kept", "read again"):
        r = results[name]
        console.print(
            f"{name}: {r['prefilled_tokens']} of {r['prompt_tokens']} prompt tokens prefilled, {r['seconds']:.1f} s"
        )
    settings = {name: value for name, value in vars(options).items() if name != "json"}
    write_json(options.json, results, **settings)
    modes = results["as they answer"], results["by counts"]
    return int(min(r["ratio"] for r in modes) < GOAL or not modes[1]["same_bits"])


if __name__ == "__main__":
    sys.exit(main())
