"""Tiny models and batches that several rooms' tests share. Imports no Megatron: each room's `jobs.py` does."""

from __future__ import annotations

import copy
import json
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from aligner.config.sections.model.attention import AttentionConfig, ScalesConfig
from aligner.config.sections.model.config import ModelConfig
from aligner.config.sections.model.entries import EntriesConfig
from aligner.config.sections.model.hyper import HyperConfig
from aligner.config.sections.model.indexer import IndexerConfig
from aligner.config.sections.model.latent import LatentConfig
from aligner.config.sections.model.linear import LinearConfig
from aligner.config.sections.model.moe import MoeConfig
from aligner.config.sections.model.rope import RopeScalingConfig
from aligner.config.sections.optim import OptimConfig
from aligner.data.teacher_prompts import behind
from aligner.families import SAME, find
from aligner.families.hf_config import config_from_hf, hf_config
from aligner.models.fused import joined, parts_of
from aligner.models.safetensors_io import open_hf, write_hf
from aligner.tools.layouts.weights import norm_middle, wild_source  # noqa: F401 (the latter for others)
from aligner.types import LabelTargets, TrainBatch

# the vocabulary is odd: two tensor ranks pad it
LLAMA = ModelConfig(
    family="llama",
    num_layers=2,
    hidden_size=32,
    ffn_hidden_size=48,
    num_heads=4,
    num_kv_heads=2,
    vocab_size=101,
    max_position=256,
)
MODELS = {
    "llama": LLAMA,
    "llama3": replace(
        LLAMA,
        rope_base=500000.0,
        rope_scaling=RopeScalingConfig(8.0, 1.0, 4.0, 8192),
        max_position=16384,
        num_kv_heads=1,
    ),
    "qwen2": replace(LLAMA, family="qwen2", qkv_bias=True),
    "qwen3": replace(LLAMA, family="qwen3", qk_norm=True, head_dim=16, num_kv_heads=4),
}
# rows of the tests are longer than these windows
WINDOWS = {
    "mistral": replace(LLAMA, family="mistral", attention=AttentionConfig(window=5)),
    "gemma3": replace(
        LLAMA,
        family="gemma3_text",
        num_layers=4,
        head_dim=16,
        qk_norm=True,
        rope_base=1e6,
        attention=AttentionConfig(window=6, global_every=2, local_rope_base=100.0, query_scale_dim=10),
    ),
}
# families and features of the table that share nothing but a test each: all of them against transformers
MORE = {
    "yarn": replace(
        LLAMA,
        rope_scaling=RopeScalingConfig(4.0, original_max_position=64, type="yarn", mscale=0.5, mscale_all_dim=1.0),
    ),
    "longrope": replace(
        LLAMA,
        rope_scaling=RopeScalingConfig(
            8.0,
            original_max_position=16,
            type="longrope",
            short_factor=[1.0, 1.1, 1.2, 1.3],
            long_factor=[1.0, 2.0, 4.0, 7.0],
        ),
    ),
}
MORE |= {
    "llama-biases": replace(LLAMA, qkv_bias=True, mlp_bias=True),
    "qwen2-windows": replace(MODELS["qwen2"], attention=AttentionConfig(window=6, global_layers=[0]), num_layers=3),
    "qwen3-windows": replace(
        MODELS["qwen3"], qkv_bias=True, num_layers=4, attention=AttentionConfig(window=6, global_layers=[0, 2, 3])
    ),
}
MORE |= {
    "granite": replace(
        LLAMA,
        family="granite",
        attention=AttentionConfig(multiplier=0.2),
        scales=ScalesConfig(embedding=3.0, residual=0.4, logits=1.7),
    ),
    "smollm3": replace(
        LLAMA, family="smollm3", num_layers=4, mlp_bias=True, attention=AttentionConfig(nope_layers=[1, 2])
    ),
    "smollm3-windows": replace(
        LLAMA,
        family="smollm3",
        num_layers=3,
        attention=AttentionConfig(window=5, global_layers=[0, 2], nope_layers=[1]),
    ),
    "gemma2": replace(
        LLAMA,
        family="gemma2",
        num_layers=4,
        head_dim=16,
        attention=AttentionConfig(window=6, global_every=2, query_scale_dim=10, softcap=2.0),
        scales=ScalesConfig(logits_softcap=3.0),
    ),
    "gemma4": replace(
        LLAMA,
        family="gemma4_text",
        num_layers=4,
        num_kv_heads=4,
        head_dim=4,
        qk_norm=True,
        rope_base=1e4,
        rope_scaling=RopeScalingConfig(type="proportional"),
        attention=AttentionConfig(
            window=6,
            global_every=2,
            local_rope_base=100.0,
            rotary_fraction=0.5,
            global_head_dim=8,
            global_kv_heads=2,
            key_is_value=True,
        ),
        scales=ScalesConfig(logits_softcap=3.0),
    ),
    "olmo2": replace(LLAMA, family="olmo2", qk_norm=True),
    "olmo3": replace(
        LLAMA,
        family="olmo3",
        num_layers=3,
        qk_norm=True,
        attention=AttentionConfig(window=6, global_every=2, local_rope_base=300.0),
        rope_scaling=RopeScalingConfig(4.0, original_max_position=64, type="yarn"),
    ),
    "phi3": replace(
        LLAMA,
        family="phi3",
        attention=AttentionConfig(window=7, rotary_fraction=0.75),
        rope_scaling=RopeScalingConfig(
            8.0,
            original_max_position=16,
            type="longrope",
            short_factor=[1.0, 1.1, 1.2],
            long_factor=[1.0, 2.0, 4.0],
        ),
    ),
    "ministral3": replace(
        LLAMA,
        family="ministral3",
        head_dim=16,
        attention=AttentionConfig(window=7),
        rope_scaling=RopeScalingConfig(
            8.0, original_max_position=4, type="yarn", mscale=1.0, mscale_all_dim=1.0, llama_4_scaling_beta=0.3
        ),
    ),
    "glm": replace(LLAMA, family="glm", qkv_bias=True, attention=AttentionConfig(rotary_fraction=0.5)),
    "seed_oss": replace(LLAMA, family="examples/own_family.py:SEED_OSS", qkv_bias=True, head_dim=16),
    "glm4": replace(LLAMA, family="glm4", attention=AttentionConfig(rotary_fraction=0.25), head_dim=16),
}
LATENT = LatentConfig(kv_rank=24, query_rank=20, plain_dim=12, rotary_dim=6, value_dim=10)
DEEPSEEK = replace(
    LLAMA,
    family="deepseek_v3",
    num_layers=3,
    num_kv_heads=4,
    rope_scaling=RopeScalingConfig(8.0, original_max_position=32, type="yarn", mscale=1.0, mscale_all_dim=0.7),
    latent=LATENT,
    moe=MoeConfig(
        9, top_k=4, ffn_hidden_size=20, shared_ffn_hidden_size=20, groups=3, top_groups=2, scale=0.6, dense_layers=[0]
    ),
)
GLM = replace(
    LLAMA,
    family="glm4_moe",
    tie_embeddings=False,
    head_dim=16,
    qk_norm=True,
    qkv_bias=True,
    attention=AttentionConfig(rotary_fraction=0.5),
    moe=replace(DEEPSEEK.moe, num_experts=4, top_k=2, groups=1, top_groups=1),
)
MOE = replace(MODELS["qwen3"], family="qwen3_moe", moe=MoeConfig(4, top_k=2, ffn_hidden_size=24))
MIXTRAL = replace(LLAMA, family="mixtral", ffn_hidden_size=40, moe=MoeConfig(6, top_k=3, ffn_hidden_size=40))
GPT_OSS = replace(
    LLAMA,
    family="gpt_oss",
    qkv_bias=True,
    head_dim=16,
    num_layers=3,
    attention=AttentionConfig(window=6, global_every=2),
    rope_base=1.5e5,
    rope_scaling=RopeScalingConfig(4.0, original_max_position=64, type="yarn", truncate=False),
    moe=MoeConfig(4, top_k=2, ffn_hidden_size=48),
)
MORE |= {
    "gpt_oss": GPT_OSS,
    "mixtral-window": replace(MIXTRAL, attention=AttentionConfig(window=6)),
    "deepseek_v3": DEEPSEEK,
    "deepseek_v3-direct": replace(
        DEEPSEEK,
        num_layers=2,
        rope_scaling=RopeScalingConfig(),
        latent=replace(LATENT, query_rank=0, value_dim=20, neighbours=False),
        moe=replace(DEEPSEEK.moe, dense_layers=[], norm_topk_prob=False, shared_ffn_hidden_size=40),
    ),
    "glm4_moe_lite": replace(
        DEEPSEEK,
        family="glm4_moe_lite",
        num_layers=2,
        moe=replace(DEEPSEEK.moe, num_experts=4, top_k=2, groups=1, top_groups=1, scale=1.8),
    ),
    "deepseek_v32": replace(DEEPSEEK, family="deepseek_v32", indexer=IndexerConfig(16, 8, 5)),
    "glm_moe_dsa": replace(
        DEEPSEEK,
        family="glm_moe_dsa",
        num_layers=4,
        rope_scaling=RopeScalingConfig(),
        indexer=IndexerConfig(16, 8, 5, shared_layers=[1, 3]),
        moe=replace(DEEPSEEK.moe, groups=1, top_groups=1),
    ),
    "deepseek_v4": replace(
        LLAMA,
        family="deepseek_v4",
        num_layers=4,
        ffn_hidden_size=20,
        num_kv_heads=1,
        head_dim=16,
        tie_embeddings=False,
        rope_base=300.0,
        rope_scaling=RopeScalingConfig(8.0, original_max_position=32, type="yarn", attention_factor=1.0),
        attention=AttentionConfig(window=5, global_layers=[1, 2, 3], local_rope_base=100.0, rotary_fraction=0.25),
        latent=LatentConfig(query_rank=20, output_groups=2, output_rank=12),
        indexer=IndexerConfig(16, 8, 2),
        entries=EntriesConfig(2, 3, [2]),
        hyper=HyperConfig(3, 4),
        moe=MoeConfig(
            4, top_k=2, ffn_hidden_size=20, shared_ffn_hidden_size=20, scale=1.5, hash_layers=2, gate_limit=0.5
        ),
    ),
    "glm4_moe": GLM,
    "glm4_moe-air": replace(GLM, qk_norm=False),
    "qwen3_moe-window": replace(MOE, qkv_bias=True, attention=AttentionConfig(window=6)),
    "qwen3_moe-mixed": replace(MOE, num_layers=4, moe=replace(MOE.moe, dense_layers=[0, 1, 3])),
}
MORE["gemma4-experts"] = replace(
    MORE["gemma4"], moe=MoeConfig(4, top_k=2, ffn_hidden_size=20, shared_ffn_hidden_size=LLAMA.ffn_hidden_size)
)
MORE["gemma4-inputs"] = replace(
    MORE["gemma4"],
    double_mlp=True,
    layer_input_size=6,
    attention=replace(MORE["gemma4"].attention, key_is_value=False, global_kv_heads=0, kv_shared_layers=2),
)
MORE |= {
    "qwen3_next": replace(
        MOE,
        family="qwen3_next",
        num_kv_heads=2,
        attention=AttentionConfig(rotary_fraction=0.25),
        linear=LinearConfig(4, 8, 8, 6, 4, attention_every=2),
        moe=MoeConfig(4, top_k=2, ffn_hidden_size=24, shared_ffn_hidden_size=20),
    ),
}
NEMOTRON = replace(
    LLAMA,
    family="nemotron_h",
    pattern="M-*E",
    num_layers=4,
    tie_embeddings=False,
    linear=LinearConfig(4, 8, 8, 6, 4, rule="mamba2"),
    moe=MoeConfig(4, top_k=2, ffn_hidden_size=24, shared_ffn_hidden_size=20, latent_size=20, groups=2, scale=1.3),
)
MORE |= {
    "nemotron_h": NEMOTRON,
    "nemotron_h-nano": replace(NEMOTRON, moe=replace(NEMOTRON.moe, latent_size=0)),
    "nemotron_h-dense": replace(NEMOTRON, pattern="M*M-", moe=MoeConfig()),
}
NEXT = MORE["qwen3_next"]
MORE |= {
    "qwen3_5": replace(NEXT, family="qwen3_5_text", moe=MoeConfig()),
    "qwen3_5_moe": replace(NEXT, family="qwen3_5_moe_text", ffn_hidden_size=NEXT.moe.ffn_hidden_size),
}
ADAM = OptimConfig(lr=1e-3)
# Adam with a huge eps and no memory is gradient descent with learning rate 1: updates are gradients
SGD = OptimConfig(lr=1e4, eps=1e4, betas=[0.0, 0.0], weight_decay=0.0, clip_grad=0.0)


