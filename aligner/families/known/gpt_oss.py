"""gpt-oss: sinks, and experts with biases and a clamped gate."""

from __future__ import annotations

from aligner.families import rows
from aligner.families.family import GATE_ALPHA, GATE_LIMIT, LONG, Family, MoeKeys

_EXPERTS = ("mlp", "gate_proj", "up_proj", "down_proj", "router")
FAMILIES = (
    Family(
        "gpt_oss",
        "GptOss",
        rows.COMMON + rows.experts(*_EXPERTS) + rows.expert_biases(*_EXPERTS) + rows.BIASES + (rows.SINKS,),
        models="gpt-oss 20B and 120B",
        moe=MoeKeys("num_local_experts", "intermediate_size"),
        keys=(("qkv_bias", "attention_bias", True),),
        constants=(("swiglu_limit", GATE_LIMIT), ("swiglu_alpha", GATE_ALPHA)),
        default_head_dim=64,
        windows="layers",
        default_window=128,
        default_global=("sliding_window_pattern", 2),
        defaults=(LONG, ("rope_theta", 1.5e5), ("rms_norm_eps", 1e-5)),
        default_rope=(
            ("rope_type", "yarn"),
            ("factor", 32.0),
            ("truncate", False),
            ("original_max_position_embeddings", 4096),
        ),
        stacked=(
            ("gate_up_proj", ("gate_proj.weight", "up_proj.weight")),
            ("gate_up_proj_bias", ("gate_proj.bias", "up_proj.bias")),
            ("down_proj", ("down_proj.weight",)),
            ("down_proj_bias", ("down_proj.bias",)),
        ),
        clamped_gate=True,
        served_by=("vllm",),
        vllm_fixed=(
            ("tie_embeddings", False),
            ("norm_eps", 1e-5),
            ("attention.global_every", 2),
            ("rope_scaling.type", "yarn"),
        ),
    ),
)
