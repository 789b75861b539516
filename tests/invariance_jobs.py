"""What the ranks run for `tests.invariance`: one recorded rollout through the losses of every stage."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.distributed as dist

from aligner.algorithms.anchor import Anchor
from aligner.algorithms.first_step import FirstStepChecks
from aligner.algorithms.losses import policy_loss
from aligner.config.sections.algorithm import AlgorithmConfig, RewardLossConfig
from aligner.config.sections.batch import BatchConfig
from aligner.config.sections.distill import DistillConfig
from aligner.config.sections.kto import KtoConfig
from aligner.config.sections.mismatch import MismatchConfig
from aligner.config.sections.model.config import ModelConfig
from aligner.config.sections.model.moe import MoeConfig
from aligner.config.sections.optim import OptimConfig
from aligner.config.sections.parallel import ParallelConfig
from aligner.config.sections.preference import PreferenceConfig
from aligner.data.teacher_prompts import behind
from aligner.megatron import moe
from aligner.megatron.ema import Ema
from aligner.megatron.model import Head
from aligner.ops.rl import advantages
from aligner.ops.rl.kto import mismatched
from aligner.roles.own_teacher import OwnTeacher
from aligner.roles.policy import Policy, Reference
from aligner.roles.ptx import Ptx
from aligner.roles.teacher import Student, Teacher, add_targets
from aligner.rollout.balance import Balancer
from aligner.rollout.record import read_recording
from aligner.rollout.unpaired import with_reference, zero_point
from aligner.run.timers import Timers
from aligner.stages.distill import distill_loss
from aligner.stages.dpo import learn
from aligner.stages.kto import kto_loss
from aligner.tools.layouts import replay as layout_replay
from aligner.tools.layouts.cases import LayoutCase
from aligner.tools.layouts.replay import STEEP, with_pair_labels
from aligner.types import LabelTargets, PolicyTargets, RolloutBatch, TrainBatch, ValueTargets
from tests import invariance_losses
from tests.invariance_muon import MuonCase
from tests.megatron.models import build, build_on, weights
from tests.tiny import random_routing, spanned, wild_source

ADAM = OptimConfig(lr=1e-3)
MUON = OptimConfig(name="muon", lr=1e-3, distributed=False, muon_precision="float32")


SCORED = ("rm", "critic")  # models with a score head


PAIRS = (
    "rm",
    "dpo",
    "dpo_by_rank",
    "kto",
    *invariance_losses.PAIRS,
)  # two rows that stay together; of kto an answer and a mismatched one
# sums, means and odds, the tail of the longer answer, weights from the whole distribution, NLL
ROWS = PreferenceConfig(["sigmoid", "ipo", "rpo_bwd_kl"], [1.0, 0.01, 0.5], ld_alpha=0.5, wpo=True, nll_coef=0.3)
BY_RANK = PreferenceConfig(["aot", "aot_unpaired"], beta=0.5, ld_alpha=0.5)
KINDS = {  # stages that `aligner check layouts` has: kind of loss, keys
    "rm": ("scores", AlgorithmConfig(reward_loss=RewardLossConfig(center_coef=0.01))),
    "critic": ("values", AlgorithmConfig()),
    "grpo": ("policy", AlgorithmConfig()),
    "sft": ("likelihood", AlgorithmConfig()),
    "sft_dft": ("likelihood", AlgorithmConfig(sft_loss="dft")),
    "dpo": ("pairs", AlgorithmConfig(preference=ROWS)),
    "dpo_by_rank": ("pairs", AlgorithmConfig(preference=BY_RANK)),
    "dpo_others": ("pairs", AlgorithmConfig(preference=invariance_losses.PAIRS["dpo_others"])),
}
TEMPERATURE = 0.8
KTO = KtoConfig(beta=0.2, desirable_weight=1.2)
# of the whole vocabulary, and of three tokens and their tail; a teacher of another shape and a larger vocabulary
DISTILL = {
    "distill": DistillConfig(kind="jsd", beta=0.3, temperature=1.5, sft_coef=0.2),
    "distill_top_k": DistillConfig(kind="mixed", beta=0.4, top_k=3, sft_coef=0.2),
    # of spans of its text, behind the same, by a teacher with another tokenizer
    "distill_spans": DistillConfig(kind="reverse_kl", temperature=3.0, on_policy=1.0, teacher_prompt="{prompt}"),
    "opsd": DistillConfig(kind="jsd", on_policy=1.0, teacher_prompt="{prompt}"),  # behind its beginning, reversed
    # likewise, by the average of its own weights; of rows without a right answer it learns nothing
    "sdpo": DistillConfig("self", kind="reverse_kl", on_policy=1.0, teacher_prompt="{prompt}{right_answer}"),
}
TEACHER = {"num_layers": 4, "hidden_size": 48, "tie_embeddings": False, "moe": MoeConfig(), "family": "qwen3"}
NEAR = 1e-6  # of probability: what rounding may turn around


@contextmanager
def near_ties() -> Iterator[list[int]]:
    """How many tokens have their k-th and k+1-st experts within NEAR: one number for each call of a router."""
    original, results = moe.route, []

    def route(hidden, router, top_k, normalise, bias=None, replayed=None, *others):
        routing = original(hidden, router, top_k, normalise, bias, replayed, *others)
        if top_k < len(router) and replayed is None:
            top = routing.probs.topk(top_k + 1, dim=-1).values
            results.append(int((top[:, -2] - top[:, -1] < NEAR).sum()))
        return routing

    moe.route = route
    try:
        yield results
    finally:
        moe.route = original


def replay(file: Path, stage: str, model: ModelConfig, case: LayoutCase, count: int, without: str = "") -> dict:
    """{"loss", "gradient", "start", "adam", "near_ties"} on rank 0: the loss before any update, the gradient by
    full tensor, the weights before and after two steps of Adam, and its `near_ties` in all of it. Of the first `count`
    rows, two micro-batches or more. `without`: rejected rows "invalid" stay in the batch, "gone" are taken out."""
    recording = read_recording(file)
    recording.rollout = recording.rollout.select(torch.arange(count))
    batch = replace(case.batch, micro_batch_samples=min(case.batch.micro_batch_rows, count // 2))
    with near_ties() as ties:
        result = _replay(recording, stage, model, replace(case, batch=batch), without)
    return result | {"near_ties": sum(ties)} if dist.get_rank() == 0 else {}


def _replay(recording, stage: str, model: ModelConfig, case: LayoutCase, without: str) -> dict:
    cfg = replace(model, vocab_size=recording.header.origin.vocab_size, recompute=case.recompute)
    rows = prepare(recording.rollout, without)
    if case.replay and stage not in SCORED:
        rows.routing = random_routing(cfg, rows)
    result, last = {}, MUON if isinstance(case, MuonCase) else ADAM
    for name, optim, steps in (("steep", STEEP, 1), ("adam", last, 2)):
        head = Head("score" if stage in SCORED else "lm")
        optim = replace(optim, distributed=case.distributed)
        on_trunk = stage == "critic" and cfg.lora.rank > 0
        kind = Head() if on_trunk else head
        sharded = build(
            cfg, case.parallel, optim, kind, case.dtype, packed=case.batch.packing, share=case.batch.share_prompts
        )
        sharded = build_on(sharded, optim) if on_trunk else sharded
        start, losses = weights(sharded), []
        layout = sharded.layout
        if stage in invariance_losses.POLICY:
            size = len(rows.lengths) // layout.data
            at = range(layout.dp_rank * size, (layout.dp_rank + 1) * size)
            own = invariance_losses.with_advantages(stage, recording.rollout, rows, at, layout.pgs.dp)
        else:
            own = share(rows, stage, layout.data, layout.dp_rank)
        own = own if stage in PAIRS else Balancer(cfg, layout.pgs.dp)(own)
        reference = frozen(sharded, case.batch) if stage == "dpo_sync" else None
        for step in range(1, steps + 1 + (stage == "dpo_sync" and steps > 1)):
            if reference is not None:
                losses.append(follow(step, sharded, reference, own, case.batch))
            else:
                losses.append(update(stage, sharded, own, case.batch))
        after = weights(sharded)
        if name == "steep":
            scale = optim.lr / optim.eps
            result |= {
                "loss": losses[0],
                "start": start,
                "gradient": {n: (start[n].double() - t.double()) / scale for n, t in after.items()},
            }
        else:
            result[name] = after
    return result


def prepare(rollout: RolloutBatch, without: str) -> TrainBatch:
    """All rows, group-major, with what the losses need; random numbers stand for other models, by row."""
    count, width = rollout.tokens.shape
    g = torch.Generator().manual_seed(3)
    noise = [torch.randn(count, width, generator=g) for _ in range(4)]
    valid = torch.arange(count) % 5 != 3 if without else torch.ones(count, dtype=torch.bool)
    mask = rollout.response_mask
    rewards = rollout.rewards + 0.1 * noise[0][:, 0]
    advantage = advantages.grpo(rewards, rollout.group, valid)
    reference = rollout.rollout_logprobs + 0.1 * noise[1]
    batch = TrainBatch(
        tokens=rollout.tokens,
        lengths=rollout.lengths,
        loss_mask=mask * valid[:, None],
        payloads=[
            PolicyTargets(advantage[:, None] * mask, rollout.rollout_logprobs, reference),
            ValueTargets(rewards[:, None] + 0.1 * noise[2], 0.1 * noise[3]),
            LabelTargets(rewards, reference),
        ],
    )
    return batch.select(valid.nonzero().flatten()) if without == "gone" else batch


def with_mismatched(rows: TrainBatch) -> TrainBatch:
    """Each row with the mismatched one behind it; labels [2B, 2] as of `collate_unpaired`."""
    starts = rows.loss_mask.argmax(1).tolist()
    others = mismatched([tuple(row[:start].tolist()) for row, start in zip(rows.tokens, starts, strict=True)])
    texts = [
        torch.cat([rows.tokens[i, : starts[i]], rows.tokens[j, starts[j] : rows.lengths[j]]])
        for i, j in enumerate(others)
    ]
    width = max(rows.tokens.shape[1], *map(len, texts))

    def beside(x: torch.Tensor, other: list[torch.Tensor]) -> torch.Tensor:
        every = [row for pair in zip(x, other, strict=True) for row in pair]
        return torch.stack([torch.nn.functional.pad(row, (0, width - len(row))) for row in every])

    masks = [(torch.arange(len(text)) >= starts[i]).float() for i, text in enumerate(texts)]
    tokens, mask = beside(rows.tokens, texts), beside(rows.loss_mask, masks)
    lengths = torch.stack([rows.lengths, torch.tensor([len(text) for text in texts])], 1).flatten()
    rewards = rows.of(LabelTargets).labels
    desirable = (rewards > rewards.median()).float().repeat_interleave(2)
    noise = torch.randn(mask.shape, generator=torch.Generator().manual_seed(4))
    # the model's logprobs are -6 on average: z0 is well above 0
    reference = -5.9 + 0.3 * noise - 0.7 * (torch.arange(len(mask)) % 2)[:, None]
    labels = torch.stack([desirable, torch.arange(len(mask)) % 2], 1)
    return TrainBatch(tokens, lengths, mask, [LabelTargets(labels, reference)])


def share(rows: TrainBatch, stage: str, ranks: int, rank: int) -> TrainBatch:
    """This data-parallel rank's rows; for pairs, the best and the worst of every four rows."""
    if stage == "kto":
        rows = with_mismatched(rows)
    elif stage in PAIRS:
        labels = rows.of(LabelTargets).labels
        order = labels.view(-1, 4).argsort(1, descending=True) + 4 * torch.arange(len(labels) // 4)[:, None]
        rows = rows.select(order[:, [0, 3, 1, 2]].flatten())
    size = len(rows.lengths) // ranks
    return rows.select(torch.arange(rank * size, (rank + 1) * size)).trim()


def learner(cfg: DistillConfig, sharded, own: TrainBatch, batch: BatchConfig) -> tuple[Student, TrainBatch]:
    """A student, and the rows with what its teacher says of them."""
    if cfg.own_teacher:
        return own_learner(cfg, sharded, own, batch)
    model, layout = sharded.cfg, sharded.layout
    shape = replace(model, **TEACHER, vocab_size=model.vocab_size + 3, recompute="none")
    teacher = Teacher(
        build(
            shape,
            replace(parallel_of(layout), expert=1),
            dtype=sharded.dtype,
            source=wild_source(shape, 5),
            packed=batch.packing,
        ),
        batch,
        cfg,
        model.vocab_size,
        tokenizer=object() if (by_text := cfg is DISTILL["distill_spans"]) else None,
    )
    student = Student(sharded, batch, cfg=cfg, vocab_size=model.vocab_size)
    student.heads = [] if cfg.top_k or by_text else [teacher.head(sharded)]
    if by_text:
        own = spanned(own, beginnings(own), shape.vocab_size)
    elif cfg.teacher_prompt:
        own = own.with_payloads(behind(beginnings(own), own, 0))
    return student, add_targets([teacher], own)


def beginnings(rows: TrainBatch) -> list[torch.Tensor]:
    return [tokens[: 1 + int(n) // 3].flip(0) for tokens, n in zip(rows.tokens, rows.lengths, strict=True)]


def own_learner(cfg: DistillConfig, sharded, own: TrainBatch, batch: BatchConfig) -> tuple[Student, TrainBatch]:
    """A student that is its own teacher, and its rows: those of an odd length have no right answer."""
    sharded.ema = sharded.ema or Ema(sharded, 0.5)
    student = Student(sharded, batch, cfg=cfg, vocab_size=sharded.cfg.vocab_size)
    teacher = OwnTeacher(sharded, batch, cfg, student.vocab_size, pupil=student)
    taught = (own.lengths % 2 == 0)[:, None]
    assert dist.get_world_size() > 1 or 0 < taught.sum() < len(taught)
    own = replace(own, loss_mask=own.loss_mask * taught)
    return student, add_targets([teacher], own.with_payloads(behind(beginnings(own), own, 0)))


def frozen(sharded, batch: BatchConfig) -> Reference:
    """A model with the weights that training starts with."""
    return Reference(build(sharded.cfg, parallel_of(sharded.layout), dtype=sharded.dtype, packed=batch.packing), batch)


def parallel_of(layout) -> ParallelConfig:
    parallel = ParallelConfig(layout.tensor, layout.pipeline, context=layout.context, sequence=layout.sequence)
    parallel.context_mode = "alltoall" if layout.over_heads else "allgather"
    parallel.expert = layout.expert
    return parallel


def follow(step: int, sharded, reference: Reference, own: TrainBatch, batch: BatchConfig) -> float:
    """A step of stage dpo whose reference follows."""
    cfg, policy = invariance_losses.PAIRS["dpo_sync"], Policy(sharded, batch, entropy=False)
    run, off = SimpleNamespace(timers=Timers()), FirstStepChecks(False)
    return learn(run, step, with_pair_labels(own), policy, reference, cfg, off)["policy/loss"]


def update(stage: str, sharded, own: TrainBatch, batch: BatchConfig) -> float:
    """One optimizer step by the stage's own role and loss; the minibatch loss before it."""
    group = sharded.layout.pgs.dp
    if stage in KINDS:
        kind, cfg = KINDS[stage]
        return layout_replay.update(kind, sharded, own, batch, cfg, TEMPERATURE)[0]
    if stage == "kto":
        role, (answers, others) = Policy(sharded, batch, entropy=False), with_reference(own, None)
        z0 = zero_point(role, others)
        assert z0 > 1 or sharded.step_count, "a zero point that counts"
        return role.update(answers, kto_loss(answers, z0, KTO, group))["policy/loss"]
    if stage in DISTILL:
        student, rows = learner(DISTILL[stage], sharded, own, batch)
        return student.update(rows, distill_loss(rows, student.cfg, group))["policy/loss"]
    role = Policy(sharded, batch, temperature=TEMPERATURE)
    if stage in invariance_losses.POLICY:
        cfg = invariance_losses.POLICY[stage]
        if not sharded.step_count:  # as a stage does before it updates; later steps are of the same rollout
            targets = own.of(PolicyTargets)
            targets.old_logprobs = targets.ref_logprobs = role.logprobs(own, own.loss_mask)
        return layout_replay.update("policy", sharded, own, batch, cfg, TEMPERATURE)[0]
    if stage == "grpo_proxy":
        mask, targets = own.loss_mask, own.of(PolicyTargets)
        engine = {"old_logprobs": None, "rollout_logprobs": targets.old_logprobs, "response_mask": mask}
        own = own.with_payloads(replace(targets, **engine, versions=own.tokens % 3))
        anchor = Anchor("proxy", MismatchConfig("tis_token"), 2, 4)
        return role.update(own, policy_loss(own, AlgorithmConfig(), 0.0, 16, group, anchor))["policy/loss"]
    assert stage == "ppo"
    cfg = AlgorithmConfig(advantage="gae", entropy_coef=0.01, aggregation="seq_mean_token_mean", dual_clip=3.0)
    cfg.kl.coef, cfg.kl.placement, cfg.kl.estimator = 0.05, "loss", "k3"
    role.ptx = Ptx(Repeated(TrainBatch(own.tokens, own.lengths, own.loss_mask)), 0.3, sharded.layout)
    stats = role.update(own, policy_loss(own, cfg, cfg.kl.coef, 16, group))
    return stats["policy/loss"] + stats["ptx/loss"]


@dataclass
class Repeated:
    """A stream of one batch."""

    batch: TrainBatch

    def next(self) -> TrainBatch:
        return self.batch