def batch(cfg: ModelConfig, rows: int = 8, width: int = 13, seed: int = 1) -> TrainBatch:
    """Ragged right-padded rows; padding is token 0, which stands nowhere else."""
    g = torch.Generator().manual_seed(seed)
    tokens = torch.randint(1, cfg.vocab_size, (rows, width), generator=g)
    lengths = torch.randint(3, width + 1, (rows,), generator=g)
    lengths[0] = width
    real = torch.arange(width)[None] < lengths[:, None]
    mask = real & (torch.rand(rows, width, generator=g) < 0.7)
    mask[:, 0] = False
    mask[:, 1] = True
    return TrainBatch(tokens * real, lengths, mask.float(), [LabelTargets(torch.randn(rows, generator=g))])


def spanned(rows: TrainBatch, prompts: Sequence[Tensor], vocab_size: int) -> TrainBatch:
    """The rows with those of a teacher with another tokenizer: spans of one or two tokens that are learned, the last
    of each row without a number; of one to three of the teacher's, behind its prompts. Each follows from its row."""
    spans, parts, replies = torch.zeros_like(rows.tokens), [], []
    for row, mask in enumerate(rows.loss_mask.tolist()):
        number, size, seed = 0, 2, int(rows.tokens[row].sum())
        for at, on in enumerate(mask):
            size = size + 1 if on and mask[at - 1] and size < 2 else 1
            number += on and size == 1
            spans[row, at] = number if on else 0
        spans[row][spans[row] == number] = 0
        parts.append(torch.tensor([*(n for n in range(1, int(number)) for _ in range(1 + (n + seed) % 3)), 0, 0]))
        replies.append(1 + (seed + 7 * torch.arange(len(parts[-1]))) % (vocab_size - 1))
    own = behind(prompts, rows, 0, replies)
    numbers = torch.zeros_like(own.teacher_tokens).masked_scatter(own.teacher_mask.bool(), torch.cat(parts))
    sampled = -torch.ones(rows.tokens.shape)  # logprobs, of which only a baseline is made
    return rows.with_payloads(replace(own, teacher_spans=numbers, spans=spans, sampled=sampled))


