"""Pages of the cache (`engine.page_tokens`): the samples of whole rows, and more rows in the same memory."""

import random

import pytest
import torch

from aligner.config.sections.engine import EngineConfig
from aligner.engines.native import NativeEngine
from aligner.engines.native.fleet import FleetEngine
from aligner.engines.native.graphs import DecodeGraphs
from aligner.engines.native.pages import PageTable, PoolShape
from aligner.types import SamplingParams
from tests.engines import test_prefixes, test_windows
from tests.engines.contract import LLAMA, MODELS, PROMPTS, fill, hf_weights, reference, responses, seeds_for
from tests.engines.graph_recorder import CpuRecorder
from tests.engines.test_fleet import generate
from tests.tiny import MORE

SAMPLING = SamplingParams(25, stop_token_ids=(3, 11))
# windows and two kinds of heads; sinks; latent vectors, and an index of them; states; entries; experts' numbers
NAMES = ["gemma4", "gpt_oss", "deepseek_v3", "glm_moe_dsa", "qwen3_next", "deepseek_v4", "mixtral"]
FAMILIES = {"llama": LLAMA} | {name: (MODELS | MORE)[name] for name in NAMES}


def make(cfg, dtype=torch.float32, reports=False, kind=NativeEngine, change=lambda name, weight: weight, **config):
    """An engine with random weights, which `change` may replace: it is compared with one that has the same."""
    engine = kind(cfg, EngineConfig(**config), device="cpu", dtype=dtype, pad_id=0, reports_routing=reports)
    draw = torch.Generator().manual_seed(0)
    engine.begin_update(0)
    for name, shape in engine.model.shapes.items():
        engine.update_weights([(name, change(name, 0.15 * torch.randn(shape, generator=draw) + ("norm" in name)))])
    engine.finish_update()
    return engine


def same(a, b):
    return all(torch.equal(getattr(a, x), getattr(b, x)) for x in ("tokens", "lengths", "logprobs"))


@pytest.mark.parametrize("name", FAMILIES)
def test_samples_are_those_of_whole_rows_bit_for_bit(name):
    cfg, seeds, sampling = FAMILIES[name], seeds_for(PROMPTS, 2), SamplingParams(14, stop_token_ids=(3, 11))
    reports = bool(cfg.moe.num_experts) and not cfg.traits.entries
    wanted = make(cfg, reports=reports, max_batch=7).generate(PROMPTS, seeds, sampling)
    for page in (4, 16) if name == "llama" else (4,):
        engine = make(cfg, reports=reports, max_batch=7, page_tokens=page)
        out = engine.generate(PROMPTS, seeds, sampling)
        assert same(out, wanted) and (not reports or torch.equal(out.routing, wanted.routing))
        assert engine.cache.table.shape.row_pages > 1 and not engine.stats.paused_rows


def test_bfloat16_is_the_same_too():
    wanted, out = (
        make(LLAMA, torch.bfloat16, page_tokens=n).generate(PROMPTS, seeds_for(PROMPTS, 3), SAMPLING) for n in (0, 8)
    )
    assert same(out, wanted)


@pytest.mark.parametrize("name", ["llama", "qwen3_next", "mixtral"])
def test_rows_pause_where_pages_are_short_and_a_rerun_has_the_same_bits(name):
    cfg, seeds = FAMILIES[name], seeds_for(PROMPTS, 4)
    reports = bool(cfg.moe.num_experts) and name != "qwen3_next"
    whole = make(cfg, reports=reports)
    wanted = whole.generate(PROMPTS, seeds, SAMPLING)
    row = whole.cache.token_bytes * 30 + whole.cache.row_bytes
    engine = make(cfg, reports=reports, page_tokens=4, kv_cache_bytes=4 * row)
    outputs, stats = [], []
    for _ in range(2):
        outputs.append(engine.generate(PROMPTS, seeds, SAMPLING))
        stats.append(engine.stats)
        assert engine.cache.held_bytes <= 4 * row
        engine.sleep(weights=False)
        engine.wake()
    assert same(*outputs) and stats[0] == stats[1]
    assert stats[0].paused_rows and stats[0].cache_usage > 0.9
    if name == "llama":
        fewer = make(cfg, kv_cache_bytes=4 * row)
        fewer.generate(PROMPTS, seeds, SAMPLING)
        assert stats[0].steps < fewer.stats.steps  # more rows at once
    assert responses(outputs[0]) == responses(wanted)
    torch.testing.assert_close(outputs[0].logprobs, wanted.logprobs, rtol=0, atol=1e-4)
    if reports:
        assert torch.equal(outputs[0].routing.sort(-1).values, wanted.routing.sort(-1).values)


