"""Answers of the model that learns, from a job."""

from __future__ import annotations

from collections.abc import Sequence

from aligner.builders.data import make_sampling, make_stream
from aligner.builders.engines import make_verifier
from aligner.builders.job import Job
from aligner.config.on_demand import on_demand
from aligner.config.sections.model.rope import longest_row
from aligner.data.dataset import PromptDataset
from aligner.data.mixture import PromptMixture
from aligner.refit.transfer import Refit
from aligner.roles.policy import Policy
from aligner.roles.teacher import Teacher
from aligner.rollout.own_answers import OwnAnswers
from aligner.rollout.requests import Requests
from aligner.rollout.sample_generator import SampleGenerator
from aligner.rollout.sharing import share
from aligner.rollout.source import Weights
from aligner.run.checkpoints import Stateful


def make_own_answers(
    job: Job,
    policy: Policy,
    refit: Refit,
    prompts: PromptDataset | PromptMixture,
    count: int,
    teachers: Sequence[Teacher] = (),
) -> tuple[OwnAnswers, dict[str, Stateful]]:
    """Make the source of the policy's answers, `count` of them at a time, and its state for checkpoints."""
    cfg, layout, teacher_prompts, right = job.cfg, job.layout, None, None
    of_group, limit = cfg.algorithm.distill.of_group, cfg.sampling.max_response_tokens
    verifier, stream = make_verifier(job, refit, policy, prompts), make_stream(job, prompts, count)
    sampling = make_sampling(job, cfg.sampling.temperature, limit)
    if cfg.algorithm.distill.teacher_prompt:
        longest = min(longest_row(t.model.cfg.rope_scaling, t.model.cfg.max_position) for t in teachers)
        make, room, other = on_demand("algorithm.distill.teacher_prompt"), limit if of_group else 0, None
        if teachers[0].tokenizer is not None:
            make_other = on_demand("algorithm.distill.teacher_prompt, of another tokenizer")
            other = make_other(job.tokenizer, teachers[0].tokenizer, longest)
        teacher_prompts = make(prompts, job.tokenizer, cfg.data.template_arguments, longest - limit, room, other)
    if of_group:
        right = on_demand("algorithm.distill.teacher_prompt, of groups")(job, prompts)
    count //= cfg.batch.group
    own_slots = range(count)[share(count, layout.data, layout.dp_rank)]
    answers = OwnAnswers(
        Weights(refit, verifier, job.timers),
        Requests(prompts, stream, cfg.batch.group, count, own_slots, cfg.seed),
        SampleGenerator(refit.engine, job.tokenizer, sampling, layout.peers, job.timers),
        layout.pgs.dp,
        cfg.algorithm.distill.teacher_of,
        teacher_prompts,
        right,
    )
    return answers, {"prompts": stream, "sentinel": verifier}