def transformers_model(cfg: ModelConfig, head: str = "lm", outputs: int = 1, seed: int = 0):
    """A random transformers model of this shape, and its config.json."""
    import transformers

    raw = hf_config(cfg, bos_token_id=None, eos_token_id=None, pad_token_id=0, head=head, num_labels=outputs)
    kind = transformers.AutoModelForCausalLM if head == "lm" else transformers.AutoModelForSequenceClassification
    model = kind.from_config(transformers.AutoConfig.for_model(**copy.deepcopy(raw))).eval()  # Phi-3 changes it
    g = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.copy_(torch.randn(p.shape, generator=g) * 0.2 + (norm_middle(cfg, name) if "norm" in name else 0.0))
        for b in choice_biases(model):
            b.copy_(torch.randn(b.shape, generator=g) * 0.2)
        for name, b in model.named_buffers():
            if name.endswith("tid2eid"):
                lots = torch.rand(len(b), cfg.moe.num_experts, generator=g)
                b.copy_(lots.topk(cfg.moe.top_k).indices)
        for b in layer_scalars(model):
            b.copy_(1 + torch.randn(b.shape, generator=g) * 0.2)
    return model, raw


def choice_biases(model) -> list[torch.Tensor]:
    """Buffers that are weights: what routers add to scores for the choice of experts. transformers makes them 0."""
    return [b for name, b in model.named_buffers() if name.endswith("e_score_correction_bias")]


