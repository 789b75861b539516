"""The file of the samples in flight: read by the run that wrote it, whole, or not at all."""

from array import array
from dataclasses import asdict, replace
from types import SimpleNamespace

import pytest
import torch

from aligner.config.freeze import rollout_key
from aligner.config.resolve import compose
from aligner.data.dialogue import EnginePrompt
from aligner.data.tool_calls import Call
from aligner.environments.openai_api import ChatRequest
from aligner.environments.pool import Session
from aligner.errors import DataError
from aligner.ops.packing.turns import Turn
from aligner.rollout.agents import AgentSampleState
from aligner.rollout.sample_state import SampleState
from aligner.rollout.store import InFlight, Store, read_description
from aligner.types import Prompt, Stop
from tests import stages

PROMPT = Prompt(4, (7, 8, 9), "a b", {"answer": "c"}, ({"role": "user", "content": "a b"},))


def turn_of(prompt, *tokens, full=True):
    """By two versions, logprobs that float32 has."""
    logprobs = array("f", [-0.1 * t for t in tokens])
    versions = array("i", [2] * (len(tokens) - 1) + [5])
    return Turn(tuple(prompt), array("i", tokens), logprobs, array("f", logprobs) if full else None, versions)


def answers():
    """As they are at the start: fresh, paused, ended."""
    fresh = [
        SampleState(number, i, 10 * number + i, PROMPT, EnginePrompt("a b", PROMPT.tokens))
        for number in (5, 8)
        for i in (0, 1)
    ]
    paused = replace(fresh[1], begun=turn_of(PROMPT.tokens, 3, 4))
    ended = replace(fresh[2], turns=[turn_of(PROMPT.tokens, 6)], stop=Stop.ANSWER, ended=2)
    return fresh, [fresh[0], paused, ended, fresh[3]]


def trajectories():
    """Of an environment that opened the prompt: one that pauses in its second turn, one whose tools work, one that was
    rendered anew, one that failed."""
    fresh = [replace(state, session=Session(str(state.seed), 1, {"answer": "c"}), rollout=1) for state in answers()[0]]
    opened = replace(PROMPT, tokens=(7, 8, 9, 1), text="a b go", messages=(*PROMPT.messages, {"role": "user"}))
    first, asked = turn_of(opened.tokens, 3, 2, full=False), [{"op": "reset", "seed": 1}, {"op": "turn", "calls": []}]
    questions = {"asked": asked, "answered": [{"value": []}], "key": "50.1", "tried": 1, "apart": True}
    settings = {
        "prompt": opened,
        "row_prompt": PROMPT,
        "restarted": 1,
        "turns": [first],
        "messages": [{"role": "assistant", "content": "x"}],
        "rewards": [0.1],
    }
    one, two, three = (replace(p, session=replace(p.session, **questions), **settings) for p in fresh[:3])
    second = turn_of((*opened.tokens, 3, 2, 11), 6, full=False)
    paused = replace(one, next_prompt=EnginePrompt("a b go x", second.prompt), begun=second)
    waits = replace(two, calls=[Call("roll", {"n": 2}), Call(fault="no JSON")], waits=3, seconds=0.1, retried=1)
    waits.next_prompt = EnginePrompt("a b go", opened.tokens)
    anew = replace(three, next_prompt=EnginePrompt("z", (1, 2)), wrong=1)
    failed = replace(fresh[3], stop=Stop.FAILED, failure="hung: no answer", ended=2)
    return fresh, [paused, waits, anew, failed]


def talks():
    """Of agents: one whose request is held where it paused, one that has not begun."""
    fresh, states = trajectories()
    fresh, states = ([AgentSampleState(**vars(state)) for state in some] for some in (fresh, states))
    message = {"role": "assistant", "content": "x"}
    states[0].cut, states[0].digest, states[0].echoes = True, "0af1", {'["assistant", "x"]': message}
    states[0].request = asdict(ChatRequest("policy", [], [{"type": "function"}], stop=["."], sampled={"top_p": 0.9}))
    states[3] = fresh[3]
    return fresh, states


def store(folder, key="this run"):
    return Store(folder, key, None, shared=True)  # its layout is not asked: rank 0 writes all


def stored(folder, states):
    store(folder).write(3, 7, InFlight(2, [5, 8], states))
    return folder / "step-00000003"


def read(folder, states, key="this run", version=7, groups=(5, 8)):
    return store(folder, key).read(3, version, InFlight(2, list(groups), states))


@pytest.mark.parametrize("kind", [answers, trajectories, talks])
def test_it_is_read_as_it_was_written(tmp_path, world, kind):
    fresh, states = kind()
    stored(tmp_path, states)
    content = read(tmp_path, fresh)
    for one, other in zip(content.states, states, strict=True):
        assert vars(one) == vars(other)


@pytest.mark.parametrize("other", [{"key": "another run"}, {"version": 6}, {"groups": (5, 9)}])
def test_what_is_of_others_is_left_out_and_deleted(tmp_path, world, capsys, other):
    """Before anyone writes beside it."""
    fresh, states = answers()
    folder = stored(tmp_path, states)
    assert read(tmp_path, fresh, **other) is None
    assert not folder.exists() and capsys.readouterr().out == ""


