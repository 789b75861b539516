"""A task for tools: products of two numbers, which a small model cannot find, and a calculator that it seldom calls.

    python -m examples.calculator FOLDER [--seed N]

writes tokenizer/, sft.jsonl (conversations, a third of which call the tool), train.jsonl and test.jsonl (questions).
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

VOCABULARY = 384
CALLED = 1 / 3  # of the conversations in sft.jsonl
TEMPLATE = (
    "{%- if tools -%}<|system|>{%- for tool in tools -%}{{ tool.function.name }}{%- endfor -%}{%- endif -%}"
    "{%- for m in messages -%}{%- if m.role == 'assistant' -%}<|assistant|>{% generation %}{{ m.content }}"
    "{%- for call in m.tool_calls or [] -%}"
    '{{ \'<tool_call>\n{"name": "\' + call.function.name + \'", "arguments": \' }}'
    "{{ call.function.arguments | tojson }}{{ '}\n</tool_call>' }}{%- endfor -%}{{ '<eos>' }}{% endgeneration %}"
    "{%- else -%}{{ '<|system|>' if m.role == 'tool' else '<|user|>' }}{{ m.content }}{%- endif -%}{%- endfor -%}"
    "{%- if add_generation_prompt -%}<|assistant|>{%- endif -%}"
)


def multiply(a: int, b: int) -> int:
    """Multiplies two numbers.

    Args:
        a: The first one.
        b: The second one.
    """
    return a * b


async def agent(task: Any, base_url: str, sampling: dict[str, Any]) -> float:
    """Run the task as an agent: ask, multiply if the model calls the tool, and return 1 for the right answer, else
    0."""
    import httpx
    from transformers.utils import get_json_schema

    body = sampling | {"messages": list(task.messages), "tools": [get_json_schema(multiply)]}
    # without TLS, which the loopback does not have: its certificates take 24 ms of a CPU to read
    async with httpx.AsyncClient(base_url=base_url, timeout=600, verify=False) as client:
        while True:
            reply = await client.post("chat/completions", json=body)
            if reply.status_code == 400:  # a budget is met
                return 0.0
            message = reply.raise_for_status().json()["choices"][0]["message"]
            body["messages"].append(message)
            if not message.get("tool_calls"):
                return float(message["content"].strip() == task.row["answer"])
            for call in message["tool_calls"]:
                try:
                    result = str(multiply(**json.loads(call["function"]["arguments"])))
                except TypeError as cause:
                    result = f"error: {cause}"
                body["messages"].append({"role": "tool", "tool_call_id": call["id"], "content": result})


def conversation(a: int, b: int, called: bool) -> list[dict[str, Any]]:
    answer = [{"role": "assistant", "content": str(a * b)}]
    if called:
        function = {"name": "multiply", "arguments": {"a": a, "b": b}}
        call = {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": function}]}
        answer = [call, {"role": "tool", "content": str(a * b)}, *answer]
    return [{"role": "user", "content": f"{a}*{b}"}, *answer]


def make_data(root: Path, seed: int) -> None:
    from transformers.utils import get_json_schema

    from aligner.data.tokenizer import train_tokenizer

    draw = random.Random(seed)
    pairs = [(a, b) for a in range(10, 100) for b in range(10, 100)]
    draw.shuffle(pairs)
    train, test = pairs[500:], pairs[:500]
    tools = [get_json_schema(multiply)]
    chats = [conversation(a, b, draw.random() < CALLED) for a, b in train]
    write_rows(root / "sft.jsonl", ({"messages": chat, "tools": tools} for chat in chats))
    for name, rows in (("train", train), ("test", test)):
        write_rows(root / f"{name}.jsonl", ({"prompt": f"{a}*{b}", "answer": str(a * b)} for a, b in rows))
    call = '<tool_call>\n{"name": "multiply", "arguments": {"a": 1, "b": 1}}\n</tool_call>'
    options = {"split_digits": True, "split_words": False, "chat_template": TEMPLATE}
    train_tokenizer([call, "multiply"] * 9, str(root / "tokenizer"), VOCABULARY, **options)


def write_rows(path: Path, rows: Iterable[dict[str, Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def run(argv: Sequence[str] | None, name: str, about: str, make: Callable[[Path, int], None]) -> int:
    """Run a command that makes a task's data in a folder."""
    parser = argparse.ArgumentParser(prog=name, description=about.partition("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    make(args.folder, args.seed)
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    return run(argv, "calculator", __doc__, make_data)


if __name__ == "__main__":
    sys.exit(main())
