"""Scaled rotary embeddings against transformers' functions, on random grids."""

import json
import random
from dataclasses import replace

import pytest
import torch
import transformers
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from aligner.config.sections.model.config import ModelConfig
from aligner.config.sections.model.rope import RopeScalingConfig, longest_row
from aligner.errors import CheckpointError, ConfigError
from aligner.families.hf_config import config_from_hf, hf_config
from aligner.models.rope import attention_factor, inverse_frequencies
from aligner.roles.model_init import shape_of

LLAMA = ModelConfig(num_heads=2, num_kv_heads=2, hidden_size=32, head_dim=24, vocab_size=64)


def drawn(kind: str, seed: int) -> ModelConfig:
    """A model with this scaling and random parameters."""
    r = random.Random(f"{kind}{seed}")
    original = r.choice((32, 100, 4096))
    fields = {"factor": r.choice((1.5, 4.0, 32.0)), "original_max_position": original}
    if kind == "llama3":
        fields |= {"low_freq_factor": r.uniform(0.5, 1.5), "high_freq_factor": r.uniform(2, 8)}
    if kind == "yarn":
        fields |= {"beta_fast": r.uniform(4, 40), "beta_slow": r.uniform(0.5, 2), "truncate": r.random() < 0.5}
        fields |= r.choice(({}, {"attention_factor": 1.3}, {"mscale": 0.7, "mscale_all_dim": 1.0}))
    if kind == "longrope":
        fields |= {name: [r.uniform(1, 9) for _ in range(12)] for name in ("short_factor", "long_factor")}
    if kind in ("linear", "dynamic"):
        del fields["original_max_position"]
    base, longest = r.choice((1e4, 5e5)), int(original * r.choice((1, 8)))
    return replace(LLAMA, rope_base=base, max_position=longest, rope_scaling=RopeScalingConfig(type=kind, **fields))


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("kind", sorted(ROPE_INIT_FUNCTIONS.keys() - {"proportional"}))
def test_frequencies_are_those_of_transformers(kind, seed, tmp_path):
    cfg = drawn(kind, seed)
    raw = hf_config(cfg, bos_token_id=1, eos_token_id=2, pad_token_id=0)
    theirs = transformers.AutoConfig.for_model(**raw)
    wanted, factor = ROPE_INIT_FUNCTIONS[kind](theirs, "cpu", seq_len=cfg.max_position)
    assert torch.allclose(inverse_frequencies(cfg), wanted, rtol=1e-6)
    assert attention_factor(cfg) == pytest.approx(factor)
    theirs.save_pretrained(tmp_path)
    assert config_from_hf(tmp_path) == replace(cfg, init=str(tmp_path))
    old = {k: v for k, v in raw.items() if k != "rope_parameters"}
    (tmp_path / "config.json").write_text(json.dumps(old))
    assert config_from_hf(tmp_path) == replace(cfg, init=str(tmp_path))


def test_a_factor_that_is_absent_is_the_ratio_of_the_lengths(tmp_path):
    """As in Phi-3's files, in their older words."""
    lists = {"short_factor": [1.0] * 12, "long_factor": [2.0] * 12}
    raw = hf_config(LLAMA, bos_token_id=1, eos_token_id=2, pad_token_id=0)
    del raw["rope_parameters"]
    raw |= {"rope_scaling": {"type": "su", **lists}, "max_position_embeddings": 400}
    (tmp_path / "config.json").write_text(json.dumps(raw | {"original_max_position_embeddings": 100}))
    scaling = config_from_hf(tmp_path).rope_scaling
    assert (scaling.type, scaling.factor, scaling.original_max_position) == ("longrope", 4.0, 100)


def test_the_lists_of_longrope():
    """One for all rows of a run: the long one where the model may see rows beyond the original context."""
    fields = {"type": "longrope", "original_max_position": 32, "short_factor": [1.0] * 12, "long_factor": [4.0] * 12}
    cfg = replace(LLAMA, max_position=64, rope_scaling=RopeScalingConfig(**fields))
    plain = inverse_frequencies(LLAMA)
    assert torch.allclose(inverse_frequencies(cfg), plain / 4)
    assert torch.allclose(inverse_frequencies(replace(cfg, max_position=32)), plain)
    short = replace(cfg, rope_scaling=replace(cfg.rope_scaling, factors="short"))
    assert torch.allclose(inverse_frequencies(short), plain)
    assert longest_row(short.rope_scaling, 64) == 32 and longest_row(cfg.rope_scaling, 64) == 64
    assert shape_of(short) == shape_of(cfg)  # a choice of the run
    assert set(shape_of(LLAMA)["rope_scaling"]) == {
        "factor",
        "low_freq_factor",
        "high_freq_factor",
        "original_max_position",
    }


def test_malformed_rope_scaling_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"short_factor='3 numbers': expected 12 numbers"):
        replace(LLAMA, rope_scaling=RopeScalingConfig(type="longrope", short_factor=[1.0] * 3))
    raw = hf_config(LLAMA, bos_token_id=1, eos_token_id=2, pad_token_id=0)
    for rope, error, text in (
        ({"rope_type": "mrope", "factor": 2.0}, ConfigError, "rope_type default, llama3.*mrope"),
        ({"rope_type": "llama3", "factor": 2.0}, CheckpointError, "no value for rope_parameters.low_freq_factor"),
    ):
        (tmp_path / "config.json").write_text(json.dumps(raw | {"rope_parameters": rope, "rope_theta": None}))
        with pytest.raises(error, match=text):
            config_from_hf(tmp_path)
