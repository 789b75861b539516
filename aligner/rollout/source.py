"""The synchronous source of rollouts: refit, verify, generate, score, collate.

Prompts are dealt to data-parallel ranks in contiguous slices of the global batch, and within a replica to its
tensor and pipeline ranks, each of which has a whole engine. Samples stay with their data-parallel rank from then on.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from aligner.config.algorithm import AlgorithmConfig
from aligner.config.schema import BatchConfig
from aligner.data.dataset import PromptDataset
from aligner.data.stream import IndexStream
from aligner.data.tokenizer import decode_responses
from aligner.engines.base import RolloutEngine, TellingEngine
from aligner.errors import AlignerError, EngineError, RewardError
from aligner.megatron.groups import Layout
from aligner.ops.reduce import first_cause
from aligner.ops.seeds import request_seed
from aligner.ops.shaping import shaped_rewards
from aligner.refit.transfer import Refit
from aligner.refit.verify import Verifier
from aligner.rewards.composite import Component, Early, RewardPipeline, Scores
from aligner.rollout.collate import collate, join_generations, make_samples
from aligner.rollout.groups import Groups, Refill, Request, Requests, join_groups
from aligner.rollout.statistics import reduce_metrics
from aligner.run.timers import Timers
from aligner.types import STOP, Generations, Prompt, RolloutBatch, Sample, SamplingParams, ScalarMetrics


def share(count: int, parts: int, index: int) -> slice:
    """The `index`-th of `parts` contiguous shares of `count` things, sizes differing by at most one."""
    return slice(count * index // parts, count * (index + 1) // parts)


@contextmanager
def raised_together(kind: type[RewardError | EngineError] = RewardError) -> Iterator[None]:
    """Each rank generates and scores its own samples: an error of this `kind` on one of them is raised on every rank,
    so that all of them stop (and save) instead of waiting for the one. Collective over the world."""
    error: AlignerError | None = None
    try:
        yield
    except kind as caught:
        error = caught
    first = first_cause(str(error) if error else "")
    if error is not None:
        raise error
    if first is not None:
        raise kind(f"on rank {first[0]}: {first[1]}")


class Rollouts(Protocol):
    """Where a recipe's rollouts come from."""

    timers: Timers

    def next(self, step: int) -> tuple[RolloutBatch, ScalarMetrics, Scores]:
        """This rank's part of rollout `step`, its metrics so far, and the scores with components."""
        ...


