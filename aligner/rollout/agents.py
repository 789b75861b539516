"""Trajectories of agents: the requests to the model come from a program, over HTTP, one by one.

A request is a turn. Its messages are compared with the earlier prompts and answers: an answer that the agent repeats
stands for the engine's own tokens.
"""

from __future__ import annotations

import json
from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache, partial
from typing import Any, ClassVar

from aligner.data.dialogue import Dialogue
from aligner.data.formats import Tools
from aligner.data.tool_calls import Call, spoken
from aligner.environments.openai_api import MODEL, ChatRequest, Reply, request_sampling
from aligner.errors import ConfigError
from aligner.ops.packing.turns import Turn
from aligner.rollout.sample_state import SampleState
from aligner.rollout.trajectory_generator import TrajectoryGenerator
from aligner.types import SamplingParams, Stop

KEPT = 256  # lists of tools
BUDGETS = {
    Stop.TURNS: "environment.max_turns answers were given",
    Stop.TOKENS: "there is no room for a further answer within environment.max_tokens",
    Stop.SECONDS: "the agent took environment.max_seconds",
    Stop.TEMPLATE: "the chat template of model.tokenizer cannot render it",
}


@dataclass(eq=False)
class AgentSampleState(SampleState):
    cut: bool = False  # the last answer reached the token limit
    request: dict[str, Any] = field(default_factory=dict)  # to be answered next, a `ChatRequest` without its messages
    digest: str = ""  # of the whole request
    echoes: dict[str, dict[str, Any]] = field(default_factory=dict)  # message to the agent -> message for templates

    STORED: ClassVar[tuple[str, ...]] = (*SampleState.STORED, "cut", "request", "digest", "echoes")

    def end(self) -> None:
        """End the trajectory as `SampleState.end` does."""
        super().end()
        self.echoes, self.request = {}, {}


class Dialogues:
    """The dialogues of a tokenizer, with the tools of each request; the last `KEPT` are cached."""

    def __init__(self, make: Callable[[Tools], Dialogue]):
        self._made = lru_cache(KEPT)(lambda tools: make(json.loads(tools)))

    def of(self, tools: Tools) -> Dialogue:
        """Return the dialogue with these tools. Raises ConfigError where the template does not render them."""
        return self._made(json.dumps(tools))


@dataclass
class ParsedAnswer:
    """An answer in the form that its request wants."""

    tokens: list[int]
    text: str  # without its stop token or stop string
    beside: str  # the calls
    calls: list[Call]
    reason: str
    stop: str | None = None  # the request's stop string that ended it


def parse_answer(
    dialogue: Dialogue, request: ChatRequest, tokens: list[int], stopped: bool, ends: set[int]
) -> ParsedAnswer:
    """Parse an answer; `max_tokens` and `stop` of its request shorten the engine's tokens, which has limits of its
    own. A sample's beginning is what a sample of that length would be. `ends`: the stop tokens."""
    decoded, kept = dialogue.decode, tokens[: request.max_tokens]
    if request.stop:  # with the token that completes it, as the engine's own stop strings
        ended = lambda n: any(stop in decoded(kept[:n]) for stop in request.stop)  # noqa: E731
        kept = kept[: 1 + bisect_left(range(1, len(kept) + 1), True, key=ended)]
    text, whole = decoded(kept), len(kept) == len(tokens)
    places = [(start, stop) for stop in request.stop if (start := text.find(stop)) >= 0]
    start, stop_string = min(places, default=(0, None))
    if places:
        text = text[:start]
    elif kept[-1] in ends:
        text = decoded(kept[:-1])
    stopped = bool(places) or (stopped and whole)
    beside, calls = dialogue.read(text) if stopped and request.calls else (text, [])
    reason = "tool_calls" if any(call.name for call in calls) else "stop" if stopped else "length"
    return ParsedAnswer(kept, text, beside, calls, reason, stop_string)


def message_of(answer: ParsedAnswer, first: int = 0) -> dict[str, Any]:
    """Return the message for templates and rewards. Its calls are numbered from `first`. An unreadable call is text."""
    calls = [call.message(first + i) for i, call in enumerate(answer.calls) if call.name]
    if not calls:
        return {"role": "assistant", "content": spoken(answer.text)}
    return {"role": "assistant", "content": answer.beside, "tool_calls": calls}


