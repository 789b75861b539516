"""Random small models of every family against transformers: `python -m tests.grid --draws 200 --seed 0`.

A family is drawn by its entry in `aligner/families/known/`: each key in which its models differ has a draw
in `KEYS`, and one without is an error that names it. Draws are as wild as the config allows: heads that do not
multiply to the hidden size, one head, odd widths, local and unrotated layers in any order, every rotary scaling."""

from __future__ import annotations

import argparse
import random
import tempfile
from collections.abc import Callable
from dataclasses import fields
from typing import Any

import torch

from aligner.config.sections.engine import EngineConfig
from aligner.config.sections.model.attention import AttentionConfig, ScalesConfig, layer_pattern
from aligner.config.sections.model.config import ModelConfig
from aligner.config.sections.model.entries import EntriesConfig
from aligner.config.sections.model.hyper import HyperConfig
from aligner.config.sections.model.indexer import IndexerConfig
from aligner.config.sections.model.latent import LatentConfig
from aligner.config.sections.model.linear import LinearConfig
from aligner.config.sections.model.moe import MoeConfig
from aligner.config.sections.model.rope import ROPE_TYPES, RopeScalingConfig
from aligner.engines.native import NativeEngine
from aligner.families import FAMILIES
from aligner.types import SamplingParams
from tests.ranks import Ranks
from tests.tiny import batch, hf_weights, transformers_model, write_folder

PROMPT, RESPONSE = 19, 12  # tokens: beyond windows and original contexts
SHORT, LONG = 16, 256  # contexts
ATOL = 1e-4

Draw = Callable[[random.Random, ModelConfig], Any]  # of a shape; its family is not drawn yet
KEYS: dict[str, Draw] = {
    "qkv_bias": lambda r, _: r.random() < 0.5,
    "qk_norm": lambda r, _: r.random() < 0.5,
    "mlp_bias": lambda r, _: r.random() < 0.5,
    "attention.rotary_fraction": lambda r, shape: r.randrange(4, shape.kv_channels + 1, 2) / shape.kv_channels,
    "attention.multiplier": lambda r, _: r.choice([0.0, r.uniform(0.05, 0.5)]),
    "attention.query_scale_dim": lambda r, _: r.choice([0, r.randint(3, 40)]),
    "attention.softcap": lambda r, _: r.choice([0.0, r.uniform(0.5, 5)]),
    "attention.window": lambda r, _: r.choice([0, *range(1, 13)]),
    "attention.local_rope_base": lambda r, _: r.uniform(20, 1000),
    "attention.global_head_dim": lambda r, _: 2 * r.randint(2, 9),
    "attention.global_kv_heads": lambda r, shape: r.choice([0, 1, shape.num_kv_heads, shape.num_heads]),
    "attention.key_is_value": lambda r, _: r.random() < 0.7,
    "attention.nope_layers": lambda r, shape: [n for n in range(shape.num_layers) if r.random() < 0.4],
    "rope_scaling.llama_4_scaling_beta": lambda r, _: r.choice([0.0, r.uniform(0.05, 0.5)]),
    "pattern": lambda r, shape: _shuffled(r, ["*", "E", "M", *r.choices("M*-E", k=shape.num_layers)]),
    "moe.dense_layers": lambda r, shape: [n for n in range(shape.num_layers - 1) if r.random() < 0.4],
    "moe.shared_ffn_hidden_size": lambda r, _: r.randint(1, 2),  # times an expert's
    "moe.latent_size": lambda r, _: r.choice([0, r.randint(4, 30)]),
    "moe.groups": lambda r, _: r.randint(1, 3),
    "moe.top_groups": lambda r, _: r.randint(1, 3),  # at most the groups
    "moe.scale": lambda r, _: r.uniform(0.3, 1.5),
    "latent.kv_rank": lambda r, _: r.randint(3, 24),
    "latent.query_rank": lambda r, _: r.choice([0, r.randint(3, 24)]),
    "latent.plain_dim": lambda r, _: r.randint(1, 12),
    "latent.rotary_dim": lambda r, _: 2 * r.randint(1, 6),
    "latent.value_dim": lambda r, _: r.randint(1, 20),
    "latent.neighbours": lambda r, _: r.random() < 0.5,
    "indexer.heads": lambda r, _: r.randint(14, 18),  # few would give many scores of 0
    "indexer.head_dim": lambda r, _: r.randint(0, 9),  # more than is rotated
    "indexer.top_k": lambda r, _: r.randint(1, PROMPT + RESPONSE),
    "indexer.shared_layers": lambda r, shape: [n for n in range(1, shape.num_layers) if r.random() < 0.5],
    "latent.output_groups": lambda r, shape: r.choice([n for n in (1, 2, 3, 4) if shape.num_heads % n == 0]),
    "latent.output_rank": lambda r, _: r.randint(2, 12),
    "entries.tokens": lambda r, _: r.randint(1, 5),
    "entries.heavy_tokens": lambda r, _: r.randint(1, 9),
    "entries.heavy_layers": lambda r, shape: [n for n in range(shape.num_layers) if r.random() < 0.4],  # if global
    "hyper.streams": lambda r, _: r.randint(2, 4),
    "hyper.iterations": lambda r, _: r.randint(1, 20),
    "hyper.eps": lambda r, _: r.choice([1e-6, 1e-3]),
    "moe.hash_layers": lambda r, shape: r.randint(0, shape.num_layers),
    "moe.gate_limit": lambda r, _: r.uniform(0.1, 3),
    "scales.embedding": lambda r, _: r.uniform(0.5, 4),
    "scales.residual": lambda r, _: r.uniform(0.2, 1.5),
    "scales.logits": lambda r, _: r.uniform(0.5, 3),
    "scales.logits_softcap": lambda r, _: r.choice([0.0, r.uniform(1, 10)]),
    "attention.kv_shared_layers": lambda r, shape: r.choice([0, r.randint(0, shape.num_layers)]),  # or fewer
    "double_mlp": lambda r, _: r.random() < 0.5,
    "layer_input_size": lambda r, _: r.choice(
        [0, r.randint(3, 9)]
    ),  # of which there is a norm: its unit vectors of 1 are signs
}
LAYERS = ("attention.global_every", "attention.global_layers")  # two words for one thing, drawn together
# what transformers refuses: other scalings, heads that do not multiply to the hidden size
ROPE = {"phi3": ("", "longrope"), "nemotron_h": ("",), "ministral3": ("yarn",), "gemma4_text": ("proportional",)}
ROPE["deepseek_v4"] = ("", "linear", "yarn")
USUAL = ("", *(kind for kind in ROPE_TYPES if kind != "proportional"))
SQUARE = ("phi3",)


