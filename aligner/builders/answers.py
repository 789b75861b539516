"""Evaluation of stages that learn from answers, from a job."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from aligner.builders.data import make_answers
from aligner.builders.job import Job
from aligner.builders.runs import together
from aligner.config.derived import evaluation_functions
from aligner.config.on_demand import on_demand
from aligner.roles.policy import Policy
from aligner.rollout.heldout import held_out_loss
from aligner.run.loop import Evaluate

if TYPE_CHECKING:
    from aligner.refit.transfer import Refit


def make_answer_evaluation(job: Job, policy: Policy, refit: Refit | None = None) -> Evaluate | None:
    """Return the evaluation: the loss on data.eval, and the reward functions' scores of answers to its rows, by the
    engine of `refit` if the stage has one."""
    cfg = job.cfg
    if not cfg.data.eval:
        return None
    held_out = make_answers(job, cfg.data.eval, "data.eval", cfg.data)
    loss = partial(held_out_loss, policy, held_out, cfg.eval.prompts)
    answers = on_demand("eval.generate")(job, policy.model, refit) if evaluation_functions(cfg) else None
    return together(loss, answers)
