"""Drafts (`engine.draft_tokens`): the samples of an engine without them, from fewer decode steps."""

import atexit
import json
import random
from dataclasses import dataclass, field, replace
from functools import cache, partial
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch

from aligner.builders.draft_tokens import check_tokens
from aligner.config.sections.engine import EngineConfig
from aligner.config.sections.model.mtp import MtpConfig
from aligner.data.tokenizer import byte_tokenizer
from aligner.engines.native.ahead import AheadDrafts
from aligner.engines.native.drafts import LONGEST, SHORTEST, PromptLookup
from aligner.engines.native.fleet import FleetEngine
from aligner.engines.native.graphs import DecodeGraphs
from aligner.engines.native.load import engine_from_folder
from aligner.engines.native.sampler import uniforms
from aligner.engines.quantized import QuantizedEngine, make_quantizer
from aligner.errors import ConfigError, EngineError
from aligner.families.hf_config import hf_config
from aligner.models.safetensors_io import write_hf
from aligner.plan.linear import row_bytes
from aligner.types import SamplingParams
from tests.engines import test_fleet, test_pages, test_prefixes, test_windows
from tests.engines.contract import LLAMA, PROMPTS, hf_weights, reference, responses, seeds_for
from tests.engines.graph_recorder import CpuRecorder
from tests.engines.test_pages import FAMILIES, make
from tests.megatron.test_mtp import Oracle
from tests.tiny import MORE

COUNT = 4
HEAD = {"num_attention_heads": 4, "hidden_size": 32, "vocab_size": 53}
NAMES = "deepseek_v3", "glm4_moe", "glm4_moe_lite", "qwen3_5"
AHEAD = {f"{name}-mtp": replace(MORE[name], mtp=MtpConfig(1)) for name in NAMES}


def like_the_model(name, weight):
    """Change weights so that what follows a token depends little on those before it, and the layer for multi-token
    prediction predicts it from the token alone."""
    if name.endswith(("o_proj.weight", "out_proj.weight", "down_proj.weight")):
        return 0.4 * weight
    if name == "model.norm.weight" or name.endswith("shared_head.norm.weight"):
        return torch.ones_like(weight)
    if name.endswith(("eh_proj.weight", "mtp.fc.weight")):
        return 0.6 * torch.cat([torch.eye(len(weight)), torch.zeros_like(weight[:, len(weight) :])], 1)
    return weight * (1 + 3 * (name == "lm_head.weight" or "embed_tokens" in name))


def somewhat_like_the_model(name, weight):
    """Likewise, but drafts are often wrong in the middle of a row: states have to go back. Norms multiply by one more
    than their weight."""
    if name in ("model.norm.weight", "mtp.norm.weight"):
        return torch.zeros_like(weight)
    return like_the_model(name, weight) * (1 + name.endswith(("o_proj.weight", "out_proj.weight", "down_proj.weight")))


@cache
def drafter(noise=0.1, name="llama", vocabulary=LLAMA.vocab_size):
    """A folder of LLAMA's weights but for noise, or of another model."""
    cfg = replace(FAMILIES[name], vocab_size=vocabulary)
    folder, g = TemporaryDirectory(), torch.Generator().manual_seed(1)
    weights = weights_of(make(cfg)).items()
    noisy = ((name, w + 0.15 * noise * torch.randn(w.shape, generator=g)) for name, w in weights)
    write_hf(Path(folder.name, "hf"), noisy, hf_config(cfg, bos_token_id=None, eos_token_id=None, pad_token_id=0))
    atexit.register(folder.cleanup)
    return folder.name


def with_a_model(draft_tokens=0, folder=drafter, **options):
    return make(LLAMA, draft_tokens=draft_tokens, draft_model=folder() * bool(draft_tokens), **options)


