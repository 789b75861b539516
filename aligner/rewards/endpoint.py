"""A judge that asks a model behind OpenAI's chat API."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from aligner.answers import AnswerLog
from aligner.config.sections.judge import JudgeConfig
from aligner.config.sections.servers import EndpointConfig
from aligner.rewards.client import Client, Item
from aligner.rewards.judge import Judge, Question, Reply


@dataclass
class ChatForm:
    """A `rewards.client.RequestForm` that sends a question as a user's turn."""

    reply_tokens: int
    size: ClassVar[int] = 1
    expected: ClassVar[str] = "a chat completion"

    def body(self, contents: Sequence[dict[str, Any]]) -> dict[str, Any]:
        return contents[0]

    def read(self, reply: Any, count: int) -> list[str]:
        text = reply["choices"][0]["message"]["content"]
        if not isinstance(text, str | None):
            raise ValueError(text)
        return [text or ""]  # a model that thought until its tokens were used up


class EndpointReplies:
    """A `rewards.judge.Ask` that asks a server."""

    def __init__(self, config: EndpointConfig, reply_tokens: int):
        self.config = config
        url = f"{config.base_url.rstrip('/')}/chat/completions"
        self.client = Client([url], config, ChatForm(reply_tokens))

    def __call__(self, questions: Sequence[Question], tokens: int) -> list[Reply]:
        kept = {"model": self.config.model, "max_tokens": tokens, "temperature": self.config.temperature}
        return self.client.ask(
            [Item(one.key, one.vote, kept | {"messages": [{"role": "user", "content": one.text}]}) for one in questions]
        )


class EndpointJudge(Judge):
    main_thread: ClassVar[bool] = False
    may_fail: ClassVar[bool] = True

    def __init__(self, config: JudgeConfig):
        ask = EndpointReplies(config.endpoint, config.max_tokens)
        super().__init__(config, ask)
        self.client = ask.client

    def failure(self) -> str:
        return self.client.failure

    def keep_answers(self, log: AnswerLog, name: str) -> None:
        self.client.log, self.client.name = log, name

    def take_counts(self) -> dict[str, tuple[float, float]]:
        return super().take_counts() | self.client.take_counts()
