"""What the ranks run for test_clock.py."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from unittest.mock import patch

from aligner.data.dialogue import Given
from aligner.ops.packing.turns import Turn
from aligner.rollout.play import Play
from aligner.rollout.requests import Request
from aligner.rollout.source import Rollout, RolloutSource
from aligner.rollout.statistics import staleness_metrics
from aligner.types import STOP, Stop
from tests.run import jobs


@dataclass
class Sample:
    """One that is generated a window at a time."""

    request: Request
    seed: int
    number: int  # of its group
    tokens: list[int] = field(default_factory=list)
    columns: list[tuple[float, float, int]] = field(default_factory=list)  # logprob, full logprob, version of a token
    reason: int = 0
    ended: int = 0  # the window


@dataclass
class Slow:
    """The same clock in a run whose engine takes turns with the trainer: what the trainer would not wait for is made at
    once, with the weights of now."""

    source: RolloutSource
    lag: int
    steps: int
    window: int
    admitted: int = 0
    windows: int = 0
    samples: list[Sample] = field(default_factory=list)

    def next(self, step: int) -> Rollout:
        source = self.source
        metrics, size = source.weights(), source.requests.slots
        with source.player.timers("generate"):
            while len(ready := self.ready()) < size:
                self.turn()
            chosen = ready[:size]
            taken = [s for number in chosen for s in self.samples if s.number == number]
            self.samples = [s for s in self.samples if s.number not in chosen]
            self.turn()
        requests = [replace(next(s.request for s in taken if s.number == n), slot=i) for i, n in enumerate(chosen)]
        groups = source.score(source.player.ended(requests, [play_of(sample) for sample in taken], 0))
        batch, scores = source._batch(groups)
        return Rollout(batch, metrics | staleness_metrics(batch, source.weights.version, source.ranks), scores)

    def ready(self) -> list[int]:
        """Groups by the window in which their last sample ended, and their number."""
        found: dict[int, list[int]] = {}
        for sample in self.samples:
            found.setdefault(sample.number, []).append(sample.ended)
        return sorted((n for n, ends in found.items() if all(ends)), key=lambda n: (max(found[n]), n))

    def turn(self) -> None:
        size, source = self.source.requests.slots, self.source
        while self.admitted < self.steps and len({s.number for s in self.samples}) + size <= (self.lag + 1) * size:
            self.admitted += 1
            source.requests.begin(self.admitted)
            for request in source.requests.take(range(size)):
                number = (self.admitted - 1) * size + request.slot
                self.samples += [Sample(request, seed, number) for seed in request.seeds]
        self.windows += 1
        rows: list[list[Sample]] = []
        for number in dict.fromkeys(s.number for s in self.samples):
            left = [s for s in self.samples if s.number == number and not s.ended]
            rows += [[s] for s in left if s.tokens] + [[s for s in left if not s.tokens]]
        rows = [row for row in rows if row]
        if not rows:
            return
        prompts = [[*row[0].request.prompt.tokens, *row[0].tokens] for row in rows]
        seeds, begun = [[s.seed for s in row] for row in rows], [len(row[0].tokens) for row in rows]
        sampling = source.player.sampling
        out = source.player.engine._generated(prompts, seeds, sampling, begun=begun)
        for i, s in enumerate(s for row in rows for s in row):
            length, there = int(out.lengths[i]), len(s.tokens)
            for t in range(there, length):
                s.tokens.append(int(out.tokens[i, t]))
                logprobs = float(out.logprobs[i, t]), float(out.full_logprobs[i, t])
                s.columns.append((*logprobs, source.weights.version))
            s.reason = int(out.finish_reason[i])
            if s.reason == STOP or len(s.tokens) == sampling.max_response_tokens:
                s.ended = self.windows


def play_of(sample: Sample) -> Play:
    prompt = sample.request.prompt
    logprobs, full, versions = map(list, zip(*sample.columns, strict=True))
    turn = Turn(prompt.tokens, sample.tokens, logprobs, full, versions)
    stop = Stop.ANSWER if sample.reason == STOP else Stop.LENGTH
    given, index = Given(prompt.text, prompt.tokens), sample.request.seeds.index(sample.seed)
    return Play(sample.number, index, sample.seed, prompt, given, turns=[turn], stop=stop)


def slowly(arguments: list[str], lag: int, steps: int) -> None:
    """`run_stage` of engines that take turns with the trainer, by `Slow`."""
    clocks: dict[int, Slow] = {}

    def turned(self: RolloutSource, step: int) -> Rollout:
        if id(self) not in clocks:
            clocks[id(self)] = Slow(self, lag, steps, self.player.engine.config.window)
        return clocks[id(self)].next(step)

    with (
        patch.object(RolloutSource, "next", turned),
        patch("aligner.config.validate._lag"),  # a window without a lag
    ):
        assert jobs.run_stage(arguments) == 0
