"""The native engine: the contract, and what is its own (cache, scheduler, sampler)."""

import contextlib
import math
import random
from dataclasses import replace

import pytest
import torch
from transformers.generation import logits_process as lp

from aligner.config.sections.engine import EngineConfig
from aligner.engines.native import NativeEngine, packs
from aligner.engines.native.cache import SlotCache
from aligner.engines.native.pages import PoolShape
from aligner.engines.native.sampler import cut_logits, sample, uniforms
from aligner.engines.native.scratch import Scratch
from aligner.errors import ConfigError, EngineError, RefitError
from aligner.ops.kernels.scored_attention import ScoreRule
from aligner.types import STOP, SamplingParams
from tests import linear_stand_in
from tests.engines.contract import (
    LLAMA,
    MODELS,
    PROMPTS,
    EngineContract,
    check_greedy,
    check_logprobs,
    fill,
    hf_weights,
    reference,
    responses,
    seeds_for,
)
from tests.tiny import MORE


def make_engine(cfg, decode=None, dtype=torch.float32, device="cpu", **engine_config):
    return NativeEngine(cfg, EngineConfig(**engine_config), device=device, dtype=dtype, pad_id=0, decode=decode)


class TestNativeEngine(EngineContract):
    make_engine = staticmethod(make_engine)


@pytest.mark.parametrize("name", MORE)
def test_more_families_equal_transformers(name):
    """Greedy tokens and logprobs, of prompts longer than windows and original contexts."""
    cfg = MORE[name]
    model, prompts = reference(cfg), [[3 + (7 * i * i + j) % 97 for i in range(17 + 4 * j)] for j in range(3)]
    engine = fill(make_engine(cfg), model)
    out = engine.generate(prompts, seeds_for(prompts), SamplingParams(20, temperature=0))
    check_greedy(model, prompts, 20, out)
    check_logprobs(model, prompts, 1, out)


@pytest.mark.parametrize("name, rule", [("qwen3_next", "gated_delta_rule"), ("nemotron_h", "simple_gla")])
@torch.inference_mode()
def test_the_package_of_linear_attention_changes_nothing(name, rule):
    cfg, sampling = MORE[name], SamplingParams(9, stop_token_ids=(3, 11))
    model, wanted = reference(cfg), None
    for context in (contextlib.nullcontext(()), linear_stand_in.in_place()):
        with context as calls:
            engine = fill(make_engine(cfg), model)
            out = engine.generate(PROMPTS, seeds_for(PROMPTS, 3), sampling)
        wanted = wanted or responses(out)
        assert responses(out) == wanted
    steps = {"fused_recurrent_gated_delta_rule"} if name == "qwen3_next" else set()
    assert set(calls) == {"causal_conv1d", f"chunk_{rule}"} | steps


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
class TestNativeEngineOnCuda(EngineContract):
    @staticmethod
    def make_engine(cfg, decode=None, **engine_config):
        return make_engine(cfg, decode, device="cuda", **engine_config)


@pytest.mark.parametrize("max_batch", [5, 512])
def test_no_finished_row_is_decoded_and_each_prompt_is_prefilled_once(max_batch):
    engine = fill(make_engine(LLAMA, max_batch=max_batch), reference(LLAMA))
    out = engine.generate(PROMPTS, seeds_for(PROMPTS, 12), SamplingParams(15, stop_token_ids=(3, 11, 20, 30)))
    assert len(set(out.lengths.tolist())) > 4
    assert engine.stats.decoded_rows == int((out.lengths - 1).sum())
    assert engine.stats.prefilled_prompts == len(PROMPTS)
    assert engine.stats.steps <= (15 if max_batch == 512 else out.lengths.sum())


