"""What the ranks run for the tests of this folder."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from aligner.config.sections.batch import BatchConfig
from aligner.config.sections.distill import DistillConfig
from aligner.config.sections.model.config import ModelConfig
from aligner.config.sections.parallel import ParallelConfig
from aligner.data.steps import StepEncoder
from aligner.data.tokenizer import load_tokenizer
from aligner.megatron.model import Head
from aligner.megatron.weights import local_parameters, own_shard
from aligner.models import safetensors_io
from aligner.models.families import family_table
from aligner.models.hf_config import config_from_hf
from aligner.models.safetensors_io import open_hf
from aligner.models.slices import HfSource
from aligner.roles.batching import forward_rows, micro_batches
from aligner.roles.critic import Critic
from aligner.roles.model_init import InitialModel
from aligner.roles.policy import Policy, Reference
from aligner.roles.process_reward import ProcessRewardModel
from aligner.roles.ptx import Ptx
from aligner.roles.reward_model import Mixed, RewardModel
from aligner.roles.teacher import Student, Teacher, tell
from aligner.stages.distill import distill_loss
from aligner.stages.rm import steps_loss
from aligner.types import LossOutput, Prompt, Sample, TrainBatch
from tests import varlen_stand_in
from tests.invariance_jobs import Repeated
from tests.megatron.jobs import ONE, build, from_folder, shares, weights
from tests.megatron.moe_jobs import equal_shares
from tests.tiny import ADAM, MODELS, SGD, batch, wild_source


def policy_logprobs(
    folder: str, rows: TrainBatch, parallel: ParallelConfig, temperature: float, budget: int
) -> torch.Tensor:
    return Reference(from_folder(folder, parallel), BatchConfig(logprob_tokens=budget), temperature).logprobs(rows)


def loaded(folder: str, parallel: ParallelConfig, dtype: torch.dtype) -> tuple[int, bool]:
    """How often this rank opens a file of weights while a model is made of the folder; whether it then has what it
    would have read by itself."""
    opened: list[Path] = []
    real = safetensors_io._open
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(safetensors_io, "_open", lambda path: opened.append(path) or real(path))
        initial = InitialModel(config_from_hf(folder), None, folder=Path(folder))
        model = build(initial.config, parallel, dtype=dtype, source=initial.source(Head()))
    named, own = local_parameters(model.module), HfSource(partial(open_hf, folder), initial.config)
    table = {spec.canonical: spec for spec in family_table(initial.config)}
    wanted = {name: own_shard(table[name], own, model.layout).to(dtype) for name in named}
    return len(opened), all(torch.equal(t, wanted[name]) for name, t in named.items())


def order(cfg: ModelConfig, parallel: ParallelConfig, rows: TrainBatch, budget: int) -> torch.Tensor:
    """Each position answers with its own token, times ten."""
    model = build(cfg, parallel)

    def read(output: torch.Tensor, b: TrainBatch) -> torch.Tensor:
        ranks = 2 if parallel.sequence else 1  # each has a share of the stream, which is padded to be divisible
        assert len(output) * ranks == b.packing.tokens
        assert 0 <= b.packing.tokens - int(b.lengths.sum()) < max(ranks, b.packing.tokens / 8)
        return b.tokens * 10

    return forward_rows(model, rows, BatchConfig(logprob_tokens=budget), read)


def critic_values(folder: str, rows: TrainBatch, parallel: ParallelConfig, bias: float, scale: float) -> torch.Tensor:
    model = from_folder(folder, parallel, Head("score"))
    return Critic(model, BatchConfig(logprob_tokens=30), bias, scale).values(rows)


def reward_scores(folder: str, rows: TrainBatch, parallel: ParallelConfig, outputs: int, bias: float, scale: float):
    model = from_folder(folder, parallel, Head("score", outputs))
    role = RewardModel(model, BatchConfig(logprob_tokens=40), bias, scale)
    samples = []
    for i, (row, length) in enumerate(zip(rows.tokens.tolist(), rows.lengths.tolist(), strict=True)):
        prompt = Prompt(id=i, tokens=tuple(row[:2]), text="")
        samples.append(Sample(prompt, 0, "", tuple(row[2:length]), finished=True))
    mixed = replace(role, mix=(Mixed(outputs - 1, 2.0, 0.5, 4.0), Mixed(0, -1.0, 0.0, 2.0))).scores(rows)
    found = {"raw": role.raw_scores(rows), "scores": role.scores(rows), "called": role(samples), "none": role([])}
    return found | {"mixed": mixed}


def policy_update(cfg: ModelConfig, parallel: ParallelConfig, forked: bool = False) -> dict:
    """What a loss sees inside `update` against what `logprobs` says, and the names of the metrics."""
    model = build(cfg, parallel, ADAM)
    full = in_forks(batch(cfg)) if forked else batch(cfg)
    policy = Policy(model, BatchConfig(micro_batch_tokens=40), temperature=0.7, hits=True)
    full.old_logprobs = policy.logprobs(full)
    mine, before = shares(model, full), weights(model)

    def loss(out, b):
        real = b.loss_mask
        gap = ((out.logprobs - b.old_logprobs).abs() * real).max()
        assert (
            b.forks is None or len(b.row_keys) == len(b.tokens) <= 4
        )  # rows as they are, whatever the model was given
        assert out.entropy.shape == out.hits.shape == out.logprobs.shape == b.tokens.shape
        value = -(out.logprobs * b.loss_mask).sum() / full.loss_mask.sum()
        return LossOutput(value, {"hits": ((out.hits * real).sum(), real.sum())}, {"gap": gap.detach()})

    stats = policy.update(mine, loss)
    after = weights(model)
    return {"stats": stats, "moved": any(not torch.equal(t, after[n]) for n, t in before.items())}


def in_forks(rows: TrainBatch) -> TrainBatch:
    """Every second row, and the first, is of a part up to column 4 and another."""
    forks = (torch.arange(rows.tokens.shape[1]) >= 4) & (torch.arange(len(rows.tokens))[:, None] % 2 == 0)
    mask = rows.loss_mask.clone()
    mask[0::2, 4] = 0
    return replace(rows, forks=forks.long(), loss_mask=mask, row_keys=torch.arange(len(mask)))


def forked_logprobs(cfg: ModelConfig, parallel: ParallelConfig) -> dict:
    """Of rows in parts, and of the parts as rows."""
    policy = Policy(build(cfg, parallel), BatchConfig())
    rows = in_forks(batch(cfg))
    pieces = []
    for tokens, forks, length in zip(rows.tokens, rows.forks, rows.lengths.tolist(), strict=True):
        for fork in forks[:length].unique():
            piece = tokens[:length][forks[:length] == fork]
            alone = TrainBatch(piece[None], torch.tensor([len(piece)]), torch.ones(1, len(piece)))
            pieces.append(policy.logprobs(alone)[0])
    return {"rows": policy.logprobs(rows), "lengths": rows.lengths, "pieces": torch.cat(pieces)}


def ptx_update(cfg: ModelConfig, parallel: ParallelConfig, coef: float | None, own: float = 1.0) -> dict:
    """A step of gradient descent on `own` times a loss at another temperature, with rows of another stream beside it;
    the weights before and after it."""
    model = build(cfg, parallel, SGD)
    deal = equal_shares if cfg.moe.num_experts else shares
    policy, full = Policy(model, BatchConfig(micro_batch_samples=2), temperature=0.7), batch(cfg)
    if coef is not None:
        policy.ptx = Ptx(Repeated(deal(model, batch(cfg, rows=6, width=9, seed=2))), coef, model.layout)

    def loss(out, b):
        real = b.loss_mask
        value = -own * (out.logprobs * real).sum() / full.loss_mask.sum()
        return LossOutput(value, {"seen": (real.sum(), torch.tensor(1.0))}, {"top": out.logprobs.detach().min()})

    before = weights(model)
    stats = policy.update(deal(model, full), loss)
    return {"stats": stats, "before": before, "after": weights(model)}


def nll_at_one(cfg: ModelConfig) -> float:
    """Of the rows that `ptx_update` learns beside its own, by a pass without gradient."""
    rows = batch(cfg, rows=6, width=9, seed=2)
    logprobs = Reference(build(cfg), BatchConfig()).logprobs(rows)
    return float(-(logprobs * rows.loss_mask).sum() / rows.loss_mask.sum())


def critic_update(cfg: ModelConfig, parallel: ParallelConfig, forked: bool = False) -> dict:
    model = build(cfg, parallel, ADAM, Head("score"))
    full = in_forks(batch(cfg)) if forked else batch(cfg)
    critic = Critic(model, BatchConfig(micro_batch_samples=2), bias=0.3, scale=2.0)
    full.values = critic.values(full)
    mine = shares(model, full)

    def loss(values, b):
        mask = b.loss_mask
        assert b.forks is None or len(b.row_keys) == len(b.tokens) <= 2  # rows as they are
        value = ((values - 1.0).square() * mask).sum() / full.loss_mask.sum()
        return LossOutput(value, {}, {"gap": ((values - b.values).abs() * mask).max().detach()})

    stats = [critic.update(mine, loss) for _ in range(3)]
    return {"stats": stats}


def reward_update(cfg: ModelConfig, parallel: ParallelConfig, bc: BatchConfig) -> dict:
    """Pairs: rows 2i (chosen) and 2i + 1 (rejected) must come together."""
    model = build(cfg, parallel, ADAM, Head("score"))
    full = batch(cfg)
    full.labels = torch.arange(len(full.lengths)).float()
    rows = torch.arange(len(full.lengths)).view(model.layout.data, -1)[model.layout.dp_rank]

    def loss(scores, b):
        chosen, rejected = b.labels[0::2], b.labels[1::2]
        assert torch.equal(rejected, chosen + 1) and (chosen % 2 == 0).all()
        margins = scores[0::2, 0] - scores[1::2, 0]
        return LossOutput(-torch.nn.functional.logsigmoid(margins).sum() / (len(full.lengths) // 2))

    role = RewardModel(model, bc)
    stats = [role.update(full.select(rows), loss, unit=2) for _ in range(4)]
    return {"stats": stats}


def steps_update(cfg: ModelConfig, parallel: ParallelConfig, bc: BatchConfig) -> dict:
    """Gradient descent on the labels of steps; the logits before it, at the steps' ends."""
    model = build(cfg, parallel, SGD, Head("score"), packed=bc.packing)
    full = batch(cfg)
    full = TrainBatch(full.tokens, full.lengths, full.loss_mask, returns=(full.tokens % 3 == 0).float())
    role = ProcessRewardModel(model, bc, None)
    logits, mine = role.logits(full), shares(model, full)
    stats = role.update(mine, steps_loss(mine, model.layout.pgs.dp))
    on = full.loss_mask.bool()
    return {"logits": logits[on], "labels": full.returns[on], "stats": stats, "after": weights(model)}


