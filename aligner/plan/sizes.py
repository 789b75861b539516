"""Bytes of what a GPU holds, one by one; when it holds what: `memory.py`.

Weights, gradients and optimizer state are exact (`tests/plan` compares them with Megatron's buffers); transients are
the large ones of each phase.
"""

from __future__ import annotations

from math import ceil

from aligner.config.sections.engine import message_bytes
from aligner.families.table import parameters
from aligner.plan.adapters import held_parameters, is_adapted, kept_bytes, saved_bytes, trained_parameters
from aligner.plan.job import PREFILL_TOKENS, PlanJob, PlannedModel
from aligner.plan.shapes import Count, Grid, rank_parameters, widest_mlp

COMPARED = 7  # numbers of a logit of a student and its teacher, as `WIDE` in `roles/teacher.py`, which imports torch
SAMPLED_LOGITS = 1 << 26  # float64 cumulative sums of the native sampler at a time


def weight_bytes(count: Count, element: int) -> float:
    return element * (count.dense + count.experts) + 4 * (count.score + count.fixed + count.magnitudes)


def model_bytes(job: PlanJob, part: PlannedModel, stage: int) -> float:
    """Of the weights that one rank holds of a model, adapters and all."""
    if part.shared:
        return weight_bytes(trained_parameters(part, job.grid, stage), job.element) if part.trained else 0.0
    return whole_bytes(job, part, stage) - saved_bytes(part, job.grid, stage, job.element)


def whole_bytes(job: PlanJob, part: PlannedModel, stage: int) -> float:
    """Before matrices are held in fewer bits; on a grid of its own, of the stage that has most."""
    if part.grid is None:
        return weight_bytes(held_parameters(part, job.grid, stage), job.element)
    stages = range(part.grid.pipeline)
    return max(weight_bytes(held_parameters(part, part.grid, one), job.element) for one in stages)


def gradient_bytes(count: Count) -> float:
    """`grad_reduce_in_fp32`: one float32 number for each parameter, on every data-parallel rank."""
    return 4.0 * (count.total - count.fixed)


