"""The rollout engine's routing in the trainer: against loops, transformers and the engine, in every layout."""

from dataclasses import replace

import pytest
import torch

from aligner.config.sections.batch import BatchConfig
from aligner.config.sections.engine import EngineConfig
from aligner.config.sections.model.config import ModelConfig
from aligner.config.sections.model.moe import MoeConfig
from aligner.config.sections.parallel import ParallelConfig
from aligner.engines.native import NativeEngine
from aligner.megatron.model import Head
from aligner.megatron.moe import ExpertLayer
from aligner.ops.packing.pack import Times
from aligner.ops.packing.routing import RoutingReplay, widened
from aligner.roles.critic import Critic
from aligner.roles.policy import Policy, Reference
from aligner.stages.ppo import value_loss
from aligner.types import SamplingParams, TrainBatch, ValueTargets
from tests.megatron.models import agreed, build, equal_shares, from_folder, nll_loss, weights
from tests.tiny import (
    DEEPSEEK,
    GPT_OSS,
    MIXTRAL,
    MOE,
    MORE,
    SGD,
    batch,
    random_routing,
    relative,
    transformers_model,
    wild_source,
    write_folder,
)

pytestmark = pytest.mark.multirank

ONE = ParallelConfig()
BASE = BatchConfig(micro_batch_samples=2)
CASES = {
    "dp2": (2, ONE, BASE),
    "tp2-sequence": (2, ParallelConfig(tensor=2, sequence=True), BASE),
    "ep2-pp2": (4, ParallelConfig(expert=2, pipeline=2), BASE),
    "ep2-cp2": (2, ParallelConfig(expert=2, context=2), BASE),
    "padded": (1, ONE, BatchConfig(micro_batch_samples=4, packing=False)),
    "padded, cp2": (2, ParallelConfig(context=2), BatchConfig(micro_batch_samples=4, packing=False)),
    "by tokens": (1, ONE, BatchConfig(micro_batch_tokens=30)),
}


def last_layer(cfg: ModelConfig, parallel: ParallelConfig, x, grad, experts, known) -> dict:
    """The last layer alone: what it computes with experts [layers, n, k], and its gradients."""
    model = build(cfg, parallel, SGD)
    last = [m for m in model.module.modules() if isinstance(m, ExpertLayer)][-1]
    x = x.clone().requires_grad_()
    times = Times.of(torch.ones(len(x)), model.layout.tensor, model.layout.tp_rank)
    own = slice(None) if times.real is None else times.real
    times = replace(times, replay=RoutingReplay(experts[:, own], known[own]))
    out = last(x[:, None], times)[0][:, 0]
    gradients = torch.autograd.grad((out * grad).sum(), [x, *last.parameters()])
    return {
        "out": out.detach(),
        "x": gradients[0],
        "params": dict(zip([n for n, _ in last.named_parameters()], gradients[1:], strict=True)),
        "weights": {n: p.detach() for n, p in last.named_parameters()},
        "replays": last.replays.tolist(),
    }


def logits(folder: str, rows: TrainBatch) -> torch.Tensor:
    """[B, T, V] of the token after each but the last."""
    model = from_folder(folder)
    (actual,) = model.forward([rows], lambda hidden, b: model.over_logits(hidden, b, lambda z, _: z.float(), 1 << 30))
    return actual[:, 1:]


