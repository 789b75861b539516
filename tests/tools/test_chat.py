"""A conversation with a finished toy run, longer than the model."""

import pytest

from aligner.config.engine import EngineConfig
from aligner.errors import ConfigError
from aligner.tools.chat import Chat
from aligner.tools.generate import Answerer
from aligner.types import SamplingParams


def test_a_talk_that_outgrows_the_model_goes_on(tiny_runs, capsys):
    model = Answerer.load(tiny_runs["sft"] / "hf", EngineConfig(), "float32")
    assert model.tokenizer.chat_template and model.engine.model.cfg.max_position == 64
    chat = Chat(model, SamplingParams(4, 0.0), 0)
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
