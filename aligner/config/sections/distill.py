"""The section `algorithm.distill`: what a student learns from a teacher's distributions, in stage distill."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from math import floor
from typing import Any

from aligner.config.checks import above, at_least, one_of, within
from aligner.config.sections.parallel import ParallelConfig
from aligner.errors import ConfigError, DataError

KINDS = ("forward_kl", "reverse_kl", "mixed", "jsd")  # ops/kernels/divergence.py
KEY = "algorithm.distill"


@dataclass
class DistillConfig:
    """Stage distill."""

    teacher: str = ""  # a Hugging Face folder, a run folder or a checkpoint, with the student's tokenizer
    teachers: dict[str, str] = field(default_factory=dict)  # name -> folder, instead of `teacher`: rows name theirs
    teacher_column: str = "teacher"  # where a row names it, with `teachers`
    kind: str = "forward_kl"  # forward_kl, reverse_kl, mixed, jsd: of teacher and student, at each token of the answers
    beta: float = 0.5  # mixed: the share of the forward KL; jsd: of the teacher in the mixture
    temperature: float = 1.0  # divides the logits of both
    top_k: int = 0  # compare only the teacher's k most likely tokens; 0: the whole vocabulary
    # of the other tokens, with top_k: tail (one more token that stands for all of them), renormalise (there are none),
    # zero (the teacher never says them; forward_kl)
    outside: str = "tail"
    tensor: int = 0  # ranks that share each matrix of the teacher; 0: parallel.tensor
    pipeline: int = 0  # ranks that share its layers; 0: parallel.pipeline
    # a folder for the teacher's top_k logprobs of all rows, computed where it lacks them; no teacher while training
    store: str = ""
    on_policy: float = 0.0  # share of the steps whose answers the student generates, to prompts of the same rows
    sft_coef: float = 0.0  # of the negative log-likelihood of the answers, beside the divergence

    def __post_init__(self) -> None:
        one_of(f"{KEY}.kind", self.kind, KINDS)
        if not 0 < self.beta < 1:
            expected = "a number between 0 and 1, without them: forward_kl and reverse_kl are kinds of their own"
            raise ConfigError(f"{KEY}.beta", self.beta, expected)
        above(f"{KEY}.temperature", self.temperature, 0)
        at_least(f"{KEY}.top_k", self.top_k, 0)
        one_of(f"{KEY}.outside", self.outside, ("tail", "renormalise", "zero"))
        if self.outside == "zero" and self.kind != "forward_kl":
            expected = f"tail or renormalise with {KEY}.kind={self.kind}: no KL to what is impossible is finite"
            raise ConfigError(f"{KEY}.outside", "zero", expected)
        if self.outside != "tail" and not self.top_k:
            raise ConfigError(f"{KEY}.outside", self.outside, f"tail without {KEY}.top_k: nothing is outside")
        if self.teachers and self.teacher:
            expected = f"empty with {KEY}.teachers={','.join(self.teachers)}: one for all rows, or one for each"
            raise ConfigError(f"{KEY}.teacher", self.teacher, expected)
        at_least(f"{KEY}.tensor", self.tensor, 0)
        at_least(f"{KEY}.pipeline", self.pipeline, 0)
        if self.store and not self.top_k:
            raise ConfigError(f"{KEY}.top_k", 0, f"at least 1 with {KEY}.store: whole vocabularies are not stored")
        if self.store and self.teachers:
            expected = f"none with {KEY}.teachers: give each a file of data.sources, and fill the store of that alone"
            raise ConfigError(f"{KEY}.store", self.store, expected)
        within(f"{KEY}.on_policy", self.on_policy, 0, 1)
        if self.store and self.on_policy:
            raise ConfigError(f"{KEY}.store", self.store, f"none with {KEY}.on_policy: answers are new in each step")
        at_least(f"{KEY}.sft_coef", self.sft_coef, 0)
        if self.sft_coef and self.on_policy == 1:
            expected = f"0 with {KEY}.on_policy=1: a student does not learn its own answers"
            raise ConfigError(f"{KEY}.sft_coef", self.sft_coef, expected)

    def models(self) -> dict[str, str]:
        """`teacher` or `teachers.<name>` -> folder."""
        several = {f"teachers.{name}": path for name, path in self.teachers.items()}
        return several or ({"teacher": self.teacher} if self.teacher else {})

    def told_by(self, row: Mapping[str, Any], where: str) -> int | None:
        """The place in `teachers` of the one that a row names; None without. Raises DataError."""
        names, column = list(self.teachers), self.teacher_column
        if names and row.get(column) not in names:
            expected = f"the name of a teacher: {', '.join(names)} ({KEY}.teachers, {KEY}.teacher_column)"
            raise DataError(f"{where}: {column}={row.get(column)!r:.80}: expected {expected}")
        return names.index(row[column]) if names else None

    def layout(self, student: ParallelConfig) -> ParallelConfig:
        """Of the teacher, on the same ranks."""
        tensor = self.tensor or student.tensor
        pipeline, sequence = self.pipeline or student.pipeline, student.sequence and tensor > 1
        return replace(student, tensor=tensor, pipeline=pipeline, sequence=sequence)

    def generates(self, step: int) -> bool:
        """Whether the student answers in step 1, 2, ...: of the first n steps in `on_policy` * n, rounded down."""
        return floor(step * self.on_policy + 1e-9) > floor((step - 1) * self.on_policy + 1e-9)
