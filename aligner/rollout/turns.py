"""Requests -> trajectories of several turns: the model answers, its calls go to tools and environment, and what they
give is appended, until one of `Stop`.

The trajectories of a rank go on together. In rounds: the engine generates a turn of all that are still open, and the
tools of those that have answered work meanwhile. Or, where an engine can, each turn is admitted when it is there.

Ranks that only generate play them for the trainer's ranks, of a group always the same rank. In windows a trajectory
pauses: its environment stays as it is there. The trainer's ranks have the rest of what it is (`rollout/store.py`); with
that any rank can go on, and makes an environment anew out of the questions that it was asked. Turns of windows are
admitted by counts (`Turns.counted`), of decode steps alone: what waits for its tools when a window ends waits in the
next one, behind those that have waited longer.
"""

from __future__ import annotations

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
from aligner.data.dialogue import Dialogue, Given
from aligner.data.formats import Tools
from aligner.data.messages import read_messages
from aligner.environments.limits import CHARS
from aligner.environments.pool import Pool, Session
from aligner.errors import AlignerError, DataError, EngineError
from aligner.ops.agree import raised_together
from aligner.ops.packing.turns import Turn, rows_of
from aligner.ops.reduce import max_over
from aligner.ops.seeds import derive
from aligner.rollout.play import Play, by_prompt, grown
from aligner.rollout.player import Player, Score, Together
from aligner.rollout.requests import Request
from aligner.rollout.serving import Turns
from aligner.types import STOP, Generations, SamplingParams, Stop, Sums, Trajectory


@dataclass(frozen=True)
class Outside:
    """What trajectories meet."""

    pool: Pool
    dialogue: Dialogue
    cfg: EnvironmentConfig
    longest_prompt: int
    scores: bool  # there is a reward to ask the environment for


class Pace(Enum):
    """When a turn is admitted."""

    ROUNDS = "with a turn of all others"
    ANSWERS = "between two decode steps, as its tools answer"
    COUNTS = "between two decode steps, by counts: no bit depends on when tools answer"


