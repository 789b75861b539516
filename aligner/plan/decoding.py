"""Seconds of an engine's decode steps, and of its drafts."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from aligner.families.table import parameters
from aligner.plan.job import PlanJob, PlannedModel
from aligner.plan.linear import row_bytes
from aligner.plan.shapes import Grid, decode_weight_bytes, head_operations, index_operations, kv_bytes
from aligner.plan.traffic import CollectiveCalls

if TYPE_CHECKING:
    from aligner.plan.times import Machine


def decode_step(job: PlanJob, machine: Machine, rows: float, context: float, fed: int = 1) -> tuple[float, float]:
    """Return (seconds of one decode step of an engine with `rows` rows at `context` tokens, seconds of its
    collectives). A step takes the larger of bytes (weights once, the cache of each of a rank's rows) over bandwidth and
    operations over rate, then samples; at least the host's time to launch. `fed`: tokens of each row. With several,
    the native engine reads states of linear attention for all of them, and once more for those that are kept."""
    engine, m = job.engine, job.served.shape
    assert engine is not None
    tp, width, assumed = engine.tensor, engine.tensor // engine.shares, machine.assumed
    own = max(1.0, rows / engine.shares)
    if engine.reserved:
        passes = 1.0 + fed  # its kernels read a row's state, and write one behind each token
    elif job.package and not m.traits.mamba:
        passes = 4.0 + (fed > 1)  # the kernel's states are copied back
    else:
        passes = assumed.state_passes if fed == 1 else 2 * fed * assumed.state_passes + 2  # of a copy
    cached = kv_bytes(m, engine.element, width) * m.num_layers / (m.num_layers - m.attention.kv_shared_layers)
    kept = context * cached + passes * row_bytes(m) / width
    cache, rows, own = own * kept, rows * fed, own * fed
    moved = decode_weight_bytes(m, rows, engine.element, tp, engine.matrix, engine.shares) + cache
    products = head_operations(m, rows) / machine.rate + m.num_layers * machine.layer_products(m, rows)
    products += m.num_layers * (index_operations(m, rows) / machine.rate + machine.attention(m, rows, context))
    busy = max(moved / machine.device.bandwidth / assumed.decode, products / tp)
    again = len(m.layers_of("linear")) * (fed > 1 and not engine.reserved)  # those of states
    kernels = (m.num_layers + again) * assumed.layer_kernels
    busy += kernels * assumed.kernel_s
    busy += machine.moved(assumed.sampled_bytes * rows * m.vocab_size / (tp if engine.reserved else 1))
    if engine.launches:
        busy = max(busy, kernels * assumed.launch_s + assumed.sampler_s)
    busy += assumed.engine_s * engine.reserved
    # tokens of all shares meet at experts: gathered before, summed and scattered behind, which is an all-reduce's bytes
    met = len(m.layers_of("sparse")) if engine.shares > 1 else 0
    calls = (width, 2 * m.num_layers - met, own), (tp, met, rows)
    wire = sum(_decode_wire(job, machine, *call) for call in calls if call[0] > 1)
    return busy + wire, wire


def drafting_seconds(job: PlanJob, machine: Machine, rows: float, context: float) -> float:
    """Return the seconds in which tokens of `rows` rows are drafted, one after the other. A layer for multi-token
    prediction takes for each as much of a decode step as the layer and the output matrix are of the weights. A model of
    its own takes a step for each, and reads two tokens first. Prompt lookup takes none."""
    engine, m = job.engine, job.served.shape
    assert engine is not None
    if engine.drafter:
        alone = drafting_alone(job)
        seconds = [sum(decode_step(alone, machine, rows, context, fed)) for fed in (2, 1)]
        return seconds[0] + (engine.drafts - 1) * seconds[1]
    if not m.mtp.layers:
        return 0.0
    ends = m.vocab_size * m.hidden_size
    layers = parameters(m) - (1 if m.tie_embeddings else 2) * ends
    fraction = (layers / (m.num_layers + 1) + ends) / (layers + ends)
    return engine.drafts * fraction * sum(decode_step(job, machine, rows, context))


def drafting_alone(job: PlanJob) -> PlanJob:
    """Return the job of the model that drafts."""
    engine = job.engine
    assert engine is not None and engine.drafter is not None
    own = replace(engine, tensor=engine.drafting, shares=1, matrix=0.0, drafter=None)
    return replace(job, models=(PlannedModel("policy", engine.drafter),), engine=own)


def _decode_wire(job: PlanJob, machine: Machine, ranks: int, count: int, rows: float) -> float:
    """Return the seconds of all-reduces of a decode step's tokens over `ranks` of an engine."""
    assert job.engine is not None
    # latency of a small all-reduce by NVLink: engines have kernels of their own for it, for up to 8 ranks
    messages = count / 2 if ranks <= min(8, job.gpus_per_node) else count
    size = count * rows * job.policy.shape.hidden_size * job.engine.element
    call = CollectiveCalls("tp", "all_reduce", size, messages)
    return machine.seconds(call, Grid(ranks, data=job.gpus // ranks))
