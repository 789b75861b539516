"""TransformerEngine's own Python, over a stand-in for its extension, against modules of our own."""

from dataclasses import replace

import pytest
import torch
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear

from aligner.config.sections.batch import BatchConfig
from aligner.config.sections.model.config import ModelConfig
from aligner.config.sections.model.kernels import te_lacks
from aligner.config.sections.model.lora import ALL_LINEAR, LoraConfig
from aligner.config.sections.parallel import ParallelConfig
from aligner.errors import ConfigError
from aligner.megatron import groups, model, transformer_engine
from aligner.megatron.chunks import places_of
from aligner.megatron.model import Head
from aligner.megatron.optimizer_state import owned
from aligner.plan.activations import activation_bytes
from aligner.plan.job import PlanJob, PlannedModel, PlannedRows
from aligner.plan.shapes import Grid
from aligner.roles.batching import micro_batches
from tests.megatron import models, test_waits
from tests.tiny import ADAM, LLAMA, MODELS, MOE, MORE, SGD, WINDOWS, batch, relative

pytestmark = pytest.mark.multirank
SEQUENCE = ParallelConfig(tensor=2, sequence=True)
LAYOUTS = {  # the longest of the rows has 13 tokens, and becomes one of 14 or 16
    "alone": (1, ParallelConfig()),
    "tp2-sequence": (2, SEQUENCE),
    "cp2": (2, ParallelConfig(context=2)),
    "cp2-heads": (2, ParallelConfig(context=2, context_mode="alltoall")),
    "cp2-tp2-sequence": (4, ParallelConfig(tensor=2, context=2, sequence=True)),
    "tp2-pp2-sequence": (4, ParallelConfig(tensor=2, pipeline=2, sequence=True)),
}
GENTLE = replace(SGD, lr=SGD.lr / 10)  # a whole gradient magnifies what is rounded
MORE_LAYOUTS = LAYOUTS | {"pp2": (2, ParallelConfig(pipeline=2))}
BASE = BatchConfig(micro_batch_samples=3)


def train(ranks, world, bc=BASE, **kwargs):
    return ranks.run(models.train, world=world, bc=bc, **kwargs)[0]


def small_step(name: str) -> dict:
    cfg = FAMILIES[name]
    faint = cfg.linear.key_heads or cfg.traits.hyper
    return {"optim": replace(SGD, lr=SGD.lr / 100), "steps": 1} if faint else {"optim": GENTLE}


def same(got, wanted, start, rel=1e-5):
    for a, b in zip(got["metrics"], wanted["metrics"], strict=True):
        assert {name: pytest.approx(value, rel=rel, abs=1e-6) for name, value in b.items()} == a
    torch.testing.assert_close(got["logprobs"], wanted["logprobs"], rtol=1e-5, atol=1e-5)
    for name, value in wanted["weights"].items():
        assert relative(got["weights"][name], value, value - start[name]) <= 1e-3, name


def learns_the_same(ranks, te_ranks, cfg, world=2, parallel=SEQUENCE, optim=SGD, **kwargs):
    rel = 1e-4 if cfg.traits.hyper else 1e-5  # micro-batches of other sizes change the norm of its gradient by 1e-5
    start = train(ranks, 1, cfg=cfg, optim=optim, **(kwargs | {"steps": 0}))["weights"]
    wanted = train(ranks, 1, cfg=cfg, optim=optim, **kwargs)
    same(train(te_ranks, world, cfg=cfg, parallel=parallel, optim=optim, **kwargs), wanted, start, rel)


