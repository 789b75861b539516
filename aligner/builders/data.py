"""Rows, prompts and batches, from a job."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from fractions import Fraction
from functools import partial
from math import ceil
from operator import mul
from typing import Any

from aligner.builders.job import Job
from aligner.config.on_demand import on_demand
from aligner.config.sections.batch import BatchConfig
from aligner.config.sections.curriculum import CurriculumConfig
from aligner.config.sections.data import DataConfig
from aligner.data.batches import BatchSource
from aligner.data.collate import collate_sft
from aligner.data.dataset import PromptDataset, SftDataset
from aligner.data.formats import TeacherOf, no_teacher, prompt_rows
from aligner.data.mixture import Mixture, PromptMixture
from aligner.data.readers import Rows, read_rows
from aligner.data.stream import IndexStream, MixedStream, Stream
from aligner.data.text import TextDataset, sft_dataset
from aligner.data.tokenizer import sampled_with
from aligner.ops.agree import same_view
from aligner.ops.packing.balance import row_costs
from aligner.ops.seeds import derive
from aligner.roles.ptx import Ptx
from aligner.types import SamplingParams, TrainBatch

PTX = "ptx.data"  # a section like `data`


def rows_of(job: Job, path: str, key: str) -> Rows:
    """Read the rows of a dataset, the same on every rank. Raises DataError, ViewError."""
    datasets: list[Rows] = []

    def look() -> dict[str, str]:
        datasets[:] = [read_rows(path, key)]
        return {key: datasets[0].content()}

    job.built.contents[key] = same_view(path, look)[key]
    return datasets[0]


def make_training_set[D](job: Job, build: Callable[[str, str, DataConfig], D], section: str = "data") -> D | Mixture:
    """Build a dataset by `build(path, key, data)` of <section>.train, or of each of <section>.sources to mix them."""
    data = _section(job, section)
    if not data.sources:
        return build(data.train, f"{section}.train", data)
    parts = {
        source.label: build(source.path, f"{section}.sources.{source.label}", data.of(source))
        for source in data.sources
    }
    prompts = all(isinstance(dataset, PromptDataset) for dataset in parts.values())
    return (PromptMixture if prompts else Mixture)(parts, [source.weight for source in data.sources])


def _section(job: Job, section: str) -> DataConfig:
    return {"data": job.cfg.data, PTX: job.cfg.ptx.data}[section]


def make_answers(
    job: Job, path: str, key: str, data: DataConfig, teacher_of: TeacherOf = no_teacher
) -> SftDataset | TextDataset:
    """Read the answers that stage sft learns."""
    dataset = sft_dataset(rows_of(job, path, key), job.tokenizer, data, key, teacher_of)
    job.output.say_rows(dataset.report)
    return dataset


def make_prompts(
    job: Job,
    path: str,
    key: str,
    data: DataConfig,
    teacher_of: TeacherOf = no_teacher,
    curriculum: CurriculumConfig | None = None,
    teacher_prompt: str = "",
) -> PromptDataset:
    tooling, values = job.tooling, None
    tools = tooling.schemas if tooling else None
    rows = prompt_rows(rows_of(job, path, key), data, teacher_of, tools, teacher_prompt)
    if curriculum is not None and curriculum.column:
        values = on_demand("curriculum.column")(rows, key, curriculum)
    dataset = PromptDataset(rows, job.tokenizer, data, key, values)
    job.output.say_rows(dataset.report)
    return dataset


def settle_steps(job: Job, dataset: Sequence, key: str, each: int = 1) -> None:
    """Set run.steps by run.epochs and the number of kept rows. A step has the number under `key`, `each` of a row. Note
    how many rows there are."""
    run, rows, taken = job.cfg.run, len(dataset), getattr(job.cfg.batch, key) // each
    job.built.rows[key] = rows, each
    if run.epochs:
        run.steps = ceil(Fraction(repr(run.epochs)) * rows / taken)
    if taken > rows:
        job.say(
            f"WARNING: batch.{key}={taken * each}: a step takes each of the {rows} rows about {taken / rows:.3g} times"
        )


def in_shares(job: Job, dataset: Mixture, count: int) -> list:
    """Return `count` rows of a mixture, each source with its share."""
    return [dataset[int(row)] for row in make_stream(job, dataset, count).next()]


def make_stream(
    job: Job, dataset: Sequence, batch: int, section: str = "data", curriculum: CurriculumConfig | None = None
) -> Stream:
    shuffle, what = _section(job, section).shuffle, ("order",) if section == "data" else ("order", section)

    def stream(rows: Sequence, key: str, share: Fraction, *name: str) -> IndexStream:
        order = len(rows), derive(job.cfg.seed, *what, *name), shuffle, batch, f"{section}.{key}"
        if curriculum is None or not curriculum.on:
            return IndexStream(*order)
        return on_demand("curriculum")(curriculum, order, rows, share, f"data/{name[0]}" if name else "curriculum")

    if not isinstance(dataset, Mixture):
        return stream(dataset, "train", Fraction(1))
    total = sum(map(Fraction, dataset.weights))
    streams = {
        name: stream(rows, f"sources.{name}", Fraction(weight) / total, name)
        for (name, rows), weight in zip(dataset.parts.items(), dataset.weights, strict=True)
    }
    by_tokens = _section(job, section).weight_by == "tokens"
    lengths = [rows.lengths for rows in dataset.parts.values()] if by_tokens else None
    return MixedStream(streams, dataset.weights, batch, section, lengths)


def make_batches(job: Job, dataset: Any, collate: Callable[[Any, int], TrainBatch]) -> BatchSource:
    """Make the source of batches. Settles run.steps, and prints what packing makes of a step."""
    settle_steps(job, dataset, "sequences")
    if job.cfg.batch.packing:
        job.say(packing_line(dataset, job.cfg.batch, job.layout.data, job.cfg.data.weight_by == "tokens"))
    return _dealt(job, dataset, make_stream(job, dataset, job.cfg.batch.sequences), collate)


def packing_line(dataset: Any, batch: BatchConfig, ranks: int, by_tokens: bool) -> str:
    """Describe the tokens of a step's rows, and about how many packs of `batch.micro_batch_tokens` they make."""
    means, shares = [float(dataset.lengths.mean())], [1.0]
    if isinstance(dataset, Mixture):
        means = [float(rows.lengths.mean()) for rows in dataset.parts.values()]
        shares = [weight / mean if by_tokens else weight for weight, mean in zip(dataset.weights, means, strict=True)]
    mean = sum(map(mul, means, shares)) / sum(shares)
    line = f"packing: {mean:.0f} tokens for each of batch.sequences={batch.sequences}, at most {dataset.lengths.max()}"
    if not (budget := batch.micro_batch_tokens):
        return f"{line}; {batch.micro_batch_rows} of them in a micro-batch"
    tokens = mean * batch.sequences / ranks
    packs = ceil(tokens / budget)
    full = f"{tokens / packs / budget:.0%} full"
    return f"{line}; about {packs} micro-batch{'es' * (packs > 1)} of {budget} tokens on a data-parallel rank, {full}"


def _dealt(job: Job, dataset: Any, stream: Stream, collate: Callable[[Any, int], TrainBatch]) -> BatchSource:
    cost = partial(row_costs, model=job.initial.config)
    return BatchSource(dataset, stream, collate, job.tokenizer.pad_token_id, job.layout.dp_rank, job.layout.data, cost)


def make_ptx(job: Job) -> Ptx:
    """Make the rows of ptx.data; a checkpoint keeps the position in them."""
    dataset = make_training_set(job, partial(make_answers, job), PTX)
    stream = make_stream(job, dataset, job.cfg.ptx.sequences, PTX)
    job.built.state["ptx"] = stream
    return Ptx(_dealt(job, dataset, stream, collate_sft), job.cfg.ptx.coef, job.layout)


def make_sampling(job: Job, temperature: float, limit: int, plain: bool = False) -> SamplingParams:
    s = job.cfg.sampling
    special = sampled_with(job.tokenizer) | {"special": s.special_tokens}
    cut = {} if plain else {"top_p": s.top_p, "top_k": s.top_k, "min_p": s.min_p}
    return SamplingParams(limit, temperature, stop=tuple(s.stop), **special, **cut)
