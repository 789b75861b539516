"""Measurements of `aligner eval` without generating: the loss of held-out responses, and how a reward model ranks
pairs."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from aligner.builders.job import Job, start
from aligner.builders.models import make_model
from aligner.cluster.env import RankEnv
from aligner.config.schema import Config, StageConfig
from aligner.config.sections.debug import DebugConfig
from aligner.config.sections.engine import EngineConfig
from aligner.config.sections.parallel import ParallelConfig
from aligner.data.collate import collate_preference, collate_scored, collate_sft
from aligner.data.dataset import PreferenceDataset, ScoredDataset
from aligner.data.formats import preference_rows, scored_rows
from aligner.data.readers import read_rows
from aligner.data.text import sft_dataset
from aligner.errors import ConfigError
from aligner.megatron.groups import leave_distributed
from aligner.megatron.model import Head
from aligner.ops.packing.documents import join_documents, split_documents
from aligner.ops.rl.reward_loss import bradley_terry, regression
from aligner.refit.export import read_extra
from aligner.roles.policy import Policy
from aligner.roles.reward_model import RewardModel
from aligner.types import LabelTargets

Means = dict[str, tuple[Sequence[float], Sequence[float]]]  # name -> numerators, denominators, one per unit
Measured = tuple[str, int, Means, list[dict[str, Any]]]  # unit, count, means, records


def measure_rows(cfg: Config, folder: Path, scorer: bool) -> Measured:
    """Measure on this process alone, with the trainer's model on a layout of one rank."""
    model = dataclasses.replace(cfg.model, init=str(folder), tokenizer="")
    alone = {"parallel": ParallelConfig(), "engine": EngineConfig(), "debug": DebugConfig()}
    stage = StageConfig("rm" if scorer else "sft")
    job = start(dataclasses.replace(cfg, model=model, stage=stage, **alone), RankEnv())
    try:
        return _pairs(job, folder) if scorer else _losses(job)
    finally:
        leave_distributed()


def _first(job: Job, dataset: Any) -> list:
    limit = job.cfg.eval.prompts
    job.say(dataset.report)
    return [dataset[i] for i in range(min(limit, len(dataset)) if limit else len(dataset))]


def _losses(job: Job) -> Measured:
    """Measure eval/loss: mean negative log-likelihood of the tokens that carry loss, nats."""
    cfg = job.cfg
    rows = read_rows(cfg.data.eval, "data.eval")
    items = _first(job, sft_dataset(rows, job.tokenizer, cfg.data, "data.eval"))
    policy = Policy(make_model(job, job.initial, Head(), None, 0), cfg.batch, 1.0, entropy=False)
    batch = collate_sft(items, job.tokenizer.pad_token_id)
    documents = split_documents(batch)
    nll = -(policy.logprobs(documents, documents.loss_mask) * documents.loss_mask)
    losses, counts = join_documents(nll, batch).sum(1), batch.loss_mask.sum(1).tolist()
    records = [
        {"text": job.tokenizer.decode(item.tokens.tolist()), "tokens": int(n), "loss": loss / n}
        for item, loss, n in zip(items, losses.tolist(), counts, strict=True)
    ]
    return "rows", len(items), {"eval/loss": (losses.tolist(), counts)}, records


def _pairs(job: Job, folder: Path) -> Measured:
    """Measure like `rollout.heldout.pair_accuracy`: of pairs eval/accuracy, eval/loss, eval/margin; of attributes
    eval/loss."""
    cfg, attributes = job.cfg, list(read_extra(folder).get("attributes") or ())
    if read_extra(folder).get("separator"):
        hint = "Train with data.eval and run.eval_every, which measure its steps."
        raise ConfigError("RUN", str(folder), "a reward model of pairs or attributes, not of steps", hint)
    rows = read_rows(cfg.data.eval, "data.eval")
    model = RewardModel(make_model(job, job.initial, Head("score", len(attributes) or 1), None, 0), cfg.batch)
    decode, pad = job.tokenizer.decode, job.tokenizer.pad_token_id
    if attributes:
        typed = scored_rows(rows, cfg.data, attributes)
        items = _first(job, ScoredDataset(typed, job.tokenizer, cfg.data, "data.eval"))
        batch = collate_scored(items, pad)
        scores = model.raw_scores(batch)
        losses = regression(scores, batch.of(LabelTargets).labels).tolist()
        records = [
            {"text": decode(item.tokens.tolist()), "scores": dict(zip(attributes, per_pair, strict=True)), "loss": loss}
            for item, per_pair, loss in zip(items, scores.tolist(), losses, strict=True)
        ]
        return "texts", len(items), {"eval/loss": (losses, [1.0] * len(items))}, records
    typed = preference_rows(rows, cfg.data, whole=True)
    items = _first(job, PreferenceDataset(typed, job.tokenizer, cfg.data, "data.eval"))
    scores = model.raw_scores(collate_preference(items, pad))[:, 0]
    losses, stats = bradley_terry(scores[0::2], scores[1::2], None, 0.0)
    per_pair = {"eval/accuracy": stats["accuracy"], "eval/loss": losses, "eval/margin": stats["margin"]}
    records = [
        {
            "chosen": decode(item.chosen.tolist()),
            "rejected": decode(item.rejected.tolist()),
            "chosen_score": chosen,
            "rejected_score": rejected,
        }
        for item, chosen, rejected in zip(items, scores[0::2].tolist(), scores[1::2].tolist(), strict=True)
    ]
    return "pairs", len(items), {name: (v.tolist(), [1.0] * len(items)) for name, v in per_pair.items()}, records
