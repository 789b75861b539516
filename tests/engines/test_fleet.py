"""Several ranks as one engine, and several engines as one: the same tokens as one rank alone."""

import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from itertools import chain, pairwise
from uuid import uuid4

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from aligner.config.sections.engine import EngineConfig
from aligner.config.sections.model.config import ModelConfig
from aligner.engines.native import NativeEngine
from aligner.engines.native.fleet import ENOUGH, FleetEngine, assign
from aligner.errors import EngineError, LayoutError
from aligner.megatron.groups import neighbours
from aligner.ops.packing.balance import balance
from aligner.types import STOP, SamplingParams
from tests.engines.contract import LLAMA, MODELS, PROMPTS, fill, hf_weights, reference, responses, seeds_for
from tests.ranks import on_ranks
from tests.tiny import MORE

multirank = pytest.mark.multirank
SAMPLINGS = [
    SamplingParams(10, temperature=0),
    SamplingParams(10, stop_token_ids=(3, 11)),
    SamplingParams(10, temperature=0.8, top_p=0.9),
    SamplingParams(10, stop=("AB", "K")),
]
REPEATED = {name: MORE[name] for name in ("qwen3_5", "gemma4", "gpt_oss", "olmo2", "nemotron_h")}
REPEATED["gemma4-inputs"] = replace(MORE["gemma4-inputs"], num_kv_heads=1)
REPEATED |= {name: MODELS[name] for name in ("llama", "qwen3_moe")} | {"one": replace(MODELS["qwen2"], num_kv_heads=1)}


def make(
    cfg: ModelConfig, weights: dict, width: int, dtype=torch.float32, reports_routing: bool = False, **options
) -> FleetEngine:
    here = {"device": "cpu", "dtype": dtype, "pad_id": 0, "decode": letters, "group": neighbours(width)}
    engine = FleetEngine(cfg, EngineConfig(**options), **here, reports_routing=reports_routing)
    engine.begin_update(3)
    engine.update_weights(weights.items())
    engine.finish_update()
    return engine


def letters(tokens: list[int]) -> str:
    return "".join(chr(60 + t) for t in tokens)


def generate(
    models: dict[str, tuple],
    width: int,
    requests: list[tuple[list, list]],
    samplings: list[SamplingParams],
    scored: tuple[torch.Tensor, torch.Tensor],
    steal: bool = False,
    late: str = "",
    meet: str = "",
    **options,
) -> dict:
    """Every rank asks for its own share of the requests. By model. `late`: a name that no other job uses, with which
    rank 0's engine decodes when the other's has ended; `meet`: with which nobody goes on with a second part of the
    common work before all decode a first one."""
    rank, reported = dist.get_rank(), {}
    for name, (cfg, weights, *own) in models.items():
        engine = make(cfg, weights, width, **options, **(own[0] if own else {}))
        engine.steal = steal
        if late and rank == 0:
            engine.model.decode = before(engine.model.decode, partial(until, late, 1))
        elif late:
            engine._generated = then(engine._generated, partial(count, late))
        if meet:
            engine.model.decode = before(engine.model.decode, meeting(engine, f"{meet}/{name}"))
        prompts, seeds = requests[rank]
        ended: list[list] = []
        engine.finished = lambda *about, ended=ended: ended[-1].append(about)
        outs = [(ended.append([]), engine.generate(prompts, seeds, sampling))[1] for sampling in samplings]
        reported[name] = {
            "outs": outs,
            "ended": ended,
            "scored": engine.logprobs(*scored),
            "checksums": engine.checksums(),
            "stolen": engine.stolen,
            "idle": engine.take_sums().get("engine/idle_fraction"),
            "rows": engine.stats.decoded_rows,
            "bytes": sum(view.nbytes for view in engine.model.views.values()),
            "token_bytes": engine.cache.token_bytes,
        }
    return reported


def before(function: Callable, act: Callable[[], object]) -> Callable:
    return lambda *given, **named: (act(), function(*given, **named))[1]


def then(function: Callable, act: Callable[[], object]) -> Callable:
    return lambda *given, **named: (function(*given, **named), act())[0]


def meeting(engine: FleetEngine, name: str) -> Callable[[], None]:
    met: set[int] = set()  # calls of `generate`

    def meets() -> None:
        if engine._calls not in met:
            met.add(engine._calls)
            count(f"{name}/{engine._calls}")
            until(f"{name}/{engine._calls}", dist.get_world_size())

    return meets


def count(name: str, more: int = 1) -> int:
    return dist.distributed_c10d._get_default_store().add(f"tests/fleet/{name}", more)


def until(name: str, many: int) -> None:
    while count(name, 0) < many:
        time.sleep(0.005)


