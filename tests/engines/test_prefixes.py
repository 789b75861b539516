"""Rows that are kept for the turns that follow them: the same samples from fewer prefilled tokens."""

import random
from dataclasses import dataclass, field

import pytest
import torch

from aligner.config.sections.engine import EngineConfig
from aligner.engines.native.batch import Batch
from aligner.engines.native.fleet import FleetEngine
from aligner.engines.native.graphs import DecodeGraphs
from aligner.engines.native.prefixes import BLOCK, Prefixes
from aligner.engines.native.schedule import CacheUse, PromptPool, PromptRequest, plan_generation
from aligner.types import SamplingParams
from tests.engines.contract import LLAMA, fill, reference
from tests.engines.graph_recorder import CpuRecorder
from tests.tiny import MORE

TALKS, TURNS, SAID = 8, 4, 12


@dataclass
class Talks(PromptPool):
    """Each goes on with its own tokens and some more, as soon as it has an answer."""

    longest: int = 50 + (TURNS - 1) * (SAID + 9)
    prompts: int = TALKS
    rows: int = TALKS
    taken: list[tuple[int, int]] = field(default_factory=list)  # (talk, turn)
    asked: list[tuple[int, int]] = field(default_factory=list)

    in_turns = True

    def __post_init__(self):
        draw = random.Random(0)
        self.tokens = [[draw.randrange(6, 50) for _ in range(draw.randrange(20, 50))] for _ in range(TALKS)]
        self.ready = [(talk, 0) for talk in range(TALKS)]

    def wants(self, active, slots):
        return bool(self.ready)

    def take(self):
        results, self.ready = self.ready, []
        self.asked += [(len(self.taken) + i, 0) for i in range(len(results))]
        self.taken += results
        return [PromptRequest(tuple(self.tokens[talk]), [100 * talk + turn]) for talk, turn in results]

    def finished(self, number, index, tokens, logprobs, stopped):
        talk, turn = self.taken[number]
        draw = random.Random(100 * talk + turn)
        self.tokens[talk] += [*tokens, *[draw.randrange(6, 50) for _ in range(draw.randrange(1, 9))]]
        if turn + 1 < TURNS:
            self.ready.append((talk, turn + 1))

    def may_continue(self, row):
        talk, turn = self.taken[row]
        return turn + 1 < TURNS and (talk, turn + 1) not in self.taken


def make_engine(cfg, **config):
    return FleetEngine(cfg, EngineConfig(**config), device="cpu", dtype=torch.float32, pad_id=0)


def served(engine):
    """Return {(talk, turn): (tokens, logprobs)}."""
    talks = Talks()
    out = engine.serve(talks, talks.asked, talks.finished, SamplingParams(SAID, stop_token_ids=(5, 17)))
    rows = zip(talks.taken, out.tokens, out.logprobs, out.lengths.tolist(), strict=True)
    return {key: (tokens[:n].tolist(), logprobs[:n]) for key, tokens, logprobs, n in rows}


# sinks; windows and caps; what heads are made of is kept; nothing is, of a recurrent state
NAMES = ("gpt_oss", "gemma2", "gemma4", "gemma4-inputs", "deepseek_v3", "glm_moe_dsa", "qwen3_next", "nemotron_h")
NAMES += ("deepseek_v4",)
FAMILIES = {"llama": LLAMA} | {name: MORE[name] for name in NAMES}


@pytest.mark.parametrize("name", FAMILIES)
def test_later_turns_prefill_what_is_new_and_say_the_same(name):
    engine, model = make_engine(FAMILIES[name]), reference(FAMILIES[name])
    outputs, stats = served(fill(engine, model)), engine.stats
    engine.keeps_rows = False
    wanted, whole = served(engine), engine.stats
    assert whole.held_tokens == 0 and whole.prompt_tokens == stats.prompt_tokens
    forgets = FAMILIES[name].traits.linear or FAMILIES[name].traits.entries
    assert stats.held_tokens == 0 if forgets else stats.held_tokens > 0.65 * stats.prompt_tokens
    assert outputs.keys() == wanted.keys() and len(outputs) == TALKS * TURNS
    for key, (tokens, logprobs) in wanted.items():
        assert outputs[key][0] == tokens
        torch.testing.assert_close(outputs[key][1], logprobs, rtol=0, atol=3e-5)


