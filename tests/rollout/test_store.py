"""The file of the samples in flight: read by the run that wrote it, whole, or not at all."""

from array import array
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from aligner.data.dialogue import Given
from aligner.data.tool_calls import Call
from aligner.environments.pool import Session
from aligner.ops.packing.turns import Turn
from aligner.rollout.play import Play
from aligner.rollout.store import InFlight, Store
from aligner.types import Prompt, Stop

PROMPT = Prompt(4, (7, 8, 9), "a b", {"answer": "c"}, ({"role": "user", "content": "a b"},))


def said(prompt, *tokens, full=True):
    """By two versions, logprobs that float32 has."""
    logprobs = array("f", [-0.1 * t for t in tokens])
    versions = array("i", [2] * (len(tokens) - 1) + [5])
    return Turn(tuple(prompt), array("i", tokens), logprobs, array("f", logprobs) if full else None, versions)


def answers():
    """As they are at the start: fresh, paused, ended."""
    fresh = [Play(number, i, 10 * number + i, PROMPT, Given("a b", PROMPT.tokens)) for number in (5, 8) for i in (0, 1)]
    paused = replace(fresh[1], begun=said(PROMPT.tokens, 3, 4))
    ended = replace(fresh[2], turns=[said(PROMPT.tokens, 6)], stop=Stop.ANSWER, ended=2)
    return fresh, [fresh[0], paused, ended, fresh[3]]


def trajectories():
    """Of an environment that opened the prompt: one that pauses in its second turn, one whose tools work, one that was
    rendered anew, one that failed."""
    fresh = [replace(play, session=Session(str(play.seed), 1, {"answer": "c"}), rollout=1) for play in answers()[0]]
    opened = replace(PROMPT, tokens=(7, 8, 9, 1), text="a b go", messages=(*PROMPT.messages, {"role": "user"}))
    first, asked = said(opened.tokens, 3, 2, full=False), [{"op": "reset", "seed": 1}, {"op": "turn", "calls": []}]
    more = {"prompt": opened, "turns": [first], "messages": [{"role": "assistant", "content": "x"}], "rewards": [0.1]}
    one, two, three = (replace(p, session=replace(p.session, asked=asked), **more) for p in fresh[:3])
    second = said((*opened.tokens, 3, 2, 11), 6, full=False)
    paused = replace(one, given=Given("a b go x", second.prompt), begun=second)
    waits = replace(two, calls=[Call("roll", {"n": 2}), Call(fault="no JSON")], waits=3, seconds=0.1, retried=1)
    waits.given = Given("a b go", opened.tokens)
    anew = replace(three, given=Given("z", (1, 2)), wrong=1)
    failed = replace(fresh[3], stop=Stop.FAILED, failure="hung: no answer", ended=2)
    return fresh, [paused, waits, anew, failed]


def store(folder, key="this run"):
    return Store(folder, key, None, shared=True)  # its layout is not asked: rank 0 writes all


def stored(folder, plays):
    store(folder).write(3, 7, InFlight(2, [5, 8], plays))
    return folder / "step-00000003"


def read(folder, plays, key="this run", version=7, groups=(5, 8)):
    return store(folder, key).read(3, version, groups, InFlight(2, [5, 8], plays))


@pytest.mark.parametrize("kind", [answers, trajectories])
def test_it_is_read_as_it_was_written(tmp_path, world, kind):
    fresh, plays = kind()
    stored(tmp_path, plays)
    assert read(tmp_path, fresh, version=6) is None and read(tmp_path, fresh, groups=(5, 9)) is None
    found = read(tmp_path, fresh)
    for one, other in zip(found.plays, plays, strict=True):
        assert vars(one) == vars(other)


def test_parts_of_ranks_are_read_on_any_number_of_them(tmp_path, world):
    """Two data-parallel ranks wrote a group each; one that has the second group, and one that has both, read them."""
    fresh, plays = answers()
    routed = [torch.arange(4 + i).view(-1, 1, 1).to(torch.uint8) for i in range(4)]
    for play, rows in zip(plays, routed, strict=True):
        play.turns, play.begun = [replace(said(PROMPT.tokens, 6, 7), routing=rows)], None
        play.stop, play.ended = Stop.ANSWER, 3
    for rank in (0, 1):
        layout = SimpleNamespace(peers=SimpleNamespace(rank=lambda: 0), dp_rank=rank, data=2)
        Store(tmp_path, "this run", layout).write(3, 7, InFlight(2, [5, 8][rank : rank + 1], plays[2 * rank :][:2]))
    second = store(tmp_path).read(3, 7, [5, 8], InFlight(2, [8], fresh[2:]))
    both = read(tmp_path, fresh)
    assert [play.turns[0].output for play in second.plays] == [play.turns[0].output for play in plays[2:]]
    for play, rows in zip([*second.plays, *both.plays], [*routed[2:], *routed], strict=True):
        assert torch.equal(play.turns[0].routing, rows)


def test_groups_are_ready_in_the_order_in_which_their_last_samples_ended():
    _, plays = answers()
    for play, window in zip(plays, (3, 1, 2, 2), strict=True):
        play.ended = window
    flight = InFlight(2, [5, 8], plays)
    assert flight.ready() == [1, 0] and flight.take([1]).numbers == [8] and flight.open() == []
    plays[3].ended = 0
    assert flight.ready() == [0] and flight.open() == [plays[3]]


def test_one_of_another_run_is_left_out_and_deleted(tmp_path, world, capsys):
    folder = stored(tmp_path, answers()[1])
    assert read(tmp_path, answers()[0], "another run") is None
    assert not folder.exists() and capsys.readouterr().out == ""


@pytest.mark.parametrize(
    "torn, told", [("missing", ""), ("half", "damaged"), ("empty", "damaged"), ("altered", "damaged")]
)
def test_a_torn_description_is_none(tmp_path, world, capsys, torn, told):
    """A kill before it is written, a file system that lost its end, an edit."""
    folder = stored(tmp_path, answers()[1])
    (path,) = folder.glob("*.json")
    text = path.read_bytes()
    if torn == "missing":
        path.unlink()
    else:
        path.write_bytes(
            {"half": text[: len(text) // 2], "empty": b"", "altered": text.replace(b"[5, 8]", b"[5, 9]")}[torn]
        )
    assert read(tmp_path, answers()[0]) is None
    out = capsys.readouterr().out
    assert told in out and ("generated again" in out) == bool(told) and not folder.exists()
