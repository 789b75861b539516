"""`aligner eval`: a trained model's answers to held-out prompts, scored by the reward functions.

python -m aligner eval run.dir=runs/quickstart/grpo data.eval=runs/quickstart/data/test.jsonl eval.prompts=0
"""

from __future__ import annotations

import json
from pathlib import Path

from aligner.cluster.env import RankEnv
from aligner.config.schema import Config
from aligner.data.dataset import PromptDataset
from aligner.data.formats import prompt_rows
from aligner.data.readers import read_rows
from aligner.errors import ConfigError
from aligner.rewards.composite import RewardPipeline
from aligner.rewards.functions import load_function
from aligner.rollout.evaluate import judge
from aligner.rollout.references import refuse
from aligner.run.sample_table import SampleRow, print_samples
from aligner.tools.generate import Answerer, model_folder
from aligner.types import SamplingParams, ScalarMetrics


def main(cfg: Config, env: RankEnv) -> int:
    """Print accuracy and samples; write `<run.dir>/eval.json`. One process is enough: further ranks do nothing."""
    if env.rank == 0:
        evaluate(cfg)
    return 0


def evaluate(cfg: Config) -> ScalarMetrics:
    functions = cfg.eval.functions or cfg.reward.functions
    if not functions:
        raise ConfigError(
            "eval.functions", [], "at least one function that scores an answer", "Example: [{path: math}]"
        )
    if not cfg.data.eval:
        raise ConfigError("data.eval", "", "a file with held-out prompts")
    folder = model_folder(cfg)
    model = Answerer.load(folder, cfg.engine, cfg.model.dtype)
    dataset = PromptDataset(
        prompt_rows(read_rows(cfg.data.eval, "data.eval"), cfg.data), model.tokenizer, cfg.data, "data.eval"
    )
    count = min(cfg.eval.prompts, len(dataset)) if cfg.eval.prompts else len(dataset)
    prompts = [dataset[i] for i in range(count)]
    rewards = RewardPipeline([(load_function(f, i), f.weight) for i, f in enumerate(functions)], cfg.reward)
    refuse(rewards.unreadable(prompts, print), dataset, count)
    limit = cfg.eval.max_response_tokens or cfg.sampling.max_response_tokens
    sampling = SamplingParams(limit, cfg.eval.temperature, stop=tuple(cfg.sampling.stop))
    samples = model.answer(prompts, cfg.eval.samples, sampling, cfg.seed)
    verdict = judge(samples, rewards, cfg.eval)
    metrics = {name: n / d if d else 0.0 for name, (n, d) in verdict.means.items()}
    rows = [
        SampleRow(s.prompt.text, s.response, total, 0.0, s.finished)
        for s, total in zip(samples, verdict.totals, strict=True)
    ]
    print_samples(0, rows, cfg.logging.samples_shown)
    print(f"{folder}: {len(prompts)} prompts x {cfg.eval.samples} samples of {cfg.data.eval}")
    for name, value in metrics.items():
        print(f"  {name} {value:.4f}")
    out = Path(cfg.run.dir) / "eval.json"
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(json.dumps(metrics | {"prompts": len(prompts), "model": str(folder)}, indent=2) + "\n")
    except OSError as error:
        raise ConfigError("run.dir", cfg.run.dir, "a folder that can be written", str(error)) from error
    return metrics