@pytest.mark.slow
@pytest.mark.parametrize("optim", [SGD, ADAM], ids=["gradients", "adam"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_it_learns_what_modules_of_our_own_learn(ranks, te_ranks, layout, optim):
    world, parallel = LAYOUTS[layout]
    learns_the_same(ranks, te_ranks, LLAMA, world, parallel, optim)


@pytest.mark.slow
@pytest.mark.parametrize("bc", [BatchConfig(micro_batch_samples=1), BatchConfig(packing=False)], ids=["one", "padded"])
@pytest.mark.parametrize("layout", ["tp2-sequence", "cp2"])
def test_the_longest_row_may_be_lengthened(ranks, te_ranks, layout, bc):
    """Rows of odd lengths, each alone: a multiple of the tensor ranks is longer than all of them."""
    world, parallel = LAYOUTS[layout]
    start = train(ranks, 1, cfg=LLAMA, optim=SGD, steps=0)["weights"]
    wanted = train(ranks, 1, cfg=LLAMA, optim=SGD)
    same(train(te_ranks, world, bc, cfg=LLAMA, parallel=parallel, optim=SGD), wanted, start)


# heads whose values have another width, as fused attention takes them
LATENT = replace(MORE["deepseek_v3"], latent=replace(MORE["deepseek_v3"].latent, rotary_dim=4, value_dim=8))
FAMILIES = MODELS | WINDOWS | MORE | {"qwen3_moe": MOE, "latent": LATENT, "recompute": replace(LLAMA, recompute="full")}
FAMILIES["llama3"] = replace(MODELS["llama3"], num_kv_heads=2)


@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILIES)
def test_every_family_learns_the_same(ranks, te_ranks, name):
    learns_the_same(ranks, te_ranks, FAMILIES[name], **small_step(name))


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["cp2", "cp2-heads", "pp2"])
@pytest.mark.parametrize("name", ["gemma3", "gpt_oss", "latent", "qwen3_next", "nemotron_h", "smollm3-windows"])
def test_windows_sinks_latent_and_linear_attention_on_other_layouts(ranks, te_ranks, name, layout):
    cfg = FAMILIES[name]
    cfg = replace(cfg, num_layers=cfg.num_layers + cfg.num_layers % 2)
    learns_the_same(ranks, te_ranks, cfg, *MORE_LAYOUTS[layout], **small_step(name))


LORA = LoraConfig(rank=3, alpha=6, targets=[ALL_LINEAR])
ADAPTED = {
    "lora": replace(LLAMA, lora=LORA),
    "dora with biases": replace(MORE["llama-biases"], lora=replace(LORA, dora=True)),
    "norms after": replace(WINDOWS["gemma3"], lora=LORA),
    "experts": replace(MOE, lora=LORA),
    # columns of whole blocks on each of two ranks
    "4 bits": replace(LLAMA, hidden_size=128, ffn_hidden_size=128, lora=replace(LORA, quantize_base="nf4")),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    "name, layout",
    [*((name, "cp2") for name in ADAPTED), *((name, "tp2-sequence") for name in ADAPTED if name != "4 bits")],
)
def test_adapters_learn_the_same(ranks, te_ranks, name, layout):
    learns_the_same(ranks, te_ranks, ADAPTED[name], *LAYOUTS[layout], optim=ADAM)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [{"bc": replace(BASE, share_prompts=True)}, {"outputs": 2}], ids=["shared", "score"])
@pytest.mark.parametrize("name", ["llama", "gemma3", "gpt_oss"])
def test_shared_prompts_and_tokens_that_are_not_read(ranks, te_ranks, name, kind):
    """Rows have more keys than queries."""
    full = batch(FAMILIES[name])
    full.tokens[:, :7] = full.tokens[0, :7]
    full.lengths.clamp_(min=9)
    learns_the_same(ranks, te_ranks, FAMILIES[name], 1, ParallelConfig(), GENTLE, full=full, **kind)


OWN, ITS = "aligner.megatron.attention", "transformer_engine.pytorch.module.rmsnorm"
HOMES = {"linear layers": ("megatron.core.tensor_parallel.layers", "megatron.core.extensions.transformer_engine")}
HOMES["norms"] = (OWN, ITS)
ENDS = {"linear layers": ("linear_qkv", "linear_proj", "mlp.linear_fc1", "in_proj"), "norms": ("layernorm",)}


def made_of(cfg: ModelConfig) -> dict:
    """Kind of module -> where the model's are from; for attention how often its kernel was called in a pass."""
    built, calls, made = models.build(cfg), [], transformer_engine._attention
    transformer_engine._attention = lambda *options: calls.append(options) or made(*options)
    try:
        rows = batch(cfg)
        models.plain_logits(built, rows.tokens, rows.lengths)
    finally:
        transformer_engine._attention = made
    own = [(name, one) for name, one in built.module.named_modules() if list(one.parameters())]
    modules = [(name, type(one).__module__) for name, one in own]
    homes = {kind: {home for name, home in modules if name.endswith(ends)} for kind, ends in ENDS.items()}
    return homes | {"attention": len(calls)}


@pytest.mark.few(6)
@pytest.mark.parametrize("name", FAMILIES | ADAPTED)
def test_a_model_has_the_modules_that_are_said_to_be_there(te_ranks, name):
    """Norms over all heads are our own, as tensor ranks have shares of them, and the one that joins streams."""
    cfg = (FAMILIES | ADAPTED)[name]
    lacks, (got,) = te_lacks(cfg), te_ranks.run(made_of, cfg=cfg)
    assert got["attention"] == (0 if lacks["attention"] else len(cfg.layers_of("attention")))
    assert got["linear layers"] == {HOMES["linear layers"][not lacks["linear layers"]]}
    own = [OWN] * cfg.traits.wide_qk_norm + ["aligner.megatron.hyper"] * cfg.traits.hyper
    assert got["norms"] == {ITS, *own}


