"""lm-evaluation-harness, or Inspect, in a process of its own: it seeds the random generators of its process, imports
for seconds, and must not see the GPU. Both ends speak lines of JSON.

    python -m aligner.rollout.harness_process TASK ... [--folder FOLDER]     downloads the tasks' data, on a login node
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from aligner.processes import leave_requests_to_rank
from aligner.rollout.inspect_tasks import PREFIX, InspectTasks, inspected

MODULE = "aligner.rollout.harness_process"
OFFLINE = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "HF_EVALUATE_OFFLINE": "1"}
SEED = 1234  # of examples in prompts, the harness's default
ANSWER_TOKENS = 256  # the harness's default of a task's `max_gen_toks`


class TaskFailed(Exception):
    """A task that cannot run; `fault` is what the config's error is made of."""

    def __init__(self, **fault: str):
        super().__init__(fault["text"])
        self.fault = fault


def load(names: Sequence[str], folder: str) -> dict[str, Any]:
    """Return name -> its tasks of Inspect, or tasks and groups of the harness. Raises TaskFailed."""
    manager, own = None, [name for name in names if not name.startswith(PREFIX)]
    if own:
        from lm_eval.tasks import TaskManager

        manager = TaskManager(include_path=folder or None, include_defaults=False)
        if not set(own) <= set(manager.all_tasks):  # the index of the package's own takes a minute
            manager = TaskManager(include_path=folder or None)
    loaded: dict[str, Any] = {}
    for name in names:
        try:
            if manager is None or name not in own:
                loaded[name] = inspected(name, folder)
            elif name in manager.all_tasks:
                loaded[name] = manager.load([name])
        except Exception as error:  # of the suite, of datasets, or of a task's own code
            raise TaskFailed(task=name, kind="offline" if _offline(error) else "raised", text=_line(error)) from error
        if not loaded.get(name):
            raise TaskFailed(task=name, kind="unknown", text="no such task")
    return loaded


def _offline(error: BaseException | None) -> bool:
    """Return whether something was not here, and could not be downloaded."""
    while error is not None:
        if isinstance(error, ConnectionError) or "offline" in str(error).lower():
            return True
        error = error.__cause__ or error.__context__
    return False


def _line(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"


def cache_folder() -> str:
    """Return the folder in which the harness looks for data sets."""
    import datasets

    return str(datasets.config.HF_DATASETS_CACHE)


class Harness:
    def __init__(self, settings: Mapping[str, Any]):
        loaded, self.settings = load(settings["tasks"], settings["folder"]), settings
        self.loaded = {name: each for name, each in loaded.items() if not name.startswith(PREFIX)}
        own = [task for name, each in loaded.items() if name not in self.loaded for task in each]
        self.inspect = InspectTasks(settings, own)
        self.tasks = {name: task for each in self.loaded.values() for name, task in each["tasks"].items()}
        self.limit = settings["limit"] or None

    def described(self) -> list[dict[str, Any]]:
        """Return the kind of each task, its rows, and the tokens of its answers."""
        return [
            {
                "task": name,
                "kind": task.OUTPUT_TYPE,
                "rows": min(len(task.eval_docs), self.limit or len(task.eval_docs)),
                "all": len(task.eval_docs),
                "tokens": (task.config.generation_kwargs or {}).get("max_gen_toks", ANSWER_TOKENS),
            }
            for name, task in self.tasks.items()
        ] + self.inspect.described()

    def measure(self, url: str) -> dict[str, float]:
        """Return the scores of the model behind an address, by metric."""
        metrics = self._measured(url) if self.tasks else {}
        return metrics | (self.inspect.measure(url) if self.inspect.tasks else {})

    def _measured(self, url: str) -> dict[str, float]:
        from lm_eval.api.registry import get_model
        from lm_eval.evaluator import evaluate

        s = self.settings
        for task in self.tasks.values():  # as `simple_evaluate`, which also runs programs to describe the machine
            if task.get_config("num_fewshot") is None:
                task.set_config(key="num_fewshot", value=0)
            task.set_fewshot_seed(seed=SEED)
        groups = {name: group for each in self.loaded.values() for name, group in each["groups"].items()}
        model = {"model": s["model"], "base_url": f"{url}/completions", "tokenizer_backend": "huggingface"}
        model |= {"tokenizer": s["tokenizer"], "max_length": s["max_length"], "timeout": s["timeout"], "max_retries": 1}
        results = evaluate(
            get_model("local-completions").create_from_arg_obj(model, {"batch_size": s["batch_size"]}),
            {"tasks": self.tasks, "groups": groups},
            limit=self.limit,
            bootstrap_iters=0,
            log_samples=False,
            apply_chat_template=s["chat"],
            fewshot_as_multiturn=s["chat"],
        )
        of_groups, by_task = results.get("groups", {}), results["results"]
        metrics: dict[str, float] = {}
        for name, of_name in self.loaded.items():
            own = metrics_of(name, of_groups.get(name, {}))  # a group's score stands for its tasks'
            for task in () if own else of_name["tasks"]:
                own |= metrics_of(task, by_task[task])
            metrics |= own
        return metrics


def metrics_of(task: str, scores: Mapping[str, Any]) -> dict[str, float]:
    """Return metrics of a task's scores, `eval/gsm8k/exact_match/strict-match`. The harness names them "metric,filter",
    with "none" for no filter."""
    metrics = {}
    for key, value in scores.items():
        metric, comma, kind = key.partition(",")
        number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
        if comma and number and not metric.endswith("_stderr"):
            metrics["/".join(["eval", task, metric, *([] if kind == "none" else [kind])])] = float(value)
    return metrics


def _answer() -> int:
    """Answer the parent's lines: settings, and after them an address for each evaluation."""
    leave_requests_to_rank()
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what libraries print goes to the log
    for line in sys.stdin:
        asked = json.loads(line)
        try:
            if "tasks" in asked:
                harness = Harness(asked)
                answer: dict[str, Any] = {"tasks": harness.described()}
            else:
                answer = {"metrics": harness.measure(asked["url"])}
        except TaskFailed as error:
            answer = {"fault": error.fault | {"cache": cache_folder()}}
        except Exception as error:
            import traceback

            traceback.print_exc()
            answer = {"fault": {"task": "", "kind": "raised", "text": _line(error)}}
        print(json.dumps(answer), file=answers, flush=True)
    return 0


def _download(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog=f"python -m {MODULE}", description="Download the data sets of tasks.")
    parser.add_argument("tasks", nargs="+", metavar="TASK")
    parser.add_argument("--folder", default="", help="folder with tasks of yours (eval.tasks_folder)")
    args = parser.parse_args(arguments)
    try:
        load(args.tasks, args.folder)
    except TaskFailed as error:
        print(f"error: {error.fault['task']}: {error.fault['text']}", file=sys.stderr)
        return 1
    print(f"{Path(cache_folder())}: {', '.join(args.tasks)}")
    return 0


if __name__ == "__main__":
    sys.exit(_download(sys.argv[1:]) if sys.argv[1:] else _answer())
