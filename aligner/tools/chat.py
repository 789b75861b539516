"""`aligner chat`: chat with a trained model in the terminal.

python -m aligner chat runs/quickstart/grpo
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from typing import Any

from aligner.cluster.threads import use
from aligner.config.schema import Config
from aligner.data.shipped_templates import use_chat_template
from aligner.data.templates import encode_prompts
from aligner.data.tool_calls import spoken
from aligner.errors import ConfigError, DataError
from aligner.run.sample_table import printable
from aligner.tools.generate import Answerer, model_folder, sampling_of
from aligner.types import Prompt, SamplingParams

HELP = "type a message; an empty line or Ctrl-D ends. /new forgets the conversation."


@dataclass
class ChatSession:
    """A conversation. With a chat template it is kept; without one every line is a prompt of its own."""

    model: Answerer
    sampling: SamplingParams
    seed: int
    arguments: dict[str, Any] = field(default_factory=dict)  # of the chat template
    messages: list[dict[str, str]] = field(default_factory=list)
    turn: int = 0

    def reply(self, text: str) -> str:
        tokenizer = self.model.tokenizer
        if tokenizer.chat_template:
            self.messages.append({"role": "user", "content": text})
        ids = self._ids(text)
        self.turn += 1
        sample = self.model.answer([Prompt(self.turn, tuple(ids), text)], 1, self.sampling, self.seed)[0]
        if tokenizer.chat_template:
            self.messages.append({"role": "assistant", "content": spoken(sample.response)})
        return sample.response

    def _ids(self, text: str) -> list[int]:
        """Return the prompt's tokens. The oldest turns are dropped while prompt and response would exceed the model's
        positions. Raises ConfigError if the message alone does."""
        limit = self.model.engine.model.cfg.max_position - self.sampling.max_response_tokens
        while True:
            prompt = self.messages if self.model.tokenizer.chat_template else text
            (ids,) = encode_prompts(self.model.tokenizer, [prompt], ["chat"], arguments=self.arguments)
            if not ids:
                self.messages.clear()
                raise ConfigError("message", text, "one of which the model's tokenizer and template make tokens")
            if len(ids) <= limit:
                return ids
            if len(self.messages) < 3:
                self.messages.clear()
                expected = f"at most {limit}: model.max_position less sampling.max_response_tokens"
                raise ConfigError("tokens of the message", len(ids), expected)
            del self.messages[:2]
            print("(the conversation is longer than the model can read: its oldest turn is forgotten)", flush=True)


def read_line() -> str:
    try:
        return sys.stdin.readline()
    except UnicodeDecodeError as error:
        raise DataError(f"standard input: expected {error.encoding} text, found {error.object[:40]!r}") from None


def main(cfg: Config) -> int:
    """Read lines from standard input until it ends. Raises ConfigError for a run with tools."""
    if cfg.environment.on:
        key = cfg.environment.key
        off = "environment.path='' environment.tools=[] environment.agent=''"
        hint = f"To chat without them: {off}; to see trajectories: `aligner eval`."
        raise ConfigError(key, getattr(cfg.environment, key.rpartition(".")[2]), "empty: chat supports no tools", hint)
    use(cfg.cluster.threads, 1)
    folder = model_folder(cfg)
    model = Answerer.load(folder, cfg.engine, cfg.model.dtype)
    use_chat_template(model.tokenizer, cfg.data)
    chat = ChatSession(model, sampling_of(cfg), cfg.seed, cfg.data.template_arguments)
    asks = sys.stdin.isatty()
    print(f"{folder}: {HELP}", flush=True)
    while True:
        print("> " if asks else "", end="", flush=True)
        line = read_line()
        if not line.strip():
            print("\n" if asks else "", end="")
            return 0
        if line.strip() == "/new":
            chat.messages.clear()
            continue
        try:
            print(printable(chat.reply(line.rstrip("\n")), limit=100_000), flush=True)
        except ConfigError as error:  # of this message: the next one may be shorter
            print(f"error: {error}", file=sys.stderr, flush=True)