def engine_and_trainer(cfg: ModelConfig, dtype: torch.dtype, prompts: list[list[int]], group: int) -> dict:
    """Samples of an engine in `dtype`, and what a trainer in float32 with the same weights says of them: with the
    engine's routing and without, and what its step and a reference do."""
    model = build(cfg, optim=SGD, share=True)
    engine = NativeEngine(cfg, EngineConfig(max_batch=5), device="cpu", dtype=dtype, pad_id=0, reports_routing=True)
    engine.begin_update(1)
    engine.update_weights(weights(model).items())
    engine.finish_update()
    out = engine.generate(prompts, [[7 * i + j for j in range(group)] for i in range(len(prompts))], SamplingParams(12))
    asked = [prompt for prompt in prompts for _ in range(group)]
    rows = [p + t[:n] for p, t, n in zip(asked, out.tokens.tolist(), out.lengths.tolist(), strict=True)]
    lengths = torch.tensor([len(r) for r in rows])
    tokens = torch.nn.utils.rnn.pad_sequence([torch.tensor(r) for r in rows], batch_first=True)
    start = torch.tensor([len(p) for p in asked])
    column = torch.arange(tokens.shape[1])
    mask = ((column >= start[:, None]) & (column < lengths[:, None])).float()
    engines = torch.zeros_like(mask)
    engines[mask.bool()] = out.logprobs[torch.arange(out.tokens.shape[1]) < out.lengths[:, None]]
    full = TrainBatch(tokens, lengths, mask, routing=widened(out.routing, tokens.shape[1]))
    bare, bc = replace(full, routing=None), BatchConfig()
    by_name = {
        "rows": full,
        "engine": engines,
        "replayed": Policy(model, bc).logprobs(full),
        "own": Policy(model, bc).logprobs(bare),
        "reference": Reference(model, bc).logprobs(full),
    }
    return by_name | {"metrics": model.step([full], nll_loss(model, full)), "without": one_step(cfg, bare)}


def critics(cfg: ModelConfig, rows: TrainBatch) -> list[tuple]:
    """What a critic's step tells, and its values afterwards: with rows that have routing and without."""
    results = []
    for routed in (rows, replace(rows, routing=None)):
        returns = rows.loss_mask * rows.tokens / 50
        inputs = routed.with_payloads(ValueTargets(returns, torch.zeros_like(rows.loss_mask)))
        critic = Critic(build(cfg, optim=SGD, head=Head("score")), BatchConfig())
        group = critic.model.layout.pgs.dp
        results.append((critic.update(inputs, value_loss(inputs, 0.2, group)), critic.values(inputs)))
    return results


def one_step(cfg: ModelConfig, rows: TrainBatch) -> dict[str, float]:
    model = build(cfg, optim=SGD, share=True, source=wild_source(cfg))
    return model.step([rows], nll_loss(model, rows))


def oracle(cfg, weights, x, grad, value):
    """A layer in float64, token by token; given: each token's experts, None where the router chooses."""
    p = {n: t.double().requires_grad_() for n, t in weights.items()}
    x, moe, rows, differ = x.double().requires_grad_(), cfg.moe, [], 0
    for token, experts in zip(x, value, strict=True):
        probs = (p["router.weight"] @ token).softmax(0)
        own = probs.topk(moe.top_k).indices.tolist()
        differ += experts is not None and set(experts) != set(own)
        top = own if experts is None else experts
        total = sum(probs[e] for e in top) if moe.norm_topk_prob else 1.0
        out = 0.0
        for e in top:
            gate, up = p["experts.gate_up"][e]
            inner = torch.sigmoid(gate @ token) * (gate @ token) * (up @ token)
            out = out + probs[e] / total * (p["experts.down"][e] @ inner)
        rows.append(out)
    out = torch.stack(rows)
    gradients = torch.autograd.grad((out * grad.double()).sum(), [x, *p.values()])
    return out.detach(), gradients[0], dict(zip(p, gradients[1:], strict=True)), differ


