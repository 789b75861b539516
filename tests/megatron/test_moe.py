"""Mixture-of-experts layers: against loops in float64, and the same numbers in every layout."""

from dataclasses import replace
from functools import partial

import pytest
import torch
import torch.distributed as dist

from aligner.config.sections.batch import BatchConfig
from aligner.config.sections.model.config import ModelConfig
from aligner.config.sections.model.moe import MoeConfig
from aligner.config.sections.optim import OptimConfig
from aligner.config.sections.parallel import ParallelConfig
from aligner.megatron import groups
from aligner.megatron.groups import build_layout
from aligner.megatron.moe import ExpertLayer
from aligner.ops.packing.pack import Times
from aligner.roles.policy import Policy
from aligner.types import TrainBatch
from tests.megatron.models import agreed, build, equal_shares, load_and_step, same, save_and_go_on, train
from tests.tiny import ADAM, DEEPSEEK, GPT_OSS, MIXTRAL, MOE, MORE, SGD, batch, relative

pytestmark = pytest.mark.multirank

ONE = ParallelConfig()
BASE = BatchConfig(micro_batch_samples=2)
GENTLE = replace(SGD, lr=SGD.lr / 300)
BALANCED = replace(MOE, moe=replace(MOE.moe, aux_coef=0.1))
LAYOUTS = {
    "dp2": (2, ONE),
    "tp2": (2, ParallelConfig(tensor=2)),
    "tp2-sequence": (2, ParallelConfig(tensor=2, sequence=True)),
    "pp2": (2, ParallelConfig(pipeline=2)),
    "cp2": (2, ParallelConfig(context=2)),
    "ep2": (2, ParallelConfig(expert=2)),
    "ep2-dp4": (4, ParallelConfig(expert=2)),
    "ep4": (4, ParallelConfig(expert=4)),
    "ep2-tp2": (4, ParallelConfig(expert=2, tensor=2)),
    "ep2-tp2-alone": (2, ParallelConfig(expert=2, tensor=2)),
    "ep4-tp2-sequence": (4, ParallelConfig(expert=4, tensor=2, sequence=True)),
    "ep4-tp2-cp2": (4, ParallelConfig(expert=4, tensor=2, context=2)),
    "ep2-tp2-sequence": (4, ParallelConfig(expert=2, tensor=2, sequence=True)),
    "ep2-pp2": (4, ParallelConfig(expert=2, pipeline=2)),
    "ep2-cp2": (2, ParallelConfig(expert=2, context=2)),
    "ep2-cp2-dp2": (4, ParallelConfig(expert=2, context=2)),
    "ep4-cp2-dp2": (4, ParallelConfig(expert=4, context=2)),
}


def first_layer(
    cfg: ModelConfig, parallel: ParallelConfig, x: torch.Tensor, times: torch.Tensor, grad: torch.Tensor
) -> dict:
    """The first layer alone: what it computes, and its gradients with the auxiliary loss."""
    model = build(cfg, parallel, SGD)
    first = next(m for m in model.module.modules() if isinstance(m, ExpertLayer))
    x = x.clone().requires_grad_()

    def run():
        return first(x[:, None], Times.of(times, model.layout.tensor, model.layout.tp_rank))[0][:, 0]

    tokens = TrainBatch(torch.zeros(1, 1), times.sum()[None], torch.zeros(1, 0))
    model.load.layers = [first]
    model.load.begin([tokens], run)
    out = run()
    gradients = torch.autograd.grad((out * grad).sum(), [x, *first.parameters()])
    return {
        "out": out.detach(),
        "x": gradients[0],
        "params": dict(zip([n for n, _ in first.named_parameters()], gradients[1:], strict=True)),
        "weights": {n: p.detach() for n, p in first.named_parameters()},
        "metrics": model.load.metrics(),
    }


def uneven_forward(
    cfg: ModelConfig, parallel: ParallelConfig, rows: TrainBatch, budget: int, counts: list[int]
) -> dict:
    """Rank r has the first counts[r] rows: micro-batches in different numbers, or none."""
    model = build(cfg, parallel)
    own = rows.select(torch.arange(counts[model.layout.dp_rank]))
    return {"logprobs": Policy(model, BatchConfig(logprob_tokens=budget)).logprobs(own)}