@pytest.mark.parametrize("max_batch, kept", [(3, TALKS), (3, 4), (TALKS, 3)])
def test_what_runs_takes_the_place_of_what_is_kept_and_a_rerun_has_the_same_bits(max_batch, kept):
    """Rows are kept beside those that run as far as engine.kv_cache_bytes goes."""
    positions = (Talks().longest + SAID - 1) * kept * 4 // 3 + 2  # a quarter is for prompts that wait
    budget = positions * make_engine(LLAMA).cache.token_bytes
    engine = fill(make_engine(LLAMA, max_batch=max_batch, kv_cache_bytes=budget), reference(LLAMA))
    outputs, stats = served(engine), engine.stats
    assert engine.cache.kv.shape[2] == kept and engine.cache.held_bytes <= engine.config.kv_cache_bytes
    assert 0 < stats.held_tokens < stats.prompt_tokens
    again = served(engine)
    assert engine.stats == stats and all(torch.equal(outputs[key][1], again[key][1]) for key in outputs)
    wide = served(fill(make_engine(LLAMA), reference(LLAMA)))
    assert {key: tokens for key, (tokens, _) in wide.items()} == {key: tokens for key, (tokens, _) in outputs.items()}


def test_graphs_do_not_write_to_what_is_kept():
    """They decode more rows than run, in the slots behind them."""
    engine = fill(make_engine(LLAMA, max_batch=3), reference(LLAMA))
    wanted = served(engine)
    engine.graphs = DecodeGraphs(engine.model, CpuRecorder())
    outputs = served(engine)
    assert engine.stats.held_tokens > 0 and engine.graphs._record.replayed
    for key, (tokens, logprobs) in wanted.items():
        assert outputs[key][0] == tokens
        torch.testing.assert_close(outputs[key][1], logprobs, rtol=0, atol=3e-5)


def test_new_weights_find_nothing_kept():
    old, new = make_engine(LLAMA), make_engine(LLAMA)
    other = {name: tensor * 1.1 for name, tensor in reference(LLAMA).state_dict().items()}
    served(fill(old, reference(LLAMA)))
    for engine in (old, new):
        engine.begin_update(1)
        engine.update_weights((name, other[name]) for name in engine.model.shapes)
        engine.finish_update()
    outputs, wanted = served(old), served(new)
    assert all(outputs[key][0] == wanted[key][0] and torch.equal(outputs[key][1], wanted[key][1]) for key in wanted)
    assert old.stats == new.stats


def common(a, b):
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def test_the_longest_prefix_is_found_and_slots_are_never_shared():
    """Against a search through all rows, while rows come, are used up, move and are forgotten."""
    draw, prefixes, rows = random.Random(1), Prefixes(9), {}
    for row in range(300):
        longer = draw.choice(list(rows.values())) if rows and draw.random() < 0.7 else ()
        inputs = (
            *longer[: draw.randrange(len(longer) + 1)],
            *[draw.randrange(3) for _ in range(draw.randrange(1, 60))],
        )
        actual = prefixes.find(inputs)
        lengths = {other: common(held, inputs[:-1]) for other, held in rows.items()}
        best = max(lengths.values(), default=0)
        if actual is None:
            assert best < BLOCK or 2 * best < len(inputs)
        else:
            assert lengths[actual.row] == actual.length == best and 2 * best >= len(inputs)
            prefixes.used(actual)
            if len(rows[actual.row]) == actual.length:
                del rows[actual.row]
        stop = draw.randrange(3, 9)
        while len(rows) > 9 - stop:
            del rows[next(reversed(rows))]
        before = {other: prefixes.slot(other) for other in rows}
        moves = dict(prefixes.make_way(stop, lambda kept: kept[-1]))
        after = {other: prefixes.slot(other) for other in rows}
        assert all(moves.get(before[other], before[other]) == slot for other, slot in after.items())
        taken = set(after.values())
        assert len(taken) == len(rows) and all(stop <= slot < 9 for slot in taken)
        free = [slot for slot in range(stop, 9) if slot not in taken]
        if free:
            prefixes.prompts[row] = inputs
            assert prefixes.keep(row, (1, 2), free[0]) == len(inputs) + 1
            rows[row] = (*inputs, 1)


def test_rows_that_come_one_by_one_are_not_copied_each_time():
    sampling = SamplingParams(SAID)
    batch = Batch(plan_generation([], sampling, EngineConfig(), CacheUse(1)), sampling, torch.device("cpu"))
    outputs = []  # kept, so that no two lie at one address
    for rows in range(1, 1001):
        batch.make_room(rows)
        outputs.append(batch._tokens)
    assert len({tokens.data_ptr() for tokens in outputs}) < 20
    assert len(batch.result(0).tokens) == len(batch.result(0).lengths) == 1000
