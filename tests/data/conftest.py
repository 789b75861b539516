"""Small tokenizers that stand for the kinds found in the wild; made once per test session."""

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from aligner.data.tokenizer import byte_tokenizer, load_tokenizer

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
CHATML_MARKED = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' }}{% if m['role'] == 'assistant' %}"
    "{% generation %}{{ m['content'] + '<|im_end|>\n' }}{% endgeneration %}{% else %}"
    "{{ m['content'] + '<|im_end|>\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
# like Qwen3: thoughts of earlier turns are removed, so an earlier rendering is no prefix of a later one
FORGETFUL = CHATML.replace("m['content'] +", "(m['content'] if loop.last else m['content'].split('</think>') | last) +")


@pytest.fixture(scope="session")
def make_folder(tmp_path_factory):
    """make_folder(template=, bos=, **special tokens) -> a saved ChatML-like byte-level tokenizer folder."""

    def make(template=CHATML, bos=False, pad="<|endoftext|>", eos="<|im_end|>", extra=(), unk=None, regex=True):
        core = Tokenizer(models.BPE())
        core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=regex)
        core.decoder = decoders.ByteLevel()
        special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<s>", *extra]
        core.train_from_iterator(
            ["what is the answer to the question"] * 3 + ["\n\n"] * 9,
            trainers.BpeTrainer(
                vocab_size=330,
                special_tokens=special,
                initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
                show_progress=False,
            ),
        )
        if bos:
            core.post_processor = processors.TemplateProcessing(
                single="<s> $A", pair="<s> $A $B", special_tokens=[("<s>", 3)]
            )
        names = {"pad_token": pad, "eos_token": eos, "unk_token": unk, "bos_token": "<s>" if bos else None}
        tokenizer = PreTrainedTokenizerFast(
            tokenizer_object=core, **{name: token for name, token in names.items() if token is not None}
        )
        tokenizer.chat_template = template
        folder = str(tmp_path_factory.mktemp("tokenizer"))
        tokenizer.save_pretrained(folder)
        return folder

    return make


@pytest.fixture(scope="session")
def byte(tmp_path_factory):
    return byte_tokenizer(str(tmp_path_factory.mktemp("byte")))


@pytest.fixture(scope="session")
def chatml(make_folder):
    return load_tokenizer(make_folder())


@pytest.fixture(scope="session")
def marked(make_folder):
    return load_tokenizer(make_folder(CHATML_MARKED))


@pytest.fixture(scope="session")
def forgetful(make_folder):
    return load_tokenizer(make_folder(FORGETFUL))


@pytest.fixture(scope="session")
def with_bos(make_folder):
    return load_tokenizer(make_folder("<s>" + CHATML, bos=True))
