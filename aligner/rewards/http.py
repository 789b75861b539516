"""The reward `http`: a server scores responses, in one of three public formats.

    openrlhf  {"query": [prompt + response], "prompts": [...], "labels": [...]} -> {"rewards": [...], ...}
    sample    {"prompt", "response", "label"}, one sample at a time (slime, miles) -> a number, or a mapping with one
    verify    NeMo-Gym's POST /verify: the row, its prompt and an OpenAI response object -> {"reward": ...}

A request is retried if a retry may help. If all tries fail, the score is NaN, never 0: `rewards/base.py`, may_fail.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, ClassVar

from aligner.answers import AnswerLog
from aligner.config.checks import one_of
from aligner.config.options import from_plain
from aligner.config.sections.servers import LimitsConfig
from aligner.foreign import is_number
from aligner.rewards.client import Client, Item, RequestFailed, item_key
from aligner.types import Sample

FORMATS = ("openrlhf", "sample", "verify")
BATCH = 16  # samples per request in OpenRLHF's format


class Http:
    """url: one or several of equal servers, asked in turn. label: the column sent as the label. limits: the fields of
    `LimitsConfig`."""

    may_fail: ClassVar[bool] = True
    reply_tokens: ClassVar[int] = 0

    def __init__(self, url: str | list[str], format: str = "openrlhf", label: str = "answer", **limits: Any):
        one_of("format", format, FORMATS)
        checked = from_plain(LimitsConfig, limits, root=LimitsConfig)
        self.format, self.label = format, label
        self.size = BATCH if format == "openrlhf" else 1
        self.expected = f"as many finite scores as samples in the format {format}"
        self.client = Client([url] if isinstance(url, str) else url, checked, self)
        self.take_counts = self.client.take_counts

    def __call__(self, samples: Sequence[Sample]) -> list[float]:
        asked = [Item(item_key(sample), 0, self._content(sample)) for sample in samples]
        return [math.nan if isinstance(score, RequestFailed) else score for score in self.client.ask(asked)]

    def failure(self) -> str:
        return self.client.failure

    def keep_answers(self, log: AnswerLog, name: str) -> None:
        self.client.log, self.client.name = log, name

    def body(self, contents: Sequence[dict[str, Any]]) -> dict[str, Any]:
        if self.format != "openrlhf":
            return contents[0]
        columns = {"query": "query", "prompts": "prompt", "labels": "label"}
        return {name: [content[column] for content in contents] for name, column in columns.items()}

    def read(self, reply: Any, count: int) -> list[float]:
        if self.format == "openrlhf":
            scores = reply["rewards"]
        elif self.format == "verify":
            scores = [reply["reward"]]
        else:
            scores = [reply["reward" if "reward" in reply else "score"] if isinstance(reply, dict) else reply]
        if not isinstance(scores, list) or len(scores) != count or not all(map(is_number, scores)):
            raise ValueError(scores)
        return [float(score) for score in scores]

    def _content(self, sample: Sample) -> dict[str, Any]:
        """Return the JSON that is sent for a sample."""
        prompt = sample.prompt
        label = prompt.fields.get(self.label)
        if self.format == "openrlhf":
            return {"query": prompt.text + sample.response, "prompt": prompt.text, "label": label}
        asked = prompt.text if prompt.messages is None else list(prompt.messages)
        if self.format == "sample":
            return {"prompt": asked, "response": sample.response, "label": label}
        columns = {name: value for name, value in prompt.fields.items() if name not in ("messages", "tools")}
        return {**columns, "responses_create_params": {"input": asked}, "response": _response(sample)}


def _response(sample: Sample) -> dict[str, Any]:
    """Return an OpenAI response object with one assistant message."""
    text = {"type": "output_text", "text": sample.response, "annotations": []}
    name = f"{sample.prompt.id}-{sample.index}"
    message = {"id": f"msg-{name}", "type": "message", "role": "assistant", "status": "completed", "content": [text]}
    kept = {"parallel_tool_calls": False, "tool_choice": "none", "tools": []}
    return {"id": name, "object": "response", "created_at": 0, "model": "policy", "output": [message], **kept}