@pytest.mark.parametrize("normalise", [True, False])
def test_the_layer_against_loops(ranks, normalise):
    """Outputs, and gradients of tokens, experts and router."""
    cfg = replace(MOE, moe=MoeConfig(5, 3, 24, normalise))
    g = torch.Generator().manual_seed(5)
    x, grad = torch.randn(17, 32, generator=g), torch.randn(17, 32, generator=g)
    experts = torch.rand(2, 17, 5, generator=g).topk(3).indices.to(torch.uint8)
    known = torch.arange(17) % 4 != 2
    job = {"cfg": cfg, "x": x, "grad": grad, "experts": experts, "known": known}
    results = ranks.run(last_layer, parallel=ONE, **job)
    results += ranks.run(last_layer, world=2, parallel=ParallelConfig(tensor=2), **job)
    inputs = [row if there else None for row, there in zip(experts[1].tolist(), known.tolist(), strict=True)]
    out, d_x, d_params, differ = oracle(cfg, results[0]["weights"], x, grad, inputs)
    assert 5 < differ < 13
    one, *both = (torch.tensor(got["replays"]) for got in results)
    assert one.tolist() == sum(both).tolist() == [float(known.sum()), differ]  # tensor ranks divide the tokens
    for got in results:
        assert relative(got["x"], d_x) < 1e-5
        assert relative(got["params"]["router.weight"], d_params["router.weight"]) < 1e-5
    assert relative(results[0]["out"], out) < 1e-5
    for name, value in d_params.items():
        assert relative(results[0]["params"][name], value) < 1e-5, name


@pytest.mark.parametrize("cfg", [MOE, MIXTRAL, GPT_OSS, DEEPSEEK, MORE["gemma4-experts"]], ids=lambda cfg: cfg.family)
def test_logits_equal_transformers_whose_routers_choose_the_same(ranks, tmp_path, cfg, monkeypatch):
    model, raw = transformers_model(cfg)
    folder = write_folder(model, raw, tmp_path / "hf")
    rows = batch(cfg, rows=3, width=19)
    routing = random_routing(cfg, rows)
    for index, number in enumerate(cfg.layers_of("sparse")):
        layer = model.model.layers[number]
        router = getattr(layer, "router", None) or (layer.mlp.router if cfg is GPT_OSS else layer.mlp.gate)
        monkeypatch.setattr(router, "forward", chooser(router, routing[:, :, index].flatten(0, 1), cfg))
    with torch.no_grad():
        wanted = model(rows.tokens).logits
    (got,) = ranks.run(logits, folder=folder, rows=replace(rows, routing=routing))
    (own,) = ranks.run(logits, folder=folder, rows=rows)
    real = torch.arange(18) < rows.lengths[:, None] - 1
    assert (got - wanted[:, :-1])[real].abs().max() <= 1e-4
    assert (own - wanted[:, :-1])[real].abs().max() > 0.1


def chooser(router, experts: torch.Tensor, cfg):
    """A router of transformers that is told what to choose."""

    def forward(hidden):
        scale = cfg.moe.scale
        if cfg.traits.branch_norms:
            logits = router.proj(router.norm(hidden) * router.scale * router.scalar_root_size)
            scale = router.per_expert_scale[experts.long()]
        else:
            bias = getattr(router, "bias", None)
            logits = torch.nn.functional.linear(hidden.reshape(-1, hidden.shape[-1]), router.weight, bias)
        scores = logits.sigmoid() if cfg is DEEPSEEK else logits.softmax(-1)
        weights = scores.gather(-1, experts.long())
        return logits, scale * weights / weights.sum(-1, keepdim=True), experts.long()

    return forward


@pytest.fixture(scope="module")
def alone(ranks):
    full = batch(MOE)
    full = replace(full, routing=random_routing(MOE, full))
    return full, train(ranks, 1, ONE, BASE, full), train(ranks, 1, ONE, BASE, replace(full, routing=None))


def train(ranks, world, parallel, bc, full, cfg=MOE):
    return agreed(ranks, world, cfg=cfg, parallel=parallel, optim=SGD, bc=bc, full=full, each=equal_shares)


def same(got, wanted):
    for ours, theirs in zip(got["metrics"], wanted["metrics"], strict=True):
        assert ours.keys() == theirs.keys()
        for name in theirs:
            assert abs(ours[name] - theirs[name]) <= 1e-5 * max(1.0, abs(theirs[name])), name
    for name, value in wanted["weights"].items():
        assert relative(got["weights"][name], value) <= 1e-5, name
    width = got["logprobs"].shape[1]
    assert torch.allclose(got["logprobs"], wanted["logprobs"][:, :width], atol=1e-5)


