"""The product's promise: layout, micro-batches and recompute do not change what is learned. Bounds for float32."""

from dataclasses import replace

import pytest
import torch

from aligner.config.sections.batch import BatchConfig
from aligner.config.sections.model.mtp import MtpConfig
from aligner.config.sections.parallel import ParallelConfig
from tests.megatron.models import agreed
from tests.tiny import ADAM, GPT_OSS, LLAMA, MODELS, MORE, SGD, WINDOWS, relative

pytestmark = pytest.mark.multirank

TP, PP, DP = ParallelConfig(tensor=2), ParallelConfig(pipeline=2), ParallelConfig()
SEQUENCE = ParallelConfig(tensor=2, sequence=True)
LAYOUTS = {
    "tp2": (2, TP),
    "pp2": (2, PP),
    "dp2": (2, DP),
    "tp2-sequence": (2, SEQUENCE),
    "tp2-pp2": (4, ParallelConfig(tensor=2, pipeline=2)),
    "cp2": (2, ParallelConfig(context=2)),
    "cp2-heads": (2, ParallelConfig(context=2, context_mode="alltoall")),
    "cp2-dp2": (4, ParallelConfig(context=2)),
    "cp2-tp2-sequence": (4, ParallelConfig(context=2, tensor=2, sequence=True)),
    "cp2-pp2": (4, ParallelConfig(context=2, pipeline=2)),
    "cp4": (4, ParallelConfig(context=4)),
}
STAGES = {
    "pp3": (3, ParallelConfig(pipeline=3)),
    "pp4": (4, ParallelConfig(pipeline=4)),
    "pp2-given": (2, ParallelConfig(pipeline=2, stage_layers=[3, 1])),
    "pp2-turns": (2, ParallelConfig(pipeline=2, virtual_stages=2)),
    "pp2-given-turns": (2, ParallelConfig(pipeline=2, virtual_stages=2, stage_layers=[1, 2, 1, 1])),
    "pp2-dp2-turns": (4, ParallelConfig(pipeline=2, virtual_stages=2)),
    "tp2-pp2-turns": (4, ParallelConfig(pipeline=2, virtual_stages=2, tensor=2, sequence=True)),
}
GENTLE = replace(SGD, lr=SGD.lr / 10)  # where vectors are made unit ones a whole gradient magnifies what is rounded
FAINT = replace(SGD, lr=SGD.lr / 300)
BASE = BatchConfig(micro_batch_samples=3)
MODELS_AND_HEADS = {
    "qwen3-tied": {"cfg": MODELS["qwen3"]},
    "qwen2-untied": {"cfg": replace(MODELS["qwen2"], tie_embeddings=False)},
    "llama-score": {"cfg": LLAMA, "outputs": 2},
}
# yarn and longrope are Llama, but for its angles
CUT = {name: {"cfg": cfg} for name, cfg in MORE.items() if name not in ("yarn", "longrope")}
CUT["indexer_loss"] = {"cfg": replace(MORE["glm_moe_dsa"], indexer=replace(MORE["glm_moe_dsa"].indexer, loss=0.5))}
AHEAD = {"mtp": {"cfg": replace(MORE["deepseek_v3"], mtp=MtpConfig(1, loss=0.5, detach=False))}}
AHEAD["mtp-four"] = {"cfg": replace(AHEAD["mtp"]["cfg"], num_layers=4)}
AHEAD["mtp-untied"] = {
    "cfg": replace(MORE["deepseek_v3"], num_layers=4, tie_embeddings=False, mtp=MtpConfig(1, loss=0.5))
}
CUT["gpt_oss"] = {"cfg": replace(GPT_OSS, num_layers=4)}  # context ranks round 10 % more with three
STAGED = CUT | AHEAD | {"five": {"cfg": replace(MODELS["qwen3"], num_layers=5)}}
for over in ("minibatch", "micro_batch"):
    moe = replace(MORE["qwen3_moe-mixed"].moe, aux_coef=0.1, aux_over=over)
    STAGED[f"balanced, {over}"] = {"cfg": replace(MORE["qwen3_moe-mixed"], moe=moe)}
LINEAR = ("qwen3_next", "nemotron_h")
WINDOWED = {name: {"cfg": cfg} for name, cfg in (WINDOWS | {"sinks": GPT_OSS, "gemma4": MORE["gemma4"]}).items()}


@pytest.fixture(scope="module")
def alone(ranks):
    """One rank's result for given arguments, computed once; with the weights before the first step."""
    seen = {}

    def get(name, optim):
        key = name, optim.eps
        if key not in seen:
            model = (MODELS_AND_HEADS | WINDOWED | STAGED)[name]
            start = agreed(ranks, 1, **model, optim=optim, bc=BASE, steps=0)["weights"]
            seen[key] = start, agreed(ranks, 1, **model, optim=optim, bc=BASE)
        return seen[key]

    return get


