"""Generation by windows (`engine.window`): with weights that stay, the samples are those of one generation."""

import pytest
import torch

from aligner.config.sections.engine import EngineConfig
from aligner.engines.native import NativeEngine
from aligner.errors import ConfigError
from aligner.types import STOP, SamplingParams
from tests.engines.contract import LLAMA, MODELS, PROMPTS, fill, reference, responses
from tests.tiny import MORE

LIMIT = 15


def make_engine(cfg, window, decode=None, **settings):
    config = EngineConfig(window=window, **settings)
    engine = NativeEngine(cfg, config, device="cpu", dtype=torch.float32, pad_id=0, decode=decode)
    return fill(engine, reference(cfg))


def by_windows(engine, prompts, seeds, sampling):
    """(tokens, logprobs) of every sample, and of each window who had a slot: (sample, tokens before, tokens after)."""
    samples = [(list(p), s) for p, own in zip(prompts, seeds, strict=True) for s in own]
    tokens, logprobs = [[] for _ in samples], [[] for _ in samples]
    left, windows = list(range(len(samples))), []
    while left:
        rows = [(samples[i][0] + tokens[i], [samples[i][1]], len(tokens[i])) for i in left]
        prompts_, seeds_, begun = zip(*rows, strict=True)
        out = engine._generated(prompts_, seeds_, sampling, begun=begun)
        assert engine.stats.steps <= engine.config.window
        still, ran = [], []
        for row, i in enumerate(left):
            before, length = len(tokens[i]), int(out.lengths[row])
            if length:
                assert out.tokens[row, :before].tolist() == tokens[i] and not out.logprobs[row, :before].any()
                tokens[i] = out.tokens[row, :length].tolist()
                logprobs[i] += out.logprobs[row, before:length].tolist()
                ran.append((i, before, length))
            if out.finish_reason[row] != STOP and length < sampling.max_response_tokens:
                still.append(i)
        left = still
        windows.append(ran)
    return tokens, logprobs, windows


CASES = [("llama", 1, 512), ("llama", 4, 512), ("llama", 99, 3)]
CASES += [
    (name, 4, 3) for name in ("llama", "qwen3", "deepseek_v3", "glm_moe_dsa", "qwen3_next", "nemotron_h", "deepseek_v4")
]


@pytest.mark.parametrize("name, window, slots", CASES)
def test_windows_make_the_samples_of_one_generation(name, window, slots):
    models = MODELS | MORE
    cfg = models.get(name, LLAMA)
    prompts, seeds = PROMPTS[:4], [[11, 12, 13], [21], [31, 32], [41]]
    sampling = SamplingParams(LIMIT, temperature=0.7, stop_token_ids=(3, 11, 20, 30))
    engine = make_engine(cfg, window, max_batch=slots)
    whole = engine.generate(prompts, seeds, sampling)  # which knows no window
    tokens, logprobs, windows = by_windows(engine, prompts, seeds, sampling)
    assert tokens == responses(whole) and (len(windows) > 2 or window == 99)
    for actual, row in zip(logprobs, whole.logprobs, strict=True):
        torch.testing.assert_close(torch.tensor(actual), row[: len(actual)], rtol=0, atol=1e-4)
    if slots == 512:  # nobody waits: each window makes `window` tokens of every sample that does not end in it
        assert all(after - before == window or after == len(tokens[i]) for ran in windows for i, before, after in ran)


def test_slots_go_to_the_oldest():
    """As they came, whatever their length; those behind them begin when slots are free."""
    engine = make_engine(LLAMA, 4, max_batch=2)
    prompts = [PROMPTS[0][:2], PROMPTS[1][:2], [*PROMPTS[2], *PROMPTS[3], 5, 6, 7]]
    _, _, windows = by_windows(engine, prompts, [[1], [2], [3]], SamplingParams(10))
    ran = [[(i, before) for i, before, _ in result] for result in windows]
    assert ran == [[(0, 0), (1, 0)], [(0, 4), (1, 4)], [(0, 8), (1, 8), (2, 0)], [(2, 2)], [(2, 6)]]


def test_a_cache_that_could_not_read_a_row_again_is_refused_in_its_first_window():
    """Of a prompt of 4 tokens and up to 10 more, all but the last are fed: 13 positions, and 13 to read them."""
    one = make_engine(LLAMA, 2).cache.token_bytes
    with pytest.raises(ConfigError, match=r"engine\.kv_cache_bytes=\d+: expected at least " + str(26 * one)):
        make_engine(LLAMA, 2, kv_cache_bytes=25 * one)._generated([[5, 6, 7, 8]], [[1]], SamplingParams(10), begun=[0])
    engine = make_engine(LLAMA, 2, kv_cache_bytes=26 * one)
    (tokens,), *_ = by_windows(engine, [[5, 6, 7, 8]], [[1]], SamplingParams(10))
    assert tokens == responses(make_engine(LLAMA, 2).generate([[5, 6, 7, 8]], [[1]], SamplingParams(10)))[0]


def test_a_stop_string_may_lie_across_windows_and_cut_logprobs_come_along():
    decode = lambda ids: " ".join(f"t{i}" for i in ids)  # noqa: E731
    plain = SamplingParams(LIMIT, top_p=0.9)
    engine = make_engine(LLAMA, 2, decode)
    (first,) = responses(engine.generate(PROMPTS[:1], [[5]], plain))
    sampling = SamplingParams(LIMIT, top_p=0.9, stop=(f"t{first[3]} t{first[4]}",))  # of two windows
    tokens, _, _ = by_windows(engine, PROMPTS[:1], [[5]], sampling)
    assert tokens[0] == first[: len(tokens[0])] and tokens[0][-2:] == first[3:5]
    out = engine._generated(PROMPTS[:1], [[5]], plain, begun=[0])
    assert out.full_logprobs[0, :2].all() and out.lengths.tolist() == [2]