def test_parts_of_ranks_are_read_on_any_number_of_them(tmp_path, world):
    """Two data-parallel ranks wrote a group each; one that has the second group, and one that has both, read them."""
    fresh, states = answers()
    routed = [torch.arange(4 + i).view(-1, 1, 1).to(torch.uint8) for i in range(4)]
    for state, rows in zip(states, routed, strict=True):
        state.turns, state.begun = [replace(turn_of(PROMPT.tokens, 6, 7), routing=rows)], None
        state.stop, state.ended = Stop.ANSWER, 3
    for rank in (0, 1):
        layout = SimpleNamespace(peers=SimpleNamespace(rank=lambda: 0), dp_rank=rank, data=2)
        Store(tmp_path, "this run", layout).write(3, 7, InFlight(2, [5, 8][rank : rank + 1], states[2 * rank :][:2]))
    second = store(tmp_path).read(3, 7, InFlight(2, [8], fresh[2:]))
    both = read(tmp_path, fresh)
    assert [state.turns[0].output for state in second.states] == [state.turns[0].output for state in states[2:]]
    for state, rows in zip([*second.states, *both.states], [*routed[2:], *routed], strict=True):
        assert torch.equal(state.turns[0].routing, rows)


def test_groups_are_ready_in_the_order_in_which_their_last_samples_ended():
    _, states = answers()
    for state, window in zip(states, (3, 1, 2, 2), strict=True):
        state.ended = window
    flight = InFlight(2, [5, 8], states)
    assert flight.ready() == [1, 0] and flight.take([1]).numbers == [8] and flight.open() == []
    states[3].ended = 0
    assert flight.ready() == [0] and flight.open() == [states[3]]


@pytest.mark.parametrize(
    "torn, message",
    [("missing", ""), ("half", "damaged"), ("empty", "damaged"), ("altered", "damaged"), ("samples", "damaged")],
)
def test_what_is_torn_is_none(tmp_path, world, capsys, torn, message):
    """A kill before the description is written, a file system that lost its end, an edit of it, another bit of a
    sample."""
    folder = stored(tmp_path, answers()[1])
    path = next(folder.glob("*.safetensors" if torn == "samples" else "*.json"))
    text = path.read_bytes()
    if torn == "missing":
        path.unlink()
    else:
        edited = {"altered": text.replace(b"[5, 8]", b"[5, 9]"), "samples": text[:-1] + bytes([text[-1] ^ 1])}
        path.write_bytes({"half": text[: len(text) // 2], "empty": b"", **edited}[torn])
    assert read(tmp_path, answers()[0]) is None
    out = capsys.readouterr().out
    assert message in out and ("generated again" in out) == bool(message) and not folder.exists()


def test_a_description_with_another_bit_anywhere_is_damaged(tmp_path, world):
    (path,) = stored(tmp_path, answers()[1]).glob("*.json")
    content = path.read_bytes()
    assert read_description(path)["groups"] == [5, 8]
    for bit in range(0, len(content) * 8, 7):  # another one in each byte
        damaged = bytearray(content)
        damaged[bit // 8] ^= 1 << bit % 8
        path.write_bytes(damaged)
        with pytest.raises(DataError):
            read_description(path)


def test_only_what_a_rollout_is_named_is_one(tmp_path):
    far = "\u0663" * 8  # digits, but not ASCII's
    strange = ["step-1.bak", "step-\u00b2", f"step-{far}", "step-", "step--0000001", "x"]
    for name in [*strange, "step-00000002", "step-100000000"]:
        (tmp_path / name).mkdir()
    assert store(tmp_path).numbers() == [2, 100_000_000] and store(tmp_path).others() == sorted(strange)


def test_the_key_knows_what_rollouts_depend_on(tiny_data, tmp_path):
    def key(*more: str) -> str:
        return rollout_key(compose(stages.overrides("grpo", tiny_data, tmp_path, *more)))

    same = [
        "parallel.tensor=2",
        "batch.micro_batch_samples=2",
        "checkpoint.every=7",
        "run.name=x",
        "logging.project=y",
        "reward.workers=2",
        "reward.timeout_s=7",
        "reward.overlap=false",
        "engine.silent_s=300",
    ]
    assert {key(text) for text in same} == {key()}
    other = [
        "seed=1",
        "sampling.top_k=3",
        "optim.lr=1",
        "engine.lag=1",
        "batch.group=8",
        "algorithm.clip_low=0.3",
        "reward.normalize=true",
    ]
    assert len({key(), *(key(text) for text in other)}) == 1 + len(other)
    replayed = ["model.family=qwen3_moe", "model.moe.num_experts=4", "mismatch.replay_routing=true"]
    assert key(*replayed) != key(*replayed[:2])
    code = tmp_path / "mine.py"
    code.write_text("def reward(samples): return [0.0] * len(samples)")
    own = f"reward.functions=[{{path: {code}:reward}}]"
    before = key(own)
    code.write_text("def reward(samples): return [1.0] * len(samples)")
    assert key(own) != before
