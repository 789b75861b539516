"""What a job says of the data that it reads."""

from types import SimpleNamespace

import pytest

from aligner.builders.job import Job
from aligner.config.sections.data import DataConfig
from aligner.data.dataset import PromptDataset, SftDataset
from aligner.data.formats import prompt_rows, sft_rows
from aligner.data.shipped_templates import use_chat_template
from aligner.data.tokenizer import byte_tokenizer, load_tokenizer

PLAIN = {"prompt": "q", "completion": "a"}
CHAT = {"prompt": [{"role": "user", "content": "q"}], "completion": "a"}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    found = load_tokenizer(byte_tokenizer(str(tmp_path_factory.mktemp("byte"))).name_or_path)
    use_chat_template(found, DataConfig(chat_template="chatml"))
    return found


def test_the_template_is_described_once_and_where_rows_are_conversations(tokenizer):
    data, said = DataConfig(), []
    job = SimpleNamespace(template_said=False, tokenizer=tokenizer, cfg=SimpleNamespace(data=data), say=said.append)
    plain = SftDataset(sft_rows([PLAIN], data), tokenizer, data)
    chat = SftDataset(sft_rows([PLAIN, CHAT], data), tokenizer, data)
    prompts = PromptDataset(prompt_rows([CHAT], data), tokenizer, data)
    Job.say_rows(job, plain.report)
    assert said == [plain.report]
    Job.say_rows(job, chat.report)
    assert said[-1] is chat.report and [line[:14] for line in said[1:-1]] == ["chat template:"] * 2
    Job.say_rows(job, prompts.report)
    assert said[4:] == [prompts.report]
