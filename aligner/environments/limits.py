"""What the two ends of a worker's pipe hold to."""

MAX_LINE = 16 << 20  # bytes of an answer
MAX_REQUEST = MAX_LINE // 2  # of an agent's request, which is an answer with names around it
MAX_WORDS = 2000  # characters of an error's text
CHARS = 128  # of a token, beyond what any text has of them on average
LEFT = 32  # threads of a worker that nobody waits for any more, before it takes no further trajectories
