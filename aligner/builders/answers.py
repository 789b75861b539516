"""Evaluation of stages that learn from answers, from a job."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from aligner.builders.data import make_answers
from aligner.builders.job import Job
from aligner.builders.runs import together
from aligner.config.derived import evaluates
from aligner.config.on_demand import on_demand
from aligner.roles.policy import Policy
from aligner.rollout.heldout import held_out_loss
from aligner.run.loop import Evaluate

if TYPE_CHECKING:
    from aligner.refit.transfer import Refit


def make_answer_evaluation(job: Job, policy: Policy, refit: Refit | None = None) -> Evaluate | None:
    """Return the evaluation: the loss on data.eval, the reward functions' scores of answers to its rows, and those of
    `eval.tasks`, by the engine of `refit` if the stage has one."""
    cfg, loss = job.cfg, None
    if cfg.data.eval:
        held_out = make_answers(job, cfg.data.eval, "data.eval", cfg.data)
        loss = partial(held_out_loss, policy, held_out, cfg.eval.prompts)
    answers = on_demand("eval.generate")(job, policy.model, refit) if evaluates(cfg) else ()
    return together(loss, *answers)