def layer_scalars(model) -> list[torch.Tensor]:
    """Buffers that are weights, too: factors of layers' outputs. transformers makes them 1."""
    return [b for name, b in model.named_buffers() if name.endswith("layer_scalar")]


def hf_weights(model) -> dict[str, torch.Tensor]:
    """A transformers model's tensors by their names in files, those of fused ones by their parts' names."""
    # in memory all experts of a layer are one tensor
    family = find(SAME.get(kind := model.config.model_type, kind))
    if family.moe or family.fused:
        with tempfile.TemporaryDirectory() as folder:
            model.save_pretrained(folder)
            tensors = open_hf(folder)
            return {name: tensors[name] for name in tensors}
    tied = model.config.tie_word_embeddings
    return {n: t.detach().clone() for n, t in model.state_dict().items() if not (tied and n == "lm_head.weight")}


def write_folder(model, raw, folder) -> str:
    with tempfile.TemporaryDirectory() as aside:
        (Path(aside) / "config.json").write_text(json.dumps(raw))
        parts = parts_of(config_from_hf(aside))
    write_hf(folder, joined(hf_weights(model).items(), parts), raw)
    return str(folder)


def relative(got: torch.Tensor, wanted: torch.Tensor, scale: torch.Tensor | None = None) -> float:
    """||got - wanted|| / ||scale||, the scale being `wanted` unless told."""
    scale = wanted if scale is None else scale
    return float((got.double() - wanted.double()).norm() / scale.double().norm().clamp_min(1e-12))


def random_routing(cfg: ModelConfig, rows: TrainBatch, seed: int = 4) -> torch.Tensor:
    """uint8 [B, T, layers, top_k]: experts by lot for all tokens but the last of each row, the same for the same token
    in the same place."""
    g, (count, width) = torch.Generator().manual_seed(seed), rows.tokens.shape
    lots = torch.rand(cfg.vocab_size, width, len(cfg.layers_of("sparse")), cfg.moe.num_experts, generator=g)
    lots = lots[rows.tokens, torch.arange(width).expand(count, width)]
    known = torch.arange(width) < rows.lengths[:, None] - 1
    return (lots.topk(cfg.moe.top_k).indices * known[:, :, None, None]).to(torch.uint8)
