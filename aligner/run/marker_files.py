"""The files by which a run and its batch script speak (docs/resume.md). Imports no torch."""

DONE = "DONE"  # the stage has ended
STOPPED = "STOPPED"  # it stopped at a step boundary with everything saved: start it again
PROGRESS = "progress.json"
