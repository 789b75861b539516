"""Small jobs of every stage and model family; each takes seconds, on one rank or several."""

from __future__ import annotations

import json
import string
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from aligner.config.resolve import quoted
from aligner.families import FAMILIES

ROWS = {"rm": "pairs", "dpo": "pairs", "kto": "labels"}  # stage -> file of its rows; others: train
BASE = [
    *("logging=quiet", "cluster.threads=1", "run.deterministic=true", "optim.lr=3e-3"),
    *("model.num_layers=2", "model.hidden_size=32", "model.ffn_hidden_size=48", "model.num_kv_heads=2"),
    *("model.max_position=64", "model.dtype=float32"),
]
# by default an engine takes all memory of a card, which two jobs may share here
CACHE = "engine.kv_cache_bytes=67108864"
ROWS_A_STEP = ["batch.sequences=8", "batch.micro_batch_samples=4"]
SUPERVISED = ["data.max_tokens=32", *ROWS_A_STEP]
GENERATING = [
    *("data.max_prompt_tokens=16", "sampling.max_response_tokens=4", "batch.prompts=8", "batch.group=4", CACHE),
    *("batch.micro_batch_samples=8", "reward.functions=[{path: aligner.shakedown.toy:vowels}]"),
]
STAGES = {
    **dict.fromkeys(("sft", "rm", "dpo", "kto"), SUPERVISED),
    "distill": [
        "data.max_tokens=32",
        "data.max_prompt_tokens=16",
        *ROWS_A_STEP,
        "sampling.max_response_tokens=4",
        CACHE,
    ],
    **dict.fromkeys(("grpo", "online_dpo"), GENERATING),
    "ppo": [*GENERATING, "batch.group=1", "batch.minibatch_samples=0", "critic.optim.lr=3e-3"],
}


def vowels(completions: Sequence[str], **_: Any) -> list[float]:
    """Return each completion's share of letters that are vowels: a reward that every model has some of."""
    return [sum(c in "aeiou" for c in text) / max(1, len(text)) for text in completions]


@dataclass(frozen=True)
class ToyData:
    """Rows for every stage, and a byte tokenizer, in a folder that is made if it is missing."""

    folder: Path

    def make(self) -> None:
        from aligner.data.tokenizer import byte_tokenizer

        if (self.folder / "tokenizer").exists():
            return
        self.folder.mkdir(parents=True, exist_ok=True)
        letters = string.ascii_letters[:32]
        rows = [{"prompt": f"say {c}:", "completion": c} for c in letters]
        pairs = [
            {"prompt": f"say {c}:", "chosen": c, "rejected": "?" * (1 + i % 3), "margin": 0.25 * (i % 4)}
            for i, c in enumerate(letters)
        ]
        labels = [
            {"prompt": pair["prompt"], "completion": pair[side], "label": side == "chosen"}
            for pair in pairs
            for side in ("chosen", "rejected")
        ]
        for name, content in {"train": rows, "pairs": pairs, "labels": labels}.items():
            (self.folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in content))
        byte_tokenizer(str(self.folder / "tokenizer"))

    def arguments(self, stage: str, run: Path, *overrides: str) -> list[str]:
        """Return the overrides of a job of `stage`; later ones win."""
        paths = {
            "run.dir": run,
            "data.train": self.folder / f"{ROWS.get(stage, 'train')}.jsonl",
            "model.tokenizer": self.folder / "tokenizer",
        }
        named = [f"{key}={quoted(str(path))}" for key, path in paths.items()]
        return [f"stage={stage}", *named, *BASE, *STAGES[stage], *overrides]


def family_keys(name: str) -> list[str]:
    """Return overrides of a small model of the family, with every part that its layers can have."""
    family = FAMILIES[name]
    keys: dict[str, Any] = {"family": name, "qk_norm": family.qk_norm, "qkv_bias": family.qkv_bias}
    if family.single:
        keys |= {"pattern": "M*-E", "num_layers": 4, "linear.rule": "mamba2"}
    if not family.ties:
        keys["tie_embeddings"] = False
    if family.scaled_queries:
        keys |= {"rope_scaling.type": "yarn", "rope_scaling.original_max_position": 8}
        keys |= {"rope_scaling.factor": 8.0, "rope_scaling.llama_4_scaling_beta": 0.1}
    if family.latent:
        keys |= {"num_kv_heads": 4, "latent.kv_rank": 24, "latent.plain_dim": 12, "latent.rotary_dim": 6}
        keys |= {"latent.value_dim": 10}
    if family.indexer:
        keys |= {"latent.query_rank": 20, "indexer.heads": 16, "indexer.head_dim": 8, "indexer.top_k": 5}
    if family.entries:
        keys |= {"num_kv_heads": 1, "head_dim": 16, "attention.rotary_fraction": 0.25, "moe.gate_limit": 5.0}
        keys |= {"latent.query_rank": 20, "latent.output_groups": 2, "latent.output_rank": 12, "moe.hash_layers": 1}
        keys |= {"entries.tokens": 2, "entries.heavy_tokens": 4, "hyper.streams": 2, "hyper.iterations": 4}
        keys |= {"indexer.heads": 16, "indexer.head_dim": 8, "indexer.top_k": 5}
    if family.linear:
        keys |= {"linear.attention_every": 2} if "linear.attention_every" in family.varies else {}
        keys |= {"linear.key_heads": 2, "linear.value_heads": 4, "linear.conv": 4}
        keys |= {"linear.key_head_dim": 8, "linear.value_head_dim": 6}
    if family.moe:
        keys |= {"moe.num_experts": 4, "moe.top_k": 2, "moe.ffn_hidden_size": 48}
    if "moe.shared_ffn_hidden_size" in family.varies:
        keys["moe.shared_ffn_hidden_size"] = 48
    if family.branch_norms:
        keys["ffn_hidden_size"] = 48  # of the MLP beside the experts
    if "moe.latent_size" in family.varies:
        keys["moe.latent_size"] = 16
    if family.global_heads:
        keys |= {"rope_scaling.type": "proportional", "attention.rotary_fraction": 0.5, "attention.key_is_value": True}
        keys |= {"attention.global_head_dim": 16, "attention.global_kv_heads": 2}
    for key, value in {"attention.window": 6, "attention.global_every": 2, "attention.local_rope_base": 100.0}.items():
        keys |= {key: value} if key in family.varies else {}
    return [f"model.{key}={str(value).lower() if value in (True, False) else value}" for key, value in keys.items()]