@dataclass
class RolloutSource:
    engine: RolloutEngine
    refit: Refit
    verifier: Verifier
    prompts: PromptDataset
    stream: IndexStream
    rewards: RewardPipeline
    tokenizer: object
    sampling: SamplingParams
    batch: BatchConfig
    layout: Layout
    seed: int
    algorithm: AlgorithmConfig = field(default_factory=AlgorithmConfig)
    timers: Timers = field(default_factory=Timers)

    def next(self, step: int) -> tuple[RolloutBatch, ScalarMetrics, Scores]:
        """This rank's part of rollout `step`: scored samples, metrics of the refit, and the scores with components."""
        with self.timers("refit"):
            metrics = self.refit()
            with self.timers("verify"):
                metrics |= self.verifier.check()
        if self.algorithm.filter_groups:
            groups, found = self._filtered(step)
            metrics |= found
        else:
            requests = Requests(self.batch.group)(range(self.batch.prompts), self.stream.next().tolist())
            groups = self._groups(step, requests)
        rollout = collate(
            self._samples(groups),
            groups.generations,
            torch.tensor(groups.slots).repeat_interleave(self.batch.group),
            self.tokenizer.pad_token_id,  # type: ignore[attr-defined]
        )
        scores = self.rewards.combine(groups.components, len(rollout.samples), update=True)
        rollout.rewards = torch.tensor(scores.total, dtype=torch.float32)
        rollout.valid = torch.tensor(scores.valid)
        if self.algorithm.advantage == "remax":
            rollout.greedy_rewards = self._greedy_rewards(groups).repeat_interleave(self.batch.group)
        behind = float(self.refit.model.step_count - rollout.weight_version)  # 0 here; a queue will tell otherwise
        metrics |= {"staleness/mean": behind, "staleness/max": behind}
        if late := self.rewards.take_late():
            metrics |= reduce_metrics(late, {}, dist.group.WORLD)
        return rollout, metrics, scores

    def _groups(self, step: int, requests: Sequence[Request]) -> Groups:
        """Generate and score this rank's requests: those for its share of the slots."""
        slots = range(self.batch.prompts)[share(self.batch.prompts, self.layout.data, self.layout.dp_rank)]
        mine = [request for request in requests if request.slot in slots]
        prompts = [self.prompts[request.row] for request in mine]
        seeds = [
            [request_seed(self.seed, step, prompt.id, request.first + i) for i in range(self.batch.group)]
            for prompt, request in zip(prompts, mine, strict=True)
        ]
        early: dict[int, Early] = {}
        generations = self._generate(prompts, seeds, self.sampling, early if self.rewards.scores_early else None)
        groups = Groups([request.slot for request in mine], prompts, generations)
        groups.components = self._score(self._samples(groups), self.batch.group, early)
        return groups

    def _filtered(self, step: int) -> tuple[Groups, ScalarMetrics]:
        """Rounds of generation until every slot has a group with different rewards; see `rollout/groups.py`."""
        rounds, each = self.algorithm.filter_rounds, self.algorithm.advantage == "gdpo"
        refill = Refill(self.batch.prompts, self.batch.group, rounds, self.layout.pgs.dp, each)
        number, kept = Requests(self.batch.group), []
        while refill.open:
            slots = refill.wanted()
            groups = self._groups(step, number(slots, self.stream.take(len(slots)).tolist()))
            # the running statistics of reward.normalize see what is kept, once
            scores = self.rewards.combine(groups.components, len(groups.slots) * self.batch.group, update=False)
            kept.append(refill.keep(groups, scores))
        return join_groups(kept), refill.metrics()

    def _greedy_rewards(self, groups: Groups) -> Tensor:
        """float32 [N]: the shaped reward of each prompt's greedy response, NaN where it has no score (ReMax)."""
        greedy = replace(self.sampling, temperature=0.0, top_p=1.0, top_k=0, min_p=0.0)
        generations = self._generate(groups.prompts, [[0]] * len(groups.prompts), greedy)
        samples = make_samples(self.tokenizer, groups.prompts, generations, 1)
        scores = self.rewards.combine(self._score(samples, 1), len(samples), update=False)
        rewards, finished = torch.tensor(scores.total, dtype=torch.float32), generations.finish_reason == STOP
        limit = self.sampling.max_response_tokens
        return shaped_rewards(rewards, generations.lengths, finished, self.algorithm.overlong, limit)

    def _samples(self, groups: Groups) -> list[Sample]:
        return make_samples(self.tokenizer, groups.prompts, groups.generations, self.batch.group)

    def _generate(
        self,
        prompts: list[Prompt],
        seeds: list[list[int]],
        sampling: SamplingParams,
        early: dict[int, Early] | None = None,
    ) -> Generations:
        """Each tensor, context and pipeline peer generates for its share of the prompts. Into `early` go scores that
        were begun meanwhile, by the place of the sample among this peer's."""
        peers = self.layout.peers
        part = share(len(prompts), peers.size(), peers.rank())
        with self.timers("generate"):
            with raised_together(EngineError), self._scoring(prompts[part], early):
                generations = self.engine.generate([prompt.tokens for prompt in prompts[part]], seeds[part], sampling)
            if peers.size() > 1:
                parts: list[Generations | None] = [None] * peers.size()
                dist.all_gather_object(parts, generations, group=peers)
                generations = join_generations([part for part in parts if part is not None])
        return generations

    @contextmanager
    def _scoring(self, prompts: list[Prompt], early: dict[int, Early] | None) -> Iterator[None]:
        """Samples that end while the engine generates for `prompts` are scored at once, if it tells."""
        if early is None or not isinstance(self.engine, TellingEngine):
            yield
            return

        def finished(number: int, index: int, tokens: list[int], stopped: bool) -> None:
            (text,) = decode_responses(self.tokenizer, torch.tensor([tokens]), [len(tokens)])  # type: ignore[arg-type]
            sample = Sample(prompts[number], index, text, tuple(tokens), stopped, self.engine.weight_version)
            early[number * self.batch.group + index] = self.rewards.score_early(sample)

        self.engine.finished = finished
        try:
            yield
        except BaseException:  # nobody will read them
            for begun in early.values():
                for score in begun.values():
                    score.cancel()
            raise
        finally:
            self.engine.finished = None

    def _score(self, samples: list[Sample], group: int, early: dict[int, Early] | None = None) -> dict[str, Component]:
        """Reward functions run on one share per peer, of the prompts that it generated for; models on all samples, by
        all peers. `group` samples a prompt; `early`: see `_generate`."""
        peers = self.layout.peers
        mine = share(len(samples) // group, peers.size(), peers.rank())
        with self.timers("score"):
            with raised_together():
                components = self.rewards.functions(samples[mine.start * group : mine.stop * group], early)
            if peers.size() > 1:
                gathered: list[dict | None] = [None] * peers.size()
                dist.all_gather_object(gathered, components, group=peers)
                components = {name: [v for piece in gathered for v in piece[name]] for name in components}  # type: ignore[index]
            with raised_together():
                components |= self.rewards.models(samples)
        return components
