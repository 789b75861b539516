"""Trajectories of several turns: the model answers, its calls go to tools and environment, and their results are
appended, until one of `Stop`.

The trajectories of a rank run together. In rounds the engine generates a turn of all that are still open, and the tools
of those that have answered work meanwhile. Where an engine can, each turn is admitted when its prompt is ready instead.

Ranks that only generate make them for the trainer's ranks, a group always on the same rank. In windows a trajectory
pauses: its environment stays there. The trainer's ranks have the rest of its state (`rollout/store.py`). With that
any rank can continue it, and rebuilds an environment by asking it the same questions again. Turns of windows are
admitted by counts (`TurnPool.counted`), of decode steps alone: a trajectory that waits for its tools when a window ends
waits in the next one, behind those that have waited longer. A trajectory whose environment cannot be rebuilt, because
it answers otherwise, begins again: after the round, the window or the other trajectories.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any, ClassVar

import torch
import torch.distributed as dist

from aligner.answers import Answer, AnswerLog
from aligner.config.on_demand import on_demand
from aligner.config.sections.environment import EnvironmentConfig
from aligner.data.dialogue import Dialogue, EnginePrompt
from aligner.data.formats import Tools
from aligner.data.messages import read_messages
from aligner.environments.limits import CHARS
from aligner.environments.opening import with_opening
from aligner.environments.pool import Pool, Session
from aligner.errors import AlignerError, DataError, EngineError
from aligner.ops.agree import raised_together
from aligner.ops.packing.turns import Turn, rows_of
from aligner.ops.reduce import max_over
from aligner.ops.seeds import derive
from aligner.rollout.requests import Request
from aligner.rollout.sample_generator import ByPrompt, SampleGenerator, Score
from aligner.rollout.sample_state import SampleState, by_prompt, grown, with_routing, without_routing
from aligner.rollout.turn_pool import TurnPool
from aligner.types import STOP, Generations, Prompt, SamplingParams, Stop, Sums, Trajectory


@dataclass(frozen=True)
class TrajectoryContext:
    """The surroundings of trajectories."""

    pool: Pool
    dialogue: Dialogue
    cfg: EnvironmentConfig
    longest_prompt: int
    scores: bool  # the environment is asked for a reward


class TurnAdmission(Enum):
    """When a turn is admitted."""

    ROUNDS = "with a turn of all others"
    ANSWERS = "between two decode steps, as its tools answer"
    COUNTS = "between two decode steps, by counts: no bit depends on when tools answer"


@dataclass
class TrajectoryGenerator(SampleGenerator):
    """A generator of trajectories. None is scored before all have ended."""

    outside: TrajectoryContext = field(kw_only=True)
    pace: TurnAdmission = field(default=TurnAdmission.ROUNDS, kw_only=True)
    _prompt_tokens: list[int] = field(default_factory=lambda: [0, 0], init=False)  # kept by the engine; in all
    _paused: dict[str, tuple[Session, Future[Answer] | None]] = field(default_factory=dict, init=False)  # here, by key
    _logs: dict[int, AnswerLog] = field(default_factory=dict, init=False)  # of rollouts under way

    turned: ClassVar[bool] = True
    kind: ClassVar[type[SampleState]] = SampleState

    def __post_init__(self) -> None:
        self.pool, self.dialogue, self.cfg = self.outside.pool, self.outside.dialogue, self.outside.cfg

    def fresh(self, request: Request, number: int) -> list[SampleState]:
        """See `SampleGenerator.fresh`."""
        return [self._fresh_sample(number, i, request) for i in range(len(request.seeds))]

    def serve(self, asked: Sequence[Sequence[SampleState]]) -> list[list[SampleState]]:
        """Run the groups of this rank, by their numbers, of the requests of each rank of the job, as far as they
        come in an order. On ranks that only generate. In rounds collective over these ranks."""
        ranks, rank = dist.get_world_size(), dist.get_rank()
        served = [[state for state in own if state.group % ranks == rank] for own in asked]
        states = [state for own in served for state in own]
        self._run(sorted(states, key=lambda state: (state.group, not state.paused_tokens, state.index)), self.sampling)
        return served

    def take_sums(self) -> Sums:
        """See `SampleGenerator.take_sums`."""
        (held, tokens), self._prompt_tokens = self._prompt_tokens, [0, 0]
        served = self.pace != TurnAdmission.ROUNDS
        sums = {"engine/prefix_cache_hit_rate": (float(held), float(tokens))} if served else {}
        return super().take_sums() | sums

    def _generated(self, together: ByPrompt, sampling: SamplingParams, score: Score | None = None) -> list[SampleState]:
        states = [state for same in together for state in same]
        self._run(states, sampling)
        return states

    def _ordered(self, together: ByPrompt, sampling: SamplingParams) -> Callable[[], Any]:
        """Order the samples, which `serve` makes. Routing that they have stays here."""
        assert sampling == self.sampling
        states = [without_routing(state) for same in together for state in same]
        return self.engine.generate_trajectories(states)  # type: ignore[attr-defined]

    def _arrived(self, together: ByPrompt, answer: Callable[[], Any], sampling: SamplingParams) -> list[SampleState]:
        with raised_together(EngineError):
            states = [state for own in answer() for state in own]
        before = {(state.group, state.index): state for same in together for state in same}
        return [with_routing(state, before[state.group, state.index]) for state in states]

    def _all_raise(self, kind: type[AlignerError]) -> AbstractContextManager[None]:
        """Raise errors on all ranks that share the work. A generation rank outside rounds raises alone."""
        alone = self.peers is None and self.pace != TurnAdmission.ROUNDS
        return nullcontext() if alone else raised_together(kind)

    def _run(self, states: list[SampleState], sampling: SamplingParams) -> None:
        """Run this rank's trajectories by its engine, to their ends or through a window."""
        with self._all_raise(DataError):
            self._take_up(states)
            self._begin([state for state in states if state.session and not state.session.asked], sampling)
        waiting: Sequence[SampleState] = ()
        if self.pace == TurnAdmission.ROUNDS:
            self._in_rounds(states, sampling)
        else:
            with self._all_raise(EngineError):
                going = True
                while going:
                    turns = self._turns(states, sampling)
                    self._served(turns, sampling)
                    waiting = turns.waiting
                    self._take_results([state for state in states if not state.open], sampling)
                    going = self._restart(states, sampling) and not self.window
        self._leave(states, waiting)

    def _take_up(self, states: Sequence[SampleState]) -> None:
        """Attach environments: trajectories that paused on this rank have theirs; others get one when they need it."""
        for rollout in self._logs.keys() - {state.rollout for state in states}:
            self._logs.pop(rollout).close()
        for state in states:
            if state.session.key in self._paused:
                state.session, state.asked = self._paused.pop(state.session.key)
                continue
            if state.rollout > 0 and state.rollout not in self._logs:
                self._logs[state.rollout] = self.pool.log.of(state.rollout)
            state.session.log = self._logs.get(state.rollout)
            if state.waits:
                state.asked = self.pool.ask_again(state.session)

    def _leave(self, states: Sequence[SampleState], waiting: Sequence[SampleState]) -> None:
        for state in states:
            state.waits = 0
            if state.open:
                self._paused[state.session.key] = state.session, state.asked
            else:
                self.pool.forget(state.session)
                state.end()
        for number, state in enumerate(waiting, 1):
            state.waits = number

    def _turns(self, states: Sequence[SampleState], sampling: SamplingParams) -> TurnPool:
        going = [state for state in states if state.open]
        longest = max((len(state.prompt.tokens) for state in going), default=1)
        return TurnPool(
            longest=longest + self.cfg.max_tokens - sampling.max_response_tokens,
            prompts=len(going),
            rows=len(going),
            ready=[state for state in going if state.asked is None],
            take_result=lambda state: self._take_result(state, sampling),
            take_response=self._answered,
            seed=self._seed,
            counted=self.pace == TurnAdmission.COUNTS,
            windowed=self.window > 0,
            waiting=sorted((state for state in going if state.asked is not None), key=lambda state: state.waits),
        )

    def _served(self, turns: TurnPool, sampling: SamplingParams) -> None:
        """Run by this rank's engine alone, which takes a prompt when it is ready."""
        if not turns.rows:
            return
        generations = self.engine.serve(turns, turns.asked, turns.finished, sampling)
        self._fill(turns.taken, generations, turns.begun)
        self._prompt_tokens[0] += self.engine.stats.held_tokens
        self._prompt_tokens[1] += self.engine.stats.prompt_tokens

    def _in_rounds(self, states: list[SampleState], sampling: SamplingParams) -> None:
        while int(max_over(torch.tensor(sum(state.open for state in states)), dist.group.WORLD)):
            self._round([state for state in states if state.open], sampling)
            self._take_results(states, sampling)
            self._restart(states, sampling)

    def _take_results(self, states: list[SampleState], sampling: SamplingParams) -> None:
        for state in states:
            while state.asked is not None:
                self._take_result(state, sampling)

    def _restart(self, states: Sequence[SampleState], sampling: SamplingParams) -> bool:
        """Begin trajectories again whose environment is not the one that they have seen; return whether there are."""
        again = [state for state in states if state.again is not None]
        for state in again:
            assert state.session is not None and state.again is not None
            prompt, number = state.row_prompt or state.prompt, state.restarted + 1
            why = f"{state.session.key} of rollout {state.rollout} begins again: {state.again['restarted']}"
            print(f"warning: environment: trajectory {why}", file=sys.stderr, flush=True)
            session = state.session.again(state.again, number)
            state.restart(self._unbegun(state.group, state.index, state.seed, prompt, session, state.rollout))
        self._begin(again, sampling)
        return bool(again)

    def _begin(self, states: Sequence[SampleState], sampling: SamplingParams) -> None:
        for state in states:
            self._reset(state, sampling)
        for state in states:
            assert state.asked is not None
            answer, state.asked = state.asked.result(), None
            if self._works(state, answer):
                self._opened(state, answer["value"])
        self._take_results(states, sampling)  # samples that have ended already

    def _reset(self, state: SampleState, sampling: SamplingParams) -> None:
        state.asked = self.pool.ask(state.session, "reset", seed=state.session.seed, row=state.session.row)

    def _fresh_sample(self, number: int, index: int, request: Request) -> SampleState:
        prompt, seed = request.prompt, request.seeds[index]
        assert prompt.messages is not None
        group = derive(request.seeds[0], "environment") & 0x7FFFFFFF  # as numpy and random take it
        row = {name: value for name, value in prompt.fields.items() if name not in ("messages", "tools")}
        session = Session(str(seed), group, row, logged=request.rollout > 0)
        return self._unbegun(number, index, seed, prompt, session, request.rollout)

    def _unbegun(
        self, number: int, index: int, seed: int, prompt: Prompt, session: Session, rollout: int
    ) -> SampleState:
        messages = list(prompt.messages or ())
        next_prompt = self.dialogue.resume(messages, prompt.tokens)
        return self.kind(number, index, seed, prompt, next_prompt, session, messages, rollout=rollout)

    def _opened(self, state: SampleState, opening: str | list[dict[str, Any]]) -> None:
        if not opening:
            return
        try:
            if not isinstance(opening, str):
                opening = read_messages(opening, "reset", "environment.path")
        except DataError as error:
            state.stop, state.failure = Stop.TEMPLATE, f"template: {error}"
            return
        messages = with_opening(state.messages, opening)
        if self._opens(state, messages, "environment.path: reset made a prompt"):
            if (next_prompt := self.dialogue.try_begin(messages)) is None:
                state.stop, state.failure = Stop.TEMPLATE, "template: the chat template does not render what reset made"
            else:
                self._open(state, messages, next_prompt, "environment.path: reset made a prompt")

    def _opens(self, state: SampleState, messages: list[dict[str, Any]], what: str) -> bool:
        """Return whether a prompt is short enough to tokenize."""
        size, limit = characters(messages), CHARS * self.outside.longest_prompt
        if size > limit:
            self._too_long(state, f"{what} of {size} characters")
        return size <= limit

    def _open(self, state: SampleState, messages: list[dict[str, Any]], next_prompt: EnginePrompt, what: str) -> None:
        """Begin with another prompt than the row's."""
        if len(next_prompt.tokens) > self.outside.longest_prompt:
            self._too_long(state, f"{what} of {len(next_prompt.tokens)} tokens")
            return
        state.messages, state.next_prompt, state.row_prompt = messages, next_prompt, state.row_prompt or state.prompt
        state.prompt = replace(state.prompt, tokens=next_prompt.tokens, text=next_prompt.text, messages=tuple(messages))

    def _too_long(self, state: SampleState, what: str) -> None:
        """End a trajectory that has no response to learn from."""
        expected = f"expected at most data.max_prompt_tokens={self.outside.longest_prompt}"
        state.stop, state.failure = Stop.PROMPT, f"prompt: {what}: {expected}"

    def _round(self, states: list[SampleState], sampling: SamplingParams) -> None:
        """Generate a response of each; questions to tools and environments are under way at its end."""
        together = by_prompt(states)
        seeds = [[self._seed(state) for state in p] for p in together]
        rows = [(state, len(state.turns)) for p in together for state in p]
        with raised_together(EngineError), self._listening(together):
            generations = self.engine.generate([p[0].next_prompt.tokens for p in together], seeds, sampling)
        lengths, reasons = generations.lengths.tolist(), generations.finish_reason.tolist()
        for i, (state, number) in enumerate(rows):
            if len(state.turns) == number:
                columns = generations.tokens, generations.logprobs
                tokens, logprobs = (column[i, : lengths[i]].tolist() for column in columns)
                self._answered(state, tokens, logprobs, reasons[i] == STOP)
        self._fill(rows, generations)

    @staticmethod
    def _seed(state: SampleState) -> int:
        return derive(state.seed, len(state.turns)) if state.turns else state.seed

    @staticmethod
    def _fill(
        rows: list[tuple[SampleState, int]], generations: Generations, begun: Mapping[int, Turn] | None = None
    ) -> None:
        """Complete the turns, by sample and number, from the generations; samples that have not ended pause.
        `begun`: rows of turns that had paused before."""
        for row, (state, number) in enumerate(rows):
            turn = state.turns[number] if number < len(state.turns) else None
            before, prompt = state.turns[number - 1] if number else None, turn.prompt if turn else None
            earlier = (begun or {}).get(row)
            whole = grown(earlier, prompt or state.next_prompt.tokens, generations, row, before)
            if turn is not None:
                count, routing = len(turn.output), whole.routing
                full, logprobs = None if whole.full is None else whole.full[:count], whole.logprobs[:count]
                routing = None if routing is None else routing[: len(routing) - len(whole.output) + count].clone()
                state.turns[number] = Turn(turn.prompt, turn.output, logprobs, full, whole.versions[:count], routing)
            elif whole.output:
                state.begun = whole

    @contextmanager
    def _listening(self, together: list[list[SampleState]]) -> Iterator[None]:
        if not self.engine.can.tells_finished:
            yield
            return
        self.engine.finished = lambda number, index, *output: self._answered(together[number][index], *output)
        try:
            yield
        finally:
            self.engine.finished = None

    def _answered(self, state: SampleState, tokens: list[int], logprobs: list[float], stopped: bool) -> None:
        """Take an answer; ask for the results of its calls, or for the score of a trajectory that it ends."""
        state.turns.append(Turn(state.next_prompt.tokens, tokens, logprobs))
        state.begun = None
        ends = stopped and tokens[-1] in self.sampling.stop_token_ids
        text = self.dialogue.decode(tokens[:-1] if ends else tokens)
        beside, state.calls = self.dialogue.read(text) if stopped else (text, [])
        state.messages.append(self.dialogue.answer_message(text, beside, state.calls))
        message = {"role": "assistant", "content": beside}
        called = [call.message(i) for i, call in enumerate(state.calls) if call.name]
        state.told.append(message | {"tool_calls": called} if called else message)
        if state.calls:
            sound = [{"name": call.name, "arguments": call.arguments} for call in state.calls if call.name]
            state.asked = self.pool.ask(state.session, "turn", calls=sound)
        else:
            self._end(state, Stop.ANSWER if stopped else Stop.LENGTH)

    def _end(self, state: SampleState, stop: Stop) -> None:
        state.stop = stop
        state.asked = self.pool.ask(state.session, "score") if self.outside.scores and not state.failure else None

    def _take_result(self, state: SampleState, sampling: SamplingParams) -> None:
        """Take the answer of tools or environment, once it is there: the trajectory continues, or ends."""
        assert state.asked is not None
        answer, state.asked = state.asked.result(), None
        if not self._works(state, answer):
            return
        if state.stop is not None:
            state.score = answer["value"]
        else:
            state.spans.append(answer["seconds"])
            self._next(state, answer["value"], sampling)

    def _next(self, state: SampleState, value: dict[str, Any], sampling: SamplingParams) -> None:
        texts, results = iter(value["texts"]), []
        for number, call in enumerate(state.calls):
            text = next(texts) if call.name else f"error: {call.fault}"
            results.append(self.dialogue.result(call, number, text))
        state.wrong += value["wrong"] + sum(not call.name for call in state.calls)
        state.messages += results
        state.told += results
        state.rewards.append(value["reward"] or 0.0)
        if value["done"]:
            self._end(state, Stop.DONE)
        else:
            self._continue(state, self.dialogue, sampling)

    def _continue(self, state: SampleState, dialogue: Dialogue, sampling: SamplingParams) -> None:
        cfg = self.cfg
        if len(state.turns) >= cfg.max_turns:
            self._end(state, Stop.TURNS)
        elif cfg.max_seconds and state.seconds > cfg.max_seconds:
            self._end(state, Stop.SECONDS)
        elif characters(state.messages) > CHARS * (self.outside.longest_prompt + cfg.max_tokens):
            self._end(state, Stop.TOKENS)  # too long to tokenize
        elif (next_prompt := dialogue.follow(state.next_prompt, state.turns[-1].output, state.messages)) is None:
            self._end(state, Stop.TEMPLATE)
        elif self._tokens_behind(state, next_prompt) + sampling.max_response_tokens > cfg.max_tokens:
            self._end(state, Stop.TOKENS)
        else:
            state.next_prompt = next_prompt

    @staticmethod
    def _tokens_behind(state: SampleState, next_prompt: EnginePrompt) -> int:
        """Return the number of tokens behind the prompt, if this is the next one."""
        rows = rows_of([*state.turns, Turn(next_prompt.tokens, (), ())])
        return sum(len(row.tokens) for row in rows) - len(state.prompt.tokens)

    def _works(self, state: SampleState, answer: Answer) -> bool:
        """Note an answer; return whether it is no failure, which ends the trajectory."""
        state.seconds += answer["seconds"]
        state.retried += answer["retried"]
        if "failed" in answer:
            state.stop, state.failure = Stop.FAILED, f"{answer['failed']}: {answer['text']}"
        elif "restarted" in answer:
            state.stop, state.again = Stop.FAILED, answer  # until `_restart`
        return not state.failure and state.again is None

    def _trajectory(self, state: SampleState, forks: Sequence[int] | None) -> Trajectory:
        turns, score, gamma = len(state.turns), state.score, self.cfg.gamma
        if score is not None:  # the environment's score counts at the last turn
            score = gamma ** max(0, turns - 1) * score + sum(gamma**k * r for k, r in enumerate(state.rewards))
        assert state.stop is not None
        effort = state.seconds, state.retried, state.wrong, forks[-1] + 1 if forks else 0
        messages, of_turns = tuple(state.told), (tuple(state.rewards), state.late, state.restarted, tuple(state.spans))
        return Trajectory(messages, state.stop, turns, score, state.failure, *effort, *of_turns)


def characters(messages: Sequence[Mapping[str, Any]]) -> int:
    """Return the number of characters of the texts."""
    texts = (message.get("content") or "" for message in messages)
    return sum(len(text if isinstance(text, str) else str(text)) for text in texts)


def generator_class(cfg: EnvironmentConfig, make: Callable[[Tools], Dialogue]) -> Callable[..., TrajectoryGenerator]:
    """Return the class of generator. `make` makes the dialogue of a request's tools, where an agent sends them."""
    return on_demand("environment.agent")(make) if cfg.agent else TrajectoryGenerator