def test_rows_of_a_window_have_the_routing_of_their_tokens():
    """Also those that wait for pages when it ends."""
    cfg, seeds = FAMILIES["mixtral"], seeds_for(PROMPTS, 4)
    whole = make(cfg, reports=True)
    wanted = whole.generate(PROMPTS, seeds, SAMPLING)
    budget = whole.cache.token_bytes * 120
    engine = make(cfg, reports=True, page_tokens=4, kv_cache_bytes=budget, window=14)
    out = engine._generated(PROMPTS, seeds, SAMPLING, begun=[0] * len(PROMPTS))
    assert engine.stats.paused_rows and not out.lengths.equal(wanted.lengths)
    prompts = [prompt for prompt in PROMPTS for _ in range(4)]
    for row, (prompt, length) in enumerate(zip(prompts, out.lengths.tolist(), strict=True)):
        fed = len(prompt) + length - 1 if length else 0
        assert torch.equal(out.routing[row, :fed].sort(-1).values, wanted.routing[row, :fed].sort(-1).values)
        assert not out.routing[row, fed:].any()


def test_a_paused_row_keeps_its_logprobs_and_the_oldest_never_pauses(monkeypatch):
    engine, seen = make(LLAMA, page_tokens=4, kv_cache_bytes=100 * 256), []
    from aligner.engines.native.batch import Batch

    pause = Batch.pause

    def noted(batch):
        again, moves = pause(batch)
        seen.append((again.first_row, again.begun, batch._logprobs[again.first_row, : again.begun].clone()))
        return again, moves

    monkeypatch.setattr(Batch, "pause", noted)
    out = engine.generate(PROMPTS, seeds_for(PROMPTS, 5), SAMPLING)
    assert seen and all(torch.equal(out.logprobs[row, :n], before) for row, n, before in seen)
    longest = max(range(5), key=lambda i: len(PROMPTS[i]))
    assert 5 * longest not in {row for row, *_ in seen}  # the first sample of the prompt that came first


@pytest.mark.parametrize("window, slots, budget", [(4, 512, 1 << 20), (4, 3, 1 << 20), (5, 512, 110)])
def test_paused_for_a_window_or_for_pages(window, slots, budget):
    seeds, sampling = seeds_for(PROMPTS, 3), SamplingParams(15, temperature=0.7, stop_token_ids=(3, 11, 20, 30))
    wanted, actual = (
        test_windows.by_windows(
            make(LLAMA, window=window, max_batch=slots, page_tokens=n, kv_cache_bytes=budget * 256),
            *(PROMPTS, seeds, sampling),
        )
        for n in (0, 4)
    )
    assert wanted[0] == actual[0]
    if budget == 1 << 20:
        assert wanted[1:] == actual[1:]


@pytest.mark.parametrize("name, rows", [("llama", 0), ("gemma4", 0), ("llama", 4), ("deepseek_v3", 4)])
def test_turns(name, rows):
    """Rows between their turns keep their pages while others need none."""
    outputs = []
    for page in (0, 8):
        cfg = FAMILIES[name]
        engine = make(cfg, kind=FleetEngine, max_batch=5, page_tokens=page)
        budget = rows * engine.cache.token_bytes * (test_prefixes.Talks().longest + test_prefixes.SAID)
        engine.config.kv_cache_bytes = budget or engine.config.kv_cache_bytes
        outputs.append(test_prefixes.served(engine))
        assert engine.stats.held_tokens and (not budget or engine.cache.held_bytes <= budget)
    for key, (tokens, logprobs) in outputs[0].items():
        assert outputs[1][key][0] == tokens
        torch.testing.assert_close(outputs[1][key][1], logprobs, rtol=0, atol=3e-5 if rows else 0)


