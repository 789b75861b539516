"""report.html: the board's pages of one run, or of several side by side, in one file that needs no other.

All texts of a model or a dataset stay text there; only the board's own scripts run (docs/how-to/board.md).
"""

from __future__ import annotations

import sys
from pathlib import Path

from aligner.board import curves
from aligner.board.page import report_page
from aligner.board.pages import REPORTED
from aligner.board.runs import Board
from aligner.errors import AlignerError, ConfigError
from aligner.files import write_whole
from aligner.foreign import record

ALL = 1 << 62  # bytes: a report waits for all metrics


def write_report(paths: list[Path]) -> Path:
    """Write report.html into the run folder, or, for several, into the folder they share (else the first one). A folder
    of runs (a sweep) stands for the runs in it. Raises ConfigError if there is no run."""
    folders = [folder for folder in paths if folder.is_dir()]
    board = Board(folders, budget=ALL)
    runs = [*board.runs().values()]
    if not any((run.folder / "metrics.jsonl").is_file() for run in runs):
        expected = "a run folder (run.dir) that contains metrics.jsonl, or a folder of such"
        raise ConfigError("report", " ".join(map(str, paths)), expected)
    board.look(runs)
    parents = {folder.resolve().parent for folder in folders}
    where = folders[0] if len(folders) == 1 or len(parents) > 1 else parents.pop()
    target = where / "report.html"
    title = " | ".join(run.name for run in runs)
    requests = [(name, page.endpoints[name], args) for page in REPORTED.values() for name, args in page.report.items()]
    answers = {name: answer(board, record(dict(args), name, AlignerError)) for name, answer, args in requests}
    answers["details"]["summary"] = curves.summary([where])
    page = report_page(title, REPORTED, answers).encode("utf-8", "replace").decode()
    try:
        write_whole(target, page, durable=False)
    except OSError as cause:
        raise AlignerError(f"report {str(target)!r}: expected a folder that can be written, but {cause}") from cause
    return target


def write_after(names: list[str]) -> None:
    """Write the report of runs that have ended, if they have metrics. Errors only print a warning, so that a run's exit
    code stays."""
    folders = [Path(text) for text in names]
    if not any((folder / "metrics.jsonl").is_file() for folder in folders):
        return
    try:
        print(f"report: {write_report(folders)}", flush=True)
    except (Exception, KeyboardInterrupt) as error:
        print(f"warning: no report.html: {type(error).__name__}: {error}", file=sys.stderr)


def main(folders: list[str]) -> int:
    """Run `python -m aligner report RUN [RUN ...]`: print the page's path. Several runs are compared in one page."""
    if not folders:
        print("report: expected one or more run folders", file=sys.stderr)
        return 2
    print(write_report([Path(folder) for folder in folders]))
    return 0
