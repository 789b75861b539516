"""The common part of all stages between steps: resume, metrics, samples, alarms, evaluation, checkpoints, early stop.

A recipe reads `for step in run.steps(): ...; run.finish(step, metrics)` and nothing else of this.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from aligner.config.freeze import accept, refuse
from aligner.config.schema import Config
from aligner.errors import (
    AlignerError,
    EngineError,
    EnvironmentFailedError,
    MemoryLimitError,
    MismatchError,
    RewardError,
    SuiteError,
)
from aligner.run.alarms import FILE as ALARMS
from aligner.run.alarms import Alarms
from aligner.run.chain import Chain
from aligner.run.changes import AnotherRunError
from aligner.run.checkpoints import Checkpoints
from aligner.run.marker_files import DONE, PROGRESS, STOPPED
from aligner.run.memory import peak_rss_bytes
from aligner.run.metrics import HEADLINE, MetricsLogger, append_jsonl, truncate_jsonl
from aligner.run.phases import PhaseMemory
from aligner.run.progress import ProgressBar
from aligner.run.sample_table import FILE as SAMPLES
from aligner.run.sample_table import SampleRow, print_samples
from aligner.run.stop import Boundary, StopRequested, read_progress, write_json
from aligner.run.timers import Timers
from aligner.types import ScalarMetrics, TrainBatch

Evaluate = Callable[[], ScalarMetrics]
EVALUATION_SHOWN = 6  # numbers of the last one, on the terminal
# failures that all ranks see together, and that leave the models intact
SHARED = (RewardError, MismatchError, MemoryLimitError, EngineError, EnvironmentFailedError, SuiteError)


class Run:
    """A run's steps, counted from 1; a checkpoint of step n is taken after n complete steps."""

    def __init__(
        self,
        cfg: Config,
        rank: int,
        checkpoints: Checkpoints,
        logger: MetricsLogger,
        alarms: Alarms,
        boundary: Boundary,
        evaluate: Evaluate | None,
    ):
        self.config, self.logging, self.stage, self.rank = cfg.run, cfg.logging, cfg.stage.name, rank
        self.checkpoints, self.logger, self.alarms = checkpoints, logger, alarms
        self.boundary, self.evaluate = boundary, evaluate
        self.last = min(cfg.run.steps, cfg.debug.until or cfg.run.steps)
        self.whole = not cfg.debug.until
        # without training there is nothing to save
        self.saves = not cfg.debug.rollout_only and self.whole
        self.timers = Timers()
        self.accepted: Callable[[], None] = lambda: None  # called once the folder is this run's
        self.memory: PhaseMemory | None = None
        self.chain: Chain | None = None
        self.facts: Mapping[str, Any] = {}  # facts about the computation, for the chain
        self.on_step: list[Callable[[int], None]] = []  # called on every rank with the finished step
        self.last_eval: ScalarMetrics = {}
        self.stopped: str | None = None  # why the stage ended before run.steps
        self.step = 0
        checkpoints.state["run"] = self
        self._bar: ProgressBar | None = None
        self._step_start_s = 0.0
        self._before: dict[str, Any] = {}  # the small states after the last complete step

    def state_dict(self) -> dict[str, Any]:
        return {"last_eval": self.last_eval, "stopped": self.stopped}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.last_eval, self.stopped = dict(state["last_eval"]), state["stopped"]

    def steps(self) -> Iterator[int]:
        """Yield the steps still to do. Resumes first; evaluates before the first step if evaluation is on; saves at
        the end. Raises StopRequested, after saving, if the run is asked to stop."""
        try:
            self.step = self.checkpoints.restore(self.config.resume)
        except AnotherRunError:
            if self.rank == 0:
                refuse(self.dir)
            raise
        self.logger.resume_at(self.step if self.step else -1)
        if self.rank == 0:  # the folder is this run's from here on
            accept(self.dir)
            self.accepted()
            (self.dir / DONE).unlink(missing_ok=True)
            for name in (SAMPLES, ALARMS):
                truncate_jsonl(self.dir / name, self.step)
            saved, saves_s = read_progress(self.dir)
            self.boundary.deadline.saves_s.extend(saves_s)
            self._warn_lost(saved)
            if self.step:
                print(f"resumed at step {self.step} of {self.config.steps}", flush=True)
        if self.chain is not None:
            with self.timers("record"):
                self.chain.begin(self.step, self.facts)
        total = self.last
        with ProgressBar(total, self.step, self.stage, self.rank, self.logging.progress) as self._bar:
            if evaluation := self._evaluate_if_due():
                self._record(self.step, evaluation | self.timers.take())
            self._write_progress()
            while self._settle() and self.step < total and not self.stopped:
                self._step_start_s = time.perf_counter()
                self._before = self._states()
                yield self.step + 1
            self._end()

    def _warn_lost(self, saved: int) -> None:
        """Warn of a checkpoint that was committed and is missing: deleted, or not visible yet on this node."""
        if self.config.resume == "auto" and saved > self.step:
            newest = f"the newest usable one here is of step {self.step}" if self.step else "there is none here"
            print(f"WARNING: {PROGRESS} names a checkpoint of step {saved}: {newest}", flush=True)

    def _settle(self) -> bool:
        """Settle at a step boundary, on all ranks. Returns True, or raises StopRequested after everything is saved."""
        reason, writing = self.boundary.settle(self.checkpoints.writing)
        if self.checkpoints.unfinished and not writing:
            self._complete()
        if reason:
            if self.saves and 0 < self.step != self.checkpoints.last_saved:
                self._save({})
                self.logger.log(self.step, self.timers.take())
            self._complete()
            self._write_progress()
            if self.rank == 0:
                write_json(self.dir / STOPPED, {"step": self.step, "reason": reason})
            self.logger.close()
            raise StopRequested(f"{self.stage} stopped at step {self.step} of {self.config.steps}: {reason}")
        return True

    def _write_progress(self) -> None:
        if self.rank == 0:
            # for the batch script and people who watch
            content = {"step": self.step, "steps": self.config.steps, "saved": self.checkpoints.committed}
            content["saves_s"] = [round(s, 3) for s in self.boundary.deadline.saves_s]
            write_json(self.dir / PROGRESS, content)

    def _end(self) -> None:
        if self.evaluate and self.whole and self.last_eval.get("_step") != self.step:
            self.logger.log(self.step, self._evaluate() | self.timers.take())
        if self.saves and self.checkpoints.config.final and self.checkpoints.last_saved != self.step:
            self._save({})
            self.logger.log(self.step, self.timers.take())
        self._complete()
        self._write_progress()
        if measured := _summary(self.last_eval):
            self._bar.write(f"evaluation at step {self.last_eval['_step']}: {measured}")
        if self.stopped and self.rank == 0 and self._bar:
            self._bar.write(f"{self.stage} stopped early at step {self.step}: {self.stopped}")

    def finish_batch(self, step: int, metrics: ScalarMetrics, batch: TrainBatch, ranks: int) -> None:
        """Close a step on this rank's rows, where each of `ranks` data-parallel ranks has about as many tokens."""
        if self.chain is not None:
            self.chain.seen.rows(batch)
        self.finish(step, metrics, tokens=float(batch.lengths.sum()) * ranks, rows=len(batch.lengths) * ranks)

    def finish(
        self, step: int, metrics: ScalarMetrics, samples: Sequence[SampleRow] = (), tokens: float = 0.0, rows: int = 0
    ) -> None:
        """Close a step: evaluate, save, log. `tokens` and `rows` (samples) of this step over all ranks give the
        throughput."""
        self.step, self._before = step, self._states()
        with self.timers("record"):
            if self.chain is not None:
                self.chain.close(step, metrics)
            for notify in self.on_step:
                notify(step)
        evaluation, failure = {}, None
        try:
            evaluation = self._evaluate_if_due()
        except SHARED as error:  # the step is complete without it: it is saved with its record, and a resume evaluates
            failure = error
        metrics = metrics | evaluation | self._spent(tokens, rows)
        self._record(step, metrics, samples)
        self._before = self._states()
        if failure is not None:
            raise failure
        if self.memory is not None:
            self.memory.check(metrics)
        # after the record: a checkpoint of step n means that step n is in metrics.jsonl
        every = self.checkpoints.config.every
        if self.saves and every and step % every == 0:
            self._save(metrics, wait=not self.checkpoints.config.async_save)
            self.logger.log(step, self.timers.take())
        self._write_progress()
        assert self._bar is not None, "finish() outside of steps()"
        self._bar.update(step, metrics)

    def _spent(self, tokens: float, rows: int) -> ScalarMetrics:
        """Return seconds and memory of the step that ends, and its throughput."""
        seconds = time.perf_counter() - self._step_start_s
        spent = self.timers.take() | {"time/step_s": seconds}
        if tokens:
            spent["throughput/tokens_per_s"] = tokens / seconds
        if rows:
            spent["throughput/samples_per_s"] = rows / seconds
        spent["memory/peak_rss_bytes"] = float(peak_rss_bytes())
        return spent | (self.memory.take() if self.memory is not None else {})

    def _record(self, step: int, metrics: ScalarMetrics, samples: Sequence[SampleRow] = ()) -> None:
        """Write metrics, alarms and samples of a step to files and terminal."""
        self.logger.log(step, metrics)
        if self.rank:
            return
        for line in self.alarms.check(metrics, step):
            append_jsonl(self.dir / ALARMS, [{"step": step, "text": line}])
            self._bar.write(line)  # type: ignore[union-attr]
        if self.config.samples_every and (step == 1 or step % self.config.samples_every == 0) and samples:
            records = [{"step": step, **row.record()} for row in samples]
            append_jsonl(self.dir / SAMPLES, records)
            self.logger.samples(step, records)
            if self.logging.progress:
                print_samples(f"samples of step {step}", samples, self.logging.samples_shown)

    def _evaluate_if_due(self) -> ScalarMetrics:
        """Evaluate after `run.eval_every` steps, unless this step was resumed from a checkpoint that was saved after
        its evaluation."""
        every = self.config.eval_every
        if not (self.evaluate and every) or self.step % every or self.last_eval.get("_step") == self.step:
            return {}
        evaluation = self._evaluate()
        if self.step:
            self._check_stop(evaluation)
        return evaluation

    def _evaluate(self) -> ScalarMetrics:
        assert self.evaluate is not None
        with self.timers("eval"):
            evaluation = self.evaluate()
        self.last_eval = dict(evaluation) | {"_step": self.step}
        return evaluation

    def _check_stop(self, metrics: ScalarMetrics) -> None:
        rule = self.config.stop
        if not rule.metric:
            return
        if rule.metric not in metrics:
            names = ", ".join(sorted(name for name in metrics if name.startswith("eval/")))
            raise AlignerError(f"run.stop.metric={rule.metric!r}: expected a metric of an evaluation: {names}")
        if metrics[rule.metric] >= rule.above:
            self.stopped = f"{rule.metric} {metrics[rule.metric]:.3f} >= run.stop.above={rule.above}"

    def _states(self) -> dict[str, Any]:
        return {name: item.state_dict() for name, item in self.checkpoints.state.items()}

    def _save(self, metrics: ScalarMetrics, states: dict[str, Any] | None = None, wait: bool = True) -> None:
        with self.timers("save"):
            measured = self.last_eval if self.last_eval.get("_step") == self.step else {}
            metrics = metrics | {k: v for k, v in measured.items() if k != "_step"}
            self.checkpoints.save(self.step, metrics, states, wait)
        self._note_seconds()

    def _complete(self) -> None:
        """Complete the checkpoint that was written meanwhile, if any."""
        if self.checkpoints.unfinished:
            with self.timers("save"):
                self.checkpoints.finish()
            self._note_seconds()

    def _note_seconds(self) -> None:
        self.boundary.deadline.saves_s.append(self.checkpoints.seconds)

    def save_after(self, error: Exception) -> None:
        """Save the last complete step after one of `SHARED`, with the small states of that time, so that a resumed
        run repeats the failed step exactly."""
        self._complete()
        if self.saves and self.step > self.checkpoints.last_saved and self.step > 0:
            self._save({}, self._before)
            if self.rank == 0:
                print(f"saved step {self.step} before stopping: {type(error).__name__}", file=sys.stderr, flush=True)

    @property
    def dir(self) -> Path:
        return Path(self.config.dir)


def _summary(evaluation: ScalarMetrics) -> str:
    """Return the numbers of an evaluation, the most important first; "" without one."""
    numbers = {k: v for k, v in evaluation.items() if k.startswith("eval/") and isinstance(v, int | float)}
    names = sorted(numbers, key=lambda name: (HEADLINE.index(name) if name in HEADLINE else len(HEADLINE), name))
    return ", ".join(f"{name} {numbers[name]:.4g}" for name in names[:EVALUATION_SHOWN])
