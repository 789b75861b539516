"""Tasks of Inspect, in the process of `harness_process.py`. They speak the chat API of the run's server."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

PREFIX = "inspect/"  # before what `inspect eval` takes: a file of eval.tasks_folder, or a task of a package
SEED = 1234  # of every request, as lm-evaluation-harness sends one


def inspected(name: str, folder: str) -> list[Any]:
    """Return the tasks of a name in `eval.tasks`: of `inspect/sums.py@easy` one, of `inspect/sums.py` all in the file.
    Empty if there is none."""
    from inspect_ai._eval.loader import create_file_tasks, load_tasks  # as `inspect eval` reads a name

    path, at, task = name.removeprefix(PREFIX).partition("@")
    if not path.endswith(".py"):
        return load_tasks([path])
    file = Path(folder).absolute() / path
    if not file.is_file():
        return []
    return load_tasks([f"{file}@{task}"]) if at else create_file_tasks(file)


class InspectTasks:
    def __init__(self, settings: Mapping[str, Any], tasks: Sequence[Any]):
        self.settings, self.tasks = settings, list(tasks)

    def described(self) -> list[dict[str, Any]]:
        """Return each task's rows, and the tokens of its answers: 0 without a limit of its own."""
        limit = self.settings["limit"]
        return [
            {
                "task": f"{PREFIX}{task.name}",
                "kind": "chat",
                "rows": min(len(task.dataset), limit or len(task.dataset)),
                "all": len(task.dataset),
                "tokens": task.config.max_tokens or 0,
            }
            for task in self.tasks
        ]

    def measure(self, url: str) -> dict[str, float]:
        """Return the scores of the model behind an address, by metric."""
        from inspect_ai import eval as evaluate
        from inspect_ai.model import GenerateConfig, get_model

        s = self.settings
        model = get_model(
            f"openai-api/aligner/{s['model']}",
            config=GenerateConfig(max_connections=s["batch_size"], max_retries=1, seed=SEED),
            base_url=url,
            api_key="none",
            memoize=False,
            client_timeout=s["timeout"],
        )
        how = {"limit": s["limit"] or None, "max_samples": s["batch_size"], "log_dir": s["logs"], "display": "none"}
        metrics: dict[str, float] = {}
        for log in evaluate(self.tasks, model=model, fail_on_error=True, score_display=False, **how):
            if log.status != "success" or log.results is None:
                raise RuntimeError(f"{PREFIX}{log.eval.task}: {log.error.message if log.error else log.status}")
            metrics |= metrics_of(f"{PREFIX}{log.eval.task}", log.results.scores)
        return metrics


def metrics_of(task: str, scores: Sequence[Any]) -> dict[str, float]:
    """Return metrics of a task's scorers, `eval/inspect/sums/includes/accuracy`."""
    return {
        f"eval/{task}/{score.name}/{name}": float(metric.value)
        for score in scores
        for name, metric in score.metrics.items()
        if name != "stderr" and math.isfinite(metric.value)
    }
