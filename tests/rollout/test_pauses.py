"""Trajectories that pause (`engine.window`): against a clock that is played in plain Python, a token of a sample at a
time, whenever tools answer and whoever goes on."""

import random
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from aligner.answers import AnswerLog
from aligner.config.sections.engine import EngineConfig
from aligner.config.sections.environment import EnvironmentConfig
from aligner.data.dialogue import Dialogue, EnginePrompt
from aligner.data.tokenizer import train_tokenizer
from aligner.data.tool_calls import Call
from aligner.engines.native import NativeEngine
from aligner.environments.pool import Pool
from aligner.environments.tools import load_tools, schemas
from aligner.errors import ConfigError
from aligner.ops.seeds import derive
from aligner.rollout.requests import Request
from aligner.rollout.store import InFlight, Store
from aligner.rollout.trajectory_generator import TrajectoryContext, TurnAdmission, generator_class
from aligner.types import Prompt, SamplingParams
from examples.calculator import TEMPLATE
from tests.engines.contract import LLAMA, fill, reference
from tests.stages import ROLL

WINDOW, TURNS, LIMIT = 5, 4, 16
STOPS = tuple(range(0, 261, 17))
SAMPLING = SamplingParams(LIMIT, stop_token_ids=STOPS)
SETTINGS = {"args": {"most_s": 0.03}, "max_turns": TURNS, "max_tokens": 2000, "workers": 1}
CFG = EnvironmentConfig(path="tests/assets/environments.py:Late", **SETTINGS)
AGENT = EnvironmentConfig(agent="tests/assets/agents.py:late", **SETTINGS)


def read_calls(text, kind, tools=()):
    """The model is random, and writes no calls."""
    return text, [Call("roll", {})] if len(text) % 5 else []


@dataclass(eq=False)
class Talk:
    """A trajectory, and all that the reference knows of it."""

    position: int
    index: int
    seed: int
    dice: random.Random
    next_prompt: EnginePrompt
    messages: list
    turns: list = field(default_factory=list)  # [prompt, tokens, logprobs, versions], the last one not yet said
    ended: int = 0

    @property
    def pauses(self):
        return bool(self.turns) and self.turns[-1][0] == self.next_prompt.tokens


class Slow:
    def __init__(self, engine, dialogue, talks, agents):
        self.engine, self.dialogue, self.talks, self.waiting, self.agents = engine, dialogue, talks, [], agents

    def window(self, number):
        free = [talk for talk in self.talks if not talk.ended and talk not in self.waiting]
        ready, running = sorted(free, key=lambda talk: (talk.position, not talk.pauses, talk.index)), []
        slots = len(free) + len(self.waiting)
        for _ in range(WINDOW):
            while self.waiting and len(running) + len(ready) < min(slots, len(self.waiting)):
                talk = self.waiting.pop(0)
                self.hear(talk, number)
                ready += [] if talk.ended else [talk]
            running, ready = running + ready, []
            done = [self.token(talk, number) for talk in running]
            left = done.count(False)
            for talk in [talk for talk, end in zip(running, done, strict=True) if end]:
                self.answered(talk, number)
            movers = [talk for talk, end in zip(running[left:], done[left:], strict=True) if not end]
            running = [movers.pop(0) if end else talk for talk, end in zip(running[:left], done[:left], strict=True)]

    def token(self, talk, version):
        """One more, by a request of its own; whether it ends the answer."""
        if not talk.pauses:
            talk.turns.append([talk.next_prompt.tokens, [], [], []])
        prompt, tokens, logprobs, versions = talk.turns[-1]
        seed = derive(talk.seed, len(talk.turns) - 1) if len(talk.turns) > 1 else talk.seed
        out = self.engine._generated([[*prompt, *tokens]], [[seed]], SAMPLING, begun=[len(tokens)])
        tokens.append(int(out.tokens[0, len(tokens)]))
        logprobs.append(float(out.logprobs[0, len(tokens) - 1]))
        versions.append(version)
        return tokens[-1] in STOPS or len(tokens) == LIMIT

    def answered(self, talk, window):
        tokens = talk.turns[-1][1]
        stopped = tokens[-1] in STOPS
        text = self.dialogue.decode(tokens[:-1] if stopped else tokens)
        talk.calls = read_calls(text, "")[1] if stopped else []
        talk.messages.append(self.dialogue.answer_message(text, text, talk.calls))
        if talk.calls or self.agents:
            self.waiting.append(talk)
        else:
            talk.ended = window

    def hear(self, talk, window):
        if not talk.calls:  # so its agent ends
            talk.ended = window
            return
        reported = str(talk.dice.randint(1, 6))
        talk.messages.append(self.dialogue.result(talk.calls[0], 0, reported))
        if len(talk.turns) == TURNS:
            talk.ended = window
        else:
            talk.next_prompt = self.dialogue.follow(talk.next_prompt, talk.turns[-1][1], talk.messages)


