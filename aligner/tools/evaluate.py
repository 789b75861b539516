"""`aligner eval`: a trained model on held-out rows. Reward functions score a policy's responses. For a fine-tuned model
without any, the loss of the rows' own responses is measured; for a reward model, how it orders pairs; for judges with
eval.generate=false, how they agree with labels.

python -m aligner eval runs/quickstart/grpo data.eval=runs/quickstart/data/test.jsonl eval.prompts=0
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from aligner.cluster.env import RankEnv
from aligner.cluster.threads import use
from aligner.config.schema import Config
from aligner.config.stages import STAGES
from aligner.config.unread import refuse_tasks
from aligner.data.dataset import PromptDataset
from aligner.data.formats import prompt_rows
from aligner.data.readers import read_rows
from aligner.data.shipped_templates import use_chat_template
from aligner.environments.tools import Tools, load_tools, schemas
from aligner.errors import ConfigError
from aligner.ops.intervals import METHOD, bootstrap
from aligner.ops.votes import majority, pass_at
from aligner.rewards.base import Reward
from aligner.rewards.composite import RewardPipeline
from aligner.rewards.environment import EnvironmentReward
from aligner.rewards.functions import load_function
from aligner.rewards.math_stated import marked, sentences
from aligner.rollout.evaluate import EvaluatedAnswers, judge, known_scores, never_full
from aligner.rollout.loss_inputs import shown_turns
from aligner.rollout.references import refuse
from aligner.run.metrics import rewrite_jsonl
from aligner.run.sample_table import SampleRow, print_samples
from aligner.tools.evaluate_judges import Interval, measure_judges
from aligner.tools.evaluate_rows import measure_rows
from aligner.tools.evaluate_turns import generate_trajectories
from aligner.tools.generate import Answerer, is_scorer, model_folder
from aligner.types import Sample, SamplingParams, ScalarMetrics

SAMPLES = "eval_samples.jsonl"


@dataclass
class Evaluation:
    """Measurements: means over units (prompts, pairs, rows), and a record for each sample."""

    unit: str
    count: int
    means: dict[str, tuple[Sequence[float], Sequence[float]]]  # name -> numerators, denominators, one per unit
    records: list[dict[str, Any]] = field(default_factory=list)
    others: dict[str, Interval] = field(default_factory=dict)  # that are no means


def main(cfg: Config, env: RankEnv, overrides: Sequence[str] = ()) -> int:
    """Print the means with their intervals, and samples; write `<run.dir>/eval.json` and eval_samples.jsonl. Ranks
    other than the first do nothing."""
    refuse_tasks(overrides)
    if env.rank == 0:
        use(cfg.cluster.threads, env.local_world_size)
        evaluate(cfg)
    return 0


def evaluate(cfg: Config) -> ScalarMetrics:
    """Measure the model. Raises ConfigError if there is no model, no rows, or nothing to measure them by."""
    folder = model_folder(cfg)
    if not cfg.data.eval:
        raise ConfigError("data.eval", "", "a file with held-out rows")
    functions = (cfg.eval.functions or cfg.reward.functions) if cfg.eval.generate else []
    stage = STAGES[cfg.stage.name]
    tools = load_tools(cfg.environment) if cfg.eval.generate else Tools()
    if is_scorer(folder) or not (stage.rollouts or stage.scores or functions):
        measured = Evaluation(*measure_rows(cfg, folder, is_scorer(folder)))
    elif cfg.reward.judges and not cfg.eval.generate:
        rows, kappas = measure_judges(cfg, folder)
        measured = Evaluation(*rows, kappas)
    elif functions or tools.scores:
        measured = _answers(cfg, folder, tools)
    else:
        kind = f"stage {cfg.stage.name}" + (" with reward.model alone" if stage.rollouts else "")
        expected = f"at least one function that scores an answer ({kind} has none)"
        raise ConfigError("eval.functions", [], expected, "Example: eval.functions=[{path: math}]")
    return _write(cfg, folder, measured)


def _answers(cfg: Config, folder: Path, tools: Tools) -> Evaluation:
    """Measure accuracy and mean scores of generated responses, or of trajectories."""
    model = Answerer.load(folder, cfg.engine, cfg.model.dtype)
    use_chat_template(model.tokenizer, cfg.data)
    tool_schemas = schemas(tools) if cfg.environment.on else None
    rows = prompt_rows(read_rows(cfg.data.eval, "data.eval"), cfg.data, tools=tool_schemas)
    dataset = PromptDataset(rows, model.tokenizer, cfg.data, "data.eval")
    count = min(cfg.eval.prompts, len(dataset)) if cfg.eval.prompts else len(dataset)
    limit = cfg.eval.max_response_tokens or cfg.sampling.max_response_tokens
    sampling = SamplingParams(
        limit, cfg.eval.temperature, stop=tuple(cfg.sampling.stop), special=cfg.sampling.special_tokens
    )
    functions, prompts = cfg.eval.functions or cfg.reward.functions, [dataset[i] for i in range(count)]
    weighted: list[tuple[Reward, float]] = [(load_function(f, i), f.weight) for i, f in enumerate(functions)]
    if tools.scores:
        weighted.append((EnvironmentReward(), cfg.environment.weight))
    rewards = RewardPipeline(weighted, cfg.reward)
    refuse(rewards.unreadable(dataset, range(count), print), dataset, count)
    if tool_schemas is None:
        samples = model.answer(prompts, cfg.eval.samples, sampling, cfg.seed)
    else:
        samples = generate_trajectories(cfg, model, tools, prompts, sampling)
    verdict = judge(samples, rewards, cfg.eval)
    for warning in never_full(sum(verdict.correct), verdict.maxima, cfg.eval.full_score, rewards):
        print(warning)
    rows = [_row(s, i, verdict.totals[i], verdict.components) for i, s in enumerate(samples)]
    print_samples("samples", rows, cfg.logging.samples_shown)
    return Evaluation(
        f"prompts x {cfg.eval.samples} samples",
        count,
        _per_prompt(samples, verdict, cfg.eval.samples),
        [row.record() | {"correct": right} for row, right in zip(rows, verdict.correct, strict=True)],
    )


def _row(sample: Sample, i: int, total: float, components: dict[str, list[float | None]]) -> SampleRow:
    scores = {name: values[i] for name, values in components.items()}
    columns = {name: value for name, value in sample.prompt.fields.items() if name not in ("messages", "tools")}
    turns = None if sample.trajectory is None else shown_turns(sample.trajectory)
    return SampleRow(sample.prompt.text, sample.response, total, None, sample.finished, scores, columns, turns)


def _per_prompt(
    samples: Sequence[Sample], verdict: EvaluatedAnswers, k: int
) -> dict[str, tuple[Sequence[float], Sequence[float]]]:
    """Return the means of `judge`, by prompt: its k samples stay together when prompts are drawn."""
    values = {
        "eval/accuracy": [float(right) for right in verdict.correct],
        "eval/reward": verdict.totals,
        "eval/response_tokens": [float(len(sample.tokens)) for sample in samples],
        "eval/eos_fraction": [float(sample.finished) for sample in samples],
    }
    starts = range(0, len(samples), k)
    means: dict[str, tuple[Sequence[float], Sequence[float]]] = {
        name: ([math.fsum(all_[i : i + k]) for i in starts], [float(k)] * len(starts)) for name, all_ in values.items()
    }
    for name, component in verdict.components.items():
        scores = [known_scores(component[i : i + k]) for i in starts]
        if any(scores):
            means[f"eval/{name}/mean"] = ([math.fsum(some) for some in scores], [float(len(some)) for some in scores])
    if k > 1:
        rights, ones = [verdict.correct[i : i + k] for i in starts], [1.0] * len(starts)
        for few in (2**power for power in range(1, (k - 1).bit_length())):
            means[f"eval/pass_at_{few}"] = ([pass_at(few, k, sum(right)) for right in rights], ones)
        means["eval/pass_at_k"] = ([float(any(right)) for right in rights], ones)
        answers = [[_voted(sample.response) for sample in samples[i : i + k]] for i in starts]
        means["eval/maj_at_k"] = (list(map(majority, answers, rights)), ones)
    return means


def _voted(response: str) -> str:
    """Return the text that a response votes for: its stated answer, or all of it."""
    return (marked(response)[0] or [response, *sentences(response)][-1]).strip()


def _write(cfg: Config, folder: Path, measured: Evaluation) -> ScalarMetrics:
    metrics = {name: math.fsum(top) / math.fsum(bottom) for name, (top, bottom) in measured.means.items()}
    intervals = {name: bootstrap(*mean, cfg.seed) for name, mean in measured.means.items()}
    metrics |= {name: value for name, (value, _) in measured.others.items()}
    intervals |= {name: interval for name, (_, interval) in measured.others.items()}
    if "eval/loss" in metrics and measured.unit == "rows":  # of tokens, in nats
        metrics["eval/perplexity"] = math.exp(min(metrics["eval/loss"], 700.0))
        intervals["eval/perplexity"] = tuple(math.exp(min(end, 700.0)) for end in intervals["eval/loss"])
    unit = measured.unit.split()[0]
    print(f"{folder}: {measured.count} {measured.unit} of {cfg.data.eval}; intervals: {METHOD} of {unit}")
    for name, value in metrics.items():
        print(f"  {name} {value:.4f} [{intervals[name][0]:.4f}, {intervals[name][1]:.4f}]")
    out = Path(cfg.run.dir)
    rewrite_jsonl(out / SAMPLES, measured.records)
    written = metrics | {
        "intervals": intervals,
        "interval_method": f"{METHOD} of {unit}",
        unit: measured.count,
        "data": cfg.data.eval,
        "model": str(folder),
    }
    try:
        (out / "eval.json").write_text(json.dumps(written, indent=2) + "\n", encoding="utf-8")
    except OSError as error:
        raise ConfigError("run.dir", cfg.run.dir, "a folder that can be written", str(error)) from error
    print(f"written: {out / 'eval.json'}, {SAMPLES}")
    return metrics
