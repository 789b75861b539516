"""`aligner chat`: talk to a trained model on the terminal.

python -m aligner chat run.dir=runs/quickstart/grpo
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, field

from aligner.config.schema import Config
from aligner.data.templates import encode_prompts
from aligner.run.sample_table import printable
from aligner.tools.generate import Answerer, model_folder
from aligner.types import Prompt, SamplingParams

HELP = "type a message; an empty line or Ctrl-D ends. /new forgets the conversation."


@dataclass
class Chat:
    """With a chat template the conversation is kept; without one every line is a prompt of its own."""

    model: Answerer
    sampling: SamplingParams
    seed: int
    messages: list[dict[str, str]] = field(default_factory=list)
    turn: int = 0

    def reply(self, text: str) -> str:
        tokenizer = self.model.tokenizer
        if tokenizer.chat_template:
            self.messages.append({"role": "user", "content": text})
            ids = tokenizer.apply_chat_template(self.messages, add_generation_prompt=True, return_dict=False)
        else:
            ids = encode_prompts(tokenizer, [text], ["chat"])[0]
        self.turn += 1
        sample = self.model.answer([Prompt(self.turn, tuple(ids), text)], 1, self.sampling, self.seed)[0]
        if tokenizer.chat_template:
            self.messages.append({"role": "assistant", "content": sample.response})
        return sample.response


def main(cfg: Config) -> int:
    """Read lines from standard input until it ends."""
    folder = model_folder(cfg)
    s = cfg.sampling
    sampling = SamplingParams(
        s.max_response_tokens, cfg.eval.temperature, top_p=s.top_p, top_k=s.top_k, min_p=s.min_p, stop=tuple(s.stop)
    )
    chat = Chat(Answerer.load(folder, cfg.engine, cfg.model.dtype), sampling, cfg.seed)
    print(f"{folder}: {HELP}", flush=True)
    while True:
        print("> ", end="", flush=True)
        line = sys.stdin.readline()
        if not line.strip():
            print()
            return 0
        if line.strip() == "/new":
            chat.messages.clear()
            continue
        print(printable(chat.reply(line.rstrip("\n")), limit=100_000), flush=True)
