"""Which experts the native engine reports for each token: those of transformers' routers, whatever slot a row had."""

from dataclasses import replace

import pytest
import torch

from aligner.config.sections.engine import EngineConfig
from aligner.engines.native import NativeEngine
from aligner.types import SamplingParams
from tests.engines.contract import MODELS, PROMPTS, fill, hf_weights, reference, responses, seeds_for
from tests.engines.test_fleet import generate
from tests.tiny import MORE

QWEN3 = MODELS["qwen3_moe"]
MIXED = replace(QWEN3, num_layers=3, moe=replace(QWEN3.moe, dense_layers=[1]))
ROUTERS = "TopKRouter", "TopkRouter", "TextRouter"
SAMPLING = SamplingParams(15, stop_token_ids=(3, 11, 20, 30))


def make(cfg, reports=True, **options):
    config = EngineConfig(**options)
    return NativeEngine(cfg, config, device="cpu", dtype=torch.float32, pad_id=0, reports_routing=reports)


def routers_choice(model, row: list[int]) -> torch.Tensor:
    """[T, layers, top_k], ascending."""
    routers, results = [m for m in model.modules() if type(m).__name__.endswith(ROUTERS)], []
    hooks = [m.register_forward_hook(lambda _, __, out: results.append(out[2].sort(-1).values)) for m in routers]
    with torch.no_grad():
        model(torch.tensor([row]))
    for hook in hooks:
        hook.remove()
    return torch.stack(results, 1)


@pytest.mark.parametrize("max_batch", [5, 512])
@pytest.mark.parametrize("name", ["qwen3_moe", "mixtral", "mixed", "gpt_oss", "deepseek_v3", "gemma4-experts"])
def test_it_is_that_of_transformers_routers(name, max_batch):
    """Of prompts and responses, less each row's last token; the rest is 0. Samples are those without the report."""
    cfg = (MODELS | MORE | {"mixed": MIXED})[name]
    model = reference(cfg)
    engine = fill(make(cfg, max_batch=max_batch), model)
    out = engine.generate(PROMPTS, seeds_for(PROMPTS, 6), SAMPLING)
    plain = fill(make(cfg, False, max_batch=max_batch), model).generate(PROMPTS, seeds_for(PROMPTS, 6), SAMPLING)
    assert plain.routing is None and torch.equal(plain.tokens, out.tokens)
    assert torch.equal(plain.logprobs, out.logprobs)
    asked = [prompt for prompt in PROMPTS for _ in range(6)]
    rows = [prompt + answer for prompt, answer in zip(asked, responses(out), strict=True)]
    assert len({len(row) for row in rows}) > 8
    assert out.routing.dtype == torch.uint8
    assert out.routing.shape == (30, max(map(len, rows)), len(cfg.layers_of("sparse")), cfg.moe.top_k)
    for row, result in zip(rows, out.routing, strict=True):
        fed = len(row) - 1
        assert torch.equal(result[:fed].long().sort(-1).values, routers_choice(model, row)[:fed])
        assert not result[fed:].any()
    again = engine.generate(PROMPTS[:2], seeds_for(PROMPTS[:2], 2), SAMPLING)  # over what the first one left behind
    for i, row in enumerate((0, 1, 6, 7)):
        width = min(again.routing.shape[1], out.routing.shape[1])
        assert torch.equal(again.routing[i, :width], out.routing[row, :width])


def test_it_counts_into_the_caches_budget():
    """A byte for each layer and expert of a token, and what is held is given back."""
    cfg = MODELS["qwen3_moe"]
    engine = fill(make(cfg), reference(cfg))
    assert engine.routes.cache.token_bytes == cfg.num_layers * cfg.moe.top_k
    plain = fill(make(cfg, False), reference(cfg))
    for each in (engine, plain):
        each.generate(PROMPTS, seeds_for(PROMPTS, 6), SAMPLING)
    slots = engine.cache.kv.shape[2] * engine.cache.kv.shape[4]
    extra = engine.held_bytes()["cache"] - plain.held_bytes()["cache"]
    assert extra >= slots * engine.routes.cache.token_bytes
    engine.sleep()
    assert engine.held_bytes()["cache"] == 0


@pytest.mark.multirank
@pytest.mark.parametrize("steal", [False, True])
@pytest.mark.parametrize(("world", "width"), [(2, 2), (2, 1)])
def test_it_comes_back_to_the_rank_that_asked(ranks, world, width, steal):
    cfg = MODELS["mixtral"]
    model = reference(cfg)
    seeds = seeds_for(PROMPTS, 4)
    wanted = fill(make(cfg), model).generate(PROMPTS, seeds, SAMPLING)
    requests = [(PROMPTS[:4], seeds[:4]), (PROMPTS[4:], seeds[4:])]
    job = {"models": {"mixtral": (cfg, hf_weights(model))}, "width": width, "requests": requests, "steal": steal}
    scored = torch.ones(1, 3, dtype=torch.int64), torch.tensor([3])
    job |= {"scored": scored, "reports_routing": True, "max_batch": 3}
    results = ranks.run(generate, world=world, samplings=[SAMPLING], **job)
    for result, rows in zip(results, (slice(0, 16), slice(16, 20)), strict=True):
        (out,) = result["mixtral"]["outs"]
        assert responses(out) == responses(wanted)[rows]
        width_ = min(out.routing.shape[1], wanted.routing.shape[1])
        assert torch.equal(out.routing[:, :width_].sort(-1).values, wanted.routing[rows, :width_].sort(-1).values)
        assert not out.routing[:, width_:].any()
