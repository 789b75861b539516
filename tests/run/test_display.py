"""Timers, progress and sample tables."""

from __future__ import annotations

import io
import math
import time

import pytest
from rich.console import Console

from aligner.run.metrics import append_jsonl, read_jsonl
from aligner.run.progress import ProgressBar
from aligner.run.sample_table import FILE, SampleRow, print_samples, printable
from aligner.run.timers import Timers


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_timers_add_up_nest_and_reset(monkeypatch):
    clock = iter([0.0, 1.0, 10.0, 12.0, 20.0, 21.0, 24.0, 30.0])
    monkeypatch.setattr(time, "perf_counter", lambda: next(clock))
    timers = Timers()
    for _ in range(2):
        with timers("generate"):
            pass
    with timers("eval"), timers("generate"):
        pass
    assert timers.take() == {"time/generate_s": 3.0, "time/eval/generate_s": 3.0, "time/eval_s": 10.0}
    assert timers.take() == {}


def test_timers_count_a_phase_that_raises():
    timers = Timers(synchronize=True)
    with pytest.raises(KeyError), timers("update"):
        raise KeyError
    with timers("save"):
        pass
    assert set(timers.take()) == {"time/update_s", "time/save_s"}


def test_progress_without_a_terminal_prints_plain_lines():
    file = io.StringIO()
    with ProgressBar(10, 0, "grpo", file=file, every_s=3600) as bar:
        for step in range(1, 11):
            bar.update(step, {"reward/mean": step / 10, **({"eval/accuracy": 0.25} if step == 5 else {})})
        bar.write("a note")
    lines = file.getvalue().splitlines()
    assert len(lines) == 3  # the first step, the last, the note
    assert "\r" not in file.getvalue()
    assert lines[0].startswith("grpo 1/10 [")
    assert lines[1].endswith("reward=1 eval_acc=0.25")  # a rare metric keeps its last value
    assert lines[2] == "a note"


@pytest.mark.parametrize(
    "metrics",
    [
        {"sft/loss": 0.5, "policy/loss": 0.7, "policy/lr": 3e-4},
        {"dpo/loss": 0.5, "policy/loss": 0.7, "policy/lr": 3e-4},
        {"kto/loss": 0.5, "policy/loss": 0.7, "policy/lr": 3e-4},
        {"distill/loss": 0.5, "policy/loss": 0.7, "policy/lr": 3e-4},
        {"rm/loss": 0.5, "rm/lr": 3e-4},
        {"policy/loss": 0.5, "policy/lr": 3e-4},
    ],
)
def test_every_stage_shows_its_loss_and_its_learning_rate(metrics):
    file = io.StringIO()
    with ProgressBar(1, 0, "any", file=file) as bar:
        bar.update(1, metrics)
    assert "loss=0.5" in file.getvalue() and "lr=0.0003" in file.getvalue() and "0.7" not in file.getvalue()


def test_progress_on_a_terminal_is_a_bar_that_starts_at_the_resumed_step():
    file = Terminal()
    bar = ProgressBar(10, 4, "sft", file=file)
    bar.update(10, {"sft/loss": 0.5, "eval/accuracy": None})
    bar.close()
    assert "\r" in file.getvalue()
    assert "10/10" in file.getvalue()
    assert "loss=0.5" in file.getvalue()


@pytest.mark.parametrize("options", [{"rank": 1}, {"enabled": False}])
def test_progress_is_silent_elsewhere(options):
    file = Terminal()
    with ProgressBar(10, 0, "sft", file=file, **options) as bar:
        bar.update(10, {"sft/loss": 0.5})
        bar.write("note")
    assert file.getvalue() == ""


ROWS = [
    SampleRow("1+1=", "[bold red]2[/bold red] [/nonsense]", 1.0, 0.5, True),
    SampleRow("2+2=", "\x1b[31mfive\x07\r", math.nan, -0.5, False),
    SampleRow("3+3=", "hidden", 0.0, 0.0, True),
]


def table() -> str:
    file = io.StringIO()
    print_samples("samples of step 7", ROWS, 2, console=Console(file=file, width=120, color_system=None))
    return file.getvalue()


def test_model_text_is_shown_not_interpreted():
    text = table()
    assert "[bold red]2[/bold red] [/nonsense]" in text
    assert "\\x1b[31mfive\\x07\\r" in text
    assert "\x1b" not in text
    assert "hidden" not in text  # only n rows
    assert "+0.5" in text
    assert "limit" in text


def test_scores_of_several_functions_are_shown():
    rows = [SampleRow("p", "r", 1.0, 0.0, True, {"math": 0.5, "[b]style": None}, {"answer": 4})]
    file = io.StringIO()
    print_samples("samples", rows, 2, console=Console(file=file, width=120, color_system=None))
    assert "math 0.5" in file.getvalue() and "[b]style none" in file.getvalue()


def test_a_trajectory_is_shown_with_all_its_turns_and_why_it_ended():
    turns = [
        {"role": "assistant", "text": "calc(1 + 1)", "tokens": 4},
        {"role": "tool", "text": "2\x1b", "reward": 0.0},
        {"role": "assistant", "text": "It is 2", "tokens": 3},
    ]
    reports = {"stop": "turns", "failure": "", "reward": 1.0, "turns": turns}
    rows = [SampleRow("1+1=", "It is 2", 1.0, None, True, trajectory=reports), SampleRow("2+2=", "4", 1.0, None, True)]
    file = io.StringIO()
    print_samples("samples", rows, 2, console=Console(file=file, width=120, color_system=None))
    text = file.getvalue()
    assert all(line in text for line in ("assistant: calc(1 + 1)", "tool: 2\\x1b", "assistant: It is 2"))
    assert "│ turns" in text and "│ stop" in text and "advantage" not in text and "step" not in text
    assert rows[0].record()["advantage"] is None


def test_printable_cuts_and_keeps_lines():
    assert printable("a\nb\x00") == "a\nb\\x00"
    assert len(printable("x" * 1000, limit=50)) == 54
    assert printable("日本") == "日本"


def test_records_of_samples_are_json(tmp_path):
    append_jsonl(tmp_path / FILE, [row.record() for row in ROWS])
    records = read_jsonl(tmp_path / FILE)
    assert records[1]["reward"] is None
    assert records[1]["response"] == ROWS[1].response
    assert records[0]["finished"] is True
    columns = {"answer": 4, "entry": {"a": 1}, "long": "x" * 9999, "bad": math.inf}
    row = SampleRow("p", "r", 1.0, 0.0, True, {"math": 0.5, "style": None}, columns)
    append_jsonl(tmp_path / FILE, [row.record()])
    last = read_jsonl(tmp_path / FILE)[-1]
    assert last["scores"] == {"math": 0.5, "style": None}
    assert last["columns"] == {"answer": 4, "entry": "{'a': 1}", "long": "x" * 2000 + " ...", "bad": None}
