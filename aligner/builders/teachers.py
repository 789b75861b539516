"""A student and its teachers, from a job."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch.distributed as dist

from aligner.builders.job import Job
from aligner.builders.models import make_model, make_policy
from aligner.config.on_demand import on_demand
from aligner.config.sections.distill import KEY
from aligner.config.sections.model.config import beside
from aligner.config.validate_model import validate_model, validate_on_gpu
from aligner.errors import ConfigError, LayoutError
from aligner.megatron.groups import build_layout
from aligner.megatron.model import Head
from aligner.roles.model_init import InitialModel, resolve
from aligner.roles.teacher import Student, Teacher

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def make_models(job: Job, stored: int) -> tuple[Student, list[Teacher]]:
    """Make the student, and its teachers unless there are stored logprobs, which cover the first `stored` tokens."""
    cfg = job.cfg.algorithm.distill
    teachers: list[Teacher] = [] if stored or cfg.own_teacher else make_teachers(job)
    vocab_size = stored or (teachers[0].vocab_size if teachers else job.initial.config.vocab_size)
    policy = make_policy(job, job.cfg.run.steps)
    student = Student(policy.model, policy.batch, ptx=policy.ptx, cfg=cfg, vocab_size=vocab_size)
    by_text = bool(teachers) and teachers[0].tokenizer is not None
    student.heads = [] if cfg.top_k or by_text else [teacher.head(student.model) for teacher in teachers]
    if cfg.own_teacher:
        make = on_demand("algorithm.distill.teacher=self")
        teachers = [make(student.model, student.batch, cfg, vocab_size, pupil=student, phase=job.timers)]
    return student, teachers


def make_teachers(job: Job) -> list[Teacher]:
    """Make the teachers on one layout, in the order of `algorithm.distill.teachers`."""
    initial, shared = find_teachers(job)
    cfg = job.cfg.algorithm.distill
    parallel, other = cfg.layout(job.cfg.parallel), None
    if parallel != job.cfg.parallel:
        world = dist.get_world_size()
        if world % math.lcm(parallel.model_size, parallel.pipeline * parallel.expert):
            product = f"{parallel.tensor}*{parallel.pipeline}*{parallel.context}"
            expected = f"tensor*pipeline of the teacher * parallel.context={product} to divide the {world} ranks"
            raise LayoutError(f"{KEY}.tensor", cfg.tensor, f"{expected}, with parallel.expert")
        other = build_layout(parallel)
    teachers = []
    for name, each in zip(cfg.models(), initial, strict=True):
        model = job.built.models[name] = make_model(job, each, Head(), None, 0, layout=other)
        own = None if same_tokens(each.tokenizer, job.tokenizer) else each.tokenizer
        teachers.append(Teacher(model, job.cfg.batch, cfg, shared, job.layout if other else None, own))
    return teachers


def find_teachers(job: Job) -> tuple[list[InitialModel], int]:
    """Resolve the teachers. Also return how many tokens their vocabularies share with the student's."""
    cfg = job.cfg.algorithm.distill
    initial = [_teacher(job, path, f"{KEY}.{name}") for name, path in cfg.models().items()]
    if job.cfg.algorithm.distill.teacher_prompt:
        _check_tokenizers(job, initial)
    shared = min(each.config.vocab_size for each in (*initial, job.initial))
    if cfg.top_k > shared:
        raise ConfigError(f"{KEY}.top_k", cfg.top_k, f"at most the {shared} tokens of the vocabulary, or 0 for all")
    return initial, shared


def _teacher(job: Job, path: str, key: str) -> InitialModel:
    """Resolve a teacher of any shape, with the student's tokenizer or prompts of its own. Raises ConfigError."""
    initial = resolve(beside(job.cfg.model), path, job.cfg.seed, key=key)
    job.built.contents[key] = initial.content
    validate_model(
        dataclasses.replace(job.cfg, parallel=job.cfg.algorithm.distill.layout(job.cfg.parallel)),
        initial.config,
        scorer=True,
    )
    if job.device.type == "cuda":
        validate_on_gpu(job.cfg, initial.config)
    if initial.has_scores:
        raise ConfigError(key, path, "a language model: this one has a head of scores")
    if not same_tokens(initial.tokenizer, job.tokenizer):
        own, other = job.tokenizer.get_vocab(), initial.tokenizer.get_vocab()
        hint = f"{len(other)} tokens there, {len(own)} here, {len(own.items() & other.items())} of them the same"
        if not job.cfg.algorithm.distill.teacher_prompt:
            hint += f". To compare spans of text instead: {KEY}.teacher_prompt={{prompt}} and {KEY}.on_policy=1"
            expected = "a teacher with the student's tokenizer: distributions are over its tokens"
            raise ConfigError(key, path, expected, hint)
        cfg, with_it = job.cfg.algorithm.distill, f"with {key}={path}, whose tokenizer is not the student's"
        for name, value, wanted, why in (
            ("top_k", cfg.top_k, 0, "it says how likely a whole text is"),
            ("kind", cfg.kind, "reverse_kl", "others need its distribution over the student's tokens"),
            ("temperature", cfg.temperature, job.cfg.sampling.temperature, "as sampling.temperature"),
        ):
            if value != wanted:
                raise ConfigError(f"{KEY}.{name}", value, f"{wanted} {with_it}: {why}", hint)
        job.say(f"{key}: another tokenizer, so spans of text are compared: {hint}")
    return initial


def same_tokens(one: PreTrainedTokenizerBase, other: PreTrainedTokenizerBase) -> bool:
    return one.get_vocab() == other.get_vocab()


def _check_tokenizers(job: Job, teachers: Sequence[InitialModel]) -> None:
    """Check that teachers share a tokenizer, since their targets do. Raises ConfigError."""
    paths = job.cfg.algorithm.distill.models()
    for (name, path), each in zip(paths.items(), teachers, strict=True):
        first = teachers[0].tokenizer
        if not same_tokens(each.tokenizer, first) or each.tokenizer.chat_template != first.chat_template:
            expected = f"a teacher with the tokenizer and chat template of {next(iter(paths.values()))}"
            raise ConfigError(f"{KEY}.{name}", path, expected)
