"""Several ranks as one engine, and several engines as one: the same tokens as one rank alone."""

from itertools import chain, pairwise
from uuid import uuid4

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from aligner.config.sections.engine import EngineConfig
from aligner.engines.native import NativeEngine
from aligner.engines.native.fleet import ENOUGH, assign
from aligner.errors import LayoutError
from aligner.ops.packing.balance import balance
from aligner.types import STOP, SamplingParams
from tests.engines.contract import LLAMA, MODELS, PROMPTS, fill, hf_weights, reference, responses, seeds_for
from tests.tiny import MORE

multirank = pytest.mark.multirank
JOB = "tests.engines.fleet_jobs:generate"
SAMPLINGS = [
    SamplingParams(10, temperature=0),
    SamplingParams(10, stop_token_ids=(3, 11)),
    SamplingParams(10, temperature=0.8, top_p=0.9),
    SamplingParams(10, stop=("AB", "K")),
]


def letters(tokens):
    return "".join(chr(60 + t) for t in tokens)


def alone(cfg, model, prompts, seeds, samplings, scored):
    engine = NativeEngine(cfg, EngineConfig(), device="cpu", dtype=torch.float32, pad_id=0, decode=letters)
    fill(engine, model)
    return [engine.generate(prompts, seeds, s) for s in samplings], engine.logprobs(*scored), engine


@pytest.fixture(scope="module")
def scored():
    tokens = torch.randint(0, 53, (4, 12), generator=torch.Generator().manual_seed(3))
    return tokens, torch.tensor([12, 5, 1, 9])


def all_told(found, seeds):
    """What a rank heard while it generated are its own samples, none twice; the share of them."""
    rows = [(prompt, sample) for prompt, own in enumerate(seeds) for sample in range(len(own))]
    heard = 0
    for out, ended in zip(found["outs"], found["ended"], strict=True):
        stopped = (out.finish_reason == STOP).tolist()
        known = dict(zip(rows, zip(responses(out), stopped, strict=True), strict=True))
        for prompt, sample, tokens, _, reason in ended:
            assert known.pop((prompt, sample)) == (tokens, reason)
        heard += len(ended)
    return heard / max(1, len(rows) * len(found["outs"]))


def same(found, wanted, rows=slice(None), atol=1e-5):
    """Equal tokens; logprobs within `atol` of rows `rows` of `wanted`. Where a cut of the distribution is renormalised,
    a token at its very edge may be in or out: then those of the full distribution are compared."""
    assert responses(found) == responses(wanted)[rows]
    assert torch.equal(found.finish_reason, wanted.finish_reason[rows])
    width = found.tokens.shape[1]
    assert (found.full_logprobs is None) == (wanted.full_logprobs is None)
    name = "logprobs" if wanted.full_logprobs is None else "full_logprobs"
    assert torch.allclose(getattr(found, name), getattr(wanted, name)[rows, :width], atol=atol, rtol=0)


@pytest.mark.slow
@multirank
@pytest.mark.parametrize("configs, samplings", [(MODELS, SAMPLINGS), (MORE, SAMPLINGS[:2])], ids=["MODELS", "MORE"])
def test_two_ranks_are_one_engine(ranks, scored, configs, samplings):
    """Every family: equal tokens, logprobs within 1e-5 of one rank's, half of the weights and of the cache each."""
    models = {name: reference(cfg) for name, cfg in configs.items() if cfg.num_kv_heads % 2 == 0}
    given_ = {name: (configs[name], hf_weights(model)) for name, model in models.items()}
    seeds = seeds_for(PROMPTS, 2)
    requests = [(PROMPTS[:2], seeds[:2]), (PROMPTS[2:], seeds[2:])]
    told = ranks.run(JOB, world=2, models=given_, width=2, requests=requests, samplings=samplings, scored=scored)
    for name, model in models.items():
        outs, logprobs, engine = alone(configs[name], model, PROMPTS, seeds, samplings, scored)
        for rank, rows in enumerate((slice(0, 4), slice(4, 10))):
            found = told[rank][name]
            assert all_told(found, requests[rank][1]) == 1
            for out, wanted in zip(found["outs"], outs, strict=True):
                same(out, wanted, rows)
                assert out.weight_version == 3
            assert torch.allclose(found["scored"], logprobs, atol=1e-5, rtol=0)
            assert found["checksums"] == dict(engine.checksums())
            shares = 1 if configs[name].latent.kv_rank else 2  # a latent vector is of all heads
            assert found["token_bytes"] * shares == engine.cache.token_bytes
            assert found["bytes"] < 0.6 * sum(view.nbytes for view in engine.model.views.values())