def step_scores(cfg: ModelConfig, tokenizer: str, answers: list[str]) -> dict:
    """What answers get, all at once and one by one, and the logits of steps that a plain pass finds."""
    model, encoder = build(cfg, head=Head("score")), StepEncoder(load_tokenizer(tokenizer, announce=False), ".")
    prompt = Prompt(id=0, tokens=(5, 6, 7), text="")
    samples = [Sample(prompt, i, answer, (1,), finished=True) for i, answer in enumerate(answers)]
    found = {}
    for over in ("min", "product"):
        role = ProcessRewardModel(model, BatchConfig(), encoder, over)
        found[over] = role(samples)
        found[f"{over}, alone"] = [score for sample in samples for score in role([sample])]
    tokens, ends = encoder.encode(["ab", "c"])
    row = torch.tensor([[*prompt.tokens, *tokens]])
    mask = torch.zeros(row.shape)
    mask[0, torch.tensor(ends) + 3] = 1.0
    logits = role.logits(TrainBatch(row, torch.tensor([row.shape[1]]), mask))
    return found | {"logits": logits[mask.bool()]}


def no_rows(cfg: ModelConfig, parallel: ParallelConfig = ONE) -> list[int]:
    model = build(cfg, parallel)
    rows = batch(cfg).select(torch.arange(0))
    return list(Reference(model, BatchConfig()).logprobs(rows).shape)


