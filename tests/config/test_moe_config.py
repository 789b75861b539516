"""`model.moe` and `parallel.expert`: what is refused, and by which key."""

import re

import pytest

from aligner.config.resolve import compose
from aligner.config.sections.model.config import ModelConfig
from aligner.config.validate import validate
from aligner.config.validate_model import validate_model, validate_on_gpu
from aligner.errors import ConfigError, LayoutError

DEEPSEEK = ["stage=sft", "data.train=conf/config.yaml", "model=deepseek_v3", "model.tokenizer=."]
RUN = ["stage=sft", "data.train=conf/config.yaml", "model=tiny_moe", "model.tokenizer=."]


@pytest.mark.parametrize(
    ("overrides", "key"),
    [
        (["model.moe.top_k=0"], "model.moe.top_k"),
        (["model.moe.num_experts=-1"], "model.moe.num_experts"),
        (["model.moe.aux_coef=-0.1"], "model.moe.aux_coef"),
        (["model.moe.aux_over=rank"], "model.moe.aux_over"),
    ],
)
def test_a_bad_value_names_its_key(overrides, key):
    with pytest.raises(ConfigError, match=key.replace(".", r"\.")):
        compose([*RUN, *overrides])


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("model.num_layers=3", "model.moe.dense_layers=[0, 1, 2]: expected some of the layers 0 to 2, ascending"),
        ("model.moe.scale=0", "model.moe.scale=0"),
        ("model.attention.window=5", "model.attention.window=5: expected 0 with model.family=deepseek_v3"),
    ],
)
def test_latent_attention_and_groups_are_checked(override, words):
    compose(DEEPSEEK)
    with pytest.raises(ConfigError, match=re.escape(words)):
        compose([*DEEPSEEK, override])
    for key in ("model.latent.kv_rank=3", "model.moe.groups=2", "model.moe.shared_ffn_hidden_size=8"):
        with pytest.raises(ConfigError, match=r"deepseek_v3.* have it"):
            compose([*RUN, key])


@pytest.mark.parametrize(
    ("overrides", "world"),
    [
        (["parallel.expert=2"], 2),
        (["parallel.expert=2", "parallel.context=2"], 2),  # context-parallel ranks share the experts
        (["parallel.expert=2", "parallel.tensor=2", "parallel.pipeline=2"], 8),
        (["parallel.expert=8"], 8),
    ],
)
def test_layouts_that_can_be(overrides, world):
    validate(compose([*RUN, *overrides]), world)


def test_the_experts_ffn_falls_back_to_the_models():
    from aligner.config.sections.model.moe import MoeConfig

    assert ModelConfig(family="mixtral", ffn_hidden_size=40, moe=MoeConfig(4)).expert_ffn == 40
    assert ModelConfig(family="mixtral", moe=MoeConfig(4, ffn_hidden_size=24)).expert_ffn == 24
    assert ModelConfig().moe.num_experts == 0


ODD = ["model.moe.ffn_hidden_size=72", "model.family=qwen3_moe"]  # 72 / 2 is no multiple of 8: an expert is not cut
NONE = ["model.moe.ffn_hidden_size=68"]


@pytest.mark.parametrize(
    ("overrides", "text"),
    [
        (NONE, "model.moe.ffn_hidden_size=68: expected a multiple of 8 for experts"),
        (["model.moe.ffn_hidden_size=0", "model.ffn_hidden_size=68"], "model.ffn_hidden_size=68"),
        (["model.hidden_size=36", "model.head_dim=16"], "model.hidden_size=36: expected a multiple of 8"),
    ],
)
def test_widths_that_the_gpus_kernel_refuses_name_their_key(overrides, text):
    cfg = compose([*RUN, *ODD, *overrides])
    validate_model(cfg, cfg.model)  # a CPU takes them
    with pytest.raises(LayoutError, match=re.escape(text)):
        validate_on_gpu(cfg, cfg.model)


@pytest.mark.parametrize(
    "overrides",
    [["model.dtype=float32", *NONE], [], ["stage=grpo", "engine.tensor_parallel=2"], ["parallel.tensor=2"]],
)
def test_widths_that_a_gpu_takes(overrides):
    cfg = compose([*RUN, *ODD, *overrides])
    validate_on_gpu(cfg, cfg.model)