learned = partial(agreed, each=equal_shares)


@pytest.fixture(scope="module")
def alone(ranks):
    """One rank's result, computed once for each model and optimizer; with the weights before the first step."""
    seen = {}

    def get(cfg, optim, **kwargs):
        key = cfg.family, str(cfg.moe), optim.eps, str(kwargs)
        if key not in seen:
            run = {"cfg": cfg, "parallel": ONE, "optim": optim, "bc": BASE} | kwargs
            seen[key] = learned(ranks, 1, **run, steps=0)["weights"], learned(ranks, 1, **run)
        return seen[key]

    return get


def check(got, base, optim):
    start, wanted = base
    for ours, theirs in zip(got["metrics"], wanted["metrics"], strict=True):
        assert ours.keys() == theirs.keys()
        for name in theirs:
            assert abs(ours[name] - theirs[name]) <= 1e-5 * max(1.0, abs(theirs[name])), name
    for name, value in wanted["weights"].items():
        scale = value if optim is SGD else value - start[name]  # of gradient descent the weights, of Adam the update
        fixed = name.endswith(("e_score_correction_bias", "layer_scalar"))  # which no gradient changes
        assert (value - start[name]).any() != fixed, name
        assert relative(got["weights"][name], value, scale) <= (1e-5 if optim is SGD else 1e-3), name
        if optim is SGD:  # two updates are two gradients
            assert relative(got["weights"][name], value, value - start[name]) <= 1e-4, name


@pytest.mark.parametrize(
    ("layout", "rank", "wanted"),
    [
        ("ep2-dp4", 1, {"ep": [0, 1], "expt_dp": [1, 3], "tp_ep": [0, 1], "tp_ep_pp": [0, 1]}),
        ("ep2-tp2", 1, {"ep": [0, 1], "expt_dp": [1, 3], "tp_ep": [0, 1], "tp_ep_pp": [0, 1]}),
        ("ep2-pp2", 2, {"ep": [2, 3], "expt_dp": [2], "tp_ep": [2, 3], "tp_ep_pp": [0, 1, 2, 3]}),
        ("cp2", 1, {"ep": [1], "expt_dp": [0, 1], "tp_ep": [1], "tp_ep_pp": [1]}),
    ],
)
def test_expert_groups_have_these_ranks(ranks, layout, rank, wanted):
    world, parallel = LAYOUTS[layout]
    assert ranks.run(group_ranks, world=world, parallel=parallel)[rank] == wanted


def group_ranks(parallel: ParallelConfig) -> dict[str, list[int]]:
    pgs = build_layout(parallel).pgs
    return {n: dist.get_process_group_ranks(getattr(pgs, n)) for n in ("ep", "expt_dp", "tp_ep", "tp_ep_pp")}


@pytest.mark.few(4)
@pytest.mark.parametrize(
    ("layout", "coef"),
    [*((name, 0.1) for name in LAYOUTS), *((name, 0.0) for name in ("ep2", "ep2-tp2-sequence", "ep2-pp2", "ep2-cp2"))],
)
def test_layouts_learn_the_same(ranks, alone, layout, coef):
    """With the auxiliary loss too: it is that of the minibatch, whoever computes which part of it."""
    world, parallel = LAYOUTS[layout]
    cfg = BALANCED if coef else MOE
    check(learned(ranks, world, cfg=cfg, parallel=parallel, optim=SGD, bc=BASE), alone(cfg, SGD), SGD)


def on_nodes_of_two(cfg: ModelConfig, **kwargs) -> dict:
    groups.ranks_per_node[0] = 2
    assert [group.size() for group in build_layout(kwargs["parallel"]).expert_groups] == [2, 2]
    return train(cfg, each=equal_shares, **kwargs)


@pytest.mark.parametrize("layout", ["ep4", "ep4-cp2-dp2"])
@pytest.mark.parametrize("recompute", ["none", "full"])
def test_experts_on_several_nodes_learn_the_same(ranks, alone, layout, recompute):
    """A token goes to nodes first, then to their ranks."""
    world, parallel = LAYOUTS[layout]
    job = {"cfg": replace(BALANCED, recompute=recompute), "parallel": parallel, "optim": SGD, "bc": BASE}
    for got in ranks.run(on_nodes_of_two, world=world, **job):
        check(got, alone(BALANCED, SGD), SGD)


