"""Generation of samples for requests: the engine's prompts, and its responses. A sample of `SampleGenerator` is one
response; one of `TrajectoryGenerator` (`rollout/trajectory_generator.py`) continues with tools and environments.

Samples of a request stay together. Each tensor, context and pipeline peer generates for its share of the requests.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch.nn.utils.rnn import pad_sequence

from aligner.data.dialogue import EnginePrompt
from aligner.data.tokenizer import decode_responses
from aligner.engines.base import RolloutEngine
from aligner.errors import EngineError
from aligner.ops.agree import raised_together
from aligner.ops.packing.rows import column
from aligner.ops.reduce import gathered, gathered_messages
from aligner.rewards.composite import Early
from aligner.rollout.groups import Groups
from aligner.rollout.requests import Request
from aligner.rollout.sample_state import OPEN_ENDS, Response, SampleState, by_prompt, grown, oldest_version, response_of
from aligner.rollout.sharing import share
from aligner.run.timers import Timers
from aligner.types import LENGTH, STOP, Generations, Sample, SamplingParams, Stop, Sums, Trajectory

Score = Callable[[Sample], Early]  # starts to score an ended sample while others are generated
ByPrompt = Sequence[Sequence[SampleState]]  # samples with the same prompt, which the engine reads once


@dataclass
class SampleGenerator:
    engine: RolloutEngine
    tokenizer: Any
    sampling: SamplingParams
    peers: dist.ProcessGroup | None  # ranks with the same samples; None on one that only generates
    timers: Timers = field(default_factory=Timers)
    window: int = 0  # decode steps after which samples pause (`engine.window`); 0: they do not
    turned: ClassVar[bool] = False  # samples are trajectories
    _early: dict[int, Early] = field(default_factory=dict, init=False)  # by number among this peer's last samples

    def __call__(
        self, requests: Sequence[Request], sampling: SamplingParams | None = None, score: Score | None = None
    ) -> Groups:
        """Return one group for each request, generated all at once. Raises EngineError on every rank. Collective
        over the peers, and over the world where one fails."""
        states = self.fresh_of(range(len(requests)), requests)
        with self.timers("generate"):
            own = self._share(by_prompt(states))
            states = self._gathered(self._generated(own, sampling or self.sampling, score))
        return self.ended(requests, states, sampling=sampling)

    def samples(self, requests: Sequence[Request], sampling: SamplingParams) -> list[Sample]:
        """Return samples of requests that no other rank shares. Collective over the world."""
        states = self.fresh_of(range(len(requests)), requests)
        self._generated(by_prompt(states), sampling)
        self.take_sums()  # the sums count rollouts only
        return self.ended(requests, states, sampling=sampling).samples

    # --- for a schedule, which orders the generation

    def fresh(self, request: Request, number: int) -> list[SampleState]:
        """Return the samples of a request, in the group of this `number`, before any generation."""
        prompt = request.prompt
        prompt_tokens = EnginePrompt(prompt.text, prompt.tokens)
        return [SampleState(number, i, seed, prompt, prompt_tokens) for i, seed in enumerate(request.seeds)]

    def fresh_of(self, numbers: Iterable[int], requests: Iterable[Request]) -> list[SampleState]:
        """Return `fresh` of each number and request."""
        return [state for number, one in zip(numbers, requests, strict=True) for state in self.fresh(one, number)]

    def advance(
        self, together: ByPrompt, sampling: SamplingParams | None = None, score: Score | None = None
    ) -> Callable[[], list[SampleState]]:
        """Let the engines continue these samples, to their ends or through a window. Return a function that waits
        for them, on every peer, and raises EngineError on every rank. Engines on other ranks work meanwhile; with
        others there is nothing left to wait for. Collective, as the function is."""
        own, sampling = self._share(together), sampling or self.sampling
        if self.engine.bridge is not None:
            with raised_together(EngineError):
                answer = self._ordered(own, sampling)
            return lambda: self._gathered(self._arrived(own, answer, sampling))
        states = self._gathered(self._generated(own, sampling, score))
        return lambda: states

    def ended(
        self,
        requests: Sequence[Request],
        states: Sequence[SampleState],
        version: int | None = None,
        sampling: SamplingParams | None = None,
    ) -> Groups:
        """Return the groups of `requests`, of ended samples. `version`: of the oldest weights, if that is known."""
        sampling = sampling or self.sampling
        if version is None:
            version = oldest_version(states, self.engine.weight_version)
        responses = [response_of(state) for state in states]
        generations = self._generations(states, responses, version, sampling.truncates)
        tokens, lengths = generations.tokens, generations.lengths.tolist()
        if self.turned:  # the response is the last answer
            last = [state.turns[-1].output if state.turns else () for state in states]
            tokens, lengths = column(last, torch.int64), [len(output) for output in last]
        texts = decode_responses(self.tokenizer, tokens, lengths, sampling.stop_token_ids, sampling.special)
        samples = [
            Sample(
                state.prompt,
                state.index,
                text,
                tuple(response.tokens),
                state.stop in OPEN_ENDS,
                version,
                self._trajectory(state, response.forks),
                state.seed,
            )
            for state, response, text in zip(states, responses, texts, strict=True)
        ]
        early, self._early = self._early, {}
        return Groups([request.slot for request in requests], generations, samples, begun=early)

    def take_sums(self) -> Sums:
        """Return sums since the last call, of this rank's engine; the same names on every rank."""
        return self.engine.take_sums()

    # --- different for samples of several turns

    def _generated(self, together: ByPrompt, sampling: SamplingParams, score: Score | None = None) -> list[SampleState]:
        """Generate on this rank, to the ends of the samples."""
        with raised_together(EngineError), self._scoring(together, score):
            generations = self.engine.generate(*_asked(together), sampling)
        return self._filled(together, generations)

    def _ordered(self, together: ByPrompt, sampling: SamplingParams) -> Callable[[], Any]:
        """Order samples from engines on other ranks."""
        begun = [len(same[0].paused_tokens) for same in together] if self.window else None
        return self.engine.order(*_asked(together), sampling, begun)

    def _arrived(self, together: ByPrompt, answer: Callable[[], Any], sampling: SamplingParams) -> list[SampleState]:
        with raised_together(EngineError):
            generations = answer()
        return self._filled(together, generations, sampling.max_response_tokens if self.window else 0)

    def _trajectory(self, state: SampleState, forks: Sequence[int] | None) -> Trajectory | None:
        return None

    # --- both

    def _share[Item](self, items: Sequence[Item]) -> Sequence[Item]:
        return items if self.peers is None else items[share(len(items), self.peers.size(), self.peers.rank())]

    def _gathered(self, own: list[SampleState]) -> list[SampleState]:
        """Return the samples of all peers."""
        if self.peers is None or self.peers.size() == 1:
            return own
        share = gathered if self.engine.no_routing is None else gathered_messages
        return [state for peers_own in share(own, self.peers) for state in peers_own]

    @staticmethod
    def _filled(together: ByPrompt, generations: Generations, limit: int = 0) -> list[SampleState]:
        """Add the responses to the samples; with a `limit`, shorter ones that have not stopped pause."""
        states, reasons = [state for same in together for state in same], generations.finish_reason.tolist()
        for row, state in enumerate(states):
            turn = grown(state.begun, state.next_prompt.tokens, generations, row)
            stopped = reasons[row] == STOP
            if stopped or len(turn.output) >= limit:
                state.turns, state.begun, state.stop = [turn], None, Stop.ANSWER if stopped else Stop.LENGTH
            elif turn.output:
                state.begun = turn
        return states

    def _generations(
        self, states: Sequence[SampleState], responses: Sequence[Response], version: int, cut: bool
    ) -> Generations:
        """Return the tokens behind the prompts of N samples; a row that was rendered anew follows the one before it."""

        def columns(name: str, dtype: torch.dtype) -> torch.Tensor | None:
            rows = [getattr(response, name) for response in responses]
            return None if any(row is None for row in rows) else column(rows, dtype)

        routing = self.engine.no_routing
        if routing is not None:
            none = routing.flatten(0, 1)  # of a trajectory without a turn
            rows = [none if response.routing is None else response.routing for response in responses]
            routing = pad_sequence([none, *rows], batch_first=True)[1:]
        return Generations(
            tokens=column([response.tokens for response in responses], torch.int64),
            lengths=torch.tensor([len(response.tokens) for response in responses], dtype=torch.int64),
            logprobs=column([response.logprobs for response in responses], torch.float32),
            finish_reason=torch.tensor([STOP if p.stop in OPEN_ENDS else LENGTH for p in states], dtype=torch.int64),
            weight_version=version,
            full_logprobs=columns("full", torch.float32) if cut else None,
            routing=routing,
            made=columns("made", torch.bool) if self.turned else None,
            forks=columns("forks", torch.int64) if self.turned else None,
            versions=columns("versions", torch.int64) if self.window else None,
        )

    @contextmanager
    def _scoring(self, together: ByPrompt, score: Score | None) -> Iterator[None]:
        """Score samples as soon as they end, if the engine reports that."""
        self._early = {}
        if score is None or not self.engine.can.tells_finished:
            yield
            return
        firsts = [0, *accumulate(map(len, together))]

        def finished(number: int, index: int, tokens: list[int], logprobs: list[float], stopped: bool) -> None:
            how = self.sampling.stop_token_ids, self.sampling.special
            (text,) = decode_responses(self.tokenizer, torch.tensor([tokens]), [len(tokens)], *how)
            state, version = together[number][index], self.engine.weight_version
            sample = Sample(state.prompt, state.index, text, tuple(tokens), stopped, version, seed=state.seed)
            self._early[firsts[number] + index] = score(sample)

        self.engine.finished = finished
        try:
            yield
        except BaseException:  # the scores will not be read
            for scores in self._early.values():
                for one in scores.values():
                    one.cancel()
            raise
        finally:
            self.engine.finished = None


def _asked(together: ByPrompt) -> tuple[list[tuple[int, ...]], list[list[int]]]:
    """Return the prompt of each request, and the seeds of its samples."""
    return [same[0].input_tokens for same in together], [[state.seed for state in same] for same in together]
