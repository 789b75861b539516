"""Supervised fine-tuning: cross-entropy on the tokens of the answers.

rows of the step -> forward, loss, backward -> optimizer step
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from aligner.config.stage import Stage

if __package__ == "aligner.stages":  # the configuration, which reads only STAGE, must not wait for torch
    import torch.distributed as dist

    from aligner.builders.answers import make_answer_evaluation
    from aligner.builders.data import make_answers, make_batches, make_training_set
    from aligner.builders.job import Job
    from aligner.builders.models import make_policy
    from aligner.builders.runs import finish, make_run, saved_first
    from aligner.data.batches import BatchSource
    from aligner.data.collate import collate_sft
    from aligner.data.mixture import Mixture
    from aligner.ops.rl.aggregate import aggregate, denominator
    from aligner.roles.policy import Policy, TokenOutputs
    from aligner.run.loop import Run
    from aligner.types import LossOutput, SourceNumbers, TrainBatch


STAGE = Stage(reads=("likelihood", "sft"))


def main(job: Job) -> None:
    cfg = job.cfg
    batches = make_batches(job, make_training_set(job, partial(make_answers, job)), collate_sft)
    policy = make_policy(job, cfg.run.steps, entropy=False, hits=True)
    run = make_run(job, {"policy": policy.model}, {"data": batches.stream}, make_answer_evaluation(job, policy))
    with saved_first(run):
        sft(run, policy, batches, cfg.algorithm.sft_loss)
    finish(job, run, policy.model)


def sft(run: Run, policy: Policy, batches: BatchSource, kind: str) -> None:
    group, mixed = policy.model.layout.pgs.dp, batches.dataset
    sources = list(mixed.parts) if isinstance(mixed, Mixture) else []
    for step in run.steps():
        batch = batches.next()
        with run.timers("update"):
            stats = policy.update(batch, sft_loss(batch, group, kind, sources))
        run.finish_batch(step, stats | batches.metrics(), batch, group.size())


def sft_loss(
    minibatch: TrainBatch, group: dist.ProcessGroup, kind: str = "nll", sources: Sequence[str] = ()
) -> Callable[[TokenOutputs, TrainBatch], LossOutput]:
    """Return the mean negative log-likelihood of the masked tokens of the whole minibatch; by `kind` dft of
    -p log p, without gradient through the weight p, the token's probability.

    The gradient of dft is that of -p: a token of probability 0 or 1 has none. Source: "On the generalization of SFT",
    arXiv:2508.05629; TRL's `loss_type="dft"`. `sources`: names of a mixture's sources, which get a metric each.
    """
    tokens = denominator(minibatch.loss_mask, "token_mean", group=group)

    def loss(out: TokenOutputs, batch: TrainBatch) -> LossOutput:
        weights = out.logprobs.detach().exp() if kind == "dft" else 1.0
        value = aggregate(-out.logprobs * weights, batch.loss_mask, "token_mean", tokens)
        count = batch.loss_mask.sum()
        means = {"sft/loss": (-(out.logprobs * batch.loss_mask).sum(), count)}
        for number, name in enumerate(sources):
            own = batch.loss_mask * (batch.of(SourceNumbers).source == number)[:, None]
            means[f"sft/loss/{name}"] = (-(out.logprobs * own).sum(), own.sum())
        if out.hits is not None:
            means["sft/token_accuracy"] = ((out.hits * batch.loss_mask).sum(), count)
        return LossOutput(value, means)

    return loss
