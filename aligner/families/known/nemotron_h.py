"""Nemotron-H and Nemotron 3: a layer is Mamba-2, attention without positions, an MLP without a gate, or experts."""

from __future__ import annotations

from dataclasses import replace

from aligner.families import rows
from aligner.families.family import Family, MoeKeys

_NORMS = {"linear": "input", "attention": "input", "dense": "pre_mlp", "sparse": "pre_mlp"}
_IN = tuple(f"mixer.in_proj_{name}" for name in ("z", "x", "B", "C", "dt"))  # in the order of its files


def _mamba(ours: str, hf: str | tuple[str, ...], shape: str, *where: object) -> rows.ParamSpec:
    return rows.layer(f"self_attention.{ours}", hf, shape, *where, kind="linear", float32=ours == rows.DECAY)


_TABLE = (
    replace(rows.COMMON[0], hf=("model.embeddings.weight",)),
    *(rows.layer(f"{ours}_layernorm.weight", "norm.weight", "hidden", kind=kind) for kind, ours in _NORMS.items()),
    *(
        replace(row, hf=tuple(name.replace("self_attn", "mixer") for name in row.hf), kind="attention")
        for row in rows.COMMON
        if ".self_attention." in row.canonical
    ),
    _mamba(
        "in_proj.weight",
        tuple(f"{_IN[i]}.weight" for i in (3, 2, 1, 0, 4)),
        "linear_in hidden",
        0,
        "key_heads",
        "linear_in",
    ),
    # whole on every tensor rank: the channels of a group are not adjacent
    _mamba("conv1d.weight", "mixer.conv1d.weight", "linear_mixed 1 conv"),
    _mamba("conv1d.bias", "mixer.conv1d.bias", "linear_mixed"),
    *(_mamba(name, f"mixer.{name}", "value_heads", 0, "key_heads") for name in ("A_log", "dt_bias", "D")),
    _mamba("out_norm.weight", "mixer.norm.weight", "linear_out", 0, "key_heads"),
    _mamba("out_proj.weight", "mixer.out_proj.weight", "hidden linear_out", 1, "key_heads"),
    rows.layer("mlp.linear_fc1.weight", "mixer.up_proj.weight", "ffn hidden", 0, "ffn", kind="dense"),
    rows.layer("mlp.linear_fc2.weight", "mixer.down_proj.weight", "hidden ffn", 1, "ffn", kind="dense"),
    *rows.experts("mixer", "", "up_proj", "down_proj"),
    *rows.sigmoid_router("mixer", "shared_experts", gated=False),
    *(
        rows.layer(f"mlp.{name}.weight", f"mixer.{name}.weight", shape, kind="sparse", when="moe.latent_size")
        for name, shape in (("fc1_latent_proj", "expert_hidden hidden"), ("fc2_latent_proj", "hidden expert_hidden"))
    ),
    replace(rows.COMMON[-1], hf=("model.norm_f.weight",)),
)
FAMILIES = (
    Family(
        "nemotron_h",
        "NemotronH",
        _TABLE,
        models="Nemotron-H, Nemotron Nano 2, Nemotron 3 Nano and Super",
        moe=MoeKeys("n_routed_experts", "moe_intermediate_size", "norm_topk_prob", aux_coef=""),
        keys=(
            ("linear.key_heads", "n_groups", 8),
            ("linear.value_heads", "mamba_num_heads", 128),
            ("linear.key_head_dim", "ssm_state_size", 128),
            ("linear.value_head_dim", "mamba_head_dim", 64),
            ("linear.conv", "conv_kernel", 4),
            ("moe.shared_ffn_hidden_size", "moe_shared_expert_intermediate_size", 7688),
            ("moe.latent_size", "moe_latent_size", 0),
            ("moe.groups", "n_group", 1),
            ("moe.top_groups", "topk_group", 1),
            ("moe.scale", "routed_scaling_factor", 1.0),
        ),
        constants=(
            ("use_bias", False),
            ("use_conv_bias", True),
            ("mamba_proj_bias", False),
            ("mamba_hidden_act", "silu"),
            ("n_shared_experts", 1),
            ("residual_in_fp32", False),
        ),
        predicts_ahead="num_nextn_predict_layers",
        default_head_dim=128,
        defaults=(("max_position_embeddings", 4096), ("rms_norm_eps", 1e-5)),
        activation_key="mlp_hidden_act",
        activation="relu2",
        norm_key="layer_norm_epsilon",
        rotary=False,
        ties=False,
        stored=(("model.", "backbone."),),
        fused=(("mixer.in_proj", _IN),),
        served_by=("vllm",),
    ),
)