def bound_of(cfg) -> float:
    if cfg.traits.hyper:  # every layer makes vectors unit ones several times
        return 1e-3
    return 6e-5 if cfg.traits.plain_scores else 2e-5  # whose softmax is sharp, which magnifies what is rounded


def check(got, base, optim, bound=2e-5):
    start, wanted = base
    for ours, theirs in zip(got["metrics"], wanted["metrics"], strict=True):
        for name in theirs:
            assert abs(ours[name] - theirs[name]) <= max(1e-5, bound / 20) * max(1.0, abs(theirs[name])), name
    if wanted["logprobs"] is not None:
        assert (got["logprobs"] - wanted["logprobs"]).abs().max() <= (1e-4 if optim is SGD else 1e-3)
    assert got["weights"].keys() == wanted["weights"].keys()
    for name, value in wanted["weights"].items():
        update = value - start[name]
        # which no gradient changes
        fixed = name.endswith(("e_score_correction_bias", "gate.bias", "tid2eid", "layer_scalar"))
        fixed |= ".indexer." in name and "indexer/loss" not in wanted["metrics"][0]
        assert update.any() != fixed, name
        # gradient descent: the sum of two gradients. Adam turns noise-sized gradients into full steps: looser
        assert relative(got["weights"][name], value, update) <= (bound if optim is SGD else 1e-3), name


@pytest.mark.few(2)
@pytest.mark.parametrize("layout", ["one", "tp2-sequence", "pp2", "cp2", "cp2-heads", "cp2-tp2-sequence"])
def test_padded_rows_learn_the_same(ranks, alone, layout):
    world, parallel = {"one": (1, DP), **LAYOUTS}[layout]
    bc = BatchConfig(micro_batch_samples=4, packing=False)
    for name in ("qwen3-tied", "llama-score"):
        got = agreed(ranks, world, **MODELS_AND_HEADS[name], parallel=parallel, optim=SGD, bc=bc)
        check(got, alone(name, SGD), SGD)


@pytest.mark.few(8)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("name", "optim"), [*((name, SGD) for name in MODELS_AND_HEADS), ("qwen2-untied", ADAM)])
def test_layouts_learn_the_same(ranks, alone, name, layout, optim):
    world, parallel = LAYOUTS[layout]
    got = agreed(ranks, world, **MODELS_AND_HEADS[name], parallel=parallel, optim=optim, bc=BASE)
    check(got, alone(name, optim), optim)


@pytest.mark.few(2)
@pytest.mark.parametrize(
    "name, layout",
    [
        ("gemma3", "tp2-pp2"),
        ("gemma3", "tp2-sequence"),
        ("gemma3", "cp2"),
        ("mistral", "cp2"),
        ("mistral", "cp2-heads"),
        ("mistral", "padded"),
        ("mistral", "shared"),
        ("gemma4", "cp2-heads"),
        ("sinks", "cp2-heads"),  # whose ranks have a share of them
        ("sinks", "shared"),
    ],
)
def test_windows_learn_the_same(ranks, alone, name, layout):
    world, parallel = {"padded": (1, DP), "shared": (1, DP), **LAYOUTS}[layout]
    bc = replace(BASE, packing=layout != "padded", share_prompts=layout == "shared")
    got = agreed(ranks, world, **WINDOWED[name], parallel=parallel, optim=SGD, bc=bc)
    check(got, alone(name, SGD), SGD, bound_of(WINDOWED[name]["cfg"]))


@pytest.mark.few(3)
@pytest.mark.parametrize(
    "name, layout",
    [
        (name, layout)
        for name in CUT
        for layout in ("tp2", "tp2-sequence", "cp2" if CUT[name]["cfg"].passes_beside else "cp2-pp2")
    ]
    + [("gemma4-inputs", layout) for layout in ("cp2-heads", "cp2-tp2-sequence", "padded", "shared")]
    + [("indexer_loss", layout) for layout in ("cp2-heads", "cp2-tp2-sequence", "padded", "shared")]
    + [("deepseek_v4", layout) for layout in ("cp2-tp2-sequence", "padded", "shared")]
    + [("mtp", layout) for layout in ("tp2", "tp2-sequence", "cp2", "cp2-heads", "dp2", "padded", "shared")]
    + [("mtp-untied", layout) for layout in ("pp2", "tp2-pp2", "cp2-pp2")]
    + [("mtp-four", layout) for layout in ("pp2", "cp2-pp2")],
)
def test_more_families_learn_the_same(ranks, alone, name, layout):
    """Those whose features reach across ranks."""
    world, parallel = {"padded": (1, DP), "shared": (1, DP), **LAYOUTS}[layout]
    model = (CUT | AHEAD)[name]
    cfg = model["cfg"]
    optim = FAINT if cfg.traits.hyper else GENTLE if cfg.linear.key_heads or cfg.layer_input_size else SGD
    bc = replace(BASE, packing=layout != "padded", share_prompts=layout == "shared")
    got = agreed(ranks, world, **model, parallel=parallel, optim=optim, bc=bc)
    check(got, alone(name, optim), SGD, bound_of(cfg))