def optimizer_bytes(count: Count, grid: Grid, element: int, distributed: bool, averaged: bool = False) -> float:
    """Adam: two float32 moments, and a float32 main copy of what is bfloat16; the distributed optimizer cuts them over
    the ranks with the same parameters (ZeRO-1; for experts data x context / expert of them). `averaged`: with `ema`'s
    float32 numbers beside them."""
    per, dense, experts = (8 if element == 4 else 12) + 4 * averaged, 1, 1
    if distributed:
        dense, experts = grid.replicas, max(1, grid.replicas // grid.expert)
    plain = 8 * (count.score / dense + count.magnitudes / experts)
    return per * (count.dense / dense + count.experts / experts) + plain


def optimizer_share(count: Count, grid: Grid, distributed: bool) -> float:
    """Parameters whose optimizer state this rank holds."""
    return optimizer_bytes(count, grid, 4, distributed) / 8


def logit_bytes(job: PlanJob, part: PlannedModel, trains: bool) -> int:
    """Of each logit, in float32 numbers as `ShardedModel.over_logits` counts them."""
    numbers = COMPARED if trains and job.compares and part is job.policy else 3
    return 4 * (numbers + 2 * bool(part.shape.scales.logits_softcap))


def logits_bytes(job: PlanJob, part: PlannedModel, tokens: float, trains: bool = False) -> float:
    """Of a part of at most `batch.logits_bytes`; `tokens` that are read. Without gradient a logit is there as it was
    made, as float32 and as its exponential."""
    if part.head != "lm":
        return 0.0
    each = logit_bytes(job, part, trains)
    most = min(each * tokens * part.shape.vocab_size / job.grid.tensor, job.logits_bytes)
    return most if trains else most * (8 + job.element * (job.element < 4)) / each


def head_bytes(job: PlanJob, part: PlannedModel, tokens: float) -> float:
    """Of a training pass: logits, and the gradients of their matrix; that of all parts is there while the next part's
    logits are made, and then its own beside it (of which a third of the numbers are left); autograd adds up the first
    two into a third."""
    logits = logits_bytes(job, part, tokens, trains=True)
    if part.head != "lm" or is_adapted(part):
        return logits
    vocabulary = -(-part.shape.vocab_size // job.grid.tensor)
    again = logit_bytes(job, part, True) * tokens * vocabulary > job.logits_bytes
    gradient = job.element * vocabulary * part.shape.hidden_size
    return max(logits + again * gradient, logits / 3 + (1 + again) * gradient, 3 * again * gradient)


def embedding_bytes(job: PlanJob, part: PlannedModel) -> float:
    """At the end of a backward pass: the embedding's gradient; of a matrix that is the head's too that one, and their
    sum."""
    if is_adapted(part):
        return 0.0
    both = part.shape.tie_embeddings and part.head == "lm" and job.grid.pipeline == 1
    gradient = job.element * -(-part.shape.vocab_size // job.grid.tensor) * part.shape.hidden_size
    return float(gradient * (3 if both else 1))


def forward_bytes(job: PlanJob, part: PlannedModel, tokens: float) -> float:
    """A layer without gradient: the stream and its norm, what attention and the MLP are given and give, and the widest
    product with its factors; of experts input and output of each pair."""
    m, grid = part.shape, part.grid or job.grid
    wide = 3 * widest_mlp(m) / grid.tensor + 2 * m.moe.top_k * m.hidden_size * bool(m.moe.num_experts)
    stream = (1 + 4 / (grid.tensor if grid.sequence else 1)) * m.hidden_size
    return job.element * tokens * (stream + wide)


def teacher_heads(job: PlanJob) -> list[float]:
    """Of each teacher's output matrix, the student's share of the vocabulary: every stage has them."""
    rows = -(-job.policy.shape.vocab_size // job.grid.tensor)
    teachers = [part for part in job.parts if part.role in ("teacher", "teachers")] if job.compares else []
    return [float(job.element * rows * part.shape.hidden_size) for part in teachers]


def judge_bytes(job: PlanJob) -> float:
    """Of judges' own weights, each once."""
    own = {judge.model: judge for judge in job.judges if judge.model}
    return sum(judge.engine.element * parameters(judge.shape) / judge.engine.tensor for judge in own.values())


def replaced_bytes(job: PlanJob, part: PlannedModel, stage: int) -> int:
    """The vocabulary's matrix whose place a score head takes: the embedding's own is none."""
    own = part.shape.tie_embeddings and job.grid.pipeline == 1
    if part.head != "score" or stage < job.grid.pipeline - 1 or own:
        return 0
    return job.element * -(-part.shape.vocab_size // job.grid.tensor) * part.shape.hidden_size


def engine_items(job: PlanJob) -> tuple[dict[str, float], dict[str, float]]:
    """What an engine keeps, and what it needs while it generates."""
    engine, m = job.engine, job.policy.shape
    assert engine is not None
    slots, cache = job.slots()
    tokens = min(PREFILL_TOKENS, ceil(job.rows.prompts / job.replicas) * job.rows.prompt_longest)
    wide = (m.num_heads + 2 * m.num_kv_heads) * m.kv_channels + 3 * widest_mlp(m)
    logits = slots * m.vocab_size
    weights = engine.element * parameters(m) / engine.tensor
    weights += kept_bytes(m, job.element, engine.tensor) if engine.factors else 0
    return {"engine weights": weights, "kv cache": cache}, {
        "prefill": engine.element * tokens * (wide + 3 * m.hidden_size) / engine.tensor,
        "sampling": 10.0 * logits + 8.0 * min(logits, SAMPLED_LOGITS),
    }


def refit_buffers(job: PlanJob, stage: int | None) -> float:
    """Of an engine that is written in place: two for the largest message that a rank sends, two for the largest that it
    receives; no pair of ranks exchanges more than what the one holds of the other's share. Else a bucket, and a whole
    tensor twice, a third time in an engine's own process. `stage` None: of a rank that only generates, and only
    receives; those that train then only send."""
    engine, grid, m = job.engine, job.grid, job.policy.shape
    assert engine is not None
    if not engine.placed:
        copies = 2 + engine.reserved
        return job.bucket_bytes + copies * job.element * m.hidden_size * max(m.vocab_size, 2 * m.ffn_hidden_size)
    aligned = engine.tensor == grid.tensor or grid.tensor == 1  # a rank holds what its engine needs of its stage

    def message(sender: int, same: bool) -> float:
        count = rank_parameters(m, grid, sender, "" if m.tie_embeddings else "lm")  # a copy of the embedding stays
        dense, experts = float(count.dense), float(count.experts)
        if engine.ranks:  # those with the same shards take turns in sending them
            wanted = job.replicas * max(1, engine.tensor / grid.tensor)
            dense *= min(1, wanted / grid.replicas)
            experts *= min(1, wanted * grid.expert / grid.replicas)
        elif same and aligned:
            dense, experts = 0, experts if grid.expert > 1 else 0
        element = job.element if engine.factors else min(job.element, engine.element)  # of the first refit
        total = element * (dense + experts) * min(1, grid.tensor / engine.tensor)
        return min(total, message_bytes(round(total), int(job.bucket_bytes)))

    received = max(message(sender, sender == stage) for sender in range(grid.pipeline))
    sent = 0.0 if stage is None else message(stage, grid.pipeline == 1)
    return 2 * (sent if engine.ranks and stage is not None else received + sent)