SAMPLINGS = [SamplingParams(9), SamplingParams(9, temperature=0), SamplingParams(9, top_p=0.9, top_k=7, min_p=0.01)]


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=["plain", "greedy", "cut"])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_logits_that_are_not_finite_are_an_error_of_their_weights(sampling, value):
    """Of one token's embedding: samples of the prompts that hold it end at once, the others are whole."""
    cfg = MODELS["qwen3"]  # whose logits have other weights than its embedding
    engine = make_engine(cfg)
    weights = {name: tensor.clone() for name, tensor in reference(cfg).state_dict().items()}
    weights["model.embed_tokens.weight"][cfg.vocab_size - 1] = value
    engine.begin_update(7)
    engine.update_weights(weights.items())
    engine.finish_update()
    prompts = [[5, cfg.vocab_size - 1, 6], [5, 6, 7, 8]]
    with pytest.raises(EngineError, match=r"weight version 7: the engine's logits are not finite in 3 of \d samples"):
        engine.generate(prompts[:1], seeds_for(prompts[:1], 3), sampling)
    assert engine.stats.steps == 1
    with pytest.raises(EngineError, match="in 2 of 4 samples"):
        engine.generate(prompts, seeds_for(prompts, 2), replace(sampling, max_response_tokens=1))


@pytest.mark.parametrize("max_batch", [5, 512])
def test_samples_are_reported_as_they_end(max_batch):
    """Each once, as it is returned, those that end first before the others."""
    engine, messages = fill(make_engine(LLAMA, max_batch=max_batch), reference(LLAMA)), []
    steps = engine.stats.steps
    engine.finished = lambda *about: messages.append((*about, engine.stats.steps))
    seeds = [[7 * i + j for j in range(1 + i)] for i in range(len(PROMPTS))]
    out = engine.generate(PROMPTS, seeds, SamplingParams(15, stop_token_ids=(3, 11, 20, 30)))
    rows = [(prompt, sample) for prompt, own in enumerate(seeds) for sample in range(len(own))]
    reasons = (out.finish_reason == STOP).tolist()
    assert len(set(reasons)) == 2
    logprobs = [row[:n] for row, n in zip(out.logprobs.tolist(), out.lengths.tolist(), strict=True)]
    wanted = [(*row, *about) for row, *about in zip(rows, responses(out), logprobs, reasons, strict=True)]
    assert sorted(about[:5] for about in messages) == sorted(wanted)
    when = [about[5] for about in messages]
    assert when == sorted(when) and len(set(when)) > 4 and when[0] < engine.stats.steps > steps
    engine.finished = None
    engine.generate(PROMPTS, seeds, SamplingParams(3))
    assert len(messages) == len(rows)


@pytest.mark.slow
def test_small_budgets_give_the_same_tokens():
    """Few slots, several prefills, groups that get slots in parts, moved rows."""
    model, sampling = reference(LLAMA), SamplingParams(10, stop_token_ids=(3, 11))
    prompts = [PROMPTS[i % 5] for i in range(30)]
    wanted = responses(fill(make_engine(LLAMA), model).generate(prompts, seeds_for(prompts, 3), sampling))
    position = 256
    for budget in (25, 45, 90, 200):
        engine = fill(make_engine(LLAMA, kv_cache_bytes=budget * position), model)
        assert responses(engine.generate(prompts, seeds_for(prompts, 3), sampling)) == wanted
        held = engine.cache.kv.nbytes + engine.cache.staged.nbytes
        assert held <= budget * position


@pytest.mark.slow
def test_rows_with_memories_stay_within_small_budgets():
    """What linear layers remember goes with its row: prefilled, admitted, moved."""
    cfg, sampling = MORE["qwen3_next"], SamplingParams(10, stop_token_ids=(3, 11))
    model, prompts = reference(cfg), [PROMPTS[i % 5] for i in range(10)]
    ample = fill(make_engine(cfg), model)
    wanted = responses(ample.generate(prompts, seeds_for(prompts, 3), sampling))
    position, row = ample.cache.token_bytes, ample.cache.row_bytes
    assert row == 4 * (8 * 8 * 6 + 3 * 4 * (2 * 8 + 2 * 6))
    for rows in (2, 5, 17):
        budget = rows * (20 * position + row)
        engine = fill(make_engine(cfg, kv_cache_bytes=budget), model)
        for _ in range(2):
            assert responses(engine.generate(prompts, seeds_for(prompts, 3), sampling)) == wanted
            assert engine.held_bytes()["cache"] <= budget
    with pytest.raises(ConfigError, match="kv_cache_bytes"):
        fill(make_engine(cfg, kv_cache_bytes=row + 20 * position), model).generate([[1] * 9], [[0]], sampling)