# by source: an engine that drafts from it, or without `draft_tokens` one with the same weights
SOURCES = {"lookup": partial(make, LLAMA), "mtp": partial(make, AHEAD["glm4_moe-mtp"], change=like_the_model)}
SOURCES["model"] = with_a_model
from_each = pytest.mark.parametrize("engine_of", SOURCES.values(), ids=SOURCES)
STATES = {"mtp": partial(make, AHEAD["qwen3_5-mtp"], change=somewhat_like_the_model)}
or_with_states = [*SOURCES.values(), pytest.param(STATES["mtp"], id="mtp, states")]
or_with_states = pytest.mark.parametrize("engine_of", or_with_states, ids=[*SOURCES, None])
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


def weights_of(engine):
    shapes = engine.model.shapes
    return {name: view.clone().reshape(shapes[name]) for name, view in engine.model.views.items()}


GOING_BACK = {name: cfg for name, cfg in FAMILIES.items() if not cfg.traits.entries} | AHEAD
GOING_BACK["nemotron_h"] = MORE["nemotron_h-dense"]


@pytest.mark.parametrize("name", GOING_BACK)
def test_samples_are_those_without_drafts(name):
    cfg, seeds = GOING_BACK[name], seeds_for(PROMPTS, 3)
    reports, page = bool(cfg.moe.num_experts), 4 * (name in ("llama", "gemma4", "deepseek_v3", *AHEAD))
    change = somewhat_like_the_model if name == "qwen3_5-mtp" else like_the_model
    make = partial(test_pages.make, change=change) if cfg.mtp.layers or cfg.traits.linear else test_pages.make
    sampling = replace(SAMPLING, temperature=0.1) if name.startswith("gemma") else SAMPLING
    plain, engine = (make(cfg, reports=reports, page_tokens=page, draft_tokens=n) for n in (0, COUNT))
    agree(
        engine.generate(PROMPTS, seeds, sampling),
        plain.generate(PROMPTS, seeds, sampling),
        1e-5 / sampling.temperature**2,
    )
    saved(engine, plain)
    assert not cfg.traits.linear or engine.cache.row_bytes == row_bytes(cfg, COUNT)
    if cfg.mtp.layers:  # drafts do not depend on pages, either, which samples of a prompt share
        whole = make(cfg, reports=reports, draft_tokens=COUNT)
        whole.generate(PROMPTS, seeds, sampling)
        assert replace(whole.stats, cache_usage=0) == replace(engine.stats, cache_usage=0)


SAMPLINGS = {
    "greedy": SamplingParams(40, temperature=0),
    "cuts": SamplingParams(40, temperature=0.6, top_p=0.9, top_k=20, min_p=0.02),
    "vocabulary": SamplingParams(40, temperature=0.5, vocabulary=30),
    "stop strings": SamplingParams(40, temperature=0.4, stop=("HIJ", "K", "9:")),
    "one token": SamplingParams(1),
}


@pytest.mark.parametrize(
    "source, kind", [*product(["lookup"], SAMPLINGS), *product(["mtp", "model"], ["cuts", "stop strings"])]
)
def test_many_seeds(source, kind):
    """Rows end in the middle of a draft, by their length, a token or a text."""
    sampling, engine_of = SAMPLINGS[kind], SOURCES[source]
    outputs, engines = [], [engine_of(draft_tokens=n) for n in (0, COUNT)]
    for engine in engines:
        engine._decode = test_fleet.letters
        outputs.append(engine.generate(PROMPTS, seeds_for(PROMPTS, 16), sampling))
    agree(outputs[1], outputs[0])
    assert sampling.max_response_tokens == 1 or saved(*engines[::-1]) is None


@or_with_states
def test_quantised_weights_and_other_ones(engine_of):
    """As they are after a refit, also of adapters."""
    outputs, weights = [], weights_of(engine_of())
    for count in (0, COUNT):
        engine = QuantizedEngine(engine_of(draft_tokens=count), make_quantizer("int8", modelopt=False)[0], True)
        for factor in (1, 1.3):
            engine.begin_update(7)
            engine.update_weights((name, factor * weight) for name, weight in weights.items())
            engine.finish_update()
            outputs.append(engine.generate(PROMPTS, seeds_for(PROMPTS, 3), SAMPLING))
    for wanted, actual in zip(outputs[:2], outputs[2:], strict=True):
        agree(actual, wanted)


