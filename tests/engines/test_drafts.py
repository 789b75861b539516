"""Drafts (`engine.draft_tokens`): the samples of an engine without them, from fewer decode steps."""

import random
from dataclasses import dataclass, field, replace
from functools import partial

import pytest
import torch

from aligner.engines.native.drafts import LONGEST, SHORTEST, PromptLookup
from aligner.engines.native.fleet import FleetEngine
from aligner.engines.native.graphs import DecodeGraphs
from aligner.engines.quantized import QuantizedEngine, make_quantizer
from aligner.errors import ConfigError, EngineError
from aligner.types import SamplingParams
from tests.engines import test_fleet, test_pages, test_prefixes, test_windows
from tests.engines.contract import LLAMA, PROMPTS, fill, hf_weights, reference, responses, seeds_for
from tests.engines.graph_recorder import CpuRecorder
from tests.engines.test_pages import FAMILIES, make

COUNT = 4
SAMPLING = SamplingParams(30, temperature=0.4, stop_token_ids=(3, 11))  # cold: rows repeat themselves


def agree(actual, wanted, atol=2e-5):
    """Equal tokens, reasons and experts; logprobs to the rounding of products of other sizes."""
    assert responses(actual) == responses(wanted) and torch.equal(actual.finish_reason, wanted.finish_reason)
    assert not actual.tokens[torch.arange(actual.tokens.shape[1]) >= actual.lengths[:, None]].any()
    for name in ("logprobs", "full_logprobs", "routing"):
        values = getattr(wanted, name)
        assert (values is None) == (getattr(actual, name) is None)
        if values is not None:
            torch.testing.assert_close(getattr(actual, name), values, rtol=0, atol=atol * (name != "routing"))


def saved(engine, other):
    """Every token that was accepted is one that no step had to make for its row."""
    stats = engine.stats
    assert 0 < stats.accepted_tokens < stats.drafted_tokens == COUNT * stats.drafted_rows
    assert stats.decoded_rows <= other.stats.decoded_rows - stats.accepted_tokens
    assert stats.steps <= other.stats.steps


@pytest.mark.parametrize("name", [name for name, cfg in FAMILIES.items() if not cfg.traits.linear + cfg.traits.entries])
def test_samples_are_those_without_drafts(name):
    cfg, seeds = FAMILIES[name], seeds_for(PROMPTS, 3)
    reports, page = bool(cfg.moe.num_experts), 4 * (name in ("llama", "gemma4", "deepseek_v3"))
    sampling = replace(SAMPLING, temperature=0.1) if name.startswith("gemma") else SAMPLING
    plain, engine = (make(cfg, reports=reports, page_tokens=page, draft_tokens=n) for n in (0, COUNT))
    agree(
        engine.generate(PROMPTS, seeds, sampling),
        plain.generate(PROMPTS, seeds, sampling),
        1e-5 / sampling.temperature**2,
    )
    saved(engine, plain)


SAMPLINGS = {
    "greedy": SamplingParams(40, temperature=0),
    "cuts": SamplingParams(40, temperature=0.6, top_p=0.9, top_k=20, min_p=0.02),
    "vocabulary": SamplingParams(40, temperature=0.5, vocabulary=30),
    "stop strings": SamplingParams(40, temperature=0.4, stop=("HIJ", "K", "9:")),
    "one token": SamplingParams(1),
}


@pytest.mark.parametrize("sampling", SAMPLINGS.values(), ids=SAMPLINGS)
def test_many_seeds(sampling):
    """Rows end in the middle of a draft, by their length, a token or a text."""
    outputs, engines = [], [make(LLAMA, draft_tokens=n) for n in (0, COUNT)]
    for engine in engines:
        engine._decode = test_fleet.letters
        outputs.append(engine.generate(PROMPTS, seeds_for(PROMPTS, 16), sampling))
    agree(outputs[1], outputs[0])
    assert sampling.max_response_tokens == 1 or saved(*engines[::-1]) is None


def test_quantised_weights_and_other_ones():
    """As they are after a refit, also of adapters: what follows is drafted from rows, never from weights."""
    outputs = []
    for count in (0, COUNT):
        engine = QuantizedEngine(make(LLAMA, draft_tokens=count), make_quantizer("int8", modelopt=False)[0], True)
        for seed in range(2):
            outputs.append(fill(engine, reference(LLAMA, seed)).generate(PROMPTS, seeds_for(PROMPTS, 3), SAMPLING))
    for wanted, actual in zip(outputs[:2], outputs[2:], strict=True):
        agree(actual, wanted)


