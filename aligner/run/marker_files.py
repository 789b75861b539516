"""Files by which a run tells its batch script how far it came and how it ended (docs/resume.md). Imports no torch."""

DONE = "DONE"  # the stage has ended
STOPPED = "STOPPED"  # it stopped at a step boundary with everything saved: start it again
PROGRESS = "progress.json"
