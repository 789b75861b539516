"""The section `algorithm.distill`: how a student learns a teacher's distributions, in stage distill."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import floor
from string import Formatter
from typing import Any

from aligner.config.key import IGNORE, REPORT, Section, key
from aligner.config.rule import rules
from aligner.config.sections.parallel import ParallelConfig
from aligner.errors import DataError

KINDS = ("forward_kl", "reverse_kl", "mixed", "jsd")  # ops/kernels/divergence.py
KEY = "algorithm.distill"
SELF = "self"  # as `teacher`: the student
RIGHT_ANSWER = "{right_answer}"  # in `teacher_prompt`: a right answer of the same group, by the student
_BETA = "a number between 0 and 1, without them: forward_kl and reverse_kl are kinds of their own"


def _inside(beta: float) -> bool:
    return 0 < beta < 1


@dataclass
class DistillConfig(Section, key=KEY):
    teacher: str = key(
        "",
        "Teacher: a Hugging Face folder, run folder or checkpoint, with the student's tokenizer unless there is a "
        "`teacher_prompt`. self: the student, with its averaged weights where `ema.decay` is set.",
        resume=IGNORE,
    )
    teachers: dict[str, str] = key({}, "Map of names to folders, for rows that name their teacher.", resume=IGNORE)
    teacher_column: str = key("teacher", "Column with the name of the row's teacher, with `teachers`.")
    kind: str = key("forward_kl", "Divergence of teacher and student at each token of the answers.", choices=KINDS)
    beta: float = key(
        0.5, "Share of the forward KL (mixed), or of the teacher in the mixture (jsd).", valid=(_inside, _BETA)
    )
    temperature: float = key(1.0, "Divisor of the logits of both models.", above=0)
    top_k: int = key(0, "Compare only the teacher's k likeliest tokens. 0: the whole vocabulary.", least=0)
    outside: str = key(
        "tail",
        "Treatment of all other tokens, with top_k. tail: one more token stands for all of them; renormalise: ignore "
        "them; zero: the teacher's probability of them is 0 (forward_kl).",
        choices=("tail", "renormalise", "zero"),
    )
    tensor: int = key(0, "Ranks that share each matrix of the teacher. 0: parallel.tensor.", least=0, resume=REPORT)
    pipeline: int = key(0, "Ranks that share its layers. 0: parallel.pipeline.", least=0, resume=REPORT)
    store: str = key(
        "",
        "Folder for the teacher's top_k logprobs of all rows. Missing ones are computed first. Training then needs no "
        "teacher.",
        resume=IGNORE,
    )
    on_policy: float = key(
        0.0, "Share of the steps with answers that the student generates to the rows' prompts.", least=0, most=1
    )
    teacher_prompt: str = key(
        "",
        "Python format string over the row's columns that builds the teacher's prompt; {prompt} is the student's, of a "
        "conversation its last message, {right_answer} another response of its batch.group that has eval.full_score. "
        "Empty: the student's.",
    )
    sft_coef: float = key(0.0, "Factor of the answers' negative log-likelihood, added to the divergence.", least=0)

    RULES = rules("""
kind!=forward_kl => outside =tail|renormalise
    | with algorithm.distill.kind={kind}: no KL to what is impossible is finite
!top_k => outside =tail | without algorithm.distill.top_k: nothing is outside
teachers => teacher = | with algorithm.distill.teachers={teachers}: one for all rows, or one for each
store => top_k >=1 | with algorithm.distill.store: whole vocabularies are not stored
teachers => store =
    | with algorithm.distill.teachers: give each a file of data.sources, and fill a store for it separately
on_policy => store = | with algorithm.distill.on_policy: answers are new in each step
teacher_prompt => on_policy =1
    | with algorithm.distill.teacher_prompt: the teacher reads answers that the student has just generated
own_teacher !teacher_prompt => teacher_prompt
    | a prompt of the teacher's own with algorithm.distill.teacher=self, which learns nothing behind the same prompts
own_teacher => tensor, pipeline =0 | with algorithm.distill.teacher=self: the student has its layout already
on_policy=1 => sft_coef =0 | with algorithm.distill.on_policy=1: a student does not learn its own answers
""")

    @property
    def own_teacher(self) -> bool:
        """Whether the student is its own teacher."""
        return self.teacher == SELF

    @property
    def of_group(self) -> bool:
        """Whether the teacher reads another answer of the student."""
        return RIGHT_ANSWER in self.teacher_prompt

    @property
    def pieces(self) -> tuple[int, list[str]]:
        """The number of characters of `teacher_prompt` between its columns, and these."""
        parts = list(Formatter().parse(self.teacher_prompt))
        return sum(len(text) for text, *_ in parts), [name for _, name, *_ in parts if name]

    def models(self) -> dict[str, str]:
        """Return `teacher` or `teachers.<name>` -> folder, without the student itself."""
        several = {f"teachers.{name}": path for name, path in self.teachers.items()}
        return several or ({"teacher": self.teacher} if self.teacher and not self.own_teacher else {})

    def teacher_of(self, row: Mapping[str, Any], where: str) -> int | None:
        """Return the index in `teachers` of the one that a row names; None without. Raises DataError."""
        names, column = list(self.teachers), self.teacher_column
        if names and row.get(column) not in names:
            expected = f"the name of a teacher: {', '.join(names)} ({KEY}.teachers, {KEY}.teacher_column)"
            raise DataError(f"{where}: {column}={row.get(column)!r:.80}: expected {expected}")
        return names.index(row[column]) if names else None

    def layout(self, student: ParallelConfig) -> ParallelConfig:
        """Return the teacher's layout, on the same ranks."""
        tensor = self.tensor or student.tensor
        pipeline, sequence = self.pipeline or student.pipeline, student.sequence and tensor > 1
        student = student if pipeline == student.pipeline else replace(student, stage_layers=[], virtual_stages=1)
        return replace(student, tensor=tensor, pipeline=pipeline, sequence=sequence)

    def generates(self, step: int) -> bool:
        """Return whether the student answers in step 1, 2, ...: of the first n steps in `on_policy` * n, rounded
        down."""
        return floor(step * self.on_policy + 1e-9) > floor((step - 1) * self.on_policy + 1e-9)