@from_each
@pytest.mark.parametrize("budget", [1 << 20, 130])
def test_where_pages_are_short_drafts_give_way_and_a_rerun_has_the_same_bits(budget, engine_of):
    each = [{"page_tokens": 4, "draft_tokens": n} for n in (0, COUNT)]
    sizes = [budget * engine_of(**options).cache.token_bytes for options in each]
    plain, engine = (engine_of(**options, kv_cache_bytes=size) for options, size in zip(each, sizes, strict=True))
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


@or_with_states
@pytest.mark.parametrize("page, slots", [(0, 512), (4, 512), (0, 10)])
def test_windows_pause_after_the_same_tokens(page, slots, engine_of):
    """Where all have slots. Those that wait for one get it after other steps."""
    seeds, results = seeds_for(PROMPTS, 3), []
    for count in (0, COUNT):
        engine = engine_of(window=6, max_batch=slots, page_tokens=page, draft_tokens=count)
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


@or_with_states
@pytest.mark.parametrize("page", [0, 8])
def test_turns_continue_rows_that_had_drafts_and_their_tokens_are_heard_as_they_come(page, engine_of, monkeypatch):
    results, pools = [], []
    monkeypatch.setattr(test_prefixes, "Talks", lambda: pools.append(HeardTalks()) or pools[-1])
    monkeypatch.setattr(test_prefixes, "SamplingParams", partial(SamplingParams, temperature=0))
    monkeypatch.setattr(test_prefixes, "SAID", 30)
    for count in (0, COUNT):
        engine = engine_of(kind=FleetEngine, max_batch=40 if count else 5, page_tokens=page, draft_tokens=count)
        results.append(test_prefixes.served(engine))
        assert bool(engine.stats.held_tokens) == engine.keeps_rows and bool(engine.stats.accepted_tokens) == bool(count)
    for key, (tokens, logprobs) in results[0].items():
        actual, got = results[1][key]
        assert actual == tokens
        torch.testing.assert_close(got, logprobs, rtol=0, atol=3e-5)
    outputs = [results[1][key][0] for key in pools[1].taken]
    heard = [pools[1].parts.get(row, []) for row in range(len(outputs))]
    assert all(own[: len(piece)] == piece and len(piece) < len(own) for own, piece in zip(outputs, heard, strict=True))
    assert sum(map(len, heard)) > 0.5 * sum(map(len, outputs))


@pytest.mark.parametrize("source, of", [("lookup", SOURCES), ("model", SOURCES), ("mtp", STATES)])
def test_graphs_of_steps_with_drafts(source, of):
    """Also of what states do afterwards."""
    plain, engine = (of[source](draft_tokens=n) for n in (0, COUNT))
    engine.graphs = DecodeGraphs(engine.model, CpuRecorder(), 512)
    if source == "model":
        engine.drafter.graphs = DecodeGraphs(engine.drafter.model, CpuRecorder(), 512)
    wanted = plain.generate(PROMPTS, seeds_for(PROMPTS, 4), SAMPLING)
    for _ in range(2):
        agree(engine.generate(PROMPTS, seeds_for(PROMPTS, 4), SAMPLING), wanted)
    assert {width for _, width, _ in engine.graphs._graphs} >= {1 + COUNT}
    assert any(not reach for *_, reach in engine.graphs._graphs) == bool(engine.model.linear)
    if source == "model":
        assert {width for _, width, _ in engine.drafter.graphs._graphs} == {1, 2}
        assert engine.drafter.graphs._record.replayed
    assert engine.graphs._record.replayed
    saved(engine, plain)