@pytest.mark.parametrize("budget", [1 << 20, 130])
def test_where_pages_are_short_drafts_give_way_and_a_rerun_has_the_same_bits(budget):
    plain, engine = (make(LLAMA, page_tokens=4, kv_cache_bytes=budget * 256, draft_tokens=n) for n in (0, COUNT))
    wanted, *outputs = (e.generate(PROMPTS, seeds_for(PROMPTS, 5), SAMPLING) for e in (plain, engine, engine))
    agree(outputs[0], wanted)
    assert test_pages.same(*outputs) and engine.stats.accepted_tokens
    paused = [e.stats.paused_rows for e in (engine, plain)]
    assert paused[0] < paused[1] if budget == 130 else paused == [0, 0]


@pytest.mark.parametrize("most, widths", [(19, {1}), (20, {1, 5}), (512, {1, 5})])
def test_drafts_are_fed_while_a_step_has_few_tokens(most, widths):
    engine, fed = make(LLAMA, max_batch=most, draft_tokens=COUNT), []
    decode = engine.model.decode
    engine.model.decode = lambda tokens, *others: (fed.append(tokens.shape), decode(tokens, *others))[1]
    engine.generate(PROMPTS[:4], seeds_for(PROMPTS[:4]), replace(SAMPLING, stop_token_ids=()))
    assert {width for _, width in fed} == widths
    assert all(width == 1 or rows * width <= most for rows, width in fed)


@pytest.mark.parametrize("page, slots", [(0, 512), (4, 512), (0, 10)])
def test_windows_pause_after_the_same_tokens(page, slots):
    """Where all have slots. Those that wait for one get it after other steps."""
    seeds, results = seeds_for(PROMPTS, 3), []
    for count in (0, COUNT):
        engine = make(LLAMA, window=6, max_batch=slots, page_tokens=page, draft_tokens=count)
        sampling = replace(SAMPLING, temperature=0.0)  # all rows repeat themselves
        results.append((*test_windows.by_windows(engine, PROMPTS, seeds, sampling), engine._totals.steps))
    (tokens, logprobs, windows, steps), (actual, others, paused, fewer) = results
    assert actual == tokens and (slots == 10 or (fewer < steps and paused == windows))
    for one, other in zip(others, logprobs, strict=True):
        torch.testing.assert_close(torch.tensor(one), torch.tensor(other), rtol=0, atol=2e-5)


@dataclass
class HeardTalks(test_prefixes.Talks):
    longest: int = 50 + (test_prefixes.TURNS - 1) * (30 + 9)
    parts: dict[int, list[int]] = field(default_factory=dict)

    def heard(self, new_tokens):
        for row, tokens in new_tokens():
            self.parts.setdefault(row, []).extend(tokens)


@pytest.mark.parametrize("page", [0, 8])
def test_turns_continue_rows_that_had_drafts_and_their_tokens_are_heard_as_they_come(page, monkeypatch):
    results, pools = [], []
    monkeypatch.setattr(test_prefixes, "Talks", lambda: pools.append(HeardTalks()) or pools[-1])
    monkeypatch.setattr(test_prefixes, "SamplingParams", partial(SamplingParams, temperature=0))
    monkeypatch.setattr(test_prefixes, "SAID", 30)
    for count in (0, COUNT):
        engine = make(LLAMA, kind=FleetEngine, max_batch=40 if count else 5, page_tokens=page, draft_tokens=count)
        results.append(test_prefixes.served(engine))
        assert engine.stats.held_tokens and bool(engine.stats.accepted_tokens) == bool(count)
    for key, (tokens, logprobs) in results[0].items():
        actual, got = results[1][key]
        assert actual == tokens
        torch.testing.assert_close(got, logprobs, rtol=0, atol=3e-5)
    outputs = [results[1][key][0] for key in pools[1].taken]
    heard = [pools[1].parts.get(row, []) for row in range(len(outputs))]
    assert all(own[: len(piece)] == piece and len(piece) < len(own) for own, piece in zip(outputs, heard, strict=True))
    assert sum(map(len, heard)) > 0.5 * sum(map(len, outputs))


def test_graphs_of_steps_with_drafts():
    plain, engine = (make(LLAMA, draft_tokens=n) for n in (0, COUNT))
    engine.graphs = DecodeGraphs(engine.model, CpuRecorder(), 512)
    wanted = plain.generate(PROMPTS, seeds_for(PROMPTS, 4), SAMPLING)
    for _ in range(2):
        agree(engine.generate(PROMPTS, seeds_for(PROMPTS, 4), SAMPLING), wanted)
    assert {width for _, width, _ in engine.graphs._graphs} == {1, 1 + COUNT} and engine.graphs._record.replayed
    saved(engine, plain)


