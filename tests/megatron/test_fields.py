"""Fields of Megatron's own classes, set by `model.megatron` and `optim.megatron`: they are read, and act."""

import sys
from collections import Counter
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig

from aligner.config.megatron_fields import DDP, OPTIMIZER, READ, TRANSFORMER
from aligner.config.sections.model.lora import LoraConfig
from aligner.config.sections.parallel import ParallelConfig
from aligner.megatron.moe import ExpertLayer
from aligner.megatron.sharing import LayerConfig
from tests.megatron.models import build, equal_shares, nll_loss, one_more, same, shares
from tests.ranks import on_ranks
from tests.tiny import ADAM, LLAMA, MODELS, MOE, MORE, SGD, WINDOWS, batch, relative

pytestmark = pytest.mark.multirank
CLASSES = {TRANSFORMER: LayerConfig, OPTIMIZER: OptimizerConfig, DDP: DistributedDataParallelConfig}


@contextmanager
def reads(kind: type, names: set[str]):
    """Collect the fields that others than the class itself ask its objects for."""

    def look(self, name):
        if sys._getframe(1).f_code.co_name not in ("__post_init__", "__repr__"):
            names.add(name)
        return object.__getattribute__(self, name)

    kind.__getattribute__ = look
    try:
        yield
    finally:
        del kind.__getattribute__


@pytest.mark.parametrize("kind", READ)
@on_ranks(2)
def test_an_update_reads_each_field_that_may_be_set(kind):
    names: set[str] = set()
    with reads(CLASSES[kind], names):
        model, full = build(LLAMA, ParallelConfig(pipeline=2), ADAM), batch(LLAMA)
        model.step([shares(model, full)] * 2, nll_loss(model, full))
    # what only others make Megatron ask for (tests/megatron/test_transformer_engine.py)
    behind = ("exp_avg_", "fp8_", "first_last_", "num_layers_at_", "recompute_")
    assert {name for name in READ[kind] if not name.startswith(behind)} <= names


@on_ranks(2)
def test_buckets_of_another_size_give_the_same_weights():
    steps, counts = [], []
    for size in (None, 1000):
        model = build(LLAMA, optim=replace(ADAM, clip_grad=0.0, megatron={"bucket_size": size}))
        counts.append(len(model.wrapped.bucket_groups))
        steps.append(one_more(model)["after"])
    assert counts[0] == 1 < counts[1]
    assert same(*steps)


@pytest.mark.parametrize("fields", [{"decoupled_weight_decay": False}, {"apply_wd_to_qk_layernorm": True}], ids=str)
@on_ranks(1)
def test_weight_decay_is_as_megatron_has_it(fields):
    cfg, optim = MODELS["qwen3"], replace(ADAM, weight_decay=0.5)
    plain, other = (one_more(build(cfg, optim=replace(optim, megatron=own)))["after"] for own in ({}, fields))
    changed = {name for name in plain if not torch.equal(plain[name], other[name])}
    norms = {name for name in plain if "q_norm" in name or "k_norm" in name}
    assert changed and (changed == norms) == ("apply_wd_to_qk_layernorm" in fields)


@on_ranks(4)
def test_gradients_in_bfloat16_are_added_in_float32():
    after = {}
    for exact in (False, True):
        own = {"reduce_scatter_with_fp32_accumulation": exact}
        optim = replace(ADAM, gradient_dtype="bfloat16", megatron=own)
        after[exact] = one_more(build(LLAMA, optim=optim, dtype=torch.bfloat16))
    assert after[True]["metrics"]["grad_norm"] == pytest.approx(after[False]["metrics"]["grad_norm"], rel=1e-2)
    assert not same(after[True]["after"], after[False]["after"])
    for name, value in after[False]["after"].items():
        assert relative(after[True]["after"][name], value, value) < 0.05


@on_ranks(2)
def test_stages_free_what_they_have_sent():
    after = {}
    for freed in (False, True):
        cfg = replace(LLAMA, megatron={"deallocate_pipeline_outputs": freed})
        after[freed] = one_more(build(cfg, ParallelConfig(pipeline=2), ADAM))["after"]
    assert same(*after.values())


LORA = LoraConfig(rank=2, targets=["down_proj"])
AGAIN = {
    "llama": (LLAMA, ["mlp"]),
    "gemma3": (WINDOWS["gemma3"], ["mlp"]),
    "experts": (MOE, ["moe"]),
    "some experts": (MORE["deepseek_v3"], ["mlp"]),
    "lora": (replace(LLAMA, lora=LORA), ["mlp"]),
}


@pytest.mark.few(3)
@pytest.mark.parametrize("name", AGAIN)
@on_ranks(2)
def test_what_is_recomputed_gives_the_same_gradients(name):
    """To the bit, with tensor ranks and pipelines too."""
    cfg, names = AGAIN[name]
    parallel = ParallelConfig(pipeline=2) if name == "llama" else ParallelConfig(tensor=2, sequence=True)
    steps, calls = [], []
    for own in ({}, {"recompute_modules": names}):
        model = build(replace(cfg, megatron=own), parallel, SGD)
        calls.append([])
        for layer in model.module.decoder.layers:
            kind = "moe" if isinstance(layer.mlp, ExpertLayer) else "mlp"
            layer.mlp.register_forward_hook(lambda *unused, kind=kind, seen=calls[-1]: seen.append(kind))
        steps.append(one_more(model, equal_shares))
    assert steps[0]["metrics"] == steps[1]["metrics"] and same(steps[0]["after"], steps[1]["after"])
    once, twice = map(Counter, calls)
    assert twice == {kind: count * (1 + (kind in names)) for kind, count in once.items()}
