"""Held-out accuracy: greedy answers (or k samples each), scored by the reward functions, over all ranks."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch.distributed as dist

from aligner.config.sections.rewards import EvalConfig
from aligner.data.dataset import PromptDataset
from aligner.errors import RewardError
from aligner.megatron.groups import Layout
from aligner.ops.agree import raised_together
from aligner.ops.reduce import gathered, reduce_metrics
from aligner.ops.seeds import request_seed
from aligner.refit.transfer import Refit
from aligner.rewards.composite import Component, RewardPipeline
from aligner.rewards.correct import able_to_give, correct_answers
from aligner.roles.process_reward import ProcessRewardModel
from aligner.roles.reward_model import RewardModel
from aligner.rollout.requests import Request
from aligner.rollout.sample_generator import SampleGenerator
from aligner.rollout.sharing import share
from aligner.run.timers import Timers
from aligner.types import Sample, SamplingParams, ScalarMetrics, Sums


class EvaluatedAnswers(NamedTuple):
    correct: list[bool]  # full score from every function that applies and can give it
    totals: list[float]  # weighted sum of the functions' scores
    components: dict[str, Component]  # each function's own scores
    means: Sums  # eval/*

    @property
    def maxima(self) -> dict[str, float]:
        """The best score of each function; -inf where it gave none."""
        return {name: max(known_scores(values), default=-math.inf) for name, values in self.components.items()}


def judge(samples: Sequence[Sample], rewards: RewardPipeline, config: EvalConfig) -> EvaluatedAnswers:
    """Score answers (prompt-major, `config.samples` each) by the reward functions."""
    components = rewards.functions(samples)
    correct, totals = correct_answers(components, config.full_score, rewards), []
    for i in range(len(samples)):
        terms = [(weight, components[reward.name][i] or 0.0) for reward, weight in rewards.rewards]
        totals.append(sum(weight * value for weight, value in terms if not math.isnan(value)))
    n, k = float(len(samples)), config.samples
    means = {
        "eval/accuracy": (float(sum(correct)), n),
        "eval/reward": (sum(totals), n),
        "eval/response_tokens": (float(sum(len(s.tokens) for s in samples)), n),
        "eval/eos_fraction": (float(sum(s.finished for s in samples)), n),
    }
    for name, values in components.items():
        scores = known_scores(values)
        means[f"eval/{name}/mean"] = (math.fsum(scores), float(len(scores)))
    if k > 1:
        right = [any(correct[i : i + k]) for i in range(0, len(correct), k)]
        means["eval/pass_at_k"] = (float(sum(right)), float(len(right)))
    return EvaluatedAnswers(correct, totals, components, means)


def known_scores(component: Component) -> list[float]:
    """Return the scores of answers that a function applies to and could score."""
    return [value for value in component if value is not None and not math.isnan(value)]


def never_full(accuracy: float, maxima: Mapping[str, float], full_score: float, rewards: RewardPipeline) -> list[str]:
    """Return a warning for each function that leaves the accuracy at 0. Either no function can give full score, or
    one gave it to no answer while others did. `maxima`: function -> its best score of this evaluation."""
    hint = "List in eval.functions only functions that recognise correct answers, or read eval/<function>/mean."
    able = able_to_give(full_score, rewards)
    if not able and rewards.rewards:
        return [f"WARNING: eval/accuracy is always 0: no function can give eval.full_score={full_score:g}. {hint}"]
    best = {name: maxima[name] for name in able if math.isfinite(maxima[name])}
    short = {name: value for name, value in best.items() if value < full_score - 1e-6}
    if accuracy or len(short) == len(best):
        return []
    return [
        f"WARNING: eval/accuracy is 0 because `{name}` gave no answer eval.full_score={full_score:g} (its best is "
        f"{value:g}). {hint}"
        for name, value in short.items()
    ]


@dataclass
class Evaluator:
    generator: SampleGenerator
    refit: Refit
    prompts: PromptDataset
    rewards: RewardPipeline
    sampling: SamplingParams
    config: EvalConfig
    layout: Layout
    seed: int
    reward_model: RewardModel | ProcessRewardModel | None = None
    timers: Timers = field(default_factory=Timers)
    warned: bool = False  # that a function's scores leave the accuracy at 0

    def __call__(self) -> ScalarMetrics:
        """Evaluate; return `eval/accuracy`, `eval/reward`, `eval/<function>/mean`, `eval/response_tokens`,
        `eval/eos_fraction`, with k > 1 samples `eval/pass_at_k` (any of the k is right). Warns once where a function
        leaves the accuracy at 0.

        With a reward model also `eval/model_score` (its mean score) and `eval/model_right` (the fraction it scores
        above its `middle`: its mean, or even odds). Where that grows and the accuracy does not, the policy exploits
        the model. Collective.
        """
        with self.timers("refit"):
            self.refit()
        count = min(self.config.prompts, len(self.prompts)) if self.config.prompts else len(self.prompts)
        with self.timers("generate"):
            samples = self._generate(range(count)[share(count, dist.get_world_size(), dist.get_rank())])
        with self.timers("score"):
            with raised_together(RewardError):
                verdict = judge(samples, self.rewards, self.config)
            means = verdict.means
            if self.reward_model is not None:
                means |= self._model_opinion(samples)
        best = {f"max {name}": value for name, value in verdict.maxima.items()}
        metrics = reduce_metrics(means, best, dist.group.WORLD)
        metrics = {name: value for name, value in metrics.items() if not math.isnan(value)}
        maxima = {name.removeprefix("max "): metrics.pop(name) for name in best}
        accuracy = metrics.get("eval/accuracy", 0.0)
        if dist.get_rank() == 0 and not self.warned:
            for warning in never_full(accuracy, maxima, self.config.full_score, self.rewards):
                print(warning, flush=True)
                self.warned = True
        return metrics

    def _generate(self, rows: range) -> list[Sample]:
        k = self.config.samples
        prompts = [self.prompts[row] for row in rows]
        # rollout -1: evaluation never shares a request seed with training
        seeds = [[request_seed(self.seed, -1, prompt.id, i) for i in range(k)] for prompt in prompts]
        requests = [Request(row, *of) for row, of in zip(rows, zip(prompts, seeds, strict=True), strict=True)]
        return self.generator.samples(requests, self.sampling)

    def _model_opinion(self, samples: list[Sample]) -> Sums:
        """Return the reward model's metrics. Tensor and pipeline ranks share the model: they score their samples
        together, and the first one counts."""
        assert self.reward_model is not None
        peers = self.layout.peers
        scores = self.reward_model([sample for own in gathered(samples, peers) for sample in own])
        if peers.rank() != 0:
            return {"eval/model_score": (0.0, 0.0), "eval/model_right": (0.0, 0.0)}
        n = float(len(scores))
        return {
            "eval/model_score": (sum(scores), n),
            "eval/model_right": (float(sum(s > self.reward_model.middle for s in scores)), n),
        }
