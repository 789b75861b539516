"""Held-out accuracy: greedy answers (or k samples each), scored by the reward functions, over all ranks."""

from __future__ import annotations

from dataclasses import dataclass

import torch.distributed as dist

from aligner.config.schema import EvalConfig
from aligner.data.dataset import PromptDataset
from aligner.engines.base import RolloutEngine
from aligner.megatron.groups import Layout
from aligner.ops.seeds import request_seed
from aligner.refit.transfer import Refit
from aligner.rewards.composite import RewardPipeline
from aligner.rollout.collate import make_samples
from aligner.rollout.source import share
from aligner.rollout.statistics import reduce_metrics
from aligner.run.sample_table import SampleRow
from aligner.types import Sample, SamplingParams, ScalarMetrics


@dataclass
class Evaluator:
    """`model_name` is the component of a trained reward model, if there is one: its mean score is reported beside the
    accuracy, so that reward hacking shows as a gap."""

    engine: RolloutEngine
    refit: Refit
    prompts: PromptDataset
    rewards: RewardPipeline
    tokenizer: object
    sampling: SamplingParams
    config: EvalConfig
    layout: Layout
    seed: int

    def __call__(self) -> ScalarMetrics:
        """`eval/accuracy`: the fraction of answers with full score from every function that applies to them;
        `eval/reward`, `eval/response_tokens`, with k > 1 samples `eval/pass_at_k` (any of the k is right)."""
        self.refit()
        correct, means = self.score()
        k = self.config.samples
        if k > 1:
            right = [any(correct[i : i + k]) for i in range(0, len(correct), k)]
            means["eval/pass_at_k"] = (float(sum(right)), float(len(right)))
        return reduce_metrics(means, {}, dist.group.WORLD)

    def score(self) -> tuple[list[bool], dict[str, tuple[float, float]]]:
        count = len(self.prompts) if not self.config.prompts else min(self.config.prompts, len(self.prompts))
        mine = share(count, dist.get_world_size(), dist.get_rank())
        samples = self.generate(range(count)[mine])
        components = self.rewards.functions(samples)
        full = self.config.full_score - 1e-6
        correct = [
            all(values[i] >= full for values in components.values() if values[i] is not None)
            and any(values[i] is not None for values in components.values())
            for i in range(len(samples))
        ]
        totals = [
            sum(weight * (components[reward.name][i] or 0.0) for reward, weight in self.rewards.rewards)
            for i in range(len(samples))
        ]
        n = float(len(samples))
        means = {
            "eval/accuracy": (float(sum(correct)), n),
            "eval/reward": (float(sum(totals)), n),
            "eval/response_tokens": (float(sum(len(s.tokens) for s in samples)), n),
            "eval/eos_fraction": (float(sum(s.finished for s in samples)), n),
        }
        self.shown = [
            SampleRow(s.prompt.text, s.response, total, float("nan"), s.finished)
            for s, total in zip(samples[:8], totals, strict=False)
        ]
        return correct, means

    def generate(self, rows: range) -> list[Sample]:
        k = self.config.samples
        prompts = [self.prompts[row] for row in rows]
        # rollout -1: evaluation never shares a request seed with training
        seeds = [[request_seed(self.seed, -1, prompt.id, i) for i in range(k)] for prompt in prompts]
        generations = self.engine.generate([p.tokens for p in prompts], seeds, self.sampling)
        return make_samples(self.tokenizer, prompts, generations, k)
