"""Evaluation by tasks of lm-evaluation-harness and Inspect, against the run's own engine.

refit -> server on the loopback (rank 0) <- the harness, a process of its own; all ranks answer in rounds (`rounds.py`)
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from aligner.environments.openai_api import require_server
from aligner.errors import ConfigError, MissingExtraError, SuiteError
from aligner.ops.agree import by_rank_0
from aligner.processes import guarded
from aligner.rollout.harness_process import MODULE, OFFLINE
from aligner.rollout.inspect_tasks import PREFIX
from aligner.rollout.rounds import EngineRounds
from aligner.rollout.served import Served
from aligner.run.timers import Timers
from aligner.types import ScalarMetrics

KEY = "eval.tasks"
RANKED = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")  # not the harness's


def require_suites(tasks: Sequence[str]) -> None:
    """Raise MissingExtraError where the suite of a task, or the server, is not installed."""
    require_server(KEY)
    for task in tasks:
        module, package = ("inspect_ai", "inspect-ai") if task.startswith(PREFIX) else ("lm_eval", "lm-eval[api]")
        if find_spec(module) is None:
            raise MissingExtraError(package, "", f"{KEY}={task}")


class HarnessProcess:
    """The harness, started with its settings. It ends with this object, or with this process."""

    def __init__(self, settings: Mapping[str, Any], log: Path):
        log.parent.mkdir(parents=True, exist_ok=True)
        self.log = log
        environ = {name: value for name, value in os.environ.items() if name not in RANKED}
        direct = ",".join(filter(None, (environ.get("NO_PROXY"), "127.0.0.1")))
        environ |= OFFLINE | {"NO_PROXY": direct, "no_proxy": direct, "CUDA_VISIBLE_DEVICES": ""}
        environ |= {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        command = guarded([sys.executable, "-P", "-m", MODULE])
        with log.open("ab") as errors:
            self._child = subprocess.Popen(
                command, env=environ, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True
            )
        weakref.finalize(self, _end, self._child)
        self.send(settings)

    def send(self, message: Mapping[str, Any]) -> None:
        """Send settings, or the address of a model to measure; `answer` is its answer."""
        assert self._child.stdin is not None
        with suppress(OSError):  # it has ended: there is no answer
            self._child.stdin.write(f"{json.dumps(message)}\n")
            self._child.stdin.flush()
        self.answer: Future[dict[str, Any]] = Future()
        threading.Thread(target=self._read, args=(self.answer,), name="harness", daemon=True).start()

    def _read(self, answer: Future[dict[str, Any]]) -> None:
        assert self._child.stdout is not None
        line = self._child.stdout.readline()
        answer.set_result(json.loads(line) if line.endswith("\n") else {"fault": {"task": "", "text": "it has ended"}})

    def tasks(self) -> list[dict[str, Any]]:
        """Return the tasks once they are loaded. Raises ConfigError for one that cannot run."""
        answer = self.answer.result()
        if "fault" in answer:
            raise self._refusal(answer["fault"])
        return answer["tasks"]

    def _refusal(self, fault: Mapping[str, str]) -> ConfigError:
        task, kind = fault["task"], fault.get("kind")
        suite = "Inspect" if task.startswith(PREFIX) else "lm-evaluation-harness"
        if kind == "unknown" and task.startswith(PREFIX):
            expected = f"{PREFIX} and what `inspect eval` takes: a file of eval.tasks_folder, or a package's task"
            return ConfigError(KEY, task, expected, "inspect/sums.py@easy is task `easy` of sums.py.")
        if kind == "unknown":
            expected = "a task of lm-evaluation-harness, or one in eval.tasks_folder"
            return ConfigError(KEY, task, expected, "`lm_eval ls tasks` lists them.")
        if kind == "offline":
            expected = f"a task whose data set is in {fault['cache']}: a run downloads nothing"
            hint = f"On a login node, with the same HF_HOME: python -m {MODULE} {task}"
            return ConfigError(KEY, task, expected, hint)
        return ConfigError(KEY, task, f"tasks that {suite} loads", f"{fault['text']} ({self.log})")

    def begin(self, url: str, over: Callable[[], None]) -> None:
        """Measure the model behind an address; `over` is called, on another thread, when the answer is here."""
        self.send({"url": url})
        self.answer.add_done_callback(lambda _: over())

    def metrics(self) -> ScalarMetrics:
        """Return what was measured. Raises SuiteError."""
        answer = self.answer.result()
        if "fault" in answer:
            raise SuiteError(f"{KEY}: a suite failed: {answer['fault']['text']} ({self.log})")
        return answer["metrics"]


def _end(child: subprocess.Popen) -> None:
    child.terminate()  # its guard ends the harness
    child.wait()


@dataclass
class SuiteEvaluation:
    """The evaluation. `harness` is on rank 0."""

    harness: HarnessProcess | None
    served: Served
    rounds: EngineRounds
    refit: Callable[[], object]
    timers: Timers

    def __call__(self) -> ScalarMetrics:
        """Return `eval/<task>/<metric>`, with `/<filter>` if the task has filters. Raises SuiteError, EngineError on
        every rank. Collective over the world."""
        with self.timers("refit"):
            self.refit()
        if self.harness is None:
            self.rounds.serve(lambda: False)
        else:
            from aligner.environments.endpoint import listening, loopback, make_app  # needs the extra `serve`

            listener, app = loopback(), make_app(self.served, continue_text=self.served.continue_text)
            with listening(app, listener):
                url = f"http://127.0.0.1:{listener.getsockname()[1]}/{self.served.secret}/v1"
                self.harness.begin(url, self.rounds.wake)
                self.rounds.serve(self.harness.answer.done)
        self.rounds.engine.take_sums()  # they count rollouts only
        return by_rank_0(lambda: self.harness.metrics() if self.harness else {})
