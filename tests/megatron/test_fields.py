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
from tests.tiny import ADAM, LLAMA, MOE, MORE, SGD, WINDOWS, batch

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
    behind = ("exp_avg_", "fp8_", "first_last_", "recompute_", "tp_comm_")
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


@on_ranks(1)
def test_weight_decay_may_be_added_to_the_gradient():
    optim = replace(ADAM, weight_decay=0.5)
    own = {"decoupled_weight_decay": False}
    plain, other = (one_more(build(LLAMA, optim=replace(optim, megatron=each)))["after"] for each in ({}, own))
    assert {name for name in plain if torch.equal(plain[name], other[name])} == {
        name for name in plain if "norm" in name
    }


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
