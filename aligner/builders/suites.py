"""Evaluation by tasks of lm-evaluation-harness and Inspect, from a job."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

from aligner.builders.data import make_sampling
from aligner.builders.engines import child_tokens
from aligner.builders.job import Job
from aligner.data.dialogue import Dialogue
from aligner.environments.openai_api import MODEL
from aligner.errors import ConfigError
from aligner.ops.agree import by_rank_0
from aligner.refit.transfer import Refit
from aligner.rollout.agents import Dialogues
from aligner.rollout.rounds import EngineRounds
from aligner.rollout.served import Served
from aligner.rollout.suites import KEY, HarnessProcess, SuiteEvaluation, require_suites

FOLDER = "harness"  # in the run's folder
ANSWER_S = 86400  # the run's watchdog has the limit


def make_suite(job: Job, refit: Refit) -> SuiteEvaluation:
    """Make the evaluation. Raises ConfigError on every rank for a task that cannot run."""
    require_suites(job.cfg.eval.tasks)
    from aligner.environments.endpoint import new_secret  # needs the extra `serve`

    cfg, tokenizer, can = job.cfg, job.tokenizer, job.cfg.engine.can
    limit = _limit(job, refit)
    replicas = (cfg.engine.ranks or job.env.world_size) // cfg.engine.tensor_parallel
    harness: list[HarnessProcess] = []

    def begin() -> list[dict[str, Any]]:
        folder = Path(cfg.run.dir) / FOLDER
        tokenizer.save_pretrained(folder / "tokenizer")
        settings = {
            "model": MODEL,
            "tasks": cfg.eval.tasks,
            "folder": cfg.eval.tasks_folder,
            "limit": cfg.eval.prompts,
            "chat": cfg.eval.tasks_chat,
            "logs": str(folder / "inspect"),
            "tokenizer": str(folder / "tokenizer"),
            "max_length": limit,
            "batch_size": cfg.engine.max_batch * replicas,
            "timeout": ANSWER_S,
        }
        job.say(f"{KEY}: loads {', '.join(cfg.eval.tasks)}")
        harness.append(HarnessProcess(settings, folder / "log.txt"))
        return harness[0].tasks()

    for task in by_rank_0(begin):
        _check(task, limit, can.scores, cfg.engine.name)
        if task["kind"] == "chat" and not tokenizer.chat_template:
            expected = "tasks of lm-evaluation-harness for a model without a chat template: Inspect's are chats"
            raise ConfigError(KEY, task["task"], expected, "data.chat_template sets one.")
        job.say(f"{KEY}: {task['task']}, {task['rows']} of {task['all']} rows")
    rounds = EngineRounds(refit.engine, tokenizer.pad_token_id, partial(job.timers, "generate"))
    arguments, calls = cfg.data.template_arguments, cfg.environment.calls
    dialogues = Dialogues(lambda tools: Dialogue(tokenizer, tools, arguments, calls))
    sampling = make_sampling(job, cfg.eval.temperature, cfg.sampling.max_response_tokens, plain=True)
    vocabulary = job.initial.config.vocab_size
    served = Served(new_secret(), MODEL, rounds, tokenizer, vocabulary, limit, sampling, dialogues, can.scores)
    return SuiteEvaluation(harness[0] if harness else None, served, rounds, refit, job.timers)


def _limit(job: Job, refit: Refit) -> int:
    """Return the tokens of the longest row."""
    if not job.cfg.engine.can.any_prompt:
        return child_tokens(job.cfg)
    return job.initial.config.max_position if job.bridge else refit.engine.longest_row


def _check(task: dict[str, Any], limit: int, scores: bool, engine: str) -> None:
    """Raise ConfigError for a task that this run's engine cannot answer."""
    if task["kind"] not in ("generate_until", "chat"):
        if not scores:
            expected = f"tasks whose answers are generated with engine.name={engine}, which scores no tokens"
            raise ConfigError(KEY, task["task"], expected, "engine.name=native does.")
    elif task["tokens"] + 2 > limit:
        expected = f"tasks with answers of at most {limit - 2} tokens, as prompt and answer have {limit} positions"
        hint = f"It generates up to {task['tokens']} (generation_kwargs.max_gen_toks, or GenerateConfig.max_tokens)."
        raise ConfigError(KEY, task["task"], expected, hint)