@dataclass
class TurnPlayer(Player):
    """Nothing is scored before all trajectories have ended."""

    outside: Outside = field(kw_only=True)
    pace: Pace = field(default=Pace.ROUNDS, kw_only=True)
    _prompt_tokens: list[int] = field(default_factory=lambda: [0, 0], init=False)  # that the engine had kept; in all
    _paused: dict[str, tuple[Session, Future[Answer] | None]] = field(default_factory=dict, init=False)  # here, by key
    _logs: dict[int, AnswerLog] = field(default_factory=dict, init=False)  # of rollouts under way

    turned: ClassVar[bool] = True
    kind: ClassVar[type[Play]] = Play

    def __post_init__(self) -> None:
        self.pool, self.dialogue, self.cfg = self.outside.pool, self.outside.dialogue, self.outside.cfg

    def fresh(self, request: Request, number: int) -> list[Play]:
        """As `Player.fresh`."""
        return [self._play(number, i, request) for i in range(len(request.seeds))]

    def serve(self, asked: Sequence[Sequence[Play]]) -> list[list[Play]]:
        """On a rank that only generates: of what each rank of the job asks for, the groups of this one by their
        numbers, as far as they come in an order. In rounds collective over these ranks."""
        ranks, rank = dist.get_world_size(), dist.get_rank()
        mine = [[play for play in own if play.place % ranks == rank] for own in asked]
        plays = [play for own in mine for play in own]
        self._run(sorted(plays, key=lambda play: (play.place, not play.said, play.index)), self.sampling)
        return mine

    def take_sums(self) -> Sums:
        """As `Player.take_sums`."""
        (held, tokens), self._prompt_tokens = self._prompt_tokens, [0, 0]
        served = self.pace != Pace.ROUNDS
        return {"engine/prefix_cache_hit_rate": (float(held), float(tokens))} if served else {}

    def _played(self, together: Together, sampling: SamplingParams, score: Score | None = None) -> list[Play]:
        plays = [play for same in together for play in same]
        self._run(plays, sampling)
        return plays

    def _ordered(self, together: Together, sampling: SamplingParams) -> Callable[[], Any]:
        """`serve` makes them."""
        assert sampling == self.sampling
        return self.engine.play([play for same in together for play in same])  # type: ignore[attr-defined]

    def _arrived(self, together: Together, answer: Callable[[], Any], sampling: SamplingParams) -> list[Play]:
        with raised_together(EngineError):
            return [play for part in answer() for play in part]

    def _all_raise(self, kind: type[AlignerError]) -> AbstractContextManager[None]:
        """The trainer's ranks raise what any that only generates does: such a one waits for no other."""
        alone = self.peers is None and self.pace != Pace.ROUNDS
        return nullcontext() if alone else raised_together(kind)

    def _run(self, plays: list[Play], sampling: SamplingParams) -> None:
        """This rank's, by its engine, to their ends or through a window."""
        with self._all_raise(DataError):
            self._take_up(plays)
            self._begin([play for play in plays if play.session and not play.session.asked], sampling)
        waiting: Sequence[Play] = ()
        if self.pace == Pace.ROUNDS:
            self._in_rounds(plays, sampling)
        else:
            with self._all_raise(EngineError):
                turns = self._turns(plays, sampling)
                self._served(turns, sampling)
                waiting = turns.waiting
                self._heard([play for play in plays if not play.open], sampling)
        self._leave(plays, waiting)

    def _take_up(self, plays: Sequence[Play]) -> None:
        """Those that paused here have their environments still; of others these are made when they are needed."""
        for rollout in self._logs.keys() - {play.rollout for play in plays}:
            self._logs.pop(rollout).close()
        for play in plays:
            if play.session.key in self._paused:
                play.session, play.asked = self._paused.pop(play.session.key)
                continue
            if play.rollout > 0 and play.rollout not in self._logs:
                self._logs[play.rollout] = self.pool.log.of(play.rollout)
            play.session.log = self._logs.get(play.rollout)
            if play.waits:
                play.asked = self.pool.ask_again(play.session)

    def _leave(self, plays: Sequence[Play], waiting: Sequence[Play]) -> None:
        for play in plays:
            play.waits = 0
            if play.open:
                self._paused[play.session.key] = play.session, play.asked
            else:
                self.pool.forget(play.session)
                play.end()
        for place, play in enumerate(waiting, 1):
            play.waits = place

    def _turns(self, plays: Sequence[Play], sampling: SamplingParams) -> Turns:
        going = [play for play in plays if play.open]
        longest = max((len(play.prompt.tokens) for play in going), default=1)
        return Turns(
            longest=longest + self.cfg.max_tokens - sampling.max_response_tokens,
            prompts=len(going),
            rows=len(going),
            ready=[play for play in going if play.asked is None],
            hear=lambda play: self._hear(play, sampling),
            say=self._answered,
            seed=self._seed,
            counted=self.pace == Pace.COUNTS,
            windowed=self.window > 0,
            waiting=sorted((play for play in going if play.asked is not None), key=lambda play: play.waits),
        )

    def _served(self, turns: Turns, sampling: SamplingParams) -> None:
        """By this rank's engine alone, which takes a prompt when it is there."""
        if not turns.rows:
            return
        found = self.engine.serve(turns, turns.asked, turns.finished, sampling)
        self._fill(turns.taken, found, turns.begun)
        self._prompt_tokens[0] += self.engine.stats.held_tokens
        self._prompt_tokens[1] += self.engine.stats.prompt_tokens

    def _in_rounds(self, plays: list[Play], sampling: SamplingParams) -> None:
        while int(max_over(torch.tensor(sum(play.open for play in plays)), dist.group.WORLD)):
            self._round([play for play in plays if play.open], sampling)
            self._heard(plays, sampling)

    def _heard(self, plays: list[Play], sampling: SamplingParams) -> None:
        for play in plays:
            while play.asked is not None:
                self._hear(play, sampling)

    def _begin(self, plays: Sequence[Play], sampling: SamplingParams) -> None:
        for play in plays:
            self._reset(play, sampling)
        for play in plays:
            assert play.asked is not None
            answer, play.asked = play.asked.result(), None
            if self._works(play, answer):
                self._opened(play, answer["value"])
        self._heard(plays, sampling)  # of those that have ended already

    def _reset(self, play: Play, sampling: SamplingParams) -> None:
        play.asked = self.pool.ask(play.session, "reset", seed=play.session.seed, row=play.session.row)

    def _play(self, place: int, index: int, request: Request) -> Play:
        prompt, seed = request.prompt, request.seeds[index]
        assert prompt.messages is not None
        group = derive(request.seeds[0], "environment") & 0x7FFFFFFF  # as numpy and random take it
        row = {name: value for name, value in prompt.fields.items() if name not in ("messages", "tools")}
        session = Session(str(seed), group, row, logged=request.rollout > 0)
        messages = list(prompt.messages)
        given = self.dialogue.resume(messages, prompt.tokens)
        return self.kind(place, index, seed, prompt, given, session, messages, rollout=request.rollout)

    def _opened(self, play: Play, opening: list[dict[str, Any]]) -> None:
        if not opening:
            return
        try:
            messages = play.messages + read_messages(opening, "reset", "environment.path")
        except DataError as error:
            play.stop, play.failure = Stop.TEMPLATE, f"template: {error}"
            return
        if self._opens(play, messages, "environment.path: reset made a prompt"):
            if (given := self.dialogue.try_begin(messages)) is None:
                play.stop, play.failure = Stop.TEMPLATE, "template: the chat template does not render what reset made"
            else:
                self._open(play, messages, given, "environment.path: reset made a prompt")

    def _opens(self, play: Play, messages: list[dict[str, Any]], what: str) -> bool:
        """Whether it is worth the tokenizer's time."""
        size, limit = characters(messages), CHARS * self.outside.longest_prompt
        if size > limit:
            self._too_long(play, f"{what} of {size} characters")
        return size <= limit

    def _open(self, play: Play, messages: list[dict[str, Any]], given: Given, what: str) -> None:
        """With another prompt than the row's."""
        if len(given.tokens) > self.outside.longest_prompt:
            self._too_long(play, f"{what} of {len(given.tokens)} tokens")
            return
        play.messages, play.given = messages, given
        play.prompt = replace(play.prompt, tokens=given.tokens, text=given.text, messages=tuple(messages))

    def _too_long(self, play: Play, what: str) -> None:
        """It has no answer that could be learned from."""
        expected = f"expected at most data.max_prompt_tokens={self.outside.longest_prompt}"
        play.stop, play.failure = Stop.PROMPT, f"prompt: {what}: {expected}"

    def _round(self, plays: list[Play], sampling: SamplingParams) -> None:
        """An answer of each; questions to tools and environments are on their way when it is there."""
        together = by_prompt(plays)
        seeds = [[self._seed(play) for play in p] for p in together]
        rows = [(play, len(play.turns)) for p in together for play in p]
        with raised_together(EngineError), self._listening(together):
            found = self.engine.generate([p[0].given.tokens for p in together], seeds, sampling)
        lengths, reasons = found.lengths.tolist(), found.finish_reason.tolist()
        for i, (play, number) in enumerate(rows):
            if len(play.turns) == number:
                tokens, logprobs = (column[i, : lengths[i]].tolist() for column in (found.tokens, found.logprobs))
                self._answered(play, tokens, logprobs, reasons[i] == STOP)
        self._fill(rows, found)

    @staticmethod
    def _seed(play: Play) -> int:
        return derive(play.seed, len(play.turns)) if play.turns else play.seed

    @staticmethod
    def _fill(rows: list[tuple[Play, int]], found: Generations, begun: Mapping[int, Turn] | None = None) -> None:
        """What is to be told of the tokens of turns, by play and number; those that have not ended pause. `begun`: rows
        of turns that had paused before."""
        for row, (play, number) in enumerate(rows):
            turn = play.turns[number] if number < len(play.turns) else None
            said = grown((begun or {}).get(row), turn.prompt if turn else play.given.tokens, found, row)
            if turn is not None:
                count = len(turn.output)
                full = None if said.full is None else said.full[:count]
                play.turns[number] = Turn(turn.prompt, turn.output, said.logprobs[:count], full, said.versions[:count])
            elif said.output:
                play.begun = said

    @contextmanager
    def _listening(self, together: list[list[Play]]) -> Iterator[None]:
        if not self.engine.can.tells_finished:
            yield
            return
        self.engine.finished = lambda number, index, *told: self._answered(together[number][index], *told)
        try:
            yield
        finally:
            self.engine.finished = None

    def _answered(self, play: Play, tokens: list[int], logprobs: list[float], stopped: bool) -> None:
        """Take an answer, and ask for what it calls, or for the score of a trajectory that it ends."""
        play.turns.append(Turn(play.given.tokens, tokens, logprobs))
        play.begun = None
        ends = stopped and tokens[-1] in self.sampling.stop_token_ids
        text = self.dialogue.decode(tokens[:-1] if ends else tokens)
        beside, play.calls = self.dialogue.read(text) if stopped else (text, [])
        play.messages.append(self.dialogue.answer_message(text, beside, play.calls))
        message = {"role": "assistant", "content": beside}
        called = [call.message(i) for i, call in enumerate(play.calls) if call.name]
        play.told.append(message | {"tool_calls": called} if called else message)
        if play.calls:
            sound = [{"name": call.name, "arguments": call.arguments} for call in play.calls if call.name]
            play.asked = self.pool.ask(play.session, "turn", calls=sound)
        else:
            self._end(play, Stop.ANSWER if stopped else Stop.LENGTH)

    def _end(self, play: Play, stop: Stop) -> None:
        play.stop = stop
        play.asked = self.pool.ask(play.session, "score") if self.outside.scores and not play.failure else None

    def _hear(self, play: Play, sampling: SamplingParams) -> None:
        """What tools or environment gave, once it is there: the trajectory goes on, or comes to its end."""
        assert play.asked is not None
        answer, play.asked = play.asked.result(), None
        if not self._works(play, answer):
            return
        if play.stop is not None:
            play.score = answer["value"]
        else:
            self._next(play, answer["value"], sampling)

    def _next(self, play: Play, value: dict[str, Any], sampling: SamplingParams) -> None:
        texts, said = iter(value["texts"]), []
        for number, call in enumerate(play.calls):
            text = next(texts) if call.name else f"error: {call.fault}"
            said.append(self.dialogue.result(call, number, text))
        play.wrong += value["wrong"] + sum(not call.name for call in play.calls)
        play.messages += said
        play.told += said
        play.rewards.append(value["reward"] or 0.0)
        if value["done"]:
            self._end(play, Stop.DONE)
        else:
            self._go_on(play, self.dialogue, sampling)

    def _go_on(self, play: Play, dialogue: Dialogue, sampling: SamplingParams) -> None:
        cfg = self.cfg
        if len(play.turns) >= cfg.max_turns:
            self._end(play, Stop.TURNS)
        elif cfg.max_seconds and play.seconds > cfg.max_seconds:
            self._end(play, Stop.SECONDS)
        elif characters(play.messages) > CHARS * (self.outside.longest_prompt + cfg.max_tokens):
            self._end(play, Stop.TOKENS)  # which is not worth the tokenizer's time
        elif (given := dialogue.follow(play.given, play.turns[-1].output, play.messages)) is None:
            self._end(play, Stop.TEMPLATE)
        elif self._tokens_behind(play, given) + sampling.max_response_tokens > cfg.max_tokens:
            self._end(play, Stop.TOKENS)
        else:
            play.given = given

    @staticmethod
    def _tokens_behind(play: Play, given: Given) -> int:
        """The prompt, if the engine is given this next."""
        rows = rows_of([*play.turns, Turn(given.tokens, (), ())])
        return sum(len(row.tokens) for row in rows) - len(play.prompt.tokens)

    def _works(self, play: Play, answer: Answer) -> bool:
        """Whether it is an answer and no failure, which ends the trajectory."""
        play.seconds += answer["seconds"]
        play.retried += answer["retried"]
        if "failed" in answer:
            play.stop, play.failure = Stop.FAILED, f"{answer['failed']}: {answer['text']}"
        return not play.failure

    def _trajectory(self, play: Play, forks: Sequence[int] | None) -> Trajectory:
        turns, score, gamma = len(play.turns), play.score, self.cfg.gamma
        if score is not None:  # the environment's last word is of the last turn
            score = gamma ** max(0, turns - 1) * score + sum(gamma**k * r for k, r in enumerate(play.rewards))
        assert play.stop is not None
        effort = play.seconds, play.retried, play.wrong, forks[-1] + 1 if forks else 0
        told, rewards = tuple(play.told), tuple(play.rewards)
        return Trajectory(told, play.stop, turns, score, play.failure, *effort, rewards, play.late)


def characters(messages: Sequence[Mapping[str, Any]]) -> int:
    """Of their texts."""
    texts = (message.get("content") or "" for message in messages)
    return sum(len(text if isinstance(text, str) else str(text)) for text in texts)


def kind_of_player(cfg: EnvironmentConfig, make: Callable[[Tools], Dialogue]) -> Callable[..., TurnPlayer]:
    """`make`: of the tools of a request, where an agent makes them."""
    return on_demand("environment.agent")(make) if cfg.agent else TurnPlayer
