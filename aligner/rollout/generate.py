"""Requests -> groups of samples: each tensor, context and pipeline peer generates for its share of the prompts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from aligner.data.tokenizer import decode_responses
from aligner.engines.base import OrderedEngine, RolloutEngine, TellingEngine
from aligner.errors import EngineError
from aligner.ops.reduce import gathered
from aligner.rewards.composite import Early
from aligner.rollout.collate import join_generations, make_samples
from aligner.rollout.groups import Groups
from aligner.rollout.requests import Request
from aligner.rollout.sharing import raised_together, share
from aligner.run.timers import Timers
from aligner.types import Generations, Sample, SamplingParams


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
        """Have the engines begin, which are an `OrderedEngine`; what is returned is for `answered`. Collective."""
        assert isinstance(self.engine, OrderedEngine)
        mine = requests[share(len(requests), self.peers.size(), self.peers.rank())]
        prompts = [(*r.prompt.tokens, *(r.begun or ())) for r in mine]
        begun = [len(r.begun) for r in mine if r.begun is not None]
        with raised_together(EngineError):
            return self.engine.order(prompts, [r.seeds for r in mine], self.sampling, begun or None)

    def landed(self, requests: Sequence[Request], answer: Callable[[], Generations]) -> Groups:
        """Of all requests that were ordered together. Raises EngineError on every rank. Collective."""
        return self.groups(requests, self.answered(answer))

    def answered(self, answer: Callable[[], Generations]) -> Generations:
        """As `landed`, before it is text."""
        with raised_together(EngineError):
            generations = answer()
        return self._joined(generations)

    def groups(
        self, requests: Sequence[Request], generations: Generations, begun: dict[int, Early] | None = None
    ) -> Groups:
        group = len(requests[0].seeds) if requests else 1
        samples = make_samples(self.tokenizer, [request.prompt for request in requests], generations, group)
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
            (text,) = decode_responses(self.tokenizer, torch.tensor([tokens]), [len(tokens)])
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
