"""Fields of Megatron's own classes: their names and types come from the installed sources, and those that would do
nothing are refused."""

import dataclasses
import subprocess
import sys

import pytest

from aligner.config.identity import REPORT, effect_of
from aligner.config.megatron_fields import CLASSES, OWNERS, READ, annotations, class_of, fields_of
from aligner.config.options import all_keys
from aligner.config.resolve import compose
from aligner.config.rules import RuleContext
from aligner.errors import ConfigError


def refusal(*overrides: str) -> str:
    with pytest.raises(ConfigError) as error:
        compose(list(overrides))
    return str(error.value)


@pytest.mark.parametrize("kind", READ)
def test_names_and_types_are_those_of_the_installed_classes(kind):
    from megatron.core.distributed import DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig
    from megatron.core.transformer import TransformerConfig

    classes = {one.__name__: one for one in (TransformerConfig, OptimizerConfig, DistributedDataParallelConfig)}
    fields = {field.name for field in dataclasses.fields(classes[kind])}
    assert set(annotations(kind)) == fields
    assert set(READ[kind]) <= fields and not set(READ[kind]) & OWNERS.keys()


def test_every_owner_is_a_key_or_says_what_decides():
    known = {name for kind in READ for name in annotations(kind)}
    assert not OWNERS.keys() - known
    keys = {word for owner in OWNERS.values() for word in owner.replace(",", "").split() if word in all_keys()}
    assert keys > {"model.family", "model.dtype", "model.recompute", "parallel", "memory.offload", "optim.lr"}


def test_a_name_is_looked_up_in_both_classes():
    values = {"bucket_size": 10, "decoupled_weight_decay": False}
    assert compose(["optim.megatron={bucket_size: 10, decoupled_weight_decay: false}"]).optim.megatron == values
    assert [class_of("optim", name) for name in values] == [*reversed(CLASSES["optim"])]
    assert fields_of("optim", CLASSES["optim"][0], values) == {"decoupled_weight_decay": False}


REFUSED = {
    "model.megatron.deallocate_pipelines_output=true": "Did you mean `model.megatron.deallocate_pipeline_outputs`",
    "optim.megatron.bucket_sizes=1": "Did you mean `optim.megatron.bucket_size`",
    "optim.megatron.recompute_modules=[mlp]": "unknown config key `optim.megatron.recompute_modules`",
    "model.megatron.recompute_modules=mlp": "recompute_modules='mlp': expected a list of mlp, moe",
    "model.megatron.recompute_modules=5": "model.megatron.recompute_modules=5: expected a list of mlp, moe",
    "model.megatron.recompute_modules=[core_attn]": "recompute_modules=['core_attn']: expected a list of mlp, moe",
    "optim.megatron.bucket_size=much": "bucket_size='much': expected an integer >= 1",
    "optim.megatron.bucket_size=true": "bucket_size=True: expected an integer >= 1",
    "optim.megatron.bucket_size=0": "bucket_size=0: expected an integer >= 1",
    "optim.megatron.decoupled_weight_decay=1": "decoupled_weight_decay=1: expected true or false",
    "optim.megatron.exp_avg_dtype=float16": "exp_avg_dtype='float16': expected one of float32, bfloat16",
    "optim.megatron.exp_avg_dtype=null": "exp_avg_dtype=None: expected one of float32, bfloat16",
    "optim.megatron.loss_scale=2": "expected no value: it is decided by the loss, which is divided by",
    "optim.megatron.lr=2": "expected no value: it is decided by optim.lr",
    "critic.optim.megatron.lr=2": "critic.optim.megatron.lr=2: expected no value: it is decided by optim.lr",
    "optim.megatron.optimizer_cpu_offload=true": "expected no value: it is decided by memory.offload",
    "optim.megatron.overlap_param_gather=true": "expected no value: it is decided by the refit",
    "optim.megatron.use_distributed_optimizer=true": "expected no value: it is decided by optim.distributed",
    "model.megatron.tensor_model_parallel_size=2": "expected no value: it is decided by parallel",
    "model.megatron.recompute_granularity=full": "expected no value: it is decided by model.recompute",
    "model.megatron.hidden_size=2": "expected no value: it is decided by model.family",
    "model.megatron.params_dtype=bfloat16": "expected no value: it is decided by model.dtype",
    "optim.megatron.overlap_grad_reduce=false": "decided by aligner, which always overlaps the reduction. Remove it.",
    "optim.megatron.reduce_scatter_with_fp32_accumulation=true": "a field that aligner uses: use_precision_aware",
    "model.megatron.tp_comm_bootstrap_backend=ucc": "expected one of nccl, mpi, gloo",
    "model.megatron.tp_comm_overlap_rs_dgrad=true": "a field that aligner uses: fp8, fp8_recipe",
    "model.megatron.num_layers_at_start_in_bf16=17": "a field that aligner uses: fp8, fp8_recipe",
    "model.megatron.hidden_dropout=0.1": "a field that aligner uses: fp8, fp8_recipe",
}


@pytest.mark.parametrize("override", REFUSED)
def test_what_would_do_nothing_is_refused(override):
    assert REFUSED[override] in refusal(override)


def test_fields_of_a_pipeline_are_allowed_without_one():
    """A sweep tries both."""
    cfg = compose(["stage=sft", "data.train=README.md", "model.megatron.deallocate_pipeline_outputs=true"])
    RuleContext(cfg, 1).check("layout")


def test_a_resumed_run_may_have_others():
    assert {effect_of(key) for key in ("model.megatron", "optim.megatron")} == {REPORT}


def test_torch_is_not_imported_for_them():
    code = (
        "import sys; from aligner.config.resolve import compose; compose(['optim.megatron.bucket_size=1']); "
        "assert not {'torch', 'megatron.core'} & sys.modules.keys()"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
