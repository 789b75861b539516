"""Measurements of `aligner eval` of judges: how often they agree with the labels of written responses."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from aligner.builders.engines import native_engine
from aligner.builders.job import POLICY, Job, start
from aligner.builders.judges import make_judges
from aligner.cluster.env import RankEnv
from aligner.config.schema import Config, StageConfig
from aligner.config.sections.debug import DebugConfig
from aligner.config.sections.engine import EngineConfig
from aligner.config.sections.model.config import generating
from aligner.config.sections.parallel import ParallelConfig
from aligner.data.formats import unpaired_rows
from aligner.data.messages import Text
from aligner.data.readers import read_rows
from aligner.engines.native.load import fill
from aligner.errors import ConfigError, DataError
from aligner.megatron.groups import leave_distributed
from aligner.ops.intervals import bootstrap_of_sums
from aligner.rewards.composite import Component
from aligner.rewards.rubric import unreadable_rubrics
from aligner.tools.evaluate_rows import Measured
from aligner.types import Prompt, Sample

YES = 0.5  # least score that counts as yes
Interval = tuple[float, tuple[float, float]]  # a value, and its interval


def measure_judges(cfg: Config, folder: Path) -> tuple[Measured, dict[str, Interval]]:
    """Measure on this process alone. Returns means over rows, and each judge's kappa. Raises ConfigError, DataError."""
    for judge in cfg.reward.judges:
        if judge.kind == "pairwise":
            expected = "grade or rubric with eval.generate=false, where a label is of one response"
            raise ConfigError(f"reward.judges.{judge.name}.kind", judge.kind, expected)
    samples, labels = _labelled(cfg)
    engine = EngineConfig(dtype=cfg.engine.dtype, max_batch=cfg.engine.max_batch)
    model = dataclasses.replace(cfg.model, init=str(folder), tokenizer="")
    alone = {"parallel": ParallelConfig(), "engine": engine, "debug": DebugConfig(), "stage": StageConfig("sft")}
    job = start(dataclasses.replace(cfg, model=model, **alone), RankEnv())
    try:
        if cfg.reward.own_judges:
            _make_engine(job, folder)
        scores = {judge.name: judge(samples) for judge, _ in make_judges(job)}
    finally:
        leave_distributed()
    means, kappas = {}, {}
    for name, component in scores.items():
        counts = _counts(samples, component, labels)
        responses, answered, agreed, yes, labelled, both = counts
        means[f"eval/{name}/answered"] = (answered, responses)
        if any(answered):
            means[f"eval/{name}/accuracy"] = (agreed, answered)
            columns = (answered, yes, labelled, both)
            interval = bootstrap_of_sums(columns, kappa, cfg.seed)
            kappas[f"eval/{name}/kappa"] = kappa([math.fsum(column) for column in columns]), interval
    records: list[dict[str, Any]] = [
        {"prompt": sample.prompt.text, "response": sample.response, "label": label}
        | {"scores": {name: component[i] for name, component in scores.items()}}
        for i, (sample, label) in enumerate(zip(samples, labels, strict=True))
    ]
    return ("rows", samples[-1].prompt.id + 1, means, records), kappas


def _labelled(cfg: Config) -> tuple[list[Sample], list[bool]]:
    """Return the responses of the rows, and their labels."""
    rows = unpaired_rows(read_rows(cfg.data.eval, "data.eval"), cfg.data)
    samples, labels = [], []
    for number, row in enumerate(rows[: cfg.eval.prompts or len(rows)]):
        messages = None if isinstance(row.prompt, str) else tuple(row.prompt)
        prompt = Prompt(number, (), row.prompt if messages is None else "", row.fields, messages)
        if any(judge.kind == "rubric" for judge in cfg.reward.judges):
            for why in unreadable_rubrics([prompt]).values():
                raise DataError(f"data.eval: {row.where}: {why}")
        samples += [Sample(prompt, i, _text(text), (), True) for i, (_, text, _) in enumerate(row.answers)]
        labels += [label for *_, label in row.answers]
    if len(set(labels)) < 2:
        raise DataError(f"data.eval={cfg.data.eval!r}: expected responses with label true and false, found one label")
    return samples, labels


def _text(answer: Text) -> str:
    return answer if isinstance(answer, str) else answer[-1]["content"]


def _make_engine(job: Job, folder: Path) -> None:
    """Make the engine of the judges without a model of their own."""
    engine = native_engine(job, generating(job.initial.config), job.tokenizer)
    fill(engine, folder)
    job.built.engines[POLICY] = engine


def _counts(samples: Sequence[Sample], scores: Component, labels: Sequence[bool]) -> list[list[float]]:
    """Return numbers of responses, by row: all; those with a score; of these, those that agree with their label, with a
    yes of the judge, with a yes of the label, with both."""
    counts = np.zeros((6, samples[-1].prompt.id + 1))
    for sample, score, label in zip(samples, scores, labels, strict=True):
        known = score is not None and not math.isnan(score)
        yes = known and score >= YES  # type: ignore[operator]
        one = (True, known, known and yes == label, yes, known and label, yes and label)
        counts[:, sample.prompt.id] += one
    return counts.tolist()


def kappa(sums: Sequence[float]) -> float:
    """Return Cohen's kappa (1960): (agreement - agreement by chance) / (1 - agreement by chance). NaN where both always
    say the same. `sums`: responses, those with a yes of the one, of the other, of both."""
    n, yes, other, both = sums
    chance = (yes * other + (n - yes) * (n - other)) / n**2 if n else 1.0
    return ((n - yes - other + 2 * both) / n - chance) / (1 - chance) if chance < 1 else math.nan
