"""Published datasets: which files of a downloaded folder are read, and the row that is written for each of theirs."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from aligner.errors import DataError, RewardError

Row = dict[str, Any]
BOXED = "\n\nReason step by step, and put the final answer in \\boxed{}."
PROGRAM = "\n\nWrite the program in Python, in one fenced block."
_FINAL = re.compile(r"####[ \t]*(\S.*)\s*\Z")
# of DAPO-Math-17k, around each problem
_ASKS_FIRST, _ASKS_LAST = "Solve the following math problem step by step.", "\n\nRemember to put your answer"
# types in xLAM's tools -> JSON schema's
_TYPES = {"str": "string", "int": "integer", "float": "number", "bool": "boolean", "list": "array", "dict": "object"}


class UnfitRowError(Exception):
    """A row that is left out, with the reason."""


@dataclass(frozen=True)
class PublishedData:
    repository: str  # on the Hub
    row: Callable[[Row], Row]  # raises UnfitRowError, KeyError or TypeError
    train: tuple[str, ...] = ("data/train-*", "train*")  # files of the folder
    held_out: tuple[str, ...] = ()  # none: rows of `train` by a hash of their prompts
    once: bool = False  # rows with an earlier row's prompt are left out


def _text(row: Mapping[str, Any], column: str) -> str:
    """Return a text; a dotted name is in a nested column."""
    value: Any = row
    for name in column.split("."):
        value = value[name]
    if not isinstance(value, str):
        raise TypeError(f"column {column} is {value!r:.60}, no text")
    return value


def _asked(text: str) -> list[Row]:
    return [{"role": "user", "content": text}]


def gsm8k(row: Row) -> Row:
    final = _FINAL.search(_text(row, "answer"))
    if final is None:
        raise UnfitRowError("no final answer")
    return {"prompt": _asked(_text(row, "question").strip() + BOXED), "answer": final[1].strip()}


def dapo_math(row: Row) -> Row:
    problem = _text(row["prompt"][-1], "content")
    if problem.startswith(_ASKS_FIRST):
        problem = problem.partition("\n\n")[2]
    problem = problem.rpartition(_ASKS_LAST)[0] or problem
    return {"prompt": _asked(problem.strip() + BOXED), "answer": _text(row, "reward_model.ground_truth")}


def openmath(row: Row) -> Row:
    if row["problem_type"] != "has_answer_extracted":
        raise UnfitRowError("no extracted answer")
    completion = [{"role": "assistant", "content": _text(row, "generated_solution")}]
    prompt = _asked(_text(row, "problem").strip() + BOXED)
    return {"prompt": prompt, "completion": completion, "answer": _text(row, "expected_answer")}


def deepcoder(row: Row) -> Row:
    from aligner.rewards.code_rows import check
    from aligner.types import Prompt

    start = row.get("starter_code") or ""
    begin = f"\n\nBegin with this code:\n```python\n{start.rstrip()}\n```" if start.strip() else ""
    prompt, tests = _asked(_text(row, "problem").strip() + begin + PROGRAM), row["tests"]
    try:
        check(Prompt(0, (), prompt[0]["content"], {"tests": tests}))
    except RewardError:
        raise UnfitRowError("unreadable tests") from None
    return {"prompt": prompt, "tests": tests if isinstance(tests, str) else json.dumps(tests)}


def xlam(row: Row) -> Row:
    tools, calls = json.loads(_text(row, "tools")), json.loads(_text(row, "answers"))
    answers = [{"type": "function", "function": {name: call[name] for name in ("name", "arguments")}} for call in calls]
    response = {"role": "assistant", "content": "", "tool_calls": answers}
    return {"messages": [*_asked(_text(row, "query")), response], "tools": [_tool(tool) for tool in tools]}


def _tool(tool: Row) -> Row:
    """Return a tool of xLAM, whose parameters are {name: {type, description, default}}, as JSON schema."""
    described: Row = {}
    for name, each in tool["parameters"].items():
        kind = _TYPES.get(re.split(r"[\[, ]", each["type"])[0].lower())
        described[name] = ({"type": kind} if kind else {}) | {"description": each.get("description", "")}
    required = [name for name, each in tool["parameters"].items() if "default" not in each]
    parameters = {"type": "object", "properties": described, "required": required}
    function = {"name": tool["name"], "description": tool["description"], "parameters": parameters}
    return {"type": "function", "function": function}


def conversation(row: Row) -> Row:
    return {"messages": row["messages"]}


def pair(row: Row) -> Row:
    if row["chosen"] == row["rejected"]:
        raise UnfitRowError("equal responses")
    return {"chosen": row["chosen"], "rejected": row["rejected"]}


def asked_only(row: Row) -> Row:
    return {"prompt": _asked(_text(row, "prompt"))}


PUBLISHED = {
    "gsm8k": PublishedData("openai/gsm8k", gsm8k, ("main/train-*", "train.jsonl"), ("main/test-*", "test.jsonl")),
    "dapo_math": PublishedData("BytedTsinghua-SIA/DAPO-Math-17k", dapo_math, ("data/*", "*.parquet"), once=True),
    "openmath": PublishedData("nvidia/OpenMathReasoning", openmath, ("data/cot-*", "cot-*")),
    "deepcoder": PublishedData(
        "agentica-org/DeepCoder-Preview-Dataset",
        deepcoder,
        ("primeintellect/train*", "taco/train*", "lcbv5/train*"),
        ("lcbv5/test*", "codeforces/test*"),
        once=True,
    ),
    "xlam": PublishedData("Salesforce/xlam-function-calling-60k", xlam, ("*.json", "data/*")),
    "tulu3": PublishedData("allenai/tulu-3-sft-mixture", conversation),
    "tulu3_pairs": PublishedData("allenai/llama-3.1-tulu-3-8b-preference-mixture", pair),
    "skywork_pairs": PublishedData("Skywork/Skywork-Reward-Preference-80K-v0.2", pair),
    "ultrafeedback": PublishedData(
        "HuggingFaceH4/ultrafeedback_binarized", asked_only, ("data/train_prefs-*",), ("data/test_prefs-*",), once=True
    ),
}


def dataset(name: str) -> PublishedData:
    if name not in PUBLISHED:
        raise DataError(f"NAME={name!r}: expected one of {', '.join(PUBLISHED)}")
    return PUBLISHED[name]