def draw(family: str, seed: int) -> ModelConfig:
    """A random model of the family, the same for the same seed."""
    r, traits = random.Random(f"{family}/{seed}"), FAMILIES[family]
    groups, head_dim = r.choice([1, 1, 2, 3, 4]), 2 * r.randint(2, 9)
    heads = groups * r.choice([1, 1, 2, 3])
    sizes: dict[str, Any] = {
        "num_layers": r.randint(1, 4),
        "hidden_size": heads * (head_dim if family in SQUARE else r.randint(4, 12)),
        "ffn_hidden_size": r.randint(11, 60),
        "num_heads": heads,
        "num_kv_heads": groups,
        "head_dim": head_dim,
        "vocab_size": r.randint(40, 130),
        "rope_base": r.choice([100.0, 1e4, 1e6]),
        "norm_eps": r.choice([1e-6, 1e-5, 1e-2]),
        "max_position": LONG,
        "tie_embeddings": r.random() < 0.5,
    }
    shape = ModelConfig(**sizes)
    linear = _linear(r, shape.num_layers, traits.single) if traits.linear else LinearConfig()
    together = (*LAYERS, *(f"linear.{field.name}" for field in fields(LinearConfig)))
    assert set(traits.varies) <= {*KEYS, *together}, set(traits.varies) - {*KEYS, *together}
    values = {key: KEYS[key](r, shape) for key in KEYS if key in traits.varies}  # whatever order the table has
    if "attention.local_rope_base" in values:
        values["attention.window"] = values["attention.window"] or 1
    if set(LAYERS) <= set(traits.varies) and values["attention.window"]:
        kinds = [r.random() < 0.5 for _ in range(shape.num_layers)]
        pattern = layer_pattern([*kinds[:-1], kinds[-1] or traits.global_heads])
        values |= {f"attention.{name}": value for name, value in pattern.items()}
    if values.get("attention.kv_shared_layers"):  # else transformers 5.23 fails
        values["layer_input_size"] = values["layer_input_size"] or 5
    has_experts = traits.moe and not (traits.moe.switch and r.random() < 0.4)
    if traits.global_heads:
        values["attention.global_kv_heads"] *= values["attention.key_is_value"]
        local = [layer for layer, kind in enumerate(kinds[:-1]) if not kind]
        first = [*local[:1], next(n for n in range(shape.num_layers) if n not in local)]  # of either kind
        most = shape.num_layers - 1 - max(first)
        values["attention.kv_shared_layers"] = min(most, values["attention.kv_shared_layers"])
        values["double_mlp"] &= not has_experts
    rotary_dim = int(shape.kv_channels * values.get("attention.rotary_fraction", 1.0))
    if traits.single:
        sizes["num_layers"] = len(values["pattern"])
    sizes["tie_embeddings"] &= traits.ties
    latent = LatentConfig(**_section("latent", values))
    if traits.latent:
        sizes |= {"num_kv_heads": heads, "head_dim": latent.head_dim}
        rotary_dim = latent.rotary_dim
    if traits.entries:
        sizes["num_kv_heads"] = values["moe.shared_ffn_hidden_size"] = 1
        attention = AttentionConfig(**_section("attention", values))
        values["entries.heavy_layers"] = [n for n in values["entries.heavy_layers"] if not attention.is_local(n)]
    if traits.indexer or traits.entries:
        latent.query_rank = latent.query_rank or 5
        values["indexer.head_dim"] += rotary_dim
    cfg = ModelConfig(
        **sizes | {"family": family, "qkv_bias": traits.qkv_bias, "qk_norm": traits.qk_norm} | _section("", values),
        attention=AttentionConfig(**_section("attention", values)),
        latent=latent,
        indexer=IndexerConfig(**_section("indexer", values)),
        entries=EntriesConfig(**_section("entries", values)),
        hyper=HyperConfig(**_section("hyper", values)),
        linear=linear,
        scales=ScalesConfig(**_section("scales", values)),
        moe=_experts(r, family, shape.ffn_hidden_size, _section("moe", values)) if has_experts else MoeConfig(),
        rope_scaling=_scaling(r, ROPE.get(family, USUAL), rotary_dim, _section("rope_scaling", values)),
    )
    if "attention.local_rope_base" in values:  # transformers 5.23 reads `truncate` where no file with two bases has it
        cfg.rope_scaling.truncate = True
    return cfg