@pytest.mark.few(2)
@pytest.mark.parametrize("layout", ["ep2-tp2-sequence", "ep2-cp2", "ep2-pp2"])
def test_biased_experts_learn_the_same(ranks, alone, layout):
    world, parallel = LAYOUTS[layout]
    cfg = replace(GPT_OSS, num_layers=2, moe=replace(GPT_OSS.moe, aux_coef=0.1))
    check(learned(ranks, world, cfg=cfg, parallel=parallel, optim=SGD, bc=BASE), alone(cfg, SGD), SGD)


@pytest.mark.few(3)
@pytest.mark.parametrize(
    ("name", "layout"),
    [
        *((name, "ep2-tp2-sequence") for name in ("qwen3_next", "nemotron_h", "gemma4-experts")),
        *(("gemma4-experts", layout) for layout in ("ep2-tp2", "ep2-cp2", "ep2-pp2")),
    ],
)
def test_experts_beside_an_mlp_for_every_token_learn_the_same(ranks, alone, name, layout):
    """It has a gate, no gates inside, or norms of its own, as its experts then have."""
    world, parallel = LAYOUTS[layout]
    cfg = MORE[name]
    optim = replace(SGD, lr=SGD.lr / 10) if cfg.linear.key_heads else SGD
    check(learned(ranks, world, cfg=cfg, parallel=parallel, optim=optim, bc=BASE), alone(cfg, optim), SGD)


@pytest.mark.parametrize("layout", ["ep2", "ep2-pp2"])
def test_routing_by_groups_learns_the_same(ranks, alone, layout):
    """With a shared MLP, a dense layer, and the auxiliary loss of sigmoid scores."""
    world, parallel = LAYOUTS[layout]
    cfg = replace(DEEPSEEK, num_layers=4, moe=replace(DEEPSEEK.moe, num_experts=6, top_k=3, aux_coef=0.1))
    check(learned(ranks, world, cfg=cfg, parallel=parallel, optim=SGD, bc=BASE), alone(cfg, SGD), SGD)


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("layout", "distributed"), [("ep2", True), ("ep2-tp2-sequence", True), ("ep2-dp4", True), ("ep2-tp2", False)]
)
def test_adam_learns_the_same(ranks, alone, layout, distributed):
    """Clipping is on: the gradient norm counts every parameter once."""
    world, parallel = LAYOUTS[layout]
    optim = replace(ADAM, distributed=distributed)
    base = alone(MIXTRAL, ADAM)
    assert base[1]["metrics"][0]["grad_norm"] > ADAM.clip_grad
    check(learned(ranks, world, cfg=MIXTRAL, parallel=parallel, optim=optim, bc=BASE), base, ADAM)


BATCHES = {
    "1": BatchConfig(micro_batch_samples=1),
    "4": BatchConfig(micro_batch_samples=4),
    "8": BatchConfig(micro_batch_samples=8),
    "tokens": BatchConfig(micro_batch_tokens=30),
    "padded": BatchConfig(micro_batch_samples=4, packing=False),
}


@pytest.mark.few(3)
@pytest.mark.parametrize("bc", BATCHES)
@pytest.mark.parametrize("layout", ["one", "ep2", "cp2"])
def test_micro_batches_learn_the_same(ranks, alone, bc, layout):
    world, parallel = {"one": (1, ONE), **LAYOUTS}[layout]
    check(learned(ranks, world, cfg=BALANCED, parallel=parallel, optim=SGD, bc=BATCHES[bc]), alone(BALANCED, SGD), SGD)


@pytest.mark.parametrize("layout", ["one", "ep2-pp2"])
def test_recompute_learns_the_same(ranks, alone, layout):
    """Each token is counted once, though its layer runs twice."""
    world, parallel = {"one": (1, ONE), **LAYOUTS}[layout]
    cfg = replace(BALANCED, recompute="full")
    check(learned(ranks, world, cfg=cfg, parallel=parallel, optim=SGD, bc=BASE), alone(BALANCED, SGD), SGD)


