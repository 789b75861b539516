"""Trajectories of several turns: the model answers, its calls go to tools and environment, and their results are
appended, until one of `Stop`.

The trajectories of a rank run together. In rounds the engine generates a turn of all that are still open, and the tools
of those that have answered work meanwhile. Where an engine can, each turn is admitted when its prompt is ready instead.

Ranks that only generate play them for the trainer's ranks, a group always on the same rank. In windows a trajectory
pauses: its environment stays there. The trainer's ranks have the rest of its state (`rollout/store.py`). With that
any rank can continue it, and rebuilds an environment by asking it the same questions again. Turns of windows are
admitted by counts (`Turns.counted`), of decode steps alone: a trajectory that waits for its tools when a window ends
waits in the next one, behind those that have waited longer.
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
from aligner.data.dialogue import Dialogue, EnginePrompt
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
from aligner.rollout.turn_pool import Turns
from aligner.types import STOP, Generations, SamplingParams, Stop, Sums, Trajectory


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
class TurnPlayer(Player):
    """A player of trajectories. None is scored before all have ended."""

    outside: TrajectoryContext = field(kw_only=True)
    pace: TurnAdmission = field(default=TurnAdmission.ROUNDS, kw_only=True)
    _prompt_tokens: list[int] = field(default_factory=lambda: [0, 0], init=False)  # kept by the engine; in all
    _paused: dict[str, tuple[Session, Future[Answer] | None]] = field(default_factory=dict, init=False)  # here, by key
    _logs: dict[int, AnswerLog] = field(default_factory=dict, init=False)  # of rollouts under way

    turned: ClassVar[bool] = True
    kind: ClassVar[type[Play]] = Play

    def __post_init__(self) -> None:
        self.pool, self.dialogue, self.cfg = self.outside.pool, self.outside.dialogue, self.outside.cfg

    def fresh(self, request: Request, number: int) -> list[Play]:
        """See `Player.fresh`."""
        return [self._play(number, i, request) for i in range(len(request.seeds))]

    def serve(self, asked: Sequence[Sequence[Play]]) -> list[list[Play]]:
        """Run the groups of this rank, by their numbers, of the requests of each rank of the job, as far as they
        come in an order. On ranks that only generate. In rounds collective over these ranks."""
        ranks, rank = dist.get_world_size(), dist.get_rank()
        served = [[play for play in own if play.group % ranks == rank] for own in asked]
        plays = [play for own in served for play in own]
        self._run(sorted(plays, key=lambda play: (play.group, not play.paused_tokens, play.index)), self.sampling)
        return served

    def take_sums(self) -> Sums:
        """See `Player.take_sums`."""
        (held, tokens), self._prompt_tokens = self._prompt_tokens, [0, 0]
        served = self.pace != TurnAdmission.ROUNDS
        return {"engine/prefix_cache_hit_rate": (float(held), float(tokens))} if served else {}

    def _played(self, together: Together, sampling: SamplingParams, score: Score | None = None) -> list[Play]:
        plays = [play for same in together for play in same]
        self._run(plays, sampling)
        return plays

    def _ordered(self, together: Together, sampling: SamplingParams) -> Callable[[], Any]:
        """Order the samples, which `serve` makes."""
        assert sampling == self.sampling
        return self.engine.play([play for same in together for play in same])  # type: ignore[attr-defined]

    def _arrived(self, together: Together, answer: Callable[[], Any], sampling: SamplingParams) -> list[Play]:
        with raised_together(EngineError):
            return [play for own in answer() for play in own]

    def _all_raise(self, kind: type[AlignerError]) -> AbstractContextManager[None]:
        """Raise errors on all ranks that share the work. A generation rank outside rounds raises alone."""
        alone = self.peers is None and self.pace != TurnAdmission.ROUNDS
        return nullcontext() if alone else raised_together(kind)

    def _run(self, plays: list[Play], sampling: SamplingParams) -> None:
        """Run this rank's trajectories by its engine, to their ends or through a window."""
        with self._all_raise(DataError):
            self._take_up(plays)
            self._begin([play for play in plays if play.session and not play.session.asked], sampling)
        waiting: Sequence[Play] = ()
        if self.pace == TurnAdmission.ROUNDS:
            self._in_rounds(plays, sampling)
        else:
            with self._all_raise(EngineError):
                turns = self._turns(plays, sampling)
                self._served(turns, sampling)
                waiting = turns.waiting
                self._heard([play for play in plays if not play.open], sampling)
        self._leave(plays, waiting)

    def _take_up(self, plays: Sequence[Play]) -> None:
        """Attach environments: trajectories that paused on this rank have theirs; others get one when they need it."""
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
        for number, play in enumerate(waiting, 1):
            play.waits = number

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
            counted=self.pace == TurnAdmission.COUNTS,
            windowed=self.window > 0,
            waiting=sorted((play for play in going if play.asked is not None), key=lambda play: play.waits),
        )

    def _served(self, turns: Turns, sampling: SamplingParams) -> None:
        """Run by this rank's engine alone, which takes a prompt when it is ready."""
        if not turns.rows:
            return
        generations = self.engine.serve(turns, turns.asked, turns.finished, sampling)
        self._fill(turns.taken, generations, turns.begun)
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
        self._heard(plays, sampling)  # samples that have ended already

    def _reset(self, play: Play, sampling: SamplingParams) -> None:
        play.asked = self.pool.ask(play.session, "reset", seed=play.session.seed, row=play.session.row)

    def _play(self, number: int, index: int, request: Request) -> Play:
        prompt, seed = request.prompt, request.seeds[index]
        assert prompt.messages is not None
        group = derive(request.seeds[0], "environment") & 0x7FFFFFFF  # as numpy and random take it
        row = {name: value for name, value in prompt.fields.items() if name not in ("messages", "tools")}
        session = Session(str(seed), group, row, logged=request.rollout > 0)
        messages = list(prompt.messages)
        next_prompt = self.dialogue.resume(messages, prompt.tokens)
        return self.kind(number, index, seed, prompt, next_prompt, session, messages, rollout=request.rollout)

    def _opened(self, play: Play, opening: list[dict[str, Any]]) -> None:
        if not opening:
            return
        try:
            messages = play.messages + read_messages(opening, "reset", "environment.path")
        except DataError as error:
            play.stop, play.failure = Stop.TEMPLATE, f"template: {error}"
            return
        if self._opens(play, messages, "environment.path: reset made a prompt"):
            if (next_prompt := self.dialogue.try_begin(messages)) is None:
                play.stop, play.failure = Stop.TEMPLATE, "template: the chat template does not render what reset made"
            else:
                self._open(play, messages, next_prompt, "environment.path: reset made a prompt")

    def _opens(self, play: Play, messages: list[dict[str, Any]], what: str) -> bool:
        """Return whether a prompt is short enough to tokenize."""
        size, limit = characters(messages), CHARS * self.outside.longest_prompt
        if size > limit:
            self._too_long(play, f"{what} of {size} characters")
        return size <= limit

    def _open(self, play: Play, messages: list[dict[str, Any]], next_prompt: EnginePrompt, what: str) -> None:
        """Begin with another prompt than the row's."""
        if len(next_prompt.tokens) > self.outside.longest_prompt:
            self._too_long(play, f"{what} of {len(next_prompt.tokens)} tokens")
            return
        play.messages, play.next_prompt = messages, next_prompt
        play.prompt = replace(play.prompt, tokens=next_prompt.tokens, text=next_prompt.text, messages=tuple(messages))

    def _too_long(self, play: Play, what: str) -> None:
        """End a trajectory that has no response to learn from."""
        expected = f"expected at most data.max_prompt_tokens={self.outside.longest_prompt}"
        play.stop, play.failure = Stop.PROMPT, f"prompt: {what}: {expected}"

    def _round(self, plays: list[Play], sampling: SamplingParams) -> None:
        """Generate a response of each; questions to tools and environments are under way at its end."""
        together = by_prompt(plays)
        seeds = [[self._seed(play) for play in p] for p in together]
        rows = [(play, len(play.turns)) for p in together for play in p]
        with raised_together(EngineError), self._listening(together):
            generations = self.engine.generate([p[0].next_prompt.tokens for p in together], seeds, sampling)
        lengths, reasons = generations.lengths.tolist(), generations.finish_reason.tolist()
        for i, (play, number) in enumerate(rows):
            if len(play.turns) == number:
                columns = generations.tokens, generations.logprobs
                tokens, logprobs = (column[i, : lengths[i]].tolist() for column in columns)
                self._answered(play, tokens, logprobs, reasons[i] == STOP)
        self._fill(rows, generations)

    @staticmethod
    def _seed(play: Play) -> int:
        return derive(play.seed, len(play.turns)) if play.turns else play.seed

    @staticmethod
    def _fill(rows: list[tuple[Play, int]], generations: Generations, begun: Mapping[int, Turn] | None = None) -> None:
        """Complete the turns, by sample and number, from the generations; samples that have not ended pause.
        `begun`: rows of turns that had paused before."""
        for row, (play, number) in enumerate(rows):
            turn = play.turns[number] if number < len(play.turns) else None
            whole = grown((begun or {}).get(row), turn.prompt if turn else play.next_prompt.tokens, generations, row)
            if turn is not None:
                count = len(turn.output)
                full, logprobs = None if whole.full is None else whole.full[:count], whole.logprobs[:count]
                play.turns[number] = Turn(turn.prompt, turn.output, logprobs, full, whole.versions[:count])
            elif whole.output:
                play.begun = whole

    @contextmanager
    def _listening(self, together: list[list[Play]]) -> Iterator[None]:
        if not self.engine.can.tells_finished:
            yield
            return
        self.engine.finished = lambda number, index, *output: self._answered(together[number][index], *output)
        try:
            yield
        finally:
            self.engine.finished = None

    def _answered(self, play: Play, tokens: list[int], logprobs: list[float], stopped: bool) -> None:
        """Take an answer; ask for the results of its calls, or for the score of a trajectory that it ends."""
        play.turns.append(Turn(play.next_prompt.tokens, tokens, logprobs))
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
        """Take the answer of tools or environment, once it is there: the trajectory continues, or ends."""
        assert play.asked is not None
        answer, play.asked = play.asked.result(), None
        if not self._works(play, answer):
            return
        if play.stop is not None:
            play.score = answer["value"]
        else:
            self._next(play, answer["value"], sampling)

    def _next(self, play: Play, value: dict[str, Any], sampling: SamplingParams) -> None:
        texts, results = iter(value["texts"]), []
        for number, call in enumerate(play.calls):
            text = next(texts) if call.name else f"error: {call.fault}"
            results.append(self.dialogue.result(call, number, text))
        play.wrong += value["wrong"] + sum(not call.name for call in play.calls)
        play.messages += results
        play.told += results
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
            self._end(play, Stop.TOKENS)  # too long to tokenize
        elif (next_prompt := dialogue.follow(play.next_prompt, play.turns[-1].output, play.messages)) is None:
            self._end(play, Stop.TEMPLATE)
        elif self._tokens_behind(play, next_prompt) + sampling.max_response_tokens > cfg.max_tokens:
            self._end(play, Stop.TOKENS)
        else:
            play.next_prompt = next_prompt

    @staticmethod
    def _tokens_behind(play: Play, next_prompt: EnginePrompt) -> int:
        """Return the number of tokens behind the prompt, if this is the next one."""
        rows = rows_of([*play.turns, Turn(next_prompt.tokens, (), ())])
        return sum(len(row.tokens) for row in rows) - len(play.prompt.tokens)

    def _works(self, play: Play, answer: Answer) -> bool:
        """Note an answer; return whether it is no failure, which ends the trajectory."""
        play.seconds += answer["seconds"]
        play.retried += answer["retried"]
        if "failed" in answer:
            play.stop, play.failure = Stop.FAILED, f"{answer['failed']}: {answer['text']}"
        return not play.failure

    def _trajectory(self, play: Play, forks: Sequence[int] | None) -> Trajectory:
        turns, score, gamma = len(play.turns), play.score, self.cfg.gamma
        if score is not None:  # the environment's score counts at the last turn
            score = gamma ** max(0, turns - 1) * score + sum(gamma**k * r for k, r in enumerate(play.rewards))
        assert play.stop is not None
        effort = play.seconds, play.retried, play.wrong, forks[-1] + 1 if forks else 0
        messages, rewards = tuple(play.told), tuple(play.rewards)
        return Trajectory(messages, play.stop, turns, score, play.failure, *effort, rewards, play.late)


def characters(messages: Sequence[Mapping[str, Any]]) -> int:
    """Return the number of characters of the texts."""
    texts = (message.get("content") or "" for message in messages)
    return sum(len(text if isinstance(text, str) else str(text)) for text in texts)


def kind_of_player(cfg: EnvironmentConfig, make: Callable[[Tools], Dialogue]) -> Callable[..., TurnPlayer]:
    """Return the class of player. `make` makes the dialogue of a request's tools, where an agent sends them."""
    return on_demand("environment.agent")(make) if cfg.agent else TurnPlayer
