"""A progress bar with the remaining time and the main numbers, only on rank 0."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from typing import Any, TextIO

from tqdm import tqdm

# metric -> short name, in this order. A stage shows those that it has; of several with one name the last.
SHOWN = {
    "policy/loss": "loss",
    "sft/loss": "loss",
    "rm/loss": "loss",
    "dpo/loss": "loss",
    "kto/loss": "loss",
    "distill/loss": "loss",
    "policy/lr": "lr",
    "rm/lr": "lr",
    "rm/accuracy": "pairs",
    "rewards/accuracies": "pairs",
    "distill/kl": "kl",
    "reward/mean": "reward",
    "response/tokens_mean": "len",
    "kl/ref_k3": "kl",
    "policy/entropy": "entropy",
    "critic/explained_variance": "ev",
    "throughput/tokens_per_s": "tok/s",
    "eval/loss": "eval_loss",
    "eval/accuracy": "eval_acc",
}


class ProgressBar:
    """Progress bar: tqdm on a terminal. Elsewhere (a Slurm log) it is one plain line at the first and last step and
    whenever `every_s` seconds have passed, because carriage returns make such logs unreadable.

    A metric that is not measured in every step (eval/accuracy) keeps its last value.
    """

    def __init__(
        self,
        total: int,
        initial: int = 0,
        desc: str = "",
        rank: int = 0,
        enabled: bool = True,
        file: TextIO | None = None,
        every_s: float = 5.0,
    ):
        self.total, self.initial, self.desc, self.every_s = total, initial, desc, every_s
        self.file = file or sys.stderr
        self.on = enabled and rank == 0
        self._numbers: dict[str, str] = {}
        self._start_s = time.monotonic()
        self._printed_s = -float("inf")
        self._bar: tqdm | None = None
        if self.on and self.file.isatty():
            self._bar = tqdm(total=total, initial=initial, desc=desc, file=self.file, dynamic_ncols=True)

    def update(self, done: int, metrics: Mapping[str, Any]) -> None:
        """Show that `done` steps of `total` are complete; `metrics` are those of the last one."""
        if not self.on:
            return
        for name, short in SHOWN.items():
            if metrics.get(name) is not None:
                self._numbers[short] = f"{metrics[name]:.{'0f' if 1000 <= abs(metrics[name]) < 1e9 else '3g'}}"
        numbers = " ".join(f"{short}={value}" for short, value in self._numbers.items())
        if self._bar is not None:
            self._bar.set_postfix_str(numbers, refresh=False)
            self._bar.update(done - self._bar.n)
        elif time.monotonic() - self._printed_s >= self.every_s or done >= self.total:
            self._printed_s = time.monotonic()
            self.write(f"{self.desc} {done}/{self.total} {self._left(done)} {numbers}".strip())

    def write(self, line: str) -> None:
        """Print a line without breaking the bar (an alarm, a note)."""
        if self._bar is not None:
            self._bar.write(line, file=self.file)
        elif self.on:
            print(line, file=self.file, flush=True)

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()
            self._bar = None

    def __enter__(self) -> ProgressBar:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _left(self, done: int) -> str:
        passed_s, steps = time.monotonic() - self._start_s, done - self.initial
        left = tqdm.format_interval(passed_s / steps * (self.total - done)) if steps > 0 else "?"
        return f"[{tqdm.format_interval(passed_s)}<{left}]"