@pytest.mark.parametrize("layout", ["one", "tp2-sequence", "ep2"])
def test_shared_prompts_count_for_every_row(ranks, alone, layout):
    world, parallel = {"one": (1, ONE), **LAYOUTS}[layout]
    full = batch(MOE)
    full.tokens[:, :6] = full.tokens[:1, :6]
    full.lengths.clamp_(min=9)
    full.tokens[full.tokens == 0] = 1
    full.loss_mask[:, :6] = 0
    plain = replace(BASE, micro_batch_samples=4, share_prompts=False)
    base = alone(BALANCED, SGD, full=full, bc=plain)
    sharing = replace(plain, share_prompts=True)
    check(learned(ranks, world, cfg=BALANCED, parallel=parallel, optim=SGD, bc=sharing, full=full), base, SGD)


@pytest.mark.parametrize("cfg", [MOE, MORE["gemma4-experts"]], ids=lambda cfg: cfg.family)
def test_a_score_head_on_experts(ranks, alone, cfg):
    world, parallel = LAYOUTS["ep2-pp2"]
    got = learned(ranks, world, cfg=cfg, parallel=parallel, optim=SGD, bc=BASE, outputs=2)
    check(got, alone(cfg, SGD, outputs=2), SGD)


@pytest.mark.parametrize("layout", ["ep2-tp2-sequence", "ep2-pp2"])
def test_bfloat16_learns_nearly_the_same(ranks, alone, layout):
    world, parallel = LAYOUTS[layout]
    _, wanted = alone(MOE, ADAM)
    got = learned(ranks, world, cfg=MOE, parallel=parallel, optim=ADAM, bc=BASE, dtype=torch.bfloat16)
    for ours, theirs in zip(got["metrics"], wanted["metrics"], strict=True):
        assert ours["loss"] == pytest.approx(theirs["loss"], rel=2e-2)
        assert ours["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=0.1)
    assert all(t.dtype == torch.bfloat16 for t in got["weights"].values())


@pytest.mark.parametrize(("over", "layouts"), [("micro_batch", ("ep2-pp2", "cp2")), ("running", ("pp2", "cp2"))])
def test_the_auxiliary_loss_of_micro_batches(ranks, alone, over, layouts):
    """Of one micro-batch it is that of the minibatch; of several it is not, but layouts that keep them agree."""
    each = replace(BALANCED, moe=replace(BALANCED.moe, aux_over=over))
    whole = BatchConfig(micro_batch_samples=8)
    run = {"optim": SGD, "parallel": ONE}
    check(learned(ranks, 1, cfg=each, bc=whole, **run), alone(BALANCED, SGD), SGD)
    base = alone(each, SGD)
    router = "model.layers.0.mlp.gate.weight"
    change = base[1]["weights"][router] - base[0][router]
    assert relative(alone(BALANCED, SGD)[1]["weights"][router], base[1]["weights"][router], change) > 1e-4
    for layout in layouts:
        world, parallel = LAYOUTS[layout]
        check(learned(ranks, world, cfg=each, optim=SGD, bc=BASE, parallel=parallel), base, SGD)


def routers_gradient(cfg: ModelConfig, parts: list[torch.Tensor]) -> dict:
    """That of the last part's auxiliary loss, where this rank's parts are micro-batches."""
    model = build(cfg, ONE, SGD)
    first = next(m for m in model.module.modules() if isinstance(m, ExpertLayer))
    own = parts[model.layout.dp_rank :: model.layout.data]
    rows = [TrainBatch(torch.zeros(1, 1), torch.tensor([len(x)]), torch.zeros(1, 0)) for x in own]
    model.load.begin(rows, lambda: pytest.fail("a forward pass beforehand"))
    outs = [first(x[:, None], Times.of(torch.ones(len(x))))[0] for x in own]
    weight = first.router.weight
    return {"weight": weight.detach(), "grad": torch.autograd.grad(outs[-1].sum() * 0, weight)[0]}


@pytest.mark.parametrize("world", [1, 2])
def test_a_running_load_is_that_of_the_micro_batches_so_far_on_all_ranks(ranks, world):
    cfg = replace(MOE, moe=replace(MOE.moe, aux_coef=20.0, aux_over="running"))
    parts = list(torch.randn(4, 7, MOE.hidden_size, generator=torch.Generator().manual_seed(1)))
    for rank, got in enumerate(ranks.run(routers_gradient, world=world, cfg=cfg, parts=parts)):
        weight = got["weight"].clone().requires_grad_()
        experts = (torch.cat(parts) @ weight.t()).topk(cfg.moe.top_k).indices
        load = torch.bincount(experts.flatten(), minlength=cfg.moe.num_experts) / experts.numel()
        last = parts[3 if world == 1 else 2 + rank]
        mean = (last @ weight.t()).softmax(1).sum(0) / (4 * 7)
        (20.0 * cfg.moe.num_experts * (load * mean).sum()).backward()
        assert relative(got["grad"], weight.grad) < 1e-5


def test_experts_by_token_id_are_not_balanced(ranks):
    cfg = MORE["deepseek_v4"]
    runs = [replace(cfg, moe=replace(cfg.moe, hash_layers=cfg.num_layers, aux_coef=coef)) for coef in (0.0, 0.5)]
    one, two = (learned(ranks, 1, cfg=each, optim=GENTLE, bc=BASE, parallel=ONE) for each in runs)
    assert one["metrics"] == two["metrics"] and "moe/balance" not in one["metrics"][0]
    assert all(torch.equal(t, two["weights"][name]) for name, t in one["weights"].items())


def oracle(cfg, weights, x, times, grad):
    """The layer and its auxiliary loss in float64, token by token."""
    p = {n: t.double().requires_grad_() for n, t in weights.items()}
    x = x.double().requires_grad_()
    moe, rows, counts = cfg.moe, [], torch.zeros(cfg.moe.num_experts, dtype=torch.float64)
    mean = 0.0
    for token, n in zip(x, times.double(), strict=True):
        if n == 0:
            rows.append(torch.zeros_like(token))
            continue
        probs = (p["router.weight"] @ token).softmax(0)
        top = probs.topk(moe.top_k).indices.tolist()
        total = sum(probs[e] for e in top) if moe.norm_topk_prob else 1.0
        out = 0.0
        for e in top:
            counts[e] += n
            gate, up = p["experts.gate_up"][e]
            inner = torch.sigmoid(gate @ token) * (gate @ token) * (up @ token)
            out = out + probs[e] / total * (p["experts.down"][e] @ inner)
        mean = mean + n * probs / times.double().sum()
        rows.append(out)
    out = torch.stack(rows)
    aux = moe.num_experts * (counts / counts.sum() * mean).sum()
    loss = (out * grad.double()).sum() + moe.aux_coef * aux
    gradients = torch.autograd.grad(loss, [x, *p.values()])
    return out.detach(), gradients[0], dict(zip(p, gradients[1:], strict=True)), counts, float(aux.detach())


@pytest.mark.parametrize("over", ["minibatch", "micro_batch"])
@pytest.mark.parametrize("normalise", [True, False])
@pytest.mark.parametrize("weights", ["real", "some padding, some shared"])
def test_the_layer_and_its_auxiliary_loss_against_loops(ranks, over, normalise, weights):
    cfg = replace(MOE, moe=MoeConfig(5, 3, 24, normalise, aux_coef=20.0, aux_over=over))
    g = torch.Generator().manual_seed(5)
    x, grad = torch.randn(17, 32, generator=g), torch.randn(17, 32, generator=g)
    times = torch.ones(17) if weights == "real" else torch.randint(0, 4, (17,), generator=g).float()
    grad = grad * (times > 0)[:, None]
    job = {"cfg": cfg, "x": x, "times": times, "grad": grad}
    (got,) = ranks.run(first_layer, parallel=ONE, **job)
    out, d_x, d_params, counts, aux = oracle(cfg, got["weights"], x, times, grad)
    assert relative(got["out"], out) < 1e-5 and not got["out"][times == 0].any()
    assert relative(got["x"], d_x) < 1e-5
    for name, value in d_params.items():
        assert relative(got["params"][name], value) < 1e-5, name
    assert got["metrics"]["moe/balance"] == pytest.approx(float(counts.max() / counts.mean()))
    assert got["metrics"]["moe/aux_loss"] == pytest.approx(aux, rel=1e-5)
    assert got["metrics"]["moe/dropped"] == 0
    plain = replace(cfg, moe=replace(cfg.moe, aux_coef=0.0))
    without = oracle(plain, got["weights"], x, times, grad)[2]["router.weight"]
    assert relative(without, d_params["router.weight"]) > 0.01  # the auxiliary loss did something
    # tensor ranks compute addends of the same gradients
    both = ranks.run(first_layer, world=2, parallel=ParallelConfig(tensor=2), **job)
    for half in both:
        assert relative(half["x"], d_x) < 1e-5
        assert relative(half["params"]["router.weight"], d_params["router.weight"]) < 1e-5


def test_the_auxiliary_loss_balances(ranks):
    """Training without it leaves the load as uneven as it was; with it, a tenth of that remains."""
    excess = []
    for coef in (0.0, 1.0):
        cfg = replace(MOE, num_layers=1, moe=replace(MOE.moe, num_experts=8, aux_coef=coef))
        optim = OptimConfig(lr=5e-3, weight_decay=0.0)
        run = learned(ranks, 1, cfg=cfg, parallel=ONE, optim=optim, bc=BatchConfig(), steps=12)
        excess.append([m["moe/aux_loss"] - 1 for m in run["metrics"]])
    assert excess[0][0] == excess[1][0] > 0.05
    assert sum(excess[1][-4:]) < 0.3 * sum(excess[0][-4:])


@pytest.mark.parametrize("counts", [[8, 1], [0, 5], [3, 0]])
def test_forward_passes_of_different_lengths_meet(ranks, counts):
    """Ranks that share experts need each other, also those that have nothing left to compute."""
    rows = batch(MOE)
    job = {"cfg": MOE, "rows": rows, "budget": 20}
    (wanted,) = ranks.run(uneven_forward, parallel=ONE, counts=[8], **job)
    results = ranks.run(uneven_forward, world=2, parallel=LAYOUTS["ep2"][1], counts=counts, **job)
    for count, out in zip(counts, results, strict=True):
        assert len(out["logprobs"]) == count
        width = out["logprobs"].shape[1]
        assert torch.allclose(out["logprobs"], wanted["logprobs"][:count, :width], atol=1e-5)


CHAINS = {
    "sharded": ["one", "ep2-dp4", "ep2-pp2", "tp2"],
    "plain": ["one", "ep2-dp4", "ep2-pp2", "tp2"],
    "linear": ["ep2-tp2", "ep2-pp2"],
    "mamba": ["ep2-tp2", "ep2-pp2"],
    "beside an MLP": ["ep2-tp2", "ep2-pp2"],
    "mixed": ["ep2-pp2", "one"],  # some layers are dense, all of those on the first of two stages
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", CHAINS)
def test_checkpoints_change_layouts(ranks, tmp_path, kind):
    """Two expert ranks -> one -> four, two of which have the same experts -> two stages -> two tensor ranks: weights
    bit by bit, and the optimizer goes on."""
    models = {"linear": MORE["qwen3_next"], "mamba": MORE["nemotron_h"], "mixed": MORE["qwen3_moe-mixed"]}
    models["beside an MLP"] = MORE["gemma4-experts"]
    job = {"cfg": models.get(kind, MOE), "share": equal_shares, "optim": replace(ADAM, distributed=kind != "plain")}
    first = ranks.run(save_and_go_on, world=2, folder=tmp_path / "0", parallel=LAYOUTS["ep2"][1], **job)[0]
    for i, layout in enumerate(CHAINS[kind]):
        world, parallel = {"one": (1, ONE), **LAYOUTS}[layout]
        folders = {"folder": tmp_path / str(i), "again": tmp_path / str(i + 1)}
        out = ranks.run(load_and_step, world=world, parallel=parallel, **folders, **job)[0]
        assert same(out["weights"], first["weights"]), parallel
        for name in ("loss", "grad_norm"):
            assert out["metrics"][name] == pytest.approx(first["metrics"][name], rel=1e-5)
        for name, value in first["after"].items():
            assert torch.allclose(out["after"][name], value, atol=2e-6), (parallel, name)
