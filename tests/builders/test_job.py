"""What a job says of the data that it reads."""

import pytest

from aligner.builders.job import JobOutput
from aligner.config.sections.data import DataConfig
from aligner.data.dataset import PromptDataset, SftDataset
from aligner.data.formats import prompt_rows, sft_rows
from aligner.data.shipped_templates import use_chat_template
from aligner.data.tokenizer import byte_tokenizer, load_tokenizer

PLAIN = {"prompt": "q", "completion": "a"}
CHAT = {"prompt": [{"role": "user", "content": "q"}], "completion": "a"}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    made = load_tokenizer(byte_tokenizer(str(tmp_path_factory.mktemp("byte"))).name_or_path)
    use_chat_template(made, DataConfig(chat_template="chatml"))
    return made


def test_the_template_is_described_once_and_where_rows_are_conversations(tokenizer, capsys):
    data, terminal = DataConfig(), JobOutput(0, tokenizer, {})
    plain = SftDataset(sft_rows([PLAIN], data), tokenizer, data)
    chat = SftDataset(sft_rows([PLAIN, CHAT], data), tokenizer, data)
    prompts = PromptDataset(prompt_rows([CHAT], data), tokenizer, data, "data.eval")
    terminal.say_rows(plain.report)
    assert capsys.readouterr().out == f"{plain.report}\n"
    terminal.say_rows(chat.report)
    shown, report = capsys.readouterr().out[: -len(f"{chat.report}\n")], str(chat.report)
    assert [line[:14] for line in shown.splitlines()] == ["chat template:"] * 2
    terminal.say_rows(prompts.report)
    assert capsys.readouterr().out == f"{prompts.report}\n" and report
    terminal.say_rows(prompts.report)  # of a file that is read for losses and for responses
    assert capsys.readouterr().out == ""