@multirank
@pytest.mark.parametrize("steal", [False, True])
def test_logits_that_are_not_finite_are_told_to_the_rank_that_asked(ranks, steal):
    """And to no other, wherever they were generated: nobody waits in a collective for one that has left."""
    cfg = MODELS["qwen3"]
    job = {"cfg": cfg, "weights": hf_weights(reference(cfg)), "steal": steal}
    first, second = ranks.run("tests.engines.fleet_jobs:broken", world=2, **job)
    assert first == "2 samples" and "weight version 3: the engine's logits are not finite in 2 of 2 samples" in second


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
    told = ranks.run(JOB, world=world, samplings=SAMPLINGS[:3], scored=scored, steal=steal, **job)
    _, _, engine = alone(LLAMA, model, PROMPTS, seeds_for(PROMPTS), SAMPLINGS[:1], scored)
    for rank, asked in enumerate(requests):
        for sampling, found in zip(SAMPLINGS, told[rank]["llama"]["outs"], strict=False):
            same(found, engine.generate(*asked, sampling), atol=3e-5)  # one rank in other batches: 1.0e-5
    assert 0 < all_told(told[0]["llama"], requests[0][1]) < 1  # the others' engines generated some
    assert [all_told(told[rank]["llama"], asked[1]) for rank, asked in enumerate(requests)]
    rows = [found["llama"]["rows"] for found in told]
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
        told = ranks.run(JOB, world=2, samplings=SAMPLINGS[1:2], scored=scored, steal=steal, late=str(uuid4()), **job)
        assert list(chain(*(responses(found["llama"]["outs"][0]) for found in told))) == responses(wanted[0])
        stolen = [found["llama"]["stolen"] for found in told]
        assert stolen[0] == 0 and (stolen[1] >= 2) == steal
        if steal:
            assert told[1]["llama"]["rows"] > 1.5 * told[0]["llama"]["rows"]


@settings(deadline=None)
@given(st.lists(st.tuples(st.floats(1, 100), st.integers(0, 3)), max_size=40), st.integers(4, 6))
def test_assignment(requests, replicas):
    costs, home = [c for c, _ in requests], [r for _, r in requests]
    parts = assign(costs, home, replicas)
    assert sorted(i for part in parts for i in part) == list(range(len(costs)))
    if not costs:
        return
    before = [[i for i, r in enumerate(home) if r == replica] for replica in range(replicas)]
    loads = [sum(costs[i] for i in part) for part in parts]
    if balance(costs, before) >= ENOUGH:
        assert parts == before
    else:  # Graham's bound for the costliest first
        lower = max(max(costs), sum(costs) / replicas)
        assert max(loads) <= (4 / 3) * max(lower, sum(sorted(costs)[-replicas - 1 :][:2])) + 1e-6


def test_shares_that_cannot_be(monkeypatch):
    from aligner.engines.native import engine as module

    class Three(module.Peers):
        def __init__(self, group):
            self.group, self.size, self.rank = None, 3, 0

    monkeypatch.setattr(module, "Peers", Three)
    with pytest.raises(LayoutError, match="divisor of 2"):
        NativeEngine(LLAMA, EngineConfig(), device="cpu", dtype=torch.float32, pad_id=0)
