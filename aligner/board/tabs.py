"""The tabs of the board: those of a report, and those that need this machine."""

from __future__ import annotations

from aligner.board import chat, compose, jobs
from aligner.board.pages import REPORTED, Page

PAGES = REPORTED | {
    "compose": Page(
        {"form": compose.form, "check": compose.check, "jobs": jobs.jobs, "start": jobs.start, "stop": jobs.stop}
        | {"dry_run": jobs.dry_run, "submit": jobs.submit}
    ),
    "chat": Page({"talks": chat.talks, "open_talk": chat.open_talk, "close_talk": chat.close_talk, "say": chat.say}),
}
