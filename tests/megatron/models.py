"""Sharded toy models, and what a few steps of them give: for the ranks of this folder's tests and of others."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch

from aligner.config.sections.batch import BatchConfig
from aligner.config.sections.model.config import ModelConfig
from aligner.config.sections.optim import OptimConfig
from aligner.config.sections.parallel import ParallelConfig
from aligner.families.hf_config import config_from_hf
from aligner.families.table import family_table
from aligner.megatron import groups
from aligner.megatron.checkpoint import load_model, save_model
from aligner.megatron.model import Head
from aligner.megatron.train import ShardedModel
from aligner.megatron.weights import OUTPUT
from aligner.models.params import from_hf
from aligner.models.safetensors_io import open_hf
from aligner.ops.kernels.logprobs import token_logprobs
from aligner.roles.batching import micro_batches
from aligner.roles.policy import Policy
from aligner.roles.reward_model import last_token_scores
from aligner.tools.layouts.replay import full_weights as weights
from aligner.types import LabelTargets, LossOutput, TrainBatch
from tests.ranks import Ranks
from tests.tiny import ADAM, batch, wild_source

ONE = ParallelConfig()


def build(
    cfg: ModelConfig,
    parallel: ParallelConfig = ONE,
    optim: OptimConfig | None = None,
    head: Head = Head(),  # noqa: B008 (frozen)
    dtype: torch.dtype = torch.float32,
    total_steps: int = 10,
    source=None,
    packed: bool = True,
    share: bool = False,
    device: str = "cpu",
) -> ShardedModel:
    layout = groups.build_layout(parallel)
    source = source or wild_source(cfg)
    return ShardedModel(cfg, layout, head, dtype, torch.device(device), source, optim, total_steps, packed, share)


def build_on(trunk: ShardedModel, optim: OptimConfig = ADAM) -> ShardedModel:
    """A critic on the frozen weights of a model with adapters, with the head of one that `build` makes."""
    cfg, how = trunk.cfg, (trunk.total_steps, trunk.packed, trunk.share)
    model = ShardedModel(cfg, trunk.layout, Head("score"), trunk.dtype, trunk.device, trunk, optim, *how)
    if trunk.layout.is_last_stage:
        (head,) = (spec for spec in family_table(cfg, "score") if spec.canonical == OUTPUT)
        model.module.output_layer.weight.data.copy_(wild_source(cfg)(head))
    model.optimizer.reload_model_params()
    return model


def from_folder(folder: str, parallel: ParallelConfig = ONE, head: Head = Head(), **kwargs) -> ShardedModel:  # noqa: B008
    cfg, tensors = config_from_hf(folder), open_hf(folder)
    return build(cfg, parallel, head=head, source=lambda spec: from_hf(spec, tensors, cfg), **kwargs)


def shares(model: ShardedModel, full: TrainBatch) -> TrainBatch:
    """This data-parallel rank's rows: unequal shares, so ranks run different numbers of micro-batches."""
    size, rank = model.layout.data, model.layout.dp_rank
    rows = torch.arange(len(full.lengths))
    bounds = [0, *(len(rows) * (i + 1) // size - 1 for i in range(size - 1)), len(rows)]
    return full.select(rows[bounds[rank] : bounds[rank + 1]])


def equal_shares(model: ShardedModel, full: TrainBatch) -> TrainBatch:
    """This data-parallel rank's rows, as many as every other's."""
    size = len(full.lengths) // model.layout.data
    return full.select(torch.arange(size) + model.layout.dp_rank * size)


def nll_loss(model: ShardedModel, full: TrainBatch, logits_bytes: int = 1 << 30):
    """Negative log-likelihood over the tokens of the whole minibatch; scores: squared error over its rows (small, so
    that gradient descent with learning rate 1 does not run away)."""
    tokens, rows = full.loss_mask.sum(), len(full.lengths)
    group = model.layout.pgs.tp if model.layout.tensor > 1 else None

    def read(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return token_logprobs(logits, targets, vocab_size=model.cfg.vocab_size, group=group)[0]

    def lm(hidden: torch.Tensor, b: TrainBatch) -> LossOutput:
        logprobs = model.over_logits(hidden, b, read, logits_bytes)
        nll = -(logprobs * b.loss_mask).sum()
        return LossOutput(nll / tokens, {"nll": (nll, b.loss_mask.sum())}, {"worst": (-logprobs * b.loss_mask).max()})

    def score(output: torch.Tensor, b: TrainBatch) -> LossOutput:
        error = (last_token_scores(model, output, b).sum(-1) - b.of(LabelTargets).labels).square()
        return LossOutput(
            0.01 * error.sum() / rows, {"nll": (error.sum(), torch.tensor(len(error)))}, {"worst": error.max()}
        )

    return lm if model.head.kind == "lm" else score


def train(
    cfg: ModelConfig,
    parallel: ParallelConfig = ONE,
    optim: OptimConfig = ADAM,
    bc: BatchConfig = BatchConfig(),  # noqa: B008
    outputs: int = 0,
    dtype: torch.dtype = torch.float32,
    steps: int = 2,
    full: TrainBatch | None = None,
    each: Callable[[ShardedModel, TrainBatch], TrainBatch] = shares,
) -> dict:
    """Some steps on one minibatch: metrics of each, logprobs, and full weights at the end. `outputs`: of a score head;
    0: a language model's."""
    head = Head("score", outputs) if outputs else Head()
    model = build(cfg, parallel, optim, head, dtype, packed=bc.packing, share=bc.share_prompts)
    full = batch(cfg) if full is None else full
    group = model.layout.pgs.dp if each is equal_shares else None
    parts = micro_batches(each(model, full), bc, group=group)
    loss = nll_loss(model, full, bc.logits_bytes)
    metrics = [model.step(parts, loss) for _ in range(steps)]
    logprobs = Policy(model, bc).logprobs(full) if head.kind == "lm" else None
    return {"metrics": metrics, "weights": weights(model), "logprobs": logprobs, "version": model.step_count}


def logits(folder: str, tokens: torch.Tensor, lengths: torch.Tensor, device: str = "cpu") -> torch.Tensor:
    model = from_folder(folder, device=device)
    assert model.head.kind == "lm"
    return plain_logits(model, tokens, lengths).cpu()


def plain_logits(model: ShardedModel, tokens: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    """[B, T, V] of the token after each; rows get one more token, because a last one predicts nothing."""
    rows = TrainBatch(torch.nn.functional.pad(tokens, (0, 1)), lengths + 1, torch.zeros(len(tokens), 0))
    (actual,) = model.forward([rows], lambda hidden, b: model.over_logits(hidden, b, lambda z, _: z.float(), 1 << 30))
    return actual[:, 1:]


def agreed(ranks: Ranks, world: int, **kwargs) -> dict:
    """What `train` gives on each rank of the pool, which all are told the same."""
    first, *others = ranks.run(train, world=world, **kwargs)
    for other in others:
        assert other["metrics"] == first["metrics"]
        assert all(torch.equal(t, first["weights"][n]) for n, t in other["weights"].items())
    return first


Share = Callable[[ShardedModel, TrainBatch], TrainBatch]


def stepped(cfg: ModelConfig, steps: int = 2, share: Share = shares, **kwargs) -> ShardedModel:
    """A model that has made some steps."""
    model = build(cfg, **kwargs)
    for _ in range(steps):
        one_more(model, share)
    return model


def loaded(folder: Path, cfg: ModelConfig, with_optimizer: bool = True, **kwargs) -> ShardedModel:
    """A model that had other weights before it loaded a checkpoint."""
    model = build(cfg, source=wild_source(cfg, seed=7), **kwargs)
    load_model(model, folder, with_optimizer=with_optimizer)
    return model


def one_more(model: ShardedModel, share: Share = shares) -> dict:
    """A step: weights and version before it, its metrics, weights after it."""
    before, full = {"weights": weights(model), "version": model.step_count}, batch(model.cfg)
    parts = micro_batches(share(model, full), BatchConfig(micro_batch_samples=2))
    return before | {"metrics": model.step(parts, nll_loss(model, full)), "after": weights(model)}


def save_and_go_on(folder: Path, cfg: ModelConfig, steps: int = 2, share: Share = shares, **kwargs) -> dict:
    """A checkpoint after some steps, and one step more."""
    model = stepped(cfg, steps, share, **kwargs)
    save_model(model, folder)
    return one_more(model, share)


def load_and_step(folder: Path, cfg: ModelConfig, share: Share = shares, again: Path | None = None, **kwargs) -> dict:
    """The step after a checkpoint, which is saved `again` before it."""
    model = loaded(folder, cfg, **kwargs)
    if again:
        save_model(model, again)
    return one_more(model, share)


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    """To the bit."""
    return a.keys() == b.keys() and all(torch.equal(t, b[n]) for n, t in a.items())