@pytest.mark.multirank
def test_ranks_of_one_engine_accept_the_same(ranks):
    model, seeds = reference(LLAMA), seeds_for(PROMPTS, 3)
    plain = fill(make(LLAMA), model)
    wanted = plain.generate(PROMPTS, seeds, SAMPLING)
    job = {"models": {"llama": (LLAMA, hf_weights(model))}, "width": 2, "requests": [(PROMPTS, seeds), ([], [])]}
    job |= {"scored": (torch.ones(1, 3, dtype=torch.int64), torch.tensor([3])), "samplings": [SAMPLING]}
    results = ranks.run(test_fleet.generate, world=2, **job, draft_tokens=COUNT, page_tokens=4)
    agree(results[0]["llama"]["outs"][0], wanted)
    assert all(result["llama"]["rows"] < plain.stats.decoded_rows for result in results)


def test_logits_that_are_not_finite_are_an_error():
    engine, weights = make(LLAMA, draft_tokens=COUNT), hf_weights(reference(LLAMA))
    engine.begin_update(7)
    engine.update_weights((name, tensor * (float("nan") if "norm" in name else 1)) for name, tensor in weights.items())
    engine.finish_update()
    with pytest.raises(EngineError, match="not finite in 5 of 5 samples"):
        engine.generate(PROMPTS, seeds_for(PROMPTS), SAMPLING)


@pytest.mark.parametrize("name", ["qwen3_next", "deepseek_v4"])
def test_states_that_cannot_go_back_are_refused(name):
    with pytest.raises(ConfigError, match=rf"engine\.draft_tokens=4: expected 0 with family {name}"):
        make(FAMILIES[name], draft_tokens=4)


def test_sums_are_of_the_calls_since_the_last_ones():
    engine = make(LLAMA, draft_tokens=COUNT)
    engine.generate(PROMPTS, seeds_for(PROMPTS, 3), SAMPLING)
    once, stats = engine.take_sums(), engine.stats
    assert once["engine/decode_passes"] == (stats.steps, 1)
    assert once["engine/draft_acceptance_rate"] == (stats.accepted_tokens, stats.drafted_tokens)
    rate, length = (n / d for n, d in list(once.values())[1:])
    assert length == pytest.approx(1 + COUNT * rate)
    for _ in range(2):
        engine.generate(PROMPTS, seeds_for(PROMPTS, 3), SAMPLING)
    assert engine.take_sums() == {
        name: (2 * n, d * (1 + (name != "engine/decode_passes"))) for name, (n, d) in once.items()
    }


def drafted(tokens: list[int], count: int) -> list[int] | None:
    """What follows the longest, then the last earlier occurrence of the last tokens."""
    for length in range(LONGEST, SHORTEST - 1, -1):
        for stop in range(len(tokens) - 1, length - 1, -1):
            if tokens[stop - length : stop] == tokens[-length:]:
                longer = list(tokens)
                while len(longer) < len(tokens) + count:
                    longer.append(longer[stop + len(longer) - len(tokens)])
                return longer[len(tokens) :]
    return None


def test_drafts_are_those_of_a_search_from_the_end():
    draw = random.Random(4)
    rows = [[draw.randrange(3) for _ in range(draw.randrange(2, 40))] for _ in range(300)]
    lookup = PromptLookup(7, len(rows), 60, torch.device("cpu"))
    lookup._tokens.random_(0, 3)  # of earlier rows, and of drafts
    for slot, row in enumerate(rows):
        lookup.add(slice(slot, slot + 1), torch.tensor(row[:-1]))
    lookup.write(torch.tensor([len(row) - 1 for row in rows]), torch.tensor([[row[-1], 1, 2] for row in rows]))
    repeats = lookup.draft(torch.tensor([len(row) - 1 for row in rows]), 45)
    wanted = [drafted(row, 7) for row in rows]
    assert repeats.tolist() == [one is not None for one in wanted] and 20 < sum(repeats.tolist()) < 300
    assert all(own is None or lookup.drafts[slot].tolist() == own for slot, own in enumerate(wanted))
    drafts = lookup.drafts[150:].clone()
    lookup.move(torch.arange(150, 300), torch.arange(150))
    assert torch.equal(lookup.drafts[:150], drafts)
    lookup.drafts.zero_()
    lookup.draft(torch.tensor([len(row) - 1 for row in rows[150:]]), 45)
    assert all(own is None or lookup.drafts[slot].tolist() == own for slot, own in enumerate(wanted[150:]))
