"""Seed-OSS (ByteDance's Seed-OSS-36B), a family that is not among the project's, out of the rows that these consist of.

python -m aligner run stage=sft model.family=examples/own_family.py:SEED_OSS model.init=models/seed ...
"""

from __future__ import annotations

from aligner import api

SEED_OSS = api.Family(
    "seed_oss",
    "SeedOss",
    api.rows.COMMON + api.rows.MLP + api.rows.QKV_BIAS,
    keys=(("qkv_bias", "attention_bias", True),),
    constants=(("attention_out_bias", False),),
    default_head_dim=128,
    defaults=(("max_position_embeddings", 524288),),
)