def without_numbers(cfg: ModelConfig) -> dict:
    head, meta, layout = Head(), torch.device("meta"), groups.build_layout(ParallelConfig())
    with meta:
        built = model.build_model(cfg, layout, head, torch.float32, meta)
    assert not any("transformer_engine" in type(one).__module__ for one in built.modules())
    return {name: (where.key, where.size) for name, where in places_of(cfg, head, torch.float32).items()}


@pytest.mark.parametrize("name", ["llama-biases", "gemma3", "qwen3_moe"])
def test_without_numbers_no_memory_of_the_device_is_taken(ranks, te_ranks, name):
    """The package's modules would take it, whatever torch's device is."""
    assert te_ranks.run(without_numbers, cfg=FAMILIES[name]) == ranks.run(without_numbers, cfg=FAMILIES[name])


def critic_on_policy(cfg: ModelConfig) -> list[dict]:
    trunk = models.build(cfg, optim=ADAM)
    critic, full = models.build_on(trunk), batch(cfg)
    parts = micro_batches(full, BASE)
    return [one.step(parts, models.nll_loss(one, full)) for one in (critic, trunk, critic)]


@pytest.mark.slow
def test_a_critic_has_the_modules_of_its_trunk(ranks, te_ranks):
    (wanted,), (got,) = (pool.run(critic_on_policy, cfg=ADAPTED["dora with biases"]) for pool in (ranks, te_ranks))
    for a, b in zip(got, wanted, strict=True):
        assert a == {name: pytest.approx(value, rel=1e-5, abs=1e-6) for name, value in b.items()}


def fused_and_exact(exact: bool) -> list[str]:
    torch.use_deterministic_algorithms(exact)
    try:
        return [model.te_kinds(FAMILIES[name])["attention"] for name in ("llama", "gemma3", "latent", "gpt_oss")]
    finally:
        torch.use_deterministic_algorithms(False)


def test_attention_is_our_own_where_the_package_would_keep_all_scores(te_ranks):
    """The deterministic backward of cuDNN for packed rows takes memory without end, and none does sinks."""
    (plain,), (exact,) = (te_ranks.run(fused_and_exact, exact=exact) for exact in (False, True))
    assert plain == [""] * 4 and exact == ["neither cuDNN nor FlashAttention computes it here"] * 4


@pytest.mark.slow
@pytest.mark.parametrize(
    "name, layout, less",
    [
        ("llama", {}, 1.0),
        ("qwen3", {"tensor": 2, "sequence": True}, 1.0),
        ("qwen3_moe", {}, 1.0),
        ("gemma3", {}, 0.95),  # keys of windows are not repeated for heads of queries
        ("latent", {}, 0.95),  # values are not padded
        ("gpt_oss", {}, 0.7),
    ],
)
def test_backward_needs_no_more_than_without_it(ranks, te_ranks, name, layout, less):
    """`tests/plan/test_measured.py` compares the same of modules of our own with the plan."""
    case = {"cfg": replace(FAMILIES[name], max_position=512), "parallel": ParallelConfig(**layout), "tokens": 512}
    kept = "benchmarks.context_memory:kept_activations"
    wanted, got = (max(pool.run(kept, world=layout.get("tensor", 1), **case)) for pool in (ranks, te_ranks))
    assert got == wanted if less == 1 else got < less * wanted


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama-biases", "gemma3", "olmo2", "qwen3_moe", "latent"])
def test_checkpoints_of_either_load_in_the_other(ranks, te_ranks, name, tmp_path):
    shape = {"cfg": FAMILIES[name], "parallel": SEQUENCE, "optim": ADAM, "folder": tmp_path}
    for number, (writes, reads) in enumerate([(ranks, te_ranks), (te_ranks, ranks)]):
        shape["folder"] = tmp_path / str(number)
        wrote, read = (
            pool.run(job, world=2, **shape)[0]
            for pool, job in ((writes, models.save_and_go_on), (reads, models.load_and_step))
        )
        assert models.same(wrote["weights"], read["weights"])
        for key, value in wrote["metrics"].items():
            assert read["metrics"][key] == pytest.approx(value, rel=1e-5, abs=1e-6), key
        for key, value in wrote["after"].items():
            assert relative(read["after"][key], value, value - wrote["weights"][key]) <= 1e-2, key