def alone(cfg, model, prompts, seeds, samplings, scored):
    engine = NativeEngine(cfg, EngineConfig(), device="cpu", dtype=torch.float32, pad_id=0, decode=letters)
    fill(engine, model)
    return [engine.generate(prompts, seeds, s) for s in samplings], engine.logprobs(*scored), engine


@pytest.fixture(scope="module")
def scored():
    tokens = torch.randint(0, 53, (4, 12), generator=torch.Generator().manual_seed(3))
    return tokens, torch.tensor([12, 5, 1, 9])


def all_told(actual, seeds):
    """What a rank heard while it generated are its own samples, none twice; the share of them."""
    rows = [(prompt, sample) for prompt, own in enumerate(seeds) for sample in range(len(own))]
    heard = 0
    for out, ended in zip(actual["outs"], actual["ended"], strict=True):
        stopped = (out.finish_reason == STOP).tolist()
        known = dict(zip(rows, zip(responses(out), stopped, strict=True), strict=True))
        for prompt, sample, tokens, _, reason in ended:
            assert known.pop((prompt, sample)) == (tokens, reason)
        heard += len(ended)
    return heard / max(1, len(rows) * len(actual["outs"]))


def same(actual, wanted, rows=slice(None), atol=2e-5):
    """Equal tokens; logprobs within `atol` of rows `rows` of `wanted`: without AVX-512 some differ by just over 1e-5.
    Where a cut of the distribution is renormalised, a token at its very edge may be in or out: then those of the full
    distribution are compared."""
    assert responses(actual) == responses(wanted)[rows]
    assert torch.equal(actual.finish_reason, wanted.finish_reason[rows])
    width = actual.tokens.shape[1]
    assert (actual.full_logprobs is None) == (wanted.full_logprobs is None)
    name = "logprobs" if wanted.full_logprobs is None else "full_logprobs"
    assert torch.allclose(getattr(actual, name), getattr(wanted, name)[rows, :width], atol=atol, rtol=0)


