"""A conversation with a finished toy run, longer than the model."""

import io
import sys

import pytest

from aligner.config.resolve import compose
from aligner.config.sections.engine import EngineConfig
from aligner.errors import ConfigError, DataError
from aligner.tools.chat import ChatSession, main, read_line
from aligner.tools.generate import Answerer
from aligner.types import SamplingParams


def test_a_talk_that_outgrows_the_model_goes_on(tiny_runs, capsys):
    model = Answerer.load(tiny_runs["sft"] / "hf", EngineConfig(), "float32")
    assert model.tokenizer.chat_template and model.engine.model.cfg.max_position == 64
    chat = ChatSession(model, SamplingParams(4, 0.0), 0)
    chat.reply("hi")
    assert "forgotten" not in capsys.readouterr().out
    for i in range(6):
        chat.reply(f"message {i} of some length")
    assert "its oldest turn is forgotten" in capsys.readouterr().out
    assert chat.messages[-2] == {"role": "user", "content": "message 5 of some length"}
    assert [m["role"] for m in chat.messages] == ["user", "assistant"] * (len(chat.messages) // 2)
    with pytest.raises(ConfigError, match=r"tokens of the message=.*at most 60"):
        chat.reply("x" * 80)
    chat.reply("hello")
    assert chat.messages[0]["content"] == "hello"


def test_only_a_terminal_is_asked(tiny_runs, monkeypatch, capsys):
    cfg = compose([f"run.dir={tiny_runs['sft']}", "sampling.max_response_tokens=2", "model.dtype=float32"])
    replies = []
    for terminal in (True, False):
        stdin = io.StringIO("hi\n/new\nho\n")
        stdin.isatty = lambda terminal=terminal: terminal
        monkeypatch.setattr(sys, "stdin", stdin)
        assert main(cfg) == 0
        help_, _, printed = capsys.readouterr().out.partition("\n")
        replies.append(printed)
        assert "type a message" in help_
    first, between, second = replies[0].removeprefix("> ").removesuffix("> \n").partition("> > ")
    assert between and replies[0][:2] == "> " and replies[1] == first + second


def test_text_of_another_encoding_is_reported(monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO("ja\ngr\u00fc\u00df\n".encode("utf-8")), "utf-8"))
    assert (read_line(), read_line(), read_line()) == ("ja\n", "gr\u00fc\u00df\n", "")
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO("gr\u00fc\u00df\n".encode("latin-1")), "utf-8"))
    with pytest.raises(DataError, match=r"standard input: expected utf-8 text, found b'gr\\xfc\\xdf\\n'"):
        read_line()