@pytest.mark.few(3)
@pytest.mark.parametrize("case", CASES)
def test_layouts_and_micro_batches_replay_the_same(ranks, alone, case):
    full, wanted, own = alone
    world, parallel, bc = CASES[case]
    same(train(ranks, world, parallel, bc, full), wanted)
    assert 0.5 < wanted["metrics"][0]["moe/routing_differs"] < 1
    assert "moe/routing_differs" not in own["metrics"][0]
    assert abs(own["metrics"][0]["loss"] - wanted["metrics"][0]["loss"]) > 1e-2


@pytest.mark.parametrize("case", ["ep2-pp2", "turns", "padded, cp2"])
def test_layers_without_experts_have_no_routing(ranks, case):
    """Of five layers the first is dense: one stage has one router, the other three."""
    cfg = replace(MOE, num_layers=5, moe=replace(MOE.moe, dense_layers=[0]))
    full = batch(cfg)
    full = replace(full, routing=random_routing(cfg, full))
    assert full.routing.shape[2] == 4
    turns = ParallelConfig(pipeline=2, virtual_stages=2)
    world, parallel, bc = {"turns": (2, turns, BASE), **CASES}[case]
    same(train(ranks, world, parallel, bc, full, cfg), train(ranks, 1, ONE, BASE, full, cfg))


def test_recomputed_layers_replay_the_same(ranks, alone):
    full, wanted, _ = alone
    same(train(ranks, 1, ONE, BASE, full, replace(MOE, recompute="full")), wanted)


def test_prompts_are_shared_as_far_as_their_experts_are_the_same(ranks):
    """A row that was sent elsewhere in the middle of its prompt, and one that is the beginning of another."""
    full = batch(MOE)
    tokens, lengths = full.tokens.clone(), full.lengths.clamp_min(9)
    tokens[:, :8] = tokens[:1, :8]
    tokens[tokens == 0] = 1
    tokens[3], lengths[2], lengths[3] = tokens[2], 10, 13
    full = replace(full, tokens=tokens, lengths=lengths)
    routing = full.routing = random_routing(MOE, full)
    routing[5, 5, 1] = (routing[5, 5, 1] + 1) % 4
    plain = BatchConfig(micro_batch_samples=8, share_prompts=False)
    wanted = train(ranks, 1, ONE, plain, full)
    for world, parallel in ((1, ONE), (2, ParallelConfig(tensor=2, sequence=True))):
        same(train(ranks, world, parallel, replace(plain, share_prompts=True), full), wanted)


def test_a_critic_routes_by_itself(ranks):
    """The rows of PPO's minibatches, of a policy with other layers than the critic's."""
    rows = batch(MOE)
    rows.routing = random_routing(replace(MOE, num_layers=3), rows)
    ((results, values), (wanted, same_values)) = ranks.run(critics, cfg=MOE, rows=rows)[0]
    assert results == wanted and torch.equal(values, same_values) and values.abs().max() > 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_engines_routing_removes_its_part_of_the_mismatch(ranks, dtype):
    """In float32 both route alike, and replay changes nothing; in bfloat16 they do not always."""
    cfg = replace(MOE, moe=MoeConfig(16, 4, 24))
    prompts = [[1 + (11 * i + j * j) % 97 for j in range(4 + 3 * i)] for i in range(6)]
    job = {"cfg": cfg, "dtype": dtype, "prompts": prompts, "group": 4}
    (got,) = ranks.run(engine_and_trainer, **job)
    on = got["rows"].loss_mask.bool()
    with_, without = ((got[name] - got["engine"])[on].abs().mean() for name in ("replayed", "own"))
    assert torch.equal(got["reference"], got["own"])  # routes by itself
    if dtype == torch.float32:
        assert got["metrics"]["moe/routing_differs"] == 0
        assert torch.allclose(got["replayed"], got["own"], atol=1e-6)
        assert {k: v for k, v in got["metrics"].items() if k in got["without"]} == pytest.approx(got["without"])
    else:
        assert 0.001 < got["metrics"]["moe/routing_differs"] < 0.2
        assert with_ < 0.9 * without
