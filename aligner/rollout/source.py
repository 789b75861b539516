"""The synchronous source of rollouts: refit, verify, generate, score, collate.

Prompts are dealt to data-parallel ranks in contiguous slices of the global batch, and within a replica to its
tensor and pipeline ranks, each of which has a whole engine. Samples stay with their data-parallel rank from then on.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from aligner.config.schema import BatchConfig
from aligner.data.dataset import PromptDataset
from aligner.data.stream import IndexStream
from aligner.engines.base import RolloutEngine
from aligner.errors import RewardError
from aligner.megatron.groups import Layout
from aligner.ops.reduce import first_cause
from aligner.ops.seeds import request_seed
from aligner.refit.transfer import Refit
from aligner.refit.verify import Verifier
from aligner.rewards.composite import RewardPipeline, Scores
from aligner.rollout.collate import collate, join_generations, make_samples
from aligner.run.timers import Timers
from aligner.types import Generations, Prompt, RolloutBatch, SamplingParams, ScalarMetrics


def slots_and_indices(rows: Sequence[int], group: int) -> list[tuple[int, int, int]]:
    """(slot, row, first sample index) of a global batch of dataset rows. A row's k-th occurrence in the batch starts at
    sample index k x group, so that a small dataset never gives two samples the same request seed."""
    seen: dict[int, int] = {}
    result = []
    for slot, row in enumerate(rows):
        result.append((slot, row, seen.get(row, 0) * group))
        seen[row] = seen.get(row, 0) + 1
    return result


def share(count: int, parts: int, index: int) -> slice:
    """The `index`-th of `parts` contiguous shares of `count` things, sizes differing by at most one."""
    return slice(count * index // parts, count * (index + 1) // parts)


@contextmanager
def raised_together() -> Iterator[None]:
    """Each rank scores its own samples: a RewardError of one of them is raised on every rank, so that all of them stop
    (and save) instead of waiting for the one. Collective over the world."""
    error: RewardError | None = None
    try:
        yield
    except RewardError as caught:
        error = caught
    first = first_cause(str(error) if error else "")
    if error is not None:
        raise error
    if first is not None:
        raise RewardError(f"on rank {first[0]}: {first[1]}")


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
    timers: Timers = field(default_factory=Timers)

    def next(self, step: int) -> tuple[RolloutBatch, ScalarMetrics, Scores]:
        """This rank's part of rollout `step`: scored samples, metrics of the refit, and the scores with components."""
        with self.timers("refit"):
            metrics = self.refit()
            metrics |= self.verifier.check()
        with self.timers("generate"):
            prompts, generations, slots = self._generate(step)
        rollout = collate(
            make_samples(self.tokenizer, prompts, generations, self.batch.group),
            generations,
            torch.tensor(slots).repeat_interleave(self.batch.group),
            self.tokenizer.pad_token_id,  # type: ignore[attr-defined]
        )
        with self.timers("score"):
            scores = self.score(rollout)
        behind = float(self.refit.model.step_count - rollout.weight_version)  # 0 here; a queue will tell otherwise
        metrics |= {"staleness/mean": behind, "staleness/max": behind}
        return rollout, metrics, scores

    def _generate(self, step: int) -> tuple[list[Prompt], Generations, list[int]]:
        batch = slots_and_indices(self.stream.next().tolist(), self.batch.group)
        mine = batch[share(len(batch), self.layout.data, self.layout.dp_rank)]
        peers = self.layout.pgs.mp
        my_share = mine[share(len(mine), peers.size(), peers.rank())]
        prompts = [self.prompts[row] for _, row, _ in my_share]
        seeds = [
            [request_seed(self.seed, step, prompt.id, first + i) for i in range(self.batch.group)]
            for prompt, (_, _, first) in zip(prompts, my_share, strict=True)
        ]
        tokens = [prompt.tokens for prompt in prompts]
        generations = self.engine.generate(tokens, seeds, self.sampling)
        if peers.size() > 1:
            parts: list[Generations | None] = [None] * peers.size()
            dist.all_gather_object(parts, generations, group=peers)
            generations = join_generations([part for part in parts if part is not None])
        return [self.prompts[row] for _, row, _ in mine], generations, [slot for slot, _, _ in mine]

    def score(self, rollout: RolloutBatch) -> Scores:
        """Reward functions run on one share per tensor and pipeline peer; models on all samples, by all peers."""
        peers = self.layout.pgs.mp
        part = share(len(rollout.samples), peers.size(), peers.rank())
        with raised_together():
            components = self.rewards.functions(rollout.samples[part])
        if peers.size() > 1:
            gathered: list[dict | None] = [None] * peers.size()
            dist.all_gather_object(gathered, components, group=peers)
            components = {name: [v for piece in gathered for v in piece[name]] for name in components}  # type: ignore[index]
        with raised_together():
            components |= self.rewards.models(rollout.samples)
        scores = self.rewards.combine(components, len(rollout.samples), update=True)
        rollout.rewards = torch.tensor(scores.total, dtype=torch.float32)
        rollout.valid = torch.tensor(scores.valid)
        return scores
