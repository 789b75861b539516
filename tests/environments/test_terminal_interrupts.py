"""Calls of a terminal that reach a limit: its state stays where it can, and the text says what was ended."""

from __future__ import annotations

import pytest

from aligner.environments.terminal import Terminal
from aligner.sandbox.terminal import lacks

pytestmark = pytest.mark.skipif(bool(why := lacks()), reason=str(why))
WAITED, PROCESSES = "(it waited for 0.3 s", ", and its processes were ended, since an interrupt did not stop them)"
SHELL = ", and the shell was ended, since an interrupt did not stop it: the next call has a new one)"
EXECUTED = "until [[ $(</proc/$!/comm) == sleep ]]; do :; done"
# tool, call, end of its text, whether the state is there afterwards
CALLS = [
    ("bash", "sleep 99; echo never", f"{WAITED})", True),
    ("bash", "(trap '' INT; sleep 99); echo after", f"after\n{WAITED}{PROCESSES}", True),
    ("bash", "setsid sleep 99 & sleep 99", f"{WAITED})", True),
    # stopped as what it was forked from, it would write the shell's newline for the interrupt in a later call
    ("bash", f"sleep 99 & {EXECUTED}; kill -STOP $!; wait", f"{WAITED})", True),
    ("bash", "cat /dev/tty; tty; read y; echo [$y]", "[]", True),
    ("bash", "kill -STOP $$; echo on", f"{WAITED}{SHELL}", False),
    ("python", "import time\ntime.sleep(99)", f"KeyboardInterrupt\n{WAITED})", True),
    ("python", "import signal\nsignal.signal(2, signal.SIG_IGN)\ntime.sleep(99)", f"{WAITED}{SHELL}", False),
]


def test_a_call_that_reaches_its_limit_ends_as_little_as_it_can():
    made = Terminal(waits_s=0.3)
    made.reset(1, tests="true")
    for name, text, end, kept in CALLS:
        ask = getattr(made, name)
        ask("x=7")
        assert ask(text).endswith(end), text
        answer = ask({"bash": "echo [$x]", "python": "x"}[name])
        assert answer.startswith(
            "[7]" if name == "bash" and kept else "7" if kept else ("[]", "Traceback")[name == "python"]
        )
