"""When trajectories go on: between the steps of an engine that is played here, with tools that answer in any order."""

import random
import threading
import time
from concurrent.futures import Future
from types import SimpleNamespace

import pytest

from aligner.rollout.turn_pool import TurnPool

SLOTS, TURNS = 4, 3


class Engine:
    """Each turn takes as many steps as its sample and number say; at most SLOTS samples at a time."""

    def __init__(self, samples, counted, answer):
        self.answer, self.events, self.steps, self.waits = answer, [], 0, threading.Event()
        self.turns = TurnPool(
            1, samples, samples, [], self.take_result, self.take_response, lambda state: state.number, counted
        )
        for number in range(samples):
            prompt, fields = SimpleNamespace(tokens=(number,)), {"group": 0, "open": True, "asked": None}
            fields |= {"paused_tokens": (), "input_tokens": prompt.tokens}
            self.turns.ready.append(SimpleNamespace(number=number, turns=[], next_prompt=prompt, **fields))

    def take_response(self, state, tokens, logprobs, stopped):
        state.turns.append(tokens)
        state.open = len(state.turns) < TURNS
        state.asked = Future()
        self.answer(state)

    def take_result(self, state):
        if not state.asked.done():
            self.waits.set()
        state.asked = state.asked.result()

    def __call__(self):
        waiting, running = [], {}
        while True:
            while self.turns.wants(len(waiting) + len(running), SLOTS):
                row = len(self.turns.taken)
                taken = self.turns.take()
                waiting += range(row, row + sum(len(one.seeds) for one in taken))
            while waiting and len(running) < SLOTS:
                row = waiting.pop(0)
                state, turn = self.turns.taken[row]
                running[row] = 1 + (7 * state.number + 3 * turn) % 5
                self.events.append((self.steps, state.number, turn))
            if not running:
                return self.events
            self.steps += 1
            running = {row: left - 1 for row, left in running.items()}
            for row in [row for row, left in running.items() if not left]:
                del running[row]
                self.turns.finished(row, 0, [0], [0.0], True)
                assert self.turns.may_continue(row) == self.turns.taken[row][0].open


def late(state):
    threading.Timer(0.02 * random.random(), state.asked.set_result, (None,)).start()


@pytest.mark.parametrize("samples", [1, 3, 4, 11])
def test_who_goes_on_when_does_not_depend_on_when_tools_answer(samples):
    reports = [Engine(samples, True, answer)() for answer in (late, late, lambda state: state.asked.set_result(None))]
    assert reports[0] == reports[1] == reports[2]
    assert sorted(entry[1:] for entry in reports[0]) == [(i, k) for i in range(samples) for k in range(TURNS)]


def test_nobody_waits_for_a_late_tool_while_others_are_there():
    """One tool that answers when all others have ended: counted, when half of the samples have come to wait for it."""

    def answer(state):
        if (state.number, len(state.turns)) != (0, 1):
            state.asked.set_result(None)

    engine = Engine(6, False, answer)
    threading.Thread(target=engine, daemon=True).start()
    until = time.monotonic() + 120
    while len(engine.events) < 5 * TURNS + 1 and time.monotonic() < until:
        time.sleep(0.005)
    assert {entry[1] for entry in engine.events} == set(range(6)) and len(engine.events) == 5 * TURNS + 1
    engine.turns.taken[0][0].asked.set_result(None)
    engine = Engine(6, True, answer)
    threading.Thread(target=engine, daemon=True).start()
    assert engine.waits.wait(120)
    assert len(engine.turns.waiting) > 1 and len(engine.events) < 5 * TURNS + 1
    engine.turns.taken[0][0].asked.set_result(None)


@pytest.mark.parametrize("counted, last", [(True, 3), (False, 0)])
def test_what_is_needed_least_is_forgotten_first(counted, last):
    """Of rows that have ended in this order: one that has gone on since is not needed at all."""
    turns = Engine(4, counted, lambda state: None).turns
    assert len(turns.take()) == 4
    for row in range(4):
        turns.finished(row, 0, [0], [0.0], True)
    assert turns.least([0, 1, 2, 3]) == last and turns.least([2]) == 2
    turns.taken.append((turns.taken[2][0], 1))
    turns.finished(4, 0, [0], [0.0], True)
    assert not turns.may_continue(2) and turns.may_continue(4) and turns.least([0, 1, 2, 3, 4]) == 2