@pytest.mark.parametrize("cfg", [MORE["deepseek_v3"], MORE["glm4_moe"]], ids=["deepseek_v3", "glm4_moe"])
def test_the_models_layer_drafts_what_its_formula_draws(cfg, tmp_path, monkeypatch):
    """Against transformers' layers in float64: its own output behind the model's hidden states, one draft after the
    other, of every step; greedy, and drawn with the numbers of the tokens to come."""
    oracle, draft, drafted = Oracle(cfg), AheadDrafts.draft, {}
    with torch.no_grad():
        for name, p in oracle.whole.named_parameters():
            p *= 0.3 if "o_proj" in name or "down_proj" in name else 1
        oracle.own["norm"].copy_(oracle.whole.model.norm.weight)
        oracle.own["eh_proj"][:, : cfg.hidden_size] += 2 * torch.eye(cfg.hidden_size)

    def noted(self, last, longest, seeds, counts):
        repeats = draft(self, last, longest, seeds, counts)
        drafted.update(zip(zip(seeds.tolist(), counts.tolist(), strict=True), self.drafts.tolist(), strict=False))
        return repeats

    monkeypatch.setattr(AheadDrafts, "draft", noted)
    write_hf(tmp_path / "hf", oracle.tensors().items(), oracle.raw)
    plain, engine = (
        engine_from_folder(tmp_path / "hf", config, device="cpu", dtype=torch.float32, pad_id=0)
        for config in (EngineConfig(), EngineConfig(draft_tokens=3, page_tokens=4))
    )
    assert plain.weight_bytes < engine.weight_bytes and plain.cache.token_bytes < engine.cache.token_bytes
    prompts = PROMPTS[1:3]  # the second fills two pages, which its samples share
    seeds = seeds_for(prompts, 2)
    for temperature in (0, 0.8):
        out = engine.generate(prompts, seeds, SamplingParams(12, temperature=temperature))
        assert engine.stats.accepted_tokens
        asked = [(seed, prompt) for prompt, own in zip(prompts, seeds, strict=True) for seed in own]
        rows = {seed: (prompt, own) for (seed, prompt), own in zip(asked, responses(out), strict=True)}
        assert len(drafted) > 3 * len(rows)
        for (seed, count), tokens in drafted.items():
            prompt, own = rows[seed]
            assert tokens == drawn(oracle, [*prompt, *own[:count]], seed, count, temperature), (seed, count)
        drafted.clear()


@torch.no_grad()
def drawn(oracle, tokens, seed, count, temperature):
    embed, out = oracle.whole.model.embed_tokens, []
    h, e = oracle.hidden(torch.tensor([tokens[:-1]])), embed(torch.tensor([tokens[1:]]))
    for ahead in range(3):
        x = oracle.ahead(h, e)[:, -1:]
        logits = x[0, 0] @ oracle.whole.lm_head.weight.T
        if temperature:
            u = uniforms(torch.tensor([seed]), torch.tensor([count + ahead]))
            out.append(int((torch.softmax(logits / temperature, 0).cumsum(0) > u).int().argmax()))
        else:
            out.append(int(logits.argmax()))
        h, e = torch.cat([h, x], 1), torch.cat([e, embed(torch.tensor([out[-1:]]))], 1)
    return out


@pytest.mark.multirank
def test_ranks_of_one_engine_accept_the_same(ranks):
    sources = SOURCES | {"states": STATES["mtp"]}
    plain, seeds = {name: engine_of() for name, engine_of in sources.items()}, seeds_for(PROMPTS, 3)
    models = {name: (engine.model.cfg, weights_of(engine), {}) for name, engine in plain.items()}
    models["model"][2]["draft_model"] = drafter()
    job = {"models": models, "width": 2, "requests": [(PROMPTS, seeds), ([], [])]}
    job |= {"scored": (torch.ones(1, 3, dtype=torch.int64), torch.tensor([3])), "samplings": [SAMPLING]}
    results = ranks.run(test_fleet.generate, world=2, **job, draft_tokens=COUNT, page_tokens=4)
    for name, engine in plain.items():
        agree(results[0][name]["outs"][0], engine.generate(PROMPTS, seeds, SAMPLING))
        assert all(result[name]["rows"] < engine.stats.decoded_rows for result in results)
        assert all(result[name]["checksums"] == engine.checksums() for result in results)


