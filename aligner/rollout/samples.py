"""The samples of stage `sample`, a batch at a time: weights, once -> requests -> answers -> scores -> records.

A sample depends on its prompt's row and its number, never on the batch or the rank that it is in.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from aligner.config.schema import Config
from aligner.data.dataset import PromptDataset
from aligner.data.formats import PromptRow
from aligner.megatron.groups import Layout
from aligner.ops.reduce import reduce_metrics
from aligner.ops.rl.shaping import shaped_rewards
from aligner.ops.seeds import request_seed
from aligner.rewards.composite import Scores, finish_metrics
from aligner.rollout.groups import Groups
from aligner.rollout.requests import Request
from aligner.rollout.sample_generator import SampleGenerator
from aligner.rollout.samples_file import Record, make_records
from aligner.rollout.score import Scorer
from aligner.rollout.sharing import share
from aligner.rollout.source import Weights
from aligner.types import STOP, ScalarMetrics, Sums

BEFORE = -2  # in the seeds of requests round r is rollout -2 - r; training rollouts count from 1, evaluation is -1


@dataclass
class SampleBatches:
    weights: Weights
    generator: SampleGenerator
    score: Scorer
    prompts: PromptDataset
    rows: Sequence[PromptRow]  # of the prompts, by Prompt.id
    layout: Layout
    cfg: Config
    _placed: bool = False  # the weights in the engine

    @property
    def batches(self) -> int:
        return -(-len(self.prompts) // self.cfg.batch.prompts)

    def next(self, step: int) -> tuple[list[Record], ScalarMetrics]:
        """Return the records of all ranks on global rank 0, elsewhere none; and metrics. Collective."""
        if not self._placed:
            self.weights()  # a restart must not show in the metrics: the refit's are not reported
        self._placed, rewards = True, self.score.rewards
        rewards.begin(step)
        groups = self.score(self.generator(self._requests(step), score=rewards.score_early))
        scores = self.score.combined(groups, update=False)
        compared = self._shaped(groups, scores)
        texts = [self.rows[prompt.id].prompt for prompt in groups.prompts]
        records = make_records(groups, scores, compared, texts, self.cfg.stage.sample.column)
        metrics = measured(groups, scores, compared, self.layout.pgs.dp)
        if late := rewards.take_late():
            metrics |= reduce_metrics(late, {}, dist.group.WORLD)
        return self._gathered(records), metrics

    def slots(self, step: int) -> range:
        """Return the prompts of a batch, in the order of the data; the last batch may have fewer."""
        size = self.cfg.batch.prompts
        return range(len(self.prompts))[(step - 1) * size : step * size]

    def _requests(self, step: int) -> list[Request]:
        """Return this rank's requests."""
        batch = self.slots(step)
        own = batch[share(len(batch), self.layout.data, self.layout.dp_rank)]
        return [Request(slot, self.prompts[slot], self._seeds(self.prompts[slot].id)) for slot in own]

    def _seeds(self, row: int) -> list[int]:
        rollout = BEFORE - self.cfg.stage.sample.round
        return [request_seed(self.cfg.seed, rollout, row, i) for i in range(self.cfg.batch.group)]

    def _shaped(self, groups: Groups, scores: Scores) -> list[float]:
        """Return the rewards that are compared: those that the run's shaping gives."""
        algorithm, limit = self.cfg.algorithm, self.cfg.sampling.max_response_tokens
        total, ends = torch.tensor(scores.total, dtype=torch.float64), groups.generations
        return shaped_rewards(total, ends.lengths, ends.finish_reason == STOP, algorithm, limit).tolist()

    def _gathered(self, records: list[Record]) -> list[Record]:
        if self.layout.peers.rank() != 0:  # peers hold the same
            return []
        parts: list | None = [None] * self.layout.data if self.layout.dp_rank == 0 else None
        group = self.layout.pgs.dp
        dist.gather_object(records, parts, dst=dist.get_global_rank(group, 0), group=group)
        return [record for own in parts or () for record in own]


def measured(groups: Groups, scores: Scores, compared: Sequence[float], ranks: dist.ProcessGroup) -> ScalarMetrics:
    """Return reward/*, response/*, and sample/best: the mean over prompts of the largest reward."""
    count, size = float(len(groups.samples)), groups.size or 1
    means: Sums = {
        "response/tokens_mean": (float(groups.generations.lengths.sum()), count),
        "response/eos_fraction": (float(sum(one.finished for one in groups.samples)), count),
    }
    if not scores.components:
        return reduce_metrics(means, {}, ranks)
    known = list(zip(compared, scores.valid, strict=True))
    each = [[value for value, ok in known[i : i + size] if ok] for i in range(0, len(known), size)]
    best = [max(values) for values in each if values]
    means |= scores.metric_sums() | {"sample/best": (sum(best), float(len(best)))}
    return finish_metrics(reduce_metrics(means, scores.metric_maxima(), ranks))
