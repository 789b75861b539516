"""Files by which a run reports to its batch script how far it came and how it ended (docs/reference/files.md).
Imports no torch."""

DONE = "DONE"  # the stage has ended
STOPPED = "STOPPED"  # it stopped at a step boundary with everything saved: restart it
PROGRESS = "progress.json"