@pytest.mark.parametrize("budget", [1 << 20, 220])
def test_graphs_read_a_table_that_changes(budget):
    wanted = make(LLAMA).generate(PROMPTS, seeds_for(PROMPTS, 5), SAMPLING)
    engine = make(LLAMA, page_tokens=8, kv_cache_bytes=budget * 256, max_batch=20)
    engine.graphs = DecodeGraphs(engine.model, CpuRecorder())
    for _ in range(2):
        out = engine.generate(PROMPTS, seeds_for(PROMPTS, 5), SAMPLING)
        assert responses(out) == responses(wanted)
        torch.testing.assert_close(out.logprobs, wanted.logprobs, rtol=0, atol=1e-5)
    assert engine.graphs._record.replayed > engine.graphs._record.recorded
    assert bool(engine.stats.paused_rows) == (budget == 220)


@pytest.mark.multirank
def test_ranks_of_one_engine_pause_the_same_rows(ranks):
    model, seeds = reference(LLAMA), seeds_for(PROMPTS, 5)
    wanted = fill(make(LLAMA), model).generate(PROMPTS, seeds, SAMPLING)
    requests = [(PROMPTS[:3], seeds[:3]), (PROMPTS[3:], seeds[3:])]
    job = {"models": {"llama": (LLAMA, hf_weights(model))}, "width": 2, "requests": requests}
    job |= {"scored": (torch.ones(1, 3, dtype=torch.int64), torch.tensor([3])), "samplings": [SAMPLING]}
    results = ranks.run(generate, world=2, **job, page_tokens=4, kv_cache_bytes=100 * 128)
    for result, rows in zip(results, (slice(0, 15), slice(15, 25)), strict=True):
        (out,) = result["llama"]["outs"]
        assert responses(out) == responses(wanted)[rows]


def test_a_row_reads_what_was_written_for_it():
    """Whatever others share, write, move or leave behind, and no page is lost."""
    draw, size = random.Random(2), 4
    table, memory, rows = PageTable(PoolShape(12, 60, size, 10), torch.device("cpu")), {}, []

    def at(slot, position):
        return int(table.pages[slot, position // size]), position % size

    refused = 0
    for number in range(700):
        count, length, step = draw.randint(1, 3), draw.randint(1, 20), draw.random()
        if step < 0.2 and len(rows) + count <= 12 and table.free >= 5 + count:
            new = [(number, i) for i in range(length)]
            for page, start, stop in table.admit(len(rows), count, length):
                memory |= {(page, i - start): new[i] for i in range(start, stop)}
            rows += [list(new) for _ in range(count)]
        elif step < 0.8 and all(len(row) < 40 for row in rows):
            ahead = draw.choice([0, 0, 9])  # drafts need pages, too
            grows = table.grow(torch.tensor([min(39, len(row) + ahead) for row in rows], dtype=torch.int64))
            refused += not grows
            for slot, row in enumerate(rows) if grows else ():
                memory[at(slot, len(row))] = (number, slot)
                row.append((number, slot))
        elif rows:
            gap, last = draw.randrange(len(rows)), len(rows) - 1
            if draw.random() < 0.5 or gap == last:  # it swaps slots with the row that ended
                table.move([gap, last], [last, gap])
                table.drop([last])
            else:
                table.move([last], [gap])
            rows[gap] = rows[last]
            rows.pop()
        for row, pages in zip(rows, table.pages.tolist(), strict=False):
            assert [memory[pages[i // size], i % size] for i in range(len(row))] == row
        assert table.free == 59 - len(table.pages.unique()) + (0 in table.pages)
        assert 0 not in {page for page, _ in memory} and not table.pages[len(rows) :].any()
    assert refused > 20
