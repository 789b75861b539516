"""Bytes of each kind of tensor that a GPU holds; `memory.py` says in which phases it holds it.

Weights, gradients and optimizer state are exact (`tests/plan` compares them with Megatron's buffers). Transients are
the large ones of each phase.
"""

from __future__ import annotations

from dataclasses import replace
from math import ceil

from aligner.config.sections.engine import message_bytes
from aligner.config.sections.model.config import ModelConfig
from aligner.plan.adapters import held_parameters, is_adapted, kept_bytes, saved_bytes, trained_parameters
from aligner.plan.job import PREFILL_TOKENS, PlanJob, PlannedModel
from aligner.plan.linear import rule_forward
from aligner.plan.shapes import (
    Count,
    Grid,
    embedding_share,
    engine_grid,
    inputs_width,
    kv_bytes,
    matrix_parameters,
    rank_parameters,
    widest_mlp,
)

COMPARED = 7  # numbers of a logit of a student and its teacher, as `WIDE` in `roles/teacher.py`, which imports torch
SAMPLED_LOGITS = 1 << 26  # float64 cumulative sums of the native sampler at a time


def weight_bytes(count: Count, element: int) -> float:
    wide = 4 * (count.score + count.fixed + count.magnitudes) + 8 * count.integers
    return element * (count.dense + count.experts + count.frozen) + wide


def filled_together(job: PlanJob) -> int:
    """Return how many ranks of a replica share the weights of a refit on ranks that only generate: of an engine in
    child processes those of a node, which read one copy."""
    assert job.engine is not None
    return min(job.engine.tensor, job.gpus_per_node) if job.engine.reserved else job.engine.tensor


