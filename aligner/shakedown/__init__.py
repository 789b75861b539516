"""Check a machine's GPUs by small jobs, rung by rung."""