def test_the_cache_stays_within_its_budget_over_generations(monkeypatch):
    """What one generation has left for its slots may not add up with what the next one takes for its prompts."""
    budget, held, replaced = 60 * 256, [], Scratch.take

    def take(self, name, *shape):
        out = replaced(self, name, *shape)
        if self is engine.cache._scratch:
            storages = [t.untyped_storage() for t in (engine.cache.kv, engine.cache.staged, out)]
            held.append(max(self.held_bytes, sum({s.data_ptr(): s.nbytes() for s in storages}.values())))
        return out

    engine = fill(make_engine(LLAMA, kv_cache_bytes=budget), reference(LLAMA))
    monkeypatch.setattr(Scratch, "take", take)
    rng = random.Random(3)  # long slots first, then prompts that are long
    for _ in range(10):
        prompts = [[5] * rng.choice((1, 2, 12, 20)) for _ in range(rng.choice((1, 3, 9)))]
        engine.generate(prompts, seeds_for(prompts, rng.choice((1, 4))), SamplingParams(rng.choice((1, 3, 18))))
        assert 0 < engine.held_bytes()["cache"] <= budget
        if rng.random() < 0.2:
            engine.sleep()
            assert engine.held_bytes()["cache"] == engine.held_bytes()["scratch"] == 0
            engine.wake()
    assert 0.9 * budget < max(held) <= budget


def test_a_sleeping_engine_does_not_generate():
    engine = fill(make_engine(LLAMA), reference(LLAMA))
    weights = engine.held_bytes()["weights"]
    assert weights == sum(view.numel() * 4 for view in engine.model.views.values())
    engine.sleep()
    engine.sleep()
    with pytest.raises(AssertionError, match="sleeping"):
        engine.generate([[1]], [[0]], SamplingParams(1))
    fill(engine, reference(LLAMA, 1), 2)  # an update does not wait for the cache
    engine.wake()
    assert engine.generate([[1]], [[0]], SamplingParams(1)).weight_version == 2
    assert engine.held_bytes()["weights"] == weights


@pytest.mark.parametrize("packed", [False, True])
def test_weights_released_in_sleep_come_with_the_next_update(packed, monkeypatch):
    """Into memory that a refit has views of. What no update writes is as it was."""
    monkeypatch.setattr(packs, "worth_packing", lambda matrix: packed)
    engine = make_engine(LLAMA)
    assert not engine.held_bytes()["weights"]
    fill(engine, reference(LLAMA))
    weights, views = engine.weight_bytes, dict(engine.model.views)
    engine.generate(PROMPTS, seeds_for(PROMPTS), SamplingParams(3))
    engine.sleep()
    assert engine.weight_version == 1
    engine.sleep(weights=True)
    engine.sleep(weights=True)
    assert engine.held_bytes() == {"weights": 0, "cache": 0, "scratch": 0} and engine.weight_version == -1
    engine.wake()
    with pytest.raises(RefitError, match="no complete weights"):
        engine.generate([[1]], [[0]], SamplingParams(1))
    model = reference(LLAMA, 1)
    engine.begin_update(2)
    assert engine.held_bytes()["weights"] == weights and not any(view.any() for view in views.values())
    engine.update_weights(hf_weights(model).items())
    engine.finish_update()
    for name, tensor in hf_weights(model).items():
        assert torch.equal(views[name].reshape(tensor.shape), tensor), name
    check_logprobs(model, PROMPTS, 1, engine.generate(PROMPTS, seeds_for(PROMPTS), SamplingParams(4)))