@pytest.mark.parametrize("options", [{}, {"page_tokens": 4}, {"max_batch": 80}, {"window": 6}, {"kv_cache_bytes": 140}])
def test_a_model_like_the_own_drafts_what_is_kept(options):
    """All drafts but those behind the end of a row, or of its window: its keys and values are those of the row,
    whatever slots it had."""
    same, seeds = partial(with_a_model, folder=partial(drafter, 0.0), draft_tokens=COUNT), seeds_for(PROMPTS, 4)
    if "kv_cache_bytes" in options:
        options = {"page_tokens": 4, "kv_cache_bytes": 140 * same().cache.token_bytes}
    engine, sampling = same(**options), replace(SAMPLING, stop_token_ids=(1, 3, 11, 20))
    if "window" in options:
        ends = 5 * len(PROMPTS) * 4
        test_windows.by_windows(engine, PROMPTS, seeds, sampling)
    else:
        ends = engine.generate(PROMPTS, seeds, sampling).tokens.shape[0] + engine.stats.paused_rows
    totals = engine._totals
    assert totals.accepted_tokens >= totals.drafted_tokens - COUNT * ends and totals.accepted_tokens > 20, totals
    assert bool(totals.paused_rows) == ("kv_cache_bytes" in options)


@pytest.mark.parametrize("own, name, vocabulary", [("mixtral", "gemma4", 60), ("qwen3_next", "deepseek_v3", 40)])
def test_any_model_drafts_for_one_with_experts_whose_routes_are_reported(own, name, vocabulary):
    """Its heads, its keys, and the padding of its vocabulary are its own."""
    folder = drafter(0.0, name, vocabulary)
    plain, engine = (
        make(FAMILIES[own], reports=True, page_tokens=4, draft_tokens=n, draft_model=folder * bool(n))
        for n in (0, COUNT)
    )
    outputs = [each.generate(PROMPTS, seeds_for(PROMPTS, 3), SAMPLING) for each in (engine, plain)]
    agree(*outputs)
    assert engine.stats.drafted_tokens and engine.cache.token_bytes > plain.cache.token_bytes
    assert engine.held_bytes()["weights"] > plain.held_bytes()["weights"]


def test_models_that_cannot_draft_are_refused(tmp_path):
    for folder, expected in (
        (str(tmp_path), r"expected a Hugging Face folder"),
        (drafter(0.0, "qwen3_next"), r"expected a model whose states can go back .*, not of family qwen3_next"),
    ):
        with pytest.raises(ConfigError, match=rf"^engine\.draft_model='[\w/-]*': {expected}"):
            make(LLAMA, draft_tokens=4, draft_model=folder)
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLMEagle3"]} | HEAD))
    with pytest.raises(
        ConfigError, match=r"a whole language model\. engine\.name=vllm drafts with LlamaForCausalLMEagle3"
    ):
        make(LLAMA, draft_tokens=4, draft_model=str(tmp_path))
    check_tokens(str(tmp_path), None, heads=True)  # which have no tokenizer of their own
    own, other = byte_tokenizer(str(tmp_path)), byte_tokenizer(f"{drafter()}/hf")
    check_tokens(drafter(), own)
    other.add_tokens(["word"])
    other.save_pretrained(f"{drafter()}/hf")
    with pytest.raises(ConfigError, match=r"the same tokenizer: drafts are its tokens\. .* tokens there, .* here"):
        check_tokens(drafter(), own)


def test_logits_that_are_not_finite_are_an_error():
    engine, weights = make(LLAMA, draft_tokens=COUNT), hf_weights(reference(LLAMA))
    engine.begin_update(7)
    engine.update_weights((name, tensor * (float("nan") if "norm" in name else 1)) for name, tensor in weights.items())
    engine.finish_update()
    with pytest.raises(EngineError, match="not finite in 5 of 5 samples"):
        engine.generate(PROMPTS, seeds_for(PROMPTS), SAMPLING)


def test_entries_that_cannot_go_back_are_refused():
    with pytest.raises(ConfigError, match=r"engine\.draft_tokens=4: expected 0 with family deepseek_v4"):
        make(FAMILIES["deepseek_v4"], draft_tokens=4)


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
