"""A process that compares math answers: JSON lines {gold, response, timeout_s} in, {score} or {error} out.

A process, not a thread: sympy on a model's text can compute 9^(9^9) inside one C call that holds the interpreter lock
and cannot be interrupted. The kernel's alarm with its default action kills this process then, whatever it is doing,
and also when its parent is gone. Run as a file, so it imports nothing of the package.
"""

from __future__ import annotations

import json
import logging
import re
import resource
import signal
import sys

MEMORY_BYTES = 4 << 30  # of address space: a huge power shall fail here, not take the node's memory
GSM8K = re.compile(r"####\s*(.+)")


def final_answer(text: str) -> str | None:
    """What follows the last `####`, the mark of gsm8k's answers, thousands separators removed; None without a mark."""
    marked = GSM8K.findall(text)
    return re.sub(r"(?<=\d),(?=\d{3})", "", marked[-1]).strip() if marked else None


def parse_gold(text: str, parse) -> list:
    """The reference answer as math-verify's candidates; bare LaTeX is put between dollars first."""
    text = final_answer(text) or text.strip()
    if "$" in text or "\\boxed" in text or "\\(" in text or "\\[" in text:
        return parse(text, parsing_timeout=None)
    return parse(f"${text}$", parsing_timeout=None) or parse(text, parsing_timeout=None)


def score(gold: str, response: str) -> float:
    """1.0 where the response's final answer equals the reference, else 0.0. ValueError if there is no reference."""
    from math_verify import parse, verify

    reference = parse_gold(gold, parse)
    if all(isinstance(candidate, str) for candidate in reference):  # only the text itself: nothing was understood
        raise ValueError(f"no mathematical expression found in the reference answer {gold[:200]!r}")
    marked = final_answer(response)
    answer = parse(response if marked is None else f"${marked}$", parsing_timeout=None)
    return float(verify(reference, answer, timeout_seconds=None)) if answer else 0.0


def main() -> None:
    logging.disable(logging.WARNING)  # math-verify warns that its own (signal) timeouts are off: ours is the alarm
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, resource.getrlimit(resource.RLIMIT_AS)[1]))
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's; this process ends with its standard input
    import math_verify  # noqa: F401  the slow import is not part of the first answer's time

    for line in sys.stdin:
        request = json.loads(line)
        signal.setitimer(signal.ITIMER_REAL, request["timeout_s"])
        try:
            reply = {"score": score(request["gold"], request["response"])}
        except (MemoryError, RecursionError, OverflowError):
            reply = {"score": 0.0}  # an expression too large to compare is no right answer
        except ValueError as cause:
            reply = {"error": str(cause)}
        signal.setitimer(signal.ITIMER_REAL, 0)
        print(json.dumps(reply), flush=True)


if __name__ == "__main__":
    main()