@dataclass
class AgentGenerator(TrajectoryGenerator):
    dialogues: Dialogues = field(kw_only=True)

    kind: ClassVar[type[SampleState]] = AgentSampleState

    def _reset(self, state: AgentSampleState, sampling: SamplingParams) -> None:
        sampling_fields = request_sampling(sampling) | {"model": MODEL, "max_tokens": sampling.max_response_tokens}
        session, messages = state.session, state.messages
        row = {"seed": session.seed, "row": session.row, "messages": messages}
        state.asked = self.pool.ask(session, "reset", **row, sampling=sampling_fields)

    def _opened(self, state: AgentSampleState, value: dict[str, Any]) -> None:
        if "end" in value:
            state.stop, state.failure = Stop.FAILED, "raised: the agent ended without a request"
            return
        messages, what = self._taken(state, value), "environment.agent: a first request has a prompt"
        if not self._opens(state, messages, what):
            return
        dialogue = self._rendered(state.request)
        if (next_prompt := dialogue and dialogue.try_begin(messages)) is None:
            self._end(state, Stop.TEMPLATE)
        else:
            self._open(state, messages, next_prompt, what)

    def _next(self, state: AgentSampleState, value: dict[str, Any], sampling: SamplingParams) -> None:
        if "end" in value:
            state.stop, state.score = Stop.LENGTH if state.cut else Stop.DONE, value["end"]
            return
        before, state.messages = state.messages, self._taken(state, value)
        same = [one == other for one, other in zip(before, state.messages, strict=False)]
        state.told += state.messages[same.index(False) if False in same else len(same) :]
        if (dialogue := self._rendered(state.request)) is None:
            self._end(state, Stop.TEMPLATE)
        else:
            self._continue(state, dialogue, sampling)

    def _taken(self, state: AgentSampleState, value: dict[str, Any]) -> list[dict[str, Any]]:
        """Return the messages of a request; the model's own are those of its tokens."""
        state.request = value["request"] | {"messages": []}
        state.digest, state.late = value["digest"], state.late + value["late"]
        return [state.echoes.get(_key(message), message) for message in value["request"]["messages"]]

    def _rendered(self, request: dict[str, Any]) -> Dialogue | None:
        """Return the dialogue with a request's tools; None where the template does not render them."""
        try:
            return self.dialogues.of(request["tools"])
        except ConfigError:
            return None

    def _answered(self, state: AgentSampleState, tokens: list[int], logprobs: list[float], stopped: bool) -> None:
        request, dialogue = ChatRequest(**state.request), self.dialogues.of(state.request["tools"])
        earlier = state.begun.logprobs if state.begun else ()  # of tokens from before this window
        logprobs, state.begun = [*earlier, *logprobs[len(earlier) :]], None
        answer = parse_answer(dialogue, request, tokens, stopped, set(self.sampling.stop_token_ids))
        state.cut = not stopped and len(answer.tokens) == len(tokens)
        logprobs = logprobs[: len(answer.tokens)]
        first = len(state.turns) * 100  # of its calls in the trajectory
        state.turns.append(Turn(state.next_prompt.tokens, answer.tokens, logprobs))
        state.wrong += sum(not call.name for call in answer.calls)
        message = message_of(answer, first)
        state.messages = [*state.messages, dialogue.answer_message(answer.text, answer.beside, answer.calls, first)]
        state.told.append(message)
        state.echoes[_key(message)] = state.messages[-1]
        pieces = [self.tokenizer.decode([token]) for token in answer.tokens]
        reply = Reply(message, answer.reason, state.next_prompt.tokens, answer.tokens, logprobs, pieces, answer.stop)
        body = reply.body(request, f"chatcmpl-{state.session.key}-{len(state.turns)}")
        state.asked = self.pool.ask(state.session, "turn", digest=state.digest, body=body)

    def _end(self, state: AgentSampleState, stop: Stop) -> None:
        """End the trajectory by a budget: the agent may still return a result."""
        state.stop = stop
        code = "context_length_exceeded" if stop == Stop.TOKENS else f"budget_of_{stop}"
        why = f"no further answer in this trajectory: {BUDGETS[stop]}"
        state.asked = self.pool.ask(state.session, "score", why=why, code=code)


def agent_generator(make: Callable[[Tools], Dialogue]) -> Callable[..., AgentGenerator]:
    """Return a maker of generators of an agent's trajectories. `make` makes the dialogue of a request's tools."""
    return partial(AgentGenerator, dialogues=Dialogues(make))


def _key(message: dict[str, Any]) -> str:
    """Return the key by which a message of the model is recognised: the ids of its calls, which are its own, or its
    text."""
    calls = [call["id"] for call in message.get("tool_calls", ())]
    return json.dumps([message["role"], calls or message["content"]])