def _shuffled(r: random.Random, letters: list[str]) -> str:
    return "".join(r.sample(letters, len(letters)))


def _linear(r: random.Random, layers: int, single: bool) -> LinearConfig:
    """One layer at least has attention."""
    keys, has = r.randint(1, 3), r.randrange(layers)
    if single:
        sizes = keys, keys * r.randint(1, 3), r.randint(4, 9), r.randint(1, 9), r.randint(2, 5)
        return LinearConfig(*sizes, rule="mamba2")
    pattern = layer_pattern([n == has or r.random() < 0.3 for n in range(layers)])
    by_name = {name.replace("global", "attention"): value for name, value in pattern.items()}
    return LinearConfig(keys, keys * r.randint(1, 3), r.randint(4, 9), r.randint(1, 9), r.randint(2, 5), **by_name)


def _section(name: str, values: dict[str, Any]) -> dict[str, Any]:
    return {key.rpartition(".")[2]: value for key, value in values.items() if key.rpartition(".")[0] == name}


def _experts(r: random.Random, family: str, ffn_hidden_size: int, values: dict[str, Any]) -> MoeConfig:
    count, always = r.randint(1, 6), not FAMILIES[family].moe.norm_topk_prob  # whose config.json has neither key
    width, open_ = ffn_hidden_size if always else r.randint(7, 40), count
    if FAMILIES[family].sigmoid_router:
        each, groups = r.randint(2, 4), values.get("groups", 1)
        values = values | {
            "shared_ffn_hidden_size": width * values["shared_ffn_hidden_size"],
            "top_groups": min(groups, values.get("top_groups", 1)),
            "dense_layers": list(range(len(values.get("dense_layers", ())))),
        }
        count, open_ = each * groups, each * values["top_groups"]
    if FAMILIES[family].branch_norms:
        values, width = values | {"shared_ffn_hidden_size": ffn_hidden_size}, r.randint(7, 40)
    return MoeConfig(count, r.randint(1, open_), width, norm_topk_prob=always or r.random() < 0.5, **values)


