"""GLM-4.5, 4.6 and 4.7: DeepSeek-V3's experts behind attention that may normalise queries and keys."""

from __future__ import annotations

from aligner.families import rows
from aligner.families.family import ATTENTION_BIAS, LONG, Family
from aligner.families.known.deepseek_v3 import EXPERTS, MOE

FAMILIES = (
    Family(
        "glm4_moe",
        "Glm4Moe",
        rows.COMMON + rows.QKV_BIAS + rows.QK_NORM + EXPERTS,
        models="GLM-4.5, 4.5-Air, 4.6 and 4.7",
        moe=MOE,
        keys=(
            ATTENTION_BIAS,
            ("qk_norm", "use_qk_norm", False),
            ("moe.groups", "n_group", 1),
            ("moe.top_groups", "topk_group", 1),
            ("moe.scale", "routed_scaling_factor", 1.0),
        ),
        predicts_ahead="num_nextn_predict_layers",
        default_rotary_fraction=0.5,
        defaults=(LONG, ("rms_norm_eps", 1e-5)),
        ties=False,
        served_by=("vllm",),
        vllm_fixed=(("tie_embeddings", False),),
    ),
)
