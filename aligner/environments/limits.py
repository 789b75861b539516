"""Limits that both ends of a worker's pipe keep."""

MAX_LINE = 16 << 20  # bytes of an answer
MAX_REQUEST = MAX_LINE // 2  # bytes of an agent's request, which is an answer with names around it
MAX_WORDS = 2000  # characters of an error's text
CHARS = 128  # of a token, more than any text has on average
LEFT = 32  # abandoned threads of a worker, beyond which it takes no further trajectories