@pytest.mark.parametrize(
    "name, layout",
    [
        ("five", "pp4"),
        ("nemotron_h", "pp3"),
        ("qwen3_moe-mixed", "pp2-given"),
        ("gemma4-experts", "pp3"),
        ("five", "pp2-turns"),
        ("five", "pp2-given-turns"),
        ("five", "pp2-dp2-turns"),
        ("nemotron_h", "pp2-turns"),
        ("deepseek_v4", "pp2-turns"),
        ("mtp-untied", "pp3"),
        ("mtp-untied", "tp2-pp2-turns"),
        ("mtp-four", "pp2-turns"),
        ("balanced, minibatch", "tp2-pp2-turns"),
        ("balanced, micro_batch", "pp2-turns"),
    ],
)
def test_stages_with_other_numbers_of_layers_learn_the_same(ranks, alone, name, layout):
    world, parallel = STAGES[layout]
    cfg = STAGED[name]["cfg"]
    optim = FAINT if cfg.traits.hyper else GENTLE if cfg.linear.key_heads else SGD
    got = agreed(ranks, world, **STAGED[name], parallel=parallel, optim=optim, bc=BASE)
    check(got, alone(name, optim), SGD, bound_of(STAGED[name]["cfg"]))


@pytest.mark.few(4)
@pytest.mark.parametrize("name", LINEAR)
@pytest.mark.parametrize("layout", ["cp2-heads", "cp2-tp2-sequence", "cp4", "padded", "shared"])
def test_linear_layers_learn_the_same(ranks, alone, name, layout):
    """A row's memory begins with its first token, wherever its tokens are."""
    world, parallel = {"padded": (1, DP), "shared": (1, DP), **LAYOUTS}[layout]
    bc = replace(BASE, packing=layout != "padded", share_prompts=layout == "shared")
    got = agreed(ranks, world, **CUT[name], parallel=parallel, optim=GENTLE, bc=bc)
    check(got, alone(name, GENTLE), SGD)


@pytest.mark.parametrize("layout", ["dp2", "tp2-sequence", "tp2-pp2"])
def test_the_plain_optimizer_learns_the_same(ranks, alone, layout):
    world, parallel = LAYOUTS[layout]
    optim = replace(SGD, distributed=False)
    got = agreed(ranks, world, **MODELS_AND_HEADS["qwen3-tied"], parallel=parallel, optim=optim, bc=BASE)
    check(got, alone("qwen3-tied", SGD), SGD)


MICRO_BATCHES = {
    "1": BatchConfig(micro_batch_samples=1),
    "2": BatchConfig(micro_batch_samples=2),
    "4": BatchConfig(micro_batch_samples=4),
    "tokens": BatchConfig(micro_batch_tokens=30),
    "logits-in-parts": BatchConfig(micro_batch_samples=4, logits_bytes=12 * 11 * 7),
}


@pytest.mark.few(4)
@pytest.mark.parametrize(
    ("layout", "parts"),
    [
        *(("one", parts) for parts in MICRO_BATCHES),
        *(("pp2", parts) for parts in ("1", "4", "tokens")),
        *(("dp2", parts) for parts in ("1", "tokens")),
        *((layout, parts) for layout in ("tp2-sequence", "cp2") for parts in ("2", "logits-in-parts")),
    ],
)
def test_micro_batches_learn_the_same(ranks, alone, layout, parts):
    world, parallel = {"one": (1, DP), **LAYOUTS}[layout]
    name, bc = "qwen3-tied", MICRO_BATCHES[parts]
    check(agreed(ranks, world, **MODELS_AND_HEADS[name], parallel=parallel, optim=SGD, bc=bc), alone(name, SGD), SGD)


@pytest.mark.parametrize(
    ("layout", "layers"), [("one", "full"), ("one", "1"), ("tp2-sequence", "full"), ("tp2-pp2", "full")]
)
def test_recompute_learns_the_same(ranks, alone, layout, layers):
    world, parallel = {"one": (1, DP), **LAYOUTS}[layout]
    base = alone("qwen3-tied", SGD)
    cfg = replace(MODELS["qwen3"], recompute=layers)
    check(agreed(ranks, world, cfg=cfg, parallel=parallel, optim=SGD, bc=BASE), base, SGD)


@pytest.mark.few(2)
@pytest.mark.parametrize("layout", ["dp2", "tp2-sequence", "tp2-pp2", "cp2", "cp2-heads", "cp2-pp2"])
def test_bfloat16_learns_nearly_the_same(ranks, alone, layout):
    world, parallel = LAYOUTS[layout]
    _, wanted = alone("qwen3-tied", ADAM)
    got = agreed(ranks, world, cfg=MODELS["qwen3"], parallel=parallel, optim=ADAM, bc=BASE, dtype=torch.bfloat16)
    for ours, theirs in zip(got["metrics"], wanted["metrics"], strict=True):
        assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-2)
        assert ours["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=5e-2)
    assert all(t.dtype == torch.bfloat16 for t in got["weights"].values())
