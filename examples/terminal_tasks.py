"""Tasks for a terminal: count files, find a file, edit a line; and a small model that seldom touches the shell.

    python -m examples.terminal_tasks FOLDER [--seed N]

writes tokenizer/, sft.jsonl (conversations, a third of which run a command), train.jsonl and test.jsonl (tasks).
"""

from __future__ import annotations

import random
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from aligner.environments.terminal import Terminal
from examples import calculator
from examples.calculator import CALLED, TEMPLATE, VOCABULARY

HELD_OUT = 300
COMMANDS = {"count": "ls {n}|wc -l>out", "find": "find -name {n} >out", "edit": "sed -i s/old/{n}/ list"}


class Shell(Terminal):
    """A terminal with the shell alone."""

    python = edit = write = None  # type: ignore[assignment]


def task(kind: str, n: int, draw: random.Random) -> dict[str, Any]:
    """Return the row of a task. Its answer depends on files that only the shell can see, and change."""
    if kind == "count":
        count = draw.randint(1, 9)
        files = {f"{n}/{i}": "" for i in range(count)}
        tests = f'test "$(cat out)" = {count}'
    elif kind == "find":
        folder = draw.choice("abcdef")
        files = {f"{each}/{n if each == folder else 1}": "" for each in "abcdef"}
        tests = f"grep -qx ./{folder}/{n} out"
    else:
        files = {"list": "first\nold\nlast\n"}
        tests = f"printf 'first\\n{n}\\nlast\\n' | cmp -s list"
    return {"prompt": f"{kind} {n}", "files": files, "tests": tests}


def conversation(kind: str, n: int, called: bool) -> list[dict[str, Any]]:
    answer = [{"role": "assistant", "content": "done"}]
    if called:
        function = {"name": "bash", "arguments": {"command": COMMANDS[kind].format(n=n)}}
        call = {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": function}]}
        answer = [call, {"role": "tool", "content": ""}, *answer]
    return [{"role": "user", "content": f"{kind} {n}"}, *answer]


def make_data(root: Path, seed: int) -> None:
    from transformers.utils import get_json_schema

    from aligner.data.tokenizer import train_tokenizer

    draw = random.Random(seed)
    pairs = [(kind, n) for kind in COMMANDS for n in range(100, 1000)]
    draw.shuffle(pairs)
    train, test = pairs[HELD_OUT:], pairs[:HELD_OUT]
    tools = [get_json_schema(Shell().bash)]
    chats = [conversation(kind, n, draw.random() < CALLED) for kind, n in train]
    calculator.write_rows(root / "sft.jsonl", ({"messages": chat, "tools": tools} for chat in chats))
    for name, rows in (("train", train), ("test", test)):
        calculator.write_rows(root / f"{name}.jsonl", (task(kind, n, draw) for kind, n in rows))
    frame = '<tool_call>\n{{"name": "bash", "arguments": {{"command": "{}"}}}}\n</tool_call>'
    texts = [frame.format(command.format(n=1)) for command in COMMANDS.values()]
    options = {"split_digits": True, "split_words": False, "chat_template": TEMPLATE}
    train_tokenizer([*texts, "bash", "done", *COMMANDS] * 9, str(root / "tokenizer"), VOCABULARY, **options)


def main(argv: Sequence[str] | None = None) -> int:
    return calculator.run(argv, "terminal_tasks", __doc__, make_data)


if __name__ == "__main__":
    sys.exit(main())