def talkers(folder, *texts, tools=None):
    """A tokenizer, the dialogue of its template, and a group of three for each text."""
    tokenizer = train_tokenizer([], str(folder / "tokenizer"), 261, chat_template=TEMPLATE)
    dialogue = Dialogue(tokenizer, tools or schemas(load_tools(CFG)))
    messages = [({"role": "user", "content": text},) for text in texts]
    prompts = [Prompt(i, dialogue.begin(list(m)).tokens, "", {}, m) for i, m in enumerate(messages)]
    return (
        tokenizer,
        dialogue,
        [Request(i, prompt, [10 * i + n for n in (1, 2, 3)], 1) for i, prompt in enumerate(prompts)],
    )


def trajectory_generator(engine, tokenizer, peers, outside):
    settings = {"window": WINDOW, "outside": outside, "pace": TurnAdmission.COUNTS}
    made = generator_class(outside.cfg, lambda tools: Dialogue(tokenizer, tools))
    return made(engine, tokenizer, SAMPLING, peers, **settings)


def engine_of(window, **settings):
    shape = replace(LLAMA, vocab_size=261, max_position=4096)
    config = EngineConfig(window=window, **settings)
    return NativeEngine(shape, config, device="cpu", dtype=torch.float32, pad_id=0)


@pytest.mark.slow
@pytest.mark.parametrize(
    "cfg, event",
    [(CFG, ""), (CFG, "restart"), (AGENT, "restart"), (AGENT, "killed")],
    ids=["environment", "environment-restart", "agent-restart", "agent-killed"],
)
def test_windows_are_those_of_a_slow_clock(tmp_path, world, monkeypatch, cfg, event):
    """After the third window another process goes on with what is stored, whose environments are made anew; or that of
    the environments is killed."""
    if cfg.agent:
        pytest.importorskip("uvicorn")
        pytest.importorskip("openai")
    monkeypatch.setattr("aligner.data.dialogue.read_calls", read_calls)
    tokenizer, dialogue, requests = talkers(tmp_path, "one", "another", tools=[ROLL] if cfg.agent else None)
    engine, single = engine_of(WINDOW), engine_of(1)
    engine.keeps_rows = False  # which are read in an order of their own

    def generator():
        pool = Pool(cfg, [] if cfg.agent else dialogue.tools, AnswerLog(tmp_path / "run", 0))
        return trajectory_generator(engine, tokenizer, world, TrajectoryContext(pool, dialogue, cfg, 500, True))

    def fresh(source):
        return [state for request in requests for state in source.fresh(request, request.slot)]

    source, store = generator(), Store(tmp_path / "stored", "", None, shared=True)
    states = fresh(source)
    talks = [
        Talk(
            state.group,
            state.index,
            state.seed,
            random.Random(state.session.seed),
            dialogue.begin(list(state.messages)),
            list(state.messages),
        )
        for state in states
    ]
    slow, paused, waited, window = Slow(single, dialogue, talks, bool(cfg.agent)), 0, 0, 0
    while any(state.open for state in states):
        window += 1
        model = reference(engine.model.cfg, window)  # another for each version
        for one in (engine, single):
            fill(one, model, window)
        (actual,) = source.serve([[state for state in states if state.open]])
        by_key = {(state.group, state.index): state for state in actual}
        states = [by_key.get((state.group, state.index), state) for state in states]
        if window == 3 and event:
            assert any(state.begun for state in actual) and any(state.waits and state.turns for state in actual)
        if window == 3 and event == "restart":
            source = generator()
            store.write(window, 0, InFlight(3, [0, 1], states))
            states = store.read(window, 0, InFlight(3, [0, 1], fresh(source))).states
        elif window == 3 and event == "killed":
            for process in {state.session.process for state in states if state.open}:
                process.kill()
        slow.window(window)
        for state, talk in zip(states, talks, strict=True):
            made = [*state.turns, *([state.begun] if state.begun else [])]
            assert [[tuple(t.prompt), list(t.output), list(t.versions)] for t in made] == [
                [prompt, tokens, versions] for prompt, tokens, _, versions in talk.turns
            ]
            for turn, (*_, logprobs, _) in zip(made, talk.turns, strict=True):
                assert list(turn.logprobs) == pytest.approx(logprobs, abs=1e-5)
            assert state.open == (not talk.ended)
            assert state.waits == (slow.waiting.index(talk) + 1 if talk in slow.waiting else 0)
            paused, waited = paused + bool(state.begun), waited + bool(state.waits)
            if cfg.agent and talk.ended:  # it was sent the logprobs of all windows
                assert state.score == pytest.approx(sum(sum(logprobs) for *_, logprobs, _ in talk.turns), abs=1e-3)
    assert paused > 3 and waited > 3 and window > 3 and max(len(talk.turns) for talk in talks) == TURNS