@pytest.mark.slow
@pytest.mark.parametrize(
    "name, layout, world",
    [
        ("gemma3", {"context": 2}, 2),
        ("gpt_oss", {"tensor": 2, "sequence": True}, 2),
        ("latent", {}, 1),
        ("lora", {"tensor": 2, "sequence": True}, 2),
    ],
)
def test_the_host_waits_as_without_it(ranks, te_ranks, name, layout, world):
    case = {"world": world, "cfg": (FAMILIES | ADAPTED)[name], "layout": layout}
    wanted, got = (pool.run(test_waits.waits, **case) for pool in (ranks, te_ranks))
    for step, _ in got:  # its norm is on the device until the metrics are read
        step[test_waits.NORM] = step.pop(("train.py", "step"))
    assert got == wanted


def moments(folder, cfg: ModelConfig) -> dict:
    """A step of an optimizer with moments in bfloat16, before and after a checkpoint; and what it keeps."""
    own = dict.fromkeys(("exp_avg_dtype", "exp_avg_sq_dtype"), "bfloat16") | {"use_precision_aware_optimizer": True}
    how = {"cfg": cfg, "optim": replace(ADAM, megatron=own), "dtype": torch.bfloat16}
    wrote = models.save_and_go_on(folder, **how)
    loaded = models.loaded(folder, **how)
    shards = list(owned(loaded.optimizer))
    dtypes = {tensor.dtype for shard in shards for tensor in shard.moments.values()}, {s.main.dtype for s in shards}
    return {"wrote": wrote, "read": models.one_more(loaded), "dtypes": dtypes}


def test_moments_in_bfloat16(ranks, te_ranks, tmp_path):
    """They take half the memory, and a run resumes with them; updates nearly are those of float32 moments."""
    got = te_ranks.run(moments, world=2, folder=tmp_path / "bf16", cfg=LLAMA)[0]
    exact = ranks.run(models.save_and_go_on, world=2, folder=tmp_path / "exact", cfg=LLAMA, optim=ADAM)[0]
    assert got["dtypes"] == ({torch.bfloat16}, {torch.float32})
    assert models.same(got["wrote"]["after"], got["read"]["after"])
    for name, value in exact["after"].items():
        assert relative(got["wrote"]["after"][name].float(), value, value) < 0.02, name


# all sizes are multiples of 32 on two ranks
EIGHT_BITS = replace(LLAMA, hidden_size=128, num_heads=4, num_kv_heads=2, head_dim=32, ffn_hidden_size=128)
RECIPES = {"tensorwise": {"fp8": "hybrid", "fp8_recipe": "tensorwise"}, "mxfp8": {"fp8": "e4m3", "fp8_recipe": "mxfp8"}}
FP8_LAYOUTS = {name: LAYOUTS[name] for name in ("alone", "tp2-sequence", "cp2", "tp2-pp2-sequence")}


def train_in_fp8(cfg: ModelConfig, **kwargs) -> dict:
    """On a device that has MXFP8 too."""
    from transformer_engine.pytorch import quantization

    before, quantization._MXFP8_SUPPORT = quantization.check_mxfp8_support(), (True, "")
    try:
        return models.train(cfg, **kwargs)
    finally:
        quantization._MXFP8_SUPPORT = before


class Rounded(torch.autograd.Function):
    """A product of numbers with 8 bits, one scale for each matrix; gradients have another format."""

    @staticmethod
    def forward(ctx, x, weight):
        x, weight = (eight_bits(one, torch.float8_e4m3fn) for one in (x, weight))
        ctx.save_for_backward(x, weight)
        return torch.nn.functional.linear(x, weight)

    @staticmethod
    def backward(ctx, grad):
        (x, weight), grad = ctx.saved_tensors, eight_bits(grad, torch.float8_e5m2)
        return grad @ weight, grad.flatten(0, -2).t() @ x.flatten(0, -2)


def eight_bits(x: torch.Tensor, kind: torch.dtype) -> torch.Tensor:
    scale = torch.finfo(kind).max / x.abs().amax()
    return (x * scale).to(kind).float() * (1 / scale)


def train_rounded(cfg: ModelConfig, **kwargs) -> dict:
    """With modules of our own, whose products are rounded."""
    kinds = ColumnParallelLinear, RowParallelLinear
    before = [kind.forward for kind in kinds]
    for kind in kinds:
        kind.forward = lambda module, x, **options: (Rounded.apply(x, module.weight), None)
    try:
        return models.train(replace(cfg, kernels="own"), **kwargs)
    finally:
        for kind, forward in zip(kinds, before, strict=True):
            kind.forward = forward