@pytest.mark.slow
@multirank
@pytest.mark.parametrize(
    "configs, samplings, world",
    [(MODELS, SAMPLINGS, 2), (MORE, SAMPLINGS[:2], 2), (REPEATED, SAMPLINGS[:1], 4)],
    ids=["MODELS", "MORE", "REPEATED"],
)
def test_ranks_are_one_engine(ranks, scored, configs, samplings, world):
    """Every family: equal tokens, logprobs within 1e-5 of one rank's, a share of the weights and of the cache each. Of
    fewer heads of keys and values than ranks, several ranks have the same one."""
    models = {name: reference(cfg) for name, cfg in configs.items()}
    given_ = {name: (configs[name], hf_weights(model)) for name, model in models.items()}
    seeds = seeds_for(PROMPTS, 2)
    requests = [(PROMPTS[:2], seeds[:2]), (PROMPTS[2:], seeds[2:]), ([], []), ([], [])][:world]
    job = {"models": given_, "width": world, "requests": requests, "samplings": samplings, "scored": scored}
    results = ranks.run(generate, world=world, **job)
    for name, model in models.items():
        outs, logprobs, engine = alone(configs[name], model, PROMPTS, seeds, samplings, scored)
        for rank, rows in enumerate((slice(0, 4), slice(4, 10))):
            actual = results[rank][name]
            assert all_told(actual, requests[rank][1]) == 1
            for out, wanted in zip(actual["outs"], outs, strict=True):
                same(out, wanted, rows)
                assert out.weight_version == 3
            assert torch.allclose(actual["scored"], logprobs, atol=1e-5, rtol=0)
            assert actual["checksums"] == dict(engine.checksums())
            kept = [each._own_bytes // min(world, each.kv_heads) for each in engine.cache.kinds]
            assert actual["token_bytes"] == sum(kept)  # a latent vector is of all heads
            sizes = {name: view.nbytes for name, view in engine.model.views.items()}
            whole = sum(size for key, size in sizes.items() if not engine.model.tensors[key].sharded)  # on every rank
            assert actual["bytes"] - whole < 0.6 * (sum(sizes.values()) - whole)


@multirank
@pytest.mark.parametrize("steal", [False, True])
@on_ranks(2)
def test_logits_that_are_not_finite_are_told_to_the_rank_that_asked(steal):
    """And to no other, wherever they were generated: nobody waits in a collective for one that has left. The last rank
    asks for a token whose embedding is NaN."""
    cfg, last = MODELS["qwen3"], dist.get_rank() == 1
    weights = hf_weights(reference(cfg))
    weights["model.embed_tokens.weight"][cfg.vocab_size - 1] = float("nan")
    engine = make(cfg, weights, 1)
    engine.steal = steal
    message = "weight version 3: the engine's logits are not finite in 2 of 2 samples"
    with pytest.raises(EngineError, match=message) if last else nullcontext():
        out = engine.generate([[5, 6, cfg.vocab_size - 1 if last else 7]], [[1, 2]], SamplingParams(4))
        assert len(out.lengths) == 2


@pytest.mark.slow
@multirank
@pytest.mark.parametrize("world, width, steal", [(2, 1, False), (4, 2, False), (4, 2, True)])
def test_replicas_answer_what_each_rank_asks(ranks, scored, world, width, steal):
    """Uneven requests of all ranks, one of which asks for nothing, in few slots."""
    model, prompts = reference(LLAMA), [PROMPTS[i % 5] for i in range(11)]
    seeds = [[100 * i + j for j in range(1 + i % 3)] for i in range(11)]
    cuts = [0, 8, 11, 11, 11][: world + 1] if world == 4 else [0, 9, 11]
    requests = [(prompts[a:b], seeds[a:b]) for a, b in pairwise(cuts)]
    job = {"models": {"llama": (LLAMA, hf_weights(model))}, "width": width, "requests": requests, "max_batch": 3}
    job |= {"meet": str(uuid4())} if steal else {}  # else one might do all before another has begun
    results = ranks.run(generate, world=world, samplings=SAMPLINGS[:3], scored=scored, steal=steal, **job)
    _, _, engine = alone(LLAMA, model, PROMPTS, seeds_for(PROMPTS), SAMPLINGS[:1], scored)
    for rank, asked in enumerate(requests):
        for sampling, result in zip(SAMPLINGS, results[rank]["llama"]["outs"], strict=False):
            same(result, engine.generate(*asked, sampling), atol=3e-5)  # one rank in other batches: 1.0e-5
    assert 0 < all_told(results[0]["llama"], requests[0][1]) < 1  # the others' engines generated some
    assert [all_told(results[rank]["llama"], asked[1]) for rank, asked in enumerate(requests)]
    rows = [result["llama"]["rows"] for result in results]
    assert min(rows) > 0, "every replica had a part of it"


@multirank
def test_a_replica_that_runs_dry_takes_work(ranks, scored):
    """Rank 0 waits for the other to end, which takes from its queue. In a deterministic run it does not."""
    model, prompts = reference(LLAMA), [PROMPTS[i % 5] for i in range(24)]
    seeds = seeds_for(prompts, 2)
    requests = [(prompts[:12], seeds[:12]), (prompts[12:], seeds[12:])]
    job = {"models": {"llama": (LLAMA, hf_weights(model))}, "width": 1, "requests": requests, "max_batch": 4}
    wanted, _, _ = alone(LLAMA, model, prompts, seeds, SAMPLINGS[1:2], scored)
    for steal in (True, False):
        results = ranks.run(
            generate, world=2, samplings=SAMPLINGS[1:2], scored=scored, steal=steal, late=str(uuid4()), **job
        )
        assert list(chain(*(responses(result["llama"]["outs"][0]) for result in results))) == responses(wanted[0])
        stolen = [result["llama"]["stolen"] for result in results]
        assert stolen[0] == 0 and (stolen[1] >= 2) == steal
        if steal:
            assert results[1]["llama"]["rows"] > 1.5 * results[0]["llama"]["rows"]
        else:
            (waited, _), (idle_s, seconds) = (result["llama"]["idle"] for result in results)
            assert 3 * waited < idle_s < seconds


@settings(deadline=None)
@given(st.lists(st.tuples(st.floats(1, 100), st.integers(0, 3)), max_size=40), st.integers(4, 6))
def test_assignment_balances_costs_and_keeps_home_where_even(requests, replicas):
    costs, home = [c for c, _ in requests], [r for _, r in requests]
    parts = assign(costs, home, replicas)
    assert sorted(i for piece in parts for i in piece) == list(range(len(costs)))
    if not costs:
        return
    before = [[i for i, r in enumerate(home) if r == replica] for replica in range(replicas)]
    loads = [sum(costs[i] for i in piece) for piece in parts]
    if balance(costs, before) >= ENOUGH:
        assert parts == before
    else:  # Graham's bound for the costliest first
        lower = max(max(costs), sum(costs) / replicas)
        assert max(loads) <= (4 / 3) * max(lower, sum(sorted(costs)[-replicas - 1 :][:2])) + 1e-6


def test_shares_that_cannot_be(monkeypatch):
    from aligner.engines.native import engine as module

    class Three(module.EngineRanks):
        def __init__(self, group):
            self.group, self.size, self.rank = None, 3, 0

    monkeypatch.setattr(module, "EngineRanks", Three)
    with pytest.raises(LayoutError, match="divisor of 2"):
        NativeEngine(LLAMA, EngineConfig(), device="cpu", dtype=torch.float32, pad_id=0)
