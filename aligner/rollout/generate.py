"""Requests -> groups of samples: each tensor, context and pipeline peer generates for its share of the prompts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from aligner.data.dialogue import Given
from aligner.data.tokenizer import decode_responses
from aligner.engines.base import OrderedEngine, RolloutEngine, TellingEngine
from aligner.errors import EngineError
from aligner.ops.packing.rows import column
from aligner.ops.reduce import gathered
from aligner.rewards.composite import Early
from aligner.rollout.collate import join_generations, make_samples
from aligner.rollout.groups import Groups
from aligner.rollout.play import Play, grown
from aligner.rollout.requests import Request
from aligner.rollout.sharing import raised_together, share
from aligner.run.timers import Timers
from aligner.types import LENGTH, STOP, Generations, Sample, SamplingParams, Stop


@dataclass
class Generator:
    engine: RolloutEngine
    tokenizer: Any
    sampling: SamplingParams
    peers: dist.ProcessGroup  # ranks with the same samples
    timers: Timers = field(default_factory=Timers)

    def __call__(
        self,
        requests: Sequence[Request],
        sampling: SamplingParams | None = None,
        score: Callable[[Sample], Early] | None = None,
    ) -> Groups:
        """One group for each request. `score` is begun of samples that end while others are generated. Raises
        EngineError on every rank. Collective over the peers, and over the world where one fails."""
        part = share(len(requests), self.peers.size(), self.peers.rank())
        mine, begun = requests[part], {}
        with self.timers("generate"):
            with raised_together(EngineError), self._scoring(mine, begun, score):
                generations = self.engine.generate(
                    [request.prompt.tokens for request in mine],
                    [request.seeds for request in mine],
                    sampling or self.sampling,
                )
            generations = self._joined(generations)
        return self.groups(requests, generations, begun)

    def order(self, requests: Sequence[Request]) -> Callable[[], Generations]:
        """Have the engines begin, which are an `OrderedEngine`; what is returned is for `landed`. Collective."""
        assert isinstance(self.engine, OrderedEngine)
        mine = requests[share(len(requests), self.peers.size(), self.peers.rank())]
        with raised_together(EngineError):
            return self.engine.order([r.prompt.tokens for r in mine], [r.seeds for r in mine], self.sampling)

    def landed(self, requests: Sequence[Request], answer: Callable[[], Generations]) -> Groups:
        """Of all requests that were ordered together. Raises EngineError on every rank. Collective."""
        with raised_together(EngineError):
            generations = answer()
        return self.groups(requests, self._joined(generations))

    # --- by windows (`rollout/clock.py`)

    def fresh(self, request: Request, number: int) -> list[Play]:
        """Its samples, of the group of this `number`, of which nothing is generated."""
        prompt = request.prompt
        given = Given(prompt.text, prompt.tokens)
        return [Play(number, i, seed, prompt, given) for i, seed in enumerate(request.seeds)]

    def go_on(self, plays: Sequence[Sequence[Play]]) -> Callable[[], list[Play]]:
        """Have the engines begin a window: those of a list begin with the same. What is returned waits for what they
        become, and raises EngineError on every rank. Collective, as that is."""
        assert isinstance(self.engine, OrderedEngine)
        mine = plays[share(len(plays), self.peers.size(), self.peers.rank())]
        prompts, begun = [same[0].read for same in mine], [len(same[0].said) for same in mine]
        with raised_together(EngineError):
            answer = self.engine.order(prompts, [[p.seed for p in same] for same in mine], self.sampling, begun)
        return partial(self._gone_on, [play for same in mine for play in same], answer)

    def _gone_on(self, plays: list[Play], answer: Callable[[], Generations]) -> list[Play]:
        with raised_together(EngineError):
            found = answer()
        reasons, limit = found.finish_reason.tolist(), self.sampling.max_response_tokens
        for row, play in enumerate(plays):
            turn = replace(grown(play.begun, found, row), prompt=play.given.tokens)
            stopped = reasons[row] == STOP
            if stopped or len(turn.output) >= limit:
                play.turns, play.begun, play.stop = [turn], None, Stop.ANSWER if stopped else Stop.LENGTH
            elif turn.output:
                play.begun = turn
        return [play for part in gathered(plays, self.peers) for play in part]

    def ended(self, requests: Sequence[Request], plays: Sequence[Play], version: int) -> Groups:
        """The groups of `requests`, whose samples these are; `version`: of the oldest weights."""
        turns = [play.turns[0] for play in plays]
        cut = self.sampling.truncates
        generations = Generations(
            tokens=column([turn.output for turn in turns], torch.int64),
            lengths=torch.tensor([len(turn.output) for turn in turns], dtype=torch.int64),
            logprobs=column([turn.logprobs for turn in turns], torch.float32),
            finish_reason=torch.tensor([STOP if play.stop == Stop.ANSWER else LENGTH for play in plays]),
            weight_version=version,
            full_logprobs=column([turn.full for turn in turns], torch.float32) if cut else None,
            versions=column([turn.versions for turn in turns], torch.int64),
        )
        return self.groups(requests, generations)

    def groups(
        self, requests: Sequence[Request], generations: Generations, begun: dict[int, Early] | None = None
    ) -> Groups:
        group = len(requests[0].seeds) if requests else 1
        prompts = [request.prompt for request in requests]
        samples = make_samples(self.tokenizer, prompts, generations, group, self.sampling)
        for sample, seed in zip(samples, (seed for request in requests for seed in request.seeds), strict=True):
            sample.seed = seed
        return Groups([request.slot for request in requests], generations, samples, begun=begun or {})

    def _joined(self, generations: Generations) -> Generations:
        return generations if self.peers.size() == 1 else join_generations(gathered(generations, self.peers))

    @contextmanager
    def _scoring(
        self, requests: Sequence[Request], begun: dict[int, Early], score: Callable[[Sample], Early] | None
    ) -> Iterator[None]:
        """Samples that end while the engine generates are scored at once, if it tells."""
        if score is None or not isinstance(self.engine, TellingEngine):
            yield
            return

        def finished(number: int, index: int, tokens: list[int], logprobs: list[float], stopped: bool) -> None:
            how = self.sampling.stop_token_ids, self.sampling.special
            (text,) = decode_responses(self.tokenizer, torch.tensor([tokens]), [len(tokens)], *how)
            request = requests[number]
            version, seed = self.engine.weight_version, request.seeds[index]
            sample = Sample(request.prompt, index, text, tuple(tokens), stopped, version, seed=seed)
            begun[number * len(request.seeds) + index] = score(sample)

        self.engine.finished = finished
        try:
            yield
        except BaseException:  # nobody will read them
            for scores in begun.values():
                for one in scores.values():
                    one.cancel()
            raise
        finally:
            self.engine.finished = None
