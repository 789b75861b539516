from hypothesis import given
from hypothesis import strategies as st

from aligner.ops.packing.turns import Turn, rows_of

TOKENS = st.lists(st.integers(0, 3), min_size=1, max_size=5)


@st.composite
def trajectories(draw):
    """Turns, and how each one's prompt was made: what was held and more, that with another end, or anything."""
    prompt, turns, kinds = draw(TOKENS), [], []
    for number in range(draw(st.integers(1, 5))):
        if number:
            kind = draw(st.sampled_from(("clean", "tail", "other")))
            held = [*turns[-1].prompt, *turns[-1].output]
            cut = {"clean": 0, "tail": draw(st.integers(1, 3)), "other": len(held)}[kind]
            prompt = held[: len(held) - cut] + draw(TOKENS)
            kinds.append(kind)
        output = draw(TOKENS)
        first = 10.0 * number
        turns.append(Turn(prompt, output, [first + i for i in range(len(output))]))
    return turns, kinds


@given(trajectories(), st.integers(1, 4))
def test_rows_hold_what_the_engine_saw_and_said(case, tail):
    turns, _ = case
    rows = rows_of(turns, tail)
    reports = [logprob for row in rows for logprob, made in zip(row.logprobs, row.made, strict=True) if made]
    number = 0
    for row in rows:
        ends = []  # a row is the engine's view of each of its turns: prompt and output, as far as not overwritten
        while number < len(turns):
            turn = turns[number]
            if ends and row.tokens[: len(turn.prompt)] != list(turn.prompt):
                break
            assert row.tokens[: len(turn.prompt)] == list(turn.prompt)
            ends.append(len(turn.prompt) + len(turn.output))
            number += 1
            if number < len(turns) and len(rows_of(turns[: number + 1], tail)) > len(rows_of(turns[:number], tail)):
                break
        assert ends[-1] == len(row.tokens) == len(row.made) == len(row.logprobs) == len(row.full)
        last = turns[number - 1]
        assert row.tokens[len(last.prompt) :] == list(last.output) and all(row.made[len(last.prompt) :])
        assert not any(row.made[: len(turns[number - len(ends)].prompt)])
    assert number == len(turns)
    for index, turn in enumerate(turns):  # of every answer a beginning is trained, and less than `tail` tokens are lost
        kept = [logprob for logprob in turn.logprobs if logprob in reports]
        assert kept == list(turn.logprobs)[: len(kept)] and len(kept) > 0
        assert len(turn.output) - len(kept) < tail and (index < len(turns) - 1 or kept == list(turn.logprobs))


@given(trajectories())
def test_what_is_appended_stays_one_row(case):
    turns, kinds = case
    if set(kinds) <= {"clean"}:
        (row,) = rows_of(turns)
        assert row.tokens == [*turns[-1].prompt, *turns[-1].output]
        assert sum(row.made) == sum(len(turn.output) for turn in turns)


def test_turns_join_realign_or_fork():
    first = Turn([1, 2], [3, 4, 5], [-0.1, -0.2, -0.3], [-1.0, -2.0, -3.0])
    clean, realign = Turn([1, 2, 3, 4, 5, 6], [7], [-0.4]), Turn([1, 2, 3, 4, 9, 6], [7], [-0.4])
    (row,) = rows_of([first, clean])
    assert row.tokens == [1, 2, 3, 4, 5, 6, 7] and row.made == [False, False, True, True, True, False, True]
    assert row.full == [0, 0, -1, -2, -3, 0, -0.4]
    (row,) = rows_of([first, realign])
    assert row.tokens == [1, 2, 3, 4, 9, 6, 7] and row.made == [False, False, True, True, False, False, True]
    assert row.logprobs == [0, 0, -0.1, -0.2, 0, 0, -0.4]
    assert [r.tokens for r in rows_of([first, realign], tail=1)] == [[1, 2, 3, 4, 5], [1, 2, 3, 4, 9, 6, 7]]
    thoughtless = Turn([1, 2, 6], [7], [-0.4])  # all of the answer is gone: nothing of it may be lost to training
    assert [r.tokens for r in rows_of([first, thoughtless])] == [[1, 2, 3, 4, 5], [1, 2, 6, 7]]