ONE_STEP = {"bc": BASE, "steps": 1, "optim": GENTLE}


@pytest.mark.parametrize("again", [{}, {"recompute": "full"}, {"recompute_modules": ["mlp"]}], ids=str)
def test_fp8_rounds_inputs_weights_and_gradients_of_each_linear_layer(te_ranks, again):
    cfg = replace(EIGHT_BITS, megatron=RECIPES["tensorwise"])
    start = te_ranks.run(models.train, cfg=cfg, **(ONE_STEP | {"steps": 0}))[0]["weights"]
    wanted = te_ranks.run(train_rounded, cfg=cfg, **ONE_STEP)[0]
    other = replace(cfg, **again) if "recompute" in again else replace(cfg, megatron=cfg.megatron | again)
    same(te_ranks.run(models.train, cfg=other, **ONE_STEP)[0], wanted, start, 1e-4)
    (exact,) = te_ranks.run(models.train, cfg=EIGHT_BITS, **ONE_STEP)[0]["metrics"]
    assert exact["loss"] != wanted["metrics"][0]["loss"] == pytest.approx(exact["loss"], rel=0.02)
    ends = replace(cfg, megatron=cfg.megatron | {"first_last_layers_bf16": True})  # which are all layers
    assert te_ranks.run(models.train, cfg=ends, **ONE_STEP)[0]["metrics"][0]["loss"] == pytest.approx(exact["loss"])


@pytest.mark.slow
@pytest.mark.parametrize("layout", list(FP8_LAYOUTS)[1:])
@pytest.mark.parametrize("recipe", RECIPES)
def test_fp8_learns_the_same_on_all_layouts(te_ranks, recipe, layout):
    """Each rank's tokens become a multiple of 16 or 32, else products refuse them. MXFP8 has scales of 32 numbers;
    those of a rank's matrix depend on the layout."""
    world, parallel = FP8_LAYOUTS[layout]
    cfg = replace(EIGHT_BITS, megatron=RECIPES[recipe])
    alone = te_ranks.run(train_in_fp8, cfg=cfg, **ONE_STEP)[0]
    got = te_ranks.run(train_in_fp8, cfg=cfg, world=world, parallel=parallel, **ONE_STEP)[0]
    for name, value in alone["metrics"][0].items():
        assert got["metrics"][0][name] == pytest.approx(value, rel=1e-4 if recipe == "mxfp8" else 0.1), name
    for name, value in alone["weights"].items():
        assert relative(got["weights"][name], value, value) < (1e-3 if recipe == "mxfp8" else 0.05), name


@pytest.mark.slow
def test_the_plan_counts_what_fp8_keeps(te_ranks):
    sizes, planned, tokens = {}, {}, 2048
    for name, own in (("plain", {}), ("fp8", RECIPES["tensorwise"])):
        cfg = replace(EIGHT_BITS, max_position=tokens, megatron=own)
        case = {"cfg": cfg, "parallel": ParallelConfig(), "tokens": tokens, "dtype": "bfloat16"}
        sizes[name] = te_ranks.run("benchmarks.context_memory:kept_activations", **case)[0]
        rows, scorer = PlannedRows(1, 1, *[tokens / 2, tokens // 2] * 2), PlannedModel("policy", cfg, "score", True)
        planned[name] = activation_bytes(PlanJob("rm", (scorer,), Grid(), rows, None, micro_rows=1), scorer, 0)
    less = [each["plain"] - each["fp8"] for each in (sizes, planned)]
    assert less[0] == pytest.approx(less[1], rel=1e-2) and less[0] > 0


def refusals(cases: list[ModelConfig]) -> list[str]:
    with_errors = []
    for cfg in cases:
        with pytest.raises(ConfigError) as error:
            models.build(cfg)
        with_errors.append(str(error.value))
    return with_errors


def test_fp8_is_refused_where_there_is_none(ranks, te_ranks):
    """Without the package, and for MXFP8 on an H100."""
    cases = [replace(EIGHT_BITS, megatron=RECIPES[name]) for name in ("tensorwise", "mxfp8")]
    (without,), (hopper,) = ranks.run(refusals, cases=cases), te_ranks.run(refusals, cases=cases[1:])
    assert all("model.megatron.fp8" in text and "Here: it is not installed" in text for text in without), without
    assert "model.megatron.fp8='e4m3'" in hopper[0] and "compute capability 10" in hopper[0]
