"""`engine.name=trtllm_engine`: what it does not serve is refused from the config, before any GPU is touched."""

from dataclasses import replace

import pytest

from aligner.config.resolve import compose
from aligner.config.sections.model.attention import AttentionConfig
from aligner.config.sections.model.moe import MoeConfig
from aligner.config.sections.model.rope import RopeScalingConfig
from aligner.config.validate_model import validate_model
from aligner.errors import ConfigError
from tests import tiny

LLAMA = replace(tiny.LLAMA, max_position=4096)
GRPO = ["stage=grpo", "engine=trtllm_engine", "data.max_prompt_tokens=40", "sampling.max_response_tokens=60"]
GRPO += ["eval.max_response_tokens=20"]


def refused(model, *overrides: str) -> str:
    cfg = compose([*GRPO, "run.deterministic=false", *overrides])
    with pytest.raises(ConfigError) as caught:
        validate_model(cfg, model)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_only_its_families_are_accepted():
    moe = replace(LLAMA, family="mixtral", moe=MoeConfig(4, 2, 48))
    assert "model.family='mixtral': expected one of llama, mistral, qwen2, qwen3" in refused(moe)
    gemma = replace(LLAMA, family="gemma3_text", qk_norm=True, attention=AttentionConfig(window=4))
    assert "engine=trtllm and engine=native serve it" in refused(gemma)
    for served in (LLAMA, replace(LLAMA, family="qwen2", qkv_bias=True), replace(LLAMA, family="qwen3", qk_norm=True)):
        validate_model(compose([*GRPO, "run.deterministic=false"]), served)
    yarn = replace(LLAMA, rope_scaling=RopeScalingConfig(4.0, type="yarn"))
    assert "model.rope_scaling.type='yarn': expected llama3 with engine.name=trtllm_engine" in refused(yarn)
    assert "model.mlp_bias=True: expected False" in refused(replace(LLAMA, mlp_bias=True))
    assert "model.qkv_bias=True: expected False" in refused(replace(LLAMA, qkv_bias=True))


def test_windows_that_would_matter():
    mistral = replace(LLAMA, family="mistral", attention=AttentionConfig(window=100))
    validate_model(compose([*GRPO, "run.deterministic=false"]), mistral)
    assert "model.attention.window=100: expected at least 101" in refused(mistral, "sampling.max_response_tokens=61")
    assert "model.attention.window=100: expected at least 120" in refused(mistral, "engine.trtllm.max_seq_len=120")


def test_options_it_does_not_support_are_refused():
    with pytest.raises(ConfigError, match=r"run.deterministic=True: expected false.*picks kernels by timing"):
        validate_model(compose([*GRPO, "run.deterministic=true"]), LLAMA)
    for option, text in (
        ("engine.tensor_parallel=2", "engine.tensor_parallel=2: expected 1 with engine.name=trtllm_engine"),
        ("engine.cuda_graphs=true", "engine.cuda_graphs=True: expected false"),
        ("engine.sleep_weights=true", "engine.sleep_weights=True: expected false"),
    ):
        with pytest.raises(ConfigError, match=text):
            compose([*GRPO, option])
    # a stage without an engine asks nothing of it
    validate_model(compose(["stage=sft", "engine=trtllm_engine", "run.deterministic=true"]), LLAMA)


def with_engine(name):
    return compose([*[o for o in GRPO if not o.startswith("engine=")], f"engine={name}"])


def test_joined_files_are_not_for_the_other_engine_either():
    phi = replace(LLAMA, family="phi3")
    with pytest.raises(ConfigError, match=r"model.family='phi3': expected a family whose files"):
        validate_model(with_engine("trtllm"), phi)
    validate_model(compose(["stage=grpo", "reward.functions=[{path: math}]"]), phi)
    stacked = compose(["model=gpt_oss_20b"]).model
    with pytest.raises(ConfigError, match=r"model.family='gpt_oss': expected a family whose files"):
        validate_model(with_engine("trtllm"), stacked)


def test_the_other_engine_does_not_get_queries_with_factors():
    ministral = replace(tiny.MORE["ministral3"], max_position=4096)
    with pytest.raises(ConfigError, match=r"model.family='ministral3': expected a family whose queries"):
        validate_model(with_engine("trtllm"), ministral)


def test_tensorrt_llm_gets_no_heads_of_two_kinds():
    gemma = replace(tiny.MORE["gemma4"], max_position=4096)
    for engine in ("trtllm", "trtllm_engine"):
        with pytest.raises(ConfigError, match=r"model.family='gemma4_text': expected"):
            validate_model(with_engine(engine), gemma)