@pytest.mark.parametrize("name", MODELS)
def test_bfloat16_is_near_float32(name):
    model = reference(MODELS[name])
    engine = fill(make_engine(MODELS[name], dtype=torch.bfloat16), model)
    out = engine.generate(PROMPTS, seeds_for(PROMPTS, 4), SamplingParams(20))
    exact = fill(make_engine(MODELS[name]), model.to(torch.bfloat16).float())
    rows = [list(PROMPTS[i // 4]) + r for i, r in enumerate(responses(out))]
    width = max(map(len, rows))
    tokens = torch.tensor([r + [0] * (width - len(r)) for r in rows])
    scored = exact.logprobs(tokens, torch.tensor([len(r) for r in rows]))
    for i, row in enumerate(rows):
        gap = (scored[i, len(row) - 20 : len(row)] - out.logprobs[i]).abs()
        assert gap.mean() < 0.05, (i, gap)


def test_cache_moves_only_what_it_says():
    cache = SlotCache(2, 3, 4, torch.device("cpu"), torch.float32)
    cache.resize(PoolShape(5, 5, 6))
    cache.kv.copy_(torch.randn(cache.kv.shape))
    before = cache.kv.clone()
    cache.move(torch.tensor([4, 3]), torch.tensor([0, 2]), 5)
    assert torch.equal(cache.kv[:, :, [0, 2], :, :5], before[:, :, [4, 3], :, :5])
    assert torch.equal(cache.kv[:, :, [1, 3, 4]], before[:, :, [1, 3, 4]])
    assert torch.equal(cache.kv[..., 5, :], before[..., 5, :])


def test_memory_is_given_back():
    engine = fill(make_engine(LLAMA), reference(LLAMA))
    engine.generate(PROMPTS, seeds_for(PROMPTS), SamplingParams(6))
    engine.sleep()
    assert engine.cache.kv.numel() == engine.cache.staged.numel() == 0
    with pytest.raises(AssertionError, match="wake"):
        engine.generate([[1]], [[0]], SamplingParams(1))
    engine.close()
    assert not engine.model.views


def test_cache_writes_one_position_per_slot():
    cache = SlotCache(2, 3, 4, torch.device("cpu"), torch.float32)
    cache.resize(PoolShape(5, 5, 6))
    wanted, new, positions = cache.kv.clone(), torch.randn(4, 6, 4), torch.tensor([5, 0, 2, 2])
    cache.write(1, cache.places(positions), new)
    for slot, position in enumerate(positions.tolist()):
        wanted[1, 0, slot, :, position], wanted[1, 1, slot, :, position] = new[slot, :3], new[slot, 3:]
    assert torch.equal(cache.kv, wanted)


# ---- sampler


def chi_square(counts, probs):
    expected = probs * counts.sum()
    keep = expected > 5
    assert not counts[probs == 0].any()
    statistic = ((counts - expected)[keep] ** 2 / expected[keep]).sum().item()
    freedom = int(keep.sum()) - 1
    return (statistic - freedom) / math.sqrt(2 * freedom)  # about standard normal


@pytest.mark.parametrize(
    "sampling",
    [
        SamplingParams(1),
        SamplingParams(1, temperature=0.5),
        SamplingParams(1, top_k=4),
        SamplingParams(1, temperature=1.5, top_p=0.8, min_p=0.05),
    ],
)
def test_samples_follow_the_distribution(sampling):
    logits = torch.randn(20, generator=torch.Generator().manual_seed(0)) * 1.5
    logits[3] = -math.inf
    n = 40_000
    for seeds, positions in (
        (torch.arange(n), torch.zeros(n, dtype=torch.int64)),  # neighbouring seeds
        (torch.full((n,), 12345), torch.arange(n)),  # one seed, neighbouring positions
    ):
        picked = sample(logits.repeat(n, 1), seeds, positions, sampling)
        probs = warped(logits[None] / sampling.temperature, sampling).softmax(-1)[0]
        counts = torch.bincount(picked.tokens, minlength=20).float()
        assert chi_square(counts, probs) < 4
        assert torch.allclose(picked.logprobs, probs.log()[picked.tokens], atol=1e-5)


def test_uniforms_are_uniform_and_uncorrelated():
    seeds, positions = torch.arange(300).repeat_interleave(100), torch.arange(100).repeat(300)
    u = uniforms(seeds, positions).view(300, 100)
    assert (u >= 0).all() and (u < 1).all() and len(u.unique()) == u.numel()
    assert chi_square(torch.histc(u.float(), 50, 0, 1), torch.full((50,), 1 / 50)) < 4
    centred = u - 0.5
    for other in (centred.roll(1, 0), centred.roll(1, 1), centred.roll((1, -1), (0, 1))):
        assert abs((centred * other).mean().item()) * 12 * math.sqrt(u.numel()) < 5


def warped(logits, sampling):
    if sampling.top_k:
        logits = lp.TopKLogitsWarper(sampling.top_k)(None, logits)
    if sampling.top_p < 1:
        logits = lp.TopPLogitsWarper(sampling.top_p)(None, logits)
    if sampling.min_p:
        logits = lp.MinPLogitsWarper(sampling.min_p)(None, logits)
    return logits


@pytest.mark.parametrize("top_k", [0, 1, 7, 500])
@pytest.mark.parametrize("top_p", [1.0, 0.9, 0.3, 1e-6])
@pytest.mark.parametrize("min_p", [0.0, 0.05, 1.0])
def test_cuts_equal_transformers(top_k, top_p, min_p):
    logits = torch.randn(64, 100, generator=torch.Generator().manual_seed(1)) * 3
    sampling = SamplingParams(1, top_k=top_k, top_p=top_p, min_p=min_p)
    assert torch.equal(cut_logits(logits, sampling), warped(logits, sampling))


def test_large_batches_of_logits_are_done_in_parts(monkeypatch):
    logits, rows = torch.randn(50, 30), torch.arange(50)
    sampling = SamplingParams(1, top_p=0.9)
    whole = sample(logits.clone(), rows, rows, sampling)
    monkeypatch.setattr("aligner.engines.native.sampler._LOGIT_ELEMENTS", 200)
    parts = sample(logits.clone(), rows, rows, sampling)
    assert all(torch.equal(a, b) for a, b in zip(whole, parts, strict=True))


def test_attention_in_parts_and_both_ways(monkeypatch):
    from aligner.engines.native import attention

    scratch = Scratch(torch.device("cpu"), torch.float32)
    q, k, v = torch.randn(9, 4, 8), torch.randn(9, 2, 12, 8), torch.randn(9, 2, 12, 8)
    lengths = torch.randint(1, 13, (9,))
    mask = torch.zeros(9, 12).masked_fill(torch.arange(12) >= lengths[:, None], -math.inf)[:, None, None]
    wanted = torch.zeros(9, 4, 8)
    for i in range(9):
        for h in range(4):
            keys, values = k[i, h // 2, : lengths[i]], v[i, h // 2, : lengths[i]]
            wanted[i, h] = (keys @ q[i, h] / math.sqrt(8)).softmax(0) @ values
    monkeypatch.setattr(attention, "_PRODUCT_ELEMENTS", 1000)
    for short in (16, 0):
        monkeypatch.setattr(attention, "_SHORT", short)
        got = attention.decode_attention(q, k, v, mask, scratch, ScoreRule())
        assert torch.allclose(got.view(9, 4, 8), wanted, atol=1e-5)
    scratch = Scratch(torch.device("cpu"), torch.bfloat16)
    for short in (16, 0):
        monkeypatch.setattr(attention, "_SHORT_BF16", short)
        got = attention.decode_attention(q.bfloat16(), k.bfloat16(), v.bfloat16(), mask, scratch, ScoreRule())
        assert torch.allclose(got.view(9, 4, 8).float(), wanted, atol=0.05)


@pytest.mark.parametrize("cut", [{}, {"temperature": 0.0}, {"temperature": 1.3}, {"top_k": 5}, {"top_p": 0.9}])
def test_ids_beyond_the_tokenizer_are_never_sampled_and_logprobs_are_of_all(cut):
    """Most of the mass lies there; without cuts the logprobs still are the trainer's."""
    g = torch.Generator().manual_seed(3)
    logits = torch.randn(400, 12, generator=g)
    logits[:, 9:] += 4
    sampling = SamplingParams(9, vocabulary=9, **cut)
    actual = sample(logits.clone(), torch.arange(400), torch.zeros(400, dtype=torch.int64), sampling)
    assert int(actual.tokens.max()) == 8
    wanted = (logits / (sampling.temperature or 1)).log_softmax(-1).gather(1, actual.tokens[:, None])[:, 0]
    of_all = actual.logprobs if actual.full_logprobs is None else actual.full_logprobs
    assert torch.allclose(of_all, wanted, atol=1e-5)