def _scaling(r: random.Random, types: tuple[str, ...], rotary_dim: int, values: dict[str, Any]) -> RopeScalingConfig:
    kind = r.choice(types)
    if not kind or (kind == "dynamic" and rotary_dim == 2):  # transformers divides by rotary_dim - 2
        return RopeScalingConfig()
    fields: dict[str, Any] = {"type": kind, "factor": r.uniform(1.5, 9)}
    if kind in ("llama3", "yarn", "longrope"):
        fields |= {"original_max_position": SHORT, "factor": LONG / SHORT}
    if kind == "yarn" and r.random() < 0.5:
        fields |= {"mscale": r.uniform(0.3, 1), "mscale_all_dim": r.uniform(0.3, 1), "truncate": r.random() < 0.5}
    if kind in ("yarn", "longrope") and r.random() < 0.3:
        fields |= {"attention_factor": r.uniform(0.7, 1.4)}
    if kind == "longrope":
        fields |= {name: [r.uniform(1, 20) for _ in range(rotary_dim // 2)] for name in ("short_factor", "long_factor")}
    return RopeScalingConfig(**fields, **values)


def compare(cfg: ModelConfig, folder: str, ranks: Ranks, device: str = "cpu") -> None:
    """Trainer (as its folder is read) and native engine against transformers, in float32: logits of ragged rows within
    1e-4, greedy tokens those of the greatest logit, and their logprobs."""
    model, raw = transformers_model(cfg)
    model.set_experts_implementation("eager")  # the other wants widths that are multiples of 4
    rows = batch(cfg, rows=3, width=PROMPT)
    real = torch.arange(PROMPT)[None] < rows.lengths[:, None]
    job = {"folder": write_folder(model, raw, folder), "tokens": rows.tokens, "lengths": rows.lengths, "device": device}
    got = ranks.run("tests.megatron.models:logits", **job)[0]
    with torch.no_grad():
        wanted = model(rows.tokens, attention_mask=real.long()).logits
    torch.testing.assert_close(got[real], wanted[real], atol=ATOL, rtol=0)

    engine = NativeEngine(cfg, EngineConfig(), device=device, dtype=torch.float32, pad_id=0)
    engine.begin_update(1)
    engine.update_weights(hf_weights(model).items())
    engine.finish_update()
    prompts = rows.tokens[:, -2 * SHORT :].tolist()  # as long as they are: all beyond the original context
    out = engine.generate(prompts, [[0]] * 3, SamplingParams(RESPONSE, temperature=0))
    with torch.no_grad():
        logits = model(torch.cat([rows.tokens, out.tokens], dim=1)).logits[:, PROMPT - 1 : -1]
    chosen = logits.gather(2, out.tokens[..., None])[..., 0]
    torch.testing.assert_close(chosen, logits.amax(-1), atol=ATOL, rtol=0)
    torch.testing.assert_close(out.logprobs, chosen - logits.logsumexp(-1), atol=ATOL, rtol=0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--draws", type=int, default=20, help="of each family")
    parser.add_argument("--seed", type=int, default=0, help="of the first")
    parser.add_argument("--families", nargs="*", default=list(FAMILIES))
    parser.add_argument("--device", default="cpu", help="of ours; transformers computes on the CPU")
    args = parser.parse_args()
    ranks, failed = Ranks(1), 0
    for family in args.families:
        for seed in range(args.seed, args.seed + args.draws):
            cfg = draw(family, seed)
            try:
                with tempfile.TemporaryDirectory() as folder:
                    compare(cfg, folder, ranks, args.device)
            except Exception as error:  # whatever it is, the others are drawn as well
                failed += 1
                print(f"{family} {seed}: {type(error).__name__}: {error}\n  {cfg}", flush=True)
    ranks.close()
    print(f"{args.draws} draws of each of {len(args.families)} families: {failed} differ")
    raise SystemExit(bool(failed))


if __name__ == "__main__":
    main()
