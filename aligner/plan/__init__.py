"""What a job will need and how long a step will take, from its config alone. Arithmetic: imports no torch."""