def micro_batch_sizes(shares: list[TrainBatch], budget: int) -> list[list[int]]:
    parts = micro_batches(shares[dist.get_rank()], BatchConfig(micro_batch_tokens=budget), group=dist.group.WORLD)
    return [part.lengths.tolist() for part in parts]


def read_or_all(cfg: ModelConfig, parallel: ParallelConfig, head: Head, bc: BatchConfig, narrow: bool) -> dict:
    """An update that reads responses only (a score head of one output: values; of two: last tokens), and logprobs or
    values before it, with what nobody reads left out or (`narrow` false) computed."""
    model = build(cfg, parallel, SGD, head, packed=bc.packing, share=bc.share_prompts)
    packings, make = [], model._pack

    def pack(b: TrainBatch):
        packings.append(make(b if narrow else replace(b, wanted=None)))
        return packings[-1]

    model._pack = pack
    full = batch(cfg, width=40)
    full.tokens[:, :12] = full.tokens[0, :12]  # a prompt
    full.lengths.clamp_(min=13)
    full.loss_mask = ((torch.arange(40) >= 12) & (torch.arange(40) < full.lengths[:, None])).float()
    full.tokens.clamp_(min=1)
    mine = shares(model, full)
    if head.kind == "lm":
        role = Policy(model, bc)
        before = role.logprobs(full, full.loss_mask) * full.loss_mask
        role.update(mine, lambda out, b: LossOutput(-(out.logprobs * b.loss_mask).sum() / full.loss_mask.sum()))
    elif head.outputs == 1:
        role = Critic(model, bc)
        before = role.values(full, full.loss_mask) * full.loss_mask
        total = full.loss_mask.sum()
        role.update(mine, lambda v, b: LossOutput(0.01 * ((v - 1).square() * b.loss_mask).sum() / total))
    else:
        role = RewardModel(model, bc)
        before = role.raw_scores(full)
        role.update(mine, lambda s, b: LossOutput(0.01 * (s - 1).square().sum() / len(full.lengths)), unit=1)
    kept = sum(p.tokens if p.final is None else len(p.final.kept) for p in packings)
    pairs = sum(len(p.targets) for p in packings)
    return {"before": before, "weights": weights(model), "kept": kept, "pairs": pairs}