@pytest.mark.slow
def test_requests_at_a_time_are_held_and_each_gets_its_own_reply(tmp_path, world):
    """Although the agents are killed while they wait, and then send them in another order."""
    pytest.importorskip("uvicorn")
    pytest.importorskip("openai")
    (tmp_path / "killed").mkdir()
    args = {"folder": str(tmp_path / "killed")}
    cfg = EnvironmentConfig(agent="tests/assets/agents.py:ordered", **SETTINGS | {"args": args})
    tokenizer, dialogue, requests = talkers(tmp_path, "one", "another", tools=[ROLL])
    engine, window = engine_of(WINDOW), 0
    pool = Pool(cfg, [], AnswerLog(tmp_path / "run", 0))
    source = trajectory_generator(engine, tokenizer, world, TrajectoryContext(pool, dialogue, cfg, 500, True))
    states = [state for request in requests for state in source.fresh(request, request.slot)]
    while left := [state for state in states if state.open]:
        window += 1
        fill(engine, reference(engine.model.cfg, window), window)
        (actual,) = source.serve([left])
        if window == 1:
            assert any(state.begun for state in actual)
            (tmp_path / "killed" / "now").touch()
            for process in {state.session.process for state in actual if state.open}:
                process.kill()
    assert [(state.score, len(state.turns)) for state in states] == [(1.0, 3)] * 6
    assert sum(state.late for state in states) >= 6
    assert any(len(set(turn.versions)) > 1 for state in states for turn in state.turns)


def window_of_two_ranks(folder):
    """Of which the second has no room for a trajectory: what it raises, or how many have begun."""
    folder = Path(folder) / str(dist.get_rank())
    tokenizer, dialogue, requests = talkers(folder, "one", "another")
    engine = engine_of(WINDOW, **({"kv_cache_bytes": 1000} if dist.get_rank() else {}))
    fill(engine, reference(engine.model.cfg, 1), 1)
    outside = TrajectoryContext(Pool(CFG, dialogue.tools, AnswerLog(folder, 0)), dialogue, CFG, 500, True)
    source = trajectory_generator(engine, tokenizer, None, outside)
    try:
        (actual,) = source.serve([[state for request in requests for state in source.fresh(request, request.slot)]])
    except ConfigError as error:
        return error.key
    return [bool(state.turns or state.begun) for state in actual]


@pytest.mark.slow
@pytest.mark.multirank
def test_a_rank_that_fails_keeps_no_other_one(ranks, tmp_path):
    """Which would not come to tell the trainer's ranks that it is done."""
    assert ranks.run(window_of_two_ranks, world=2, folder=str(tmp_path)) == [
        [True] * 3,
        "engine.kv_cache_bytes",
    ]