def engine_bytes(m: ModelConfig, tensor: int, element: int, matrix: float = 0.0, shares: int = 1) -> float:
    """Return the bytes of the weights on one of an engine's `tensor` ranks. `matrix`, `shares`: see `Engine`."""
    count = rank_parameters(m, engine_grid(m, tensor, shares), 0)
    ends = (1 if m.tie_embeddings else 2) * -(-m.vocab_size * shares // tensor) * m.hidden_size
    less = (element - matrix) * (count.total - ends) if matrix else 0.0
    return weight_bytes(count, element) - less


def model_bytes(job: PlanJob, model: PlannedModel, stage: int) -> float:
    """Return the bytes of the weights that one rank holds of a model, with adapters."""
    if model.shared:
        return weight_bytes(trained_parameters(model, job.grid, stage), job.element) if model.trained else 0.0
    return whole_bytes(job, model, stage) - saved_bytes(model, job.grid, stage, job.element)


def whole_bytes(job: PlanJob, model: PlannedModel, stage: int) -> float:
    """Return the bytes before matrices are held in fewer bits; on a grid of its own, of the stage that has most."""
    if model.grid is None:
        return weight_bytes(held_parameters(model, job.grid, stage), job.element)
    stages = range(model.grid.pipeline)
    return max(weight_bytes(held_parameters(model, model.grid, one), job.element) for one in stages)


def gradient_bytes(count: Count, element: int = 4) -> float:
    """Return the bytes of gradients: one number for each parameter, on every data-parallel rank; of float32
    parameters in float32."""
    return float(element * (count.dense + count.experts) + 4 * (count.score + count.magnitudes))


def optimizer_bytes(
    count: Count, grid: Grid, element: int, distributed: bool, averaged: bool = False, moments: float = 8
) -> float:
    """Return the bytes of Adam: two moments, and a float32 main copy of bfloat16 weights. The distributed optimizer
    cuts them over the ranks with the same parameters (ZeRO-1; for experts tensor x context x data / expert of them).
    `averaged`: with `ema`'s float32 numbers."""
    per, dense, experts = moments + 4 * (element < 4) + 4 * averaged, 1, 1
    if distributed:
        dense, experts = grid.replicas, grid.expert_replicas
    plain = moments * (count.score / dense + count.magnitudes / experts)
    return per * (count.dense / dense + count.experts / experts) + plain


def moment_bytes(model: PlannedModel, grid: Grid, stage: int) -> float:
    """Return the bytes of a parameter's moments, with Muon on average: one for a layer's matrix, two for others."""
    if not model.muon:
        return model.moments
    count = trained_parameters(model, grid, stage)
    return 8 - 4 * matrix_parameters(model.shape, grid, stage)[0] / (count.dense + count.experts + count.score)


def muon_bytes(model: PlannedModel, grid: Grid, stage: int) -> float:
    """Return the bytes that Muon needs beside its state: float32 gradients, if there are none, and of the largest
    parameter, whole, the momentum, its direction and the products."""
    count, (_, largest) = trained_parameters(model, grid, stage), matrix_parameters(model.shape, grid, stage)
    return 4 * (count.dense + count.experts) * (model.gradient < 4) + 20 * largest


def optimizer_share(count: Count, grid: Grid, distributed: bool) -> float:
    """Return the number of parameters whose optimizer state this rank holds."""
    return optimizer_bytes(count, grid, 4, distributed) / 8


def logit_bytes(job: PlanJob, model: PlannedModel, trains: bool) -> int:
    """Return the bytes of each logit, in float32 numbers as `ShardedModel.over_logits` counts them."""
    if trains and job.compares:
        numbers = COMPARED
    else:
        numbers = 3 if job.stage == "distill" or (trains and job.log_squares) else job.element // 2
    return 4 * (numbers + 2 * bool(model.shape.scales.logits_softcap))


def logits_bytes(job: PlanJob, model: PlannedModel, tokens: float, trains: bool = False) -> float:
    """Return the bytes of one part of logits, at most `batch.logits_bytes`, of `tokens` that are read. Without gradient
    a logit exists as it was made; a capped or a teacher's also as float32 and as its exponential."""
    if model.head != "lm":
        return 0.0
    each = logit_bytes(job, model, trains)
    most = min(each * tokens * model.shape.vocab_size / job.grid.tensor, job.logits_bytes)
    wide = bool(model.shape.scales.logits_softcap) or job.stage == "distill"
    return most if trains else most * min(each, job.element + 8 * wide) / each


def head_bytes(job: PlanJob, model: PlannedModel, tokens: float) -> float:
    """Return the bytes of a training pass's logits and of the gradients of their matrix.

    The gradient of all parts exists while the next part's logits are made. Then that part's own is added, when their
    gradient is left of the logits. Autograd adds up the first two gradients into a third."""
    logits = logits_bytes(job, model, tokens, trains=True) * (1 + model.shape.mtp.layers)
    if model.head != "lm" or is_adapted(model):
        return logits
    vocabulary = -(-model.shape.vocab_size // job.grid.tensor)
    each = logit_bytes(job, model, True)
    again = each * tokens * vocabulary > job.logits_bytes
    gradient = job.element * vocabulary * model.shape.hidden_size
    return max(logits + again * gradient, logits * job.element / each + (1 + again) * gradient, 3 * again * gradient)


def embedding_bytes(job: PlanJob, model: PlannedModel) -> float:
    """Return the bytes at the end of a backward pass: the embedding's gradient. Of a matrix that is also the head's:
    both gradients and their sum. The gradient of the table of layers' inputs is made before, beside the head's."""
    if is_adapted(model):
        return 0.0
    m = model.shape
    both = m.tie_embeddings and model.head == "lm" and job.grid.pipeline == 1
    column = job.element * -(-m.vocab_size // job.grid.tensor)
    return float(column * max((3 if both else 1) * m.hidden_size, both * m.hidden_size + inputs_width(m)))


def forward_bytes(job: PlanJob, model: PlannedModel, stage: int, tokens: float) -> float:
    """Return the bytes of a layer without gradient: the stream and its norm, inputs and outputs of attention and MLP,
    and the widest product with its factors, or the rule of linear attention. Experts: input and output of each pair."""
    m, grid = model.shape, model.grid or job.grid
    wide = (1 + m.mlp_parts) * widest_mlp(m) / grid.tensor + 2 * m.moe.top_k * m.expert_hidden * bool(m.moe.num_experts)
    kept = 2 + 2 * max(1, m.hyper.streams)  # two norms and, before and behind, the residual streams
    stream = m.hidden_size + (kept * m.hidden_size + 2 * inputs_width(m)) / (grid.tensor if grid.sequence else 1)
    every = grid.context * min(1.0, grid.rule_share)  # tokens that the rule sees, for each of the rank's own
    layers = m.rank_layers(grid)[stage] if model.grid is None else range(m.num_layers)
    linear = not set(layers).isdisjoint(m.layers_of("linear"))
    rule = rule_forward(m, job.package) * every / grid.tensor if linear else 0.0
    return tokens * (job.element * stream + max(job.element * wide, rule))


def teacher_heads(job: PlanJob) -> list[float]:
    """Return the bytes of each teacher's output matrix, the student's share of the vocabulary. Every stage has them."""
    rows = -(-job.policy.shape.vocab_size // job.grid.tensor)
    teachers = [model for model in job.models if job.passes.get(model.role)] if job.compares else []
    return [float(job.element * rows * model.shape.hidden_size) for model in teachers]


def judge_bytes(job: PlanJob) -> float:
    """Return the bytes of judges' own weights, each once."""
    own = {judge.model: judge for judge in job.judges if judge.model}
    return sum(engine_bytes(judge.shape, judge.engine.tensor, judge.engine.element) for judge in own.values())


def replaced_bytes(job: PlanJob, model: PlannedModel, stage: int) -> int:
    """Return the bytes of the vocabulary's matrix that a score head replaces: 0 if it is the embedding's own."""
    own = model.shape.tie_embeddings and job.grid.pipeline == 1
    if model.head != "score" or stage < job.grid.pipeline - 1 or own:
        return 0
    return job.element * embedding_share(model.shape, job.grid)


def engine_items(job: PlanJob) -> tuple[dict[str, float], dict[str, float]]:
    """Return the items that an engine keeps, and those that it needs while it generates: of a step, or of an evaluation
    if that is more."""
    if job.evaluated is None:
        return _engine_items(job)
    both = (_engine_items(job), _engine_items(replace(job, rows=job.evaluated)))
    kept, needed = ({name: max(items[name] for items in each) for name in each[0]} for each in zip(*both, strict=True))
    return kept, needed


def _engine_items(job: PlanJob) -> tuple[dict[str, float], dict[str, float]]:
    engine, m = job.engine, job.served.shape
    assert engine is not None
    slots, cache = job.slots()
    if engine.page and (m.latent.kv_rank or m.traits.entries):  # a layer's pages are gathered
        cache += slots * job.rows.longest * kv_bytes(m, engine.element, engine.tensor) / m.num_layers
    tokens = min(PREFILL_TOKENS, ceil(job.rows.prompts / job.replicas) * job.rows.prompt_longest)
    heads = [m.of_kinds(kinds) for kinds in m.head_kinds()]
    wide = max((each.num_heads + 2 * max(each.num_kv_heads, engine.tensor)) * each.kv_channels for each in heads)
    wide += (1 + m.mlp_parts) * widest_mlp(m, engine.tensor) + 2 * engine.tensor * inputs_width(m)
    logits = max(slots, min(slots * (1 + engine.drafts), engine.max_batch)) * m.vocab_size
    weights = engine_bytes(m, engine.tensor, engine.element, engine.matrix, engine.shares)
    weights += kept_bytes(m, job.element, engine.tensor) if engine.factors else 0
    held = {"engine weights": weights, "kv cache": cache}
    if engine.drafter:
        held["draft model"] = engine_bytes(engine.drafter, engine.drafting, engine.element)
    return held, {
        "prefill": engine.element * tokens * (wide + 3 * m.hidden_size) / engine.tensor,
        "sampling": 10.0 * logits + 8.0 * min(logits, SAMPLED_LOGITS),
    }


def refit_buffers(job: PlanJob, stage: int | None) -> float:
    """Return the bytes of a refit's buffers.

    An engine that is written in place: two for the largest message that a rank sends, two for the largest that it
    receives. No pair of ranks exchanges more than what the one holds of the other's share. Other engines: a bucket, and
    a whole tensor twice, a third time in an engine's own process. `stage` None: a rank that only generates, and only
    receives; those that train then only send."""
    engine, grid, m = job.engine, job.grid, job.served.shape
    assert engine is not None
    if not engine.placed:
        copies = 2 + engine.reserved
        largest = m.hidden_size * max(m.vocab_size, 2 * m.ffn_hidden_size * (1 + m.double_mlp))
        return job.bucket_bytes + copies * job.element * max(largest, m.vocab_size * inputs_width(m))

    def message(sender: int, same: bool) -> float:
        count = rank_parameters(m, grid, sender, "" if m.tie_embeddings else "lm")  # a copy of the embedding stays
        dense, experts = float(count.alike), float(count.experts)
        if engine.ranks:  # those with the same shards send them by turns
            wanted = job.replicas * max(1, engine.tensor / grid.tensor)
            dense *= min(1, wanted / grid.replicas)
            experts *= min(1, job.replicas * max(1, engine.tensor / grid.expert) / grid.expert_replicas)
        elif same:  # a rank may hold what its engine needs of its stage
            dense *= grid.tensor not in (1, engine.tensor)
            experts *= grid.expert not in (1, engine.tensor)
        element = job.element if engine.factors else min(job.element, engine.element)  # of the first refit
        total = dense * min(1, grid.tensor / engine.tensor) + experts * min(1, grid.expert / engine.tensor)
        total *= element
        return min(total, message_bytes(round(total), int(job.bucket_bytes)))

    received = max(message(sender, sender == stage) for sender in range(grid.pipeline))
    sent = 0.0 if stage is None else message(stage, grid.pipeline == 1)
    return 2 * (sent if engine.ranks and stage is not None else received + sent)


def user_buffers(job: PlanJob) -> float:
    """Return the bytes of TransformerEngine's user buffers, which stay to the end: of a micro-batch, eight to gather
    inputs or gradients and four to scatter sums. In FP8 those that gather take a byte."""
    own = job.policy.shape.megatron
    if not own.get("tp_comm_overlap"):
        return 0.0
    numbers = 4 * job.element + 8 * (1 if own.get("fp8") else job.element)
    numbers += 12 * job.element * job.policy.shape.keeps_ends
    return numbers * job.micro_tokens / job.grid.context * job.policy.shape.hidden_size
