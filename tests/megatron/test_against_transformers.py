"""ShardedModel and its optimizer against transformers and torch's AdamW."""

from dataclasses import replace

import pytest
import torch

from aligner.config.sections.batch import BatchConfig
from aligner.config.sections.optim import OptimConfig
from aligner.ops.schedules import lr_at
from aligner.roles.batching import micro_batches
from aligner.types import TrainBatch
from tests.megatron.models import from_folder, logits, nll_loss, weights
from tests.tiny import (
    LLAMA,
    MIXTRAL,
    MODELS,
    MOE,
    MORE,
    WINDOWS,
    batch,
    hf_weights,
    relative,
    transformers_model,
    write_folder,
)

pytestmark = pytest.mark.multirank
MODELS = MODELS | WINDOWS | MORE | {"qwen3_moe": MOE, "mixtral": MIXTRAL}


def trajectory(folder: str, optim: OptimConfig, batches: list[TrainBatch], total: int) -> dict:
    """One optimizer step per batch from the weights of a folder."""
    model = from_folder(folder, optim=optim, total_steps=total)
    metrics = [model.step(micro_batches(b, BatchConfig(micro_batch_samples=3)), nll_loss(model, b)) for b in batches]
    return {"metrics": metrics, "weights": weights(model)}


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("name", MODELS)
def test_logits_equal(ranks, tmp_path, name, tied):
    cfg = replace(MODELS[name], tie_embeddings=tied and MODELS[name].traits.ties)
    model, raw = transformers_model(cfg)
    rows = batch(cfg, rows=3, width=200 if name == "llama3" else 19)
    got = ranks.run(
        logits,
        folder=write_folder(model, raw, tmp_path / "hf"),
        tokens=rows.tokens,
        lengths=rows.lengths,
    )[0]
    real = torch.arange(rows.tokens.shape[1])[None] < rows.lengths[:, None]
    with torch.no_grad():
        wanted = model(rows.tokens, attention_mask=real.long()).logits
    assert wanted[real].std() > 0.5
    assert (got - wanted)[real].abs().max() <= 1e-4
    if name == "llama3":  # the rows are long enough to show the scaling
        plain, _ = transformers_model(replace(cfg, rope_scaling=LLAMA.rope_scaling))
        with torch.no_grad():
            assert (plain(rows.tokens).logits - wanted)[real].abs().max() > 1e-2


def adamw_loop(model, optim: OptimConfig, batches, total):
    """What training means, in plain PyTorch: decay for matrices only, gradient clipping, schedule."""
    named = list(model.named_parameters())
    matrices = [p for name, p in named if p.dim() >= 2 and not name.endswith("bias")]
    others = [p for name, p in named if p.dim() < 2 or name.endswith("bias")]
    adam = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": optim.weight_decay}, {"params": others, "weight_decay": 0.0}],
        betas=tuple(optim.betas),
        eps=optim.eps,
    )
    metrics = []
    for step, b in enumerate(batches):
        lr = lr_at(step, optim, total)
        for group in adam.param_groups:
            group["lr"] = lr
        logp = model(b.tokens).logits[:, :-1].log_softmax(-1).gather(-1, b.tokens[:, 1:, None])[..., 0]
        loss = -(logp * b.loss_mask[:, 1:]).sum() / b.loss_mask.sum()
        adam.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), optim.clip_grad or float("inf"))
        adam.step()
        metrics.append({"loss": float(loss.detach()), "grad_norm": float(norm), "lr": lr})
    return metrics


@pytest.mark.parametrize(
    "name, tied, clip",
    [
        ("llama", True, 1.0),
        ("qwen2", False, 1.0),
        ("qwen3", True, 0.0),
        ("qwen3_moe", True, 1.0),
        ("gemma3", True, 1.0),
        ("gpt_oss", True, 1.0),
        ("gemma4-inputs", True, 1.0),
    ],
)
def test_five_steps_equal_adamw(ranks, tmp_path, name, tied, clip):
    cfg = replace(MODELS[name], tie_embeddings=tied)
    # a large decay, so that a parameter in the wrong group would show
    optim = OptimConfig(
        lr=1e-3, min_lr=1e-4, schedule="cosine", warmup_steps=2, weight_decay=10.0, clip_grad=clip, eps=1e-5
    )
    model, raw = transformers_model(cfg)
    folder = write_folder(model, raw, tmp_path / "hf")
    start = hf_weights(model)
    batches = [batch(cfg, seed=i) for i in range(5)]
    wanted = adamw_loop(model, optim, batches, total=6)
    got = ranks.run(trajectory, folder=folder, optim=optim, batches=batches, total=6)[0]
    for ours, theirs in zip(got["metrics"], wanted, strict=True):
        assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-5)
        assert ours["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=1e-4)
        assert ours["lr"] == pytest.approx(theirs["lr"])
    if clip:
        assert wanted[0]["grad_norm"] > clip  # the clipping did something
    final = hf_weights(model)
    assert got["weights"].keys() == final.keys()
    for tensor, value in final.items():
        fixed = tensor.endswith("layer_scalar")  # which is not trained
        assert (relative(value, start[tensor]) > 1e-4) != fixed, tensor
        assert relative(got["weights"][tensor], value) <= 1e-4, tensor
