"""`model.linear`: what cannot be is refused by its key."""

from dataclasses import replace

import pytest

from aligner.config.resolve import compose
from aligner.config.sections.model.linear import LinearConfig
from aligner.config.sections.parallel import ParallelConfig
from aligner.config.validate_model import validate_model
from aligner.errors import ConfigError, LayoutError
from tests.tiny import LLAMA, MORE

BUILT = ["engine.trtllm.prefix_reuse=false", "engine.cuda_graphs=false"]
CFG = MORE["qwen3_next"]


@pytest.mark.parametrize(
    ("change", "key"),
    [
        ({"key_heads": 0}, "model.linear.key_heads"),
        ({"value_heads": 6}, "model.linear.value_heads"),
        ({"conv": 0}, "model.linear.conv"),
        ({"attention_layers": [5]}, "model.linear.attention_layers"),
        ({"attention_every": 0}, "model.linear.attention_every"),
        ({"attention_every": 3}, "model.linear.attention_every"),
    ],
)
def test_what_cannot_be_is_refused(change, key):
    with pytest.raises(ConfigError) as caught:
        replace(CFG, linear=replace(CFG.linear, **change))
    assert caught.value.key == key


def test_other_families_have_none():
    with pytest.raises(ConfigError, match=r"model\.linear\..*qwen3_next have it"):
        replace(LLAMA, linear=CFG.linear)
    with pytest.raises(ConfigError, match=r"model\.pattern=.*nemotron_h have it"):
        replace(LLAMA, pattern="**")
    with pytest.raises(ConfigError, match="shared_ffn_hidden_size"):
        replace(CFG, moe=replace(CFG.moe, shared_ffn_hidden_size=0))


@pytest.mark.parametrize(
    ("change", "key"),
    [
        ({"pattern": "M-*"}, "model.pattern"),
        ({"pattern": "M-XE"}, "model.pattern"),
        ({"pattern": "M-ME"}, "model.pattern"),
        ({"pattern": "M-*-"}, "model.moe.num_experts"),
        ({"pattern": "--*E"}, "model.linear.key_heads"),
        ({"linear": replace(MORE["nemotron_h"].linear, rule="delta")}, "model.linear.rule"),
        ({"linear": replace(MORE["nemotron_h"].linear, attention_every=2)}, "model.linear.attention_every"),
        ({"tie_embeddings": True}, "model.tie_embeddings"),
    ],
)
def test_patterns_that_cannot_be_are_refused(change, key):
    with pytest.raises(ConfigError) as caught:
        replace(MORE["nemotron_h"], **change)
    assert caught.value.key == key


def test_which_layers_are_linear():
    linear = LinearConfig(1, 1, 1, 1, 1, attention_every=4, attention_layers=[1])
    assert [linear.is_linear(layer) for layer in range(8)] == [True, False, True, False, True, True, True, False]
    assert not any(LinearConfig().is_linear(layer) for layer in range(8))


@pytest.mark.parametrize(
    ("overrides", "error", "key"),
    [
        (["parallel.tensor=2"], LayoutError, "model.linear.key_heads"),
        (["parallel.context=2", "parallel.context_mode=alltoall"], LayoutError, "model.linear.key_heads"),
        (["engine.tensor_parallel=2"], LayoutError, "model.linear.key_heads"),
        (["engine.name=trtllm"], ConfigError, "model.family"),
        (["engine.name=trtllm_engine", *BUILT], ConfigError, "model.family"),
    ],
)
def test_ranks_share_the_heads(overrides, error, key):
    cfg = compose(["stage=grpo", *overrides])
    odd = replace(CFG, max_position=4096, linear=replace(CFG.linear, key_heads=3, value_heads=6))
    with pytest.raises(error) as caught:
        validate_model(cfg, odd)
    assert caught.value.key == key
    assert cfg.parallel == ParallelConfig() or "multiple" in str(caught.value)