def with_varlen(cfg: ModelConfig, **job) -> dict:
    """`read_or_all` with `model.varlen_attention`, on its stand-in."""
    with varlen_stand_in.in_place() as calls:
        found = read_or_all(replace(cfg, varlen_attention=True), narrow=True, **job)
    return found | {"calls": len(calls)}


def told(own: ParallelConfig, theirs: ParallelConfig, top_k: int) -> dict:
    """What a teacher of another shape and layout says of this rank's rows: {row: (numbers, ids)} of the tokens in loss
    masks; and its share of the teacher's head."""
    cfg = MODELS["qwen3"]
    student = build(cfg, own)
    shape = replace(cfg, num_layers=4, hidden_size=48, vocab_size=cfg.vocab_size + 3, tie_embeddings=False)
    model, layout = build(shape, theirs, source=wild_source(shape, 5)), student.layout
    other = None if own == theirs else layout
    teacher = Teacher(model, BatchConfig(logprob_tokens=32), DistillConfig(top_k=top_k), cfg.vocab_size, other)
    edges = [7 * rank // layout.data for rank in range(layout.data + 1)]
    mine = range(*edges[layout.dp_rank : layout.dp_rank + 2])
    rows = teacher.tell(batch(cfg, rows=7).select(torch.tensor(mine)).trim())
    parts = [rows.teacher, *([rows.teacher_ids] if top_k else [])]
    found = {row: [x[i][rows.loss_mask[i].bool()] for x in parts] for i, row in enumerate(mine)}
    return {"rows": found, "head": teacher.head(student).weight, "tp": layout.tp_rank}


def told_by_two(own: ParallelConfig, theirs: ParallelConfig, top_k: int, batch_cfg: BatchConfig) -> dict:
    """Rows of two teachers of other shapes, of which the second rank has none of the first's: {row: (told, what its
    teacher says alone)}; and what an update by all of them counts."""
    cfg, said = MODELS["qwen3"], DistillConfig(kind="jsd", top_k=top_k)
    student = build(cfg, own, optim=SGD)
    layout, other = student.layout, None if own == theirs else student.layout
    teachers = []
    for seed, (hidden, layers) in enumerate([(48, 4), (32, 2)]):
        shape = replace(cfg, num_layers=layers, hidden_size=hidden, vocab_size=cfg.vocab_size + seed)
        model = build(shape, theirs, source=wild_source(shape, 5 + seed))
        teachers.append(Teacher(model, batch_cfg, said, cfg.vocab_size, other))
    rows = replace(batch(cfg, rows=7), labels=None, told_by=torch.tensor([0, 1, 0, 1, 1, 1, 1]))
    edges = [7 * rank // layout.data for rank in range(layout.data + 1)]
    mine = range(*edges[layout.dp_rank : layout.dp_rank + 2])
    rows = rows.select(torch.tensor(mine))
    alone, rows = [teacher.tell(rows) for teacher in teachers], tell(teachers, rows)
    found = {}
    for i, row in enumerate(mine):
        theirs_alone, on = alone[int(rows.told_by[i])], rows.loss_mask[i].bool()
        width = theirs_alone.teacher.shape[2]
        assert not rows.teacher[i, ..., width:].any(), "zeros beyond what the teacher says"
        found[row] = [(rows.teacher[i, on, :width], theirs_alone.teacher[i, on])]
        found[row] += [(rows.teacher_ids[i, on], theirs_alone.teacher_ids[i, on])] if top_k else []
    heads = [] if top_k else [teacher.head(student) for teacher in teachers]
    learner = Student(student, batch_cfg, cfg=said, vocab_size=cfg.vocab_size, heads=heads)
    stats = learner.update(rows, distill_loss(rows, said, layout.pgs.dp))
    return {"rows": found, "stats": {name: stats[name] for name in ("distill/loss", "distill/kl", "policy/grad_norm")}}
