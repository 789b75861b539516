import random

import pytest

from aligner.config.sections.data import DataConfig
from aligner.data.dataset import PairDataset, PreferenceDataset
from aligner.data.formats import preference_rows, sft_rows, unpaired_rows
from aligner.data.pairs import shared_prompt
from aligner.data.unpaired import UnpairedDataset
from aligner.errors import DataError

SYSTEM = {"role": "system", "content": "s"}
USER = {"role": "user", "content": "q"}
GOOD = {"role": "assistant", "content": "good"}
BAD = {"role": "assistant", "content": "bad"}
MORE = {"role": "user", "content": "go on"}


def pair(**row):
    found = preference_rows([row], DataConfig())[0]
    return found.prompt, found.chosen, found.rejected


def extracted(chosen, rejected):
    """What TRL's extract_prompt does, of texts that differ before the end of the shorter one."""
    index = next(i for i in range(min(len(chosen), len(rejected))) if chosen[i] != rejected[i])
    if index and chosen[index - 1] == " ":
        index -= 1
    return chosen[:index], chosen[index:], rejected[index:]


def test_whole_texts_share_their_prompt_as_in_trl():
    random.seed(3)
    head = "\n\nHuman: What is 2+2?\n\nAssistant:"
    for _ in range(300):
        a, b = ("".join(random.choices("ab é\n", k=random.randint(1, 9))) for _ in range(2))
        if any(x != y for x, y in zip(a, b, strict=False)):
            for texts in ((a, b), (head + a, head + b)):
                actual = pair(chosen=texts[0], rejected=texts[1])
                assert actual == extracted(*texts) and actual[0] + actual[1] == texts[0] and all(actual[1:])
    assert pair(chosen=head + " 4", rejected=head + " 5") == (head, " 4", " 5")
    assert pair(chosen="abc", rejected="abcdef") == ("ab", "c", "cdef")
    assert pair(chosen="abc", rejected="abc") == ("ab", "c", "c")
    assert pair(chosen="", rejected="abc") == ("", "", "abc") and pair(chosen=" a", rejected="b") == ("", " a", "b")


def test_the_humans_words_are_not_learned(byte):
    rows = [
        {"chosen": f"\n\nHuman: {q}?\n\nAssistant: {a}", "rejected": f"\n\nHuman: {q}?\n\nAssistant: {b}"}
        for q, a, b in (("2+2", "4", "5"), ("a fruit", "apple", "rock"))
    ]
    pairs = PairDataset(preference_rows(rows, DataConfig()), byte, DataConfig())
    single = UnpairedDataset(unpaired_rows(rows, DataConfig()), byte, DataConfig())
    texts = [" 4", " 5", " apple", " rock"]
    items = [item for i in range(2) for item in (pairs[i].chosen, pairs[i].rejected)]
    for answers in (items, [single[i].answer for i in range(4)]):
        learned = [byte.decode(item.tokens[item.loss_mask.astype(bool)]) for item in answers]
        assert learned == [text + "<eos>" for text in texts]
    assert byte.decode(single[3].prompt) == "\n\nHuman: a fruit?\n\nAssistant:"


def test_a_reward_model_reads_whole_texts_as_they_are(byte):
    rows = [{"chosen": "the same words", "rejected": "the same wonder"}]
    (row,) = preference_rows(rows, DataConfig(), whole=True)
    assert (row.prompt, row.chosen, row.rejected) == ("", *rows[0].values())
    (item,) = [PreferenceDataset([row], byte, DataConfig())[0]]
    assert item.chosen.tolist() == [*byte("the same words")["input_ids"], byte.eos_token_id]


@pytest.mark.parametrize(
    "row, prompt",
    [
        ({"prompt": "q", "chosen": [USER, GOOD], "rejected": [USER, BAD]}, [USER]),  # UltraFeedback, Tulu
        ({"prompt": " q\n", "chosen": [USER, GOOD], "rejected": [USER, BAD]}, [USER]),
        ({"prompt": "q", "chosen": [SYSTEM, USER, GOOD], "rejected": [SYSTEM, USER, BAD]}, [SYSTEM, USER]),
        ({"prompt": "q", "chosen": [GOOD], "rejected": [BAD]}, [USER]),
        ({"prompt": "q", "chosen": [GOOD], "rejected": "bad"}, [USER]),
        ({"prompt": "q", "chosen": [USER, GOOD, MORE, GOOD], "rejected": [USER, GOOD, MORE, BAD]}, [USER, GOOD, MORE]),
        ({"prompt": "go on", "chosen": [USER, BAD, MORE, GOOD], "rejected": [USER, BAD, MORE, BAD]}, [USER, BAD, MORE]),
        ({"prompt": [USER], "chosen": [USER, GOOD], "rejected": [USER, BAD]}, [USER]),
        ({"prompt": [SYSTEM, USER], "chosen": [USER, GOOD], "rejected": [BAD]}, [SYSTEM, USER]),
        ({"prompt": [USER], "chosen": "good", "rejected": [BAD]}, [USER]),
        ({"chosen": [SYSTEM, USER, GOOD], "rejected": [SYSTEM, USER, BAD]}, [SYSTEM, USER]),
    ],
)
def test_every_shape_of_a_pair_is_one(row, prompt):
    assert pair(**row) == (prompt, [GOOD], [BAD])
    (rows,) = unpaired_rows([row], DataConfig())
    assert (rows.prompt, rows.answers) == (prompt, (("chosen", [GOOD], True), ("rejected", [BAD], False)))


def test_single_answers_likewise():
    for row in (
        {"prompt": "q", "completion": [GOOD]},
        {"prompt": "q", "completion": [USER, GOOD]},
        {"prompt": [USER], "completion": [USER, GOOD]},
    ):
        (rows,) = sft_rows([row], DataConfig())
        assert (rows.prompt, rows.completion) == ([USER], [GOOD])
        assert unpaired_rows([row | {"label": True}], DataConfig())[0].answers == (("completion", [GOOD], True),)
    turns = [MORE, GOOD]  # the conversation goes on: nothing is the prompt again
    (rows,) = sft_rows([{"prompt": [USER, BAD], "completion": turns}], DataConfig())
    assert (rows.prompt, rows.completion) == ([USER, BAD], turns)


@pytest.mark.parametrize(
    "row, message",
    [
        ({"prompt": "x", "chosen": [USER, GOOD], "rejected": [USER, BAD]}, "to begin with an answer, or with a user's"),
        ({"prompt": "q", "chosen": [SYSTEM, USER, GOOD], "rejected": [USER, BAD]}, "same messages before the answers"),
        ({"prompt": "q", "chosen": [USER], "rejected": [USER, BAD]}, "role assistant in `chosen`, to be learned"),
        ({"chosen": [USER, GOOD], "rejected": [USER]}, "role assistant in `rejected`|role assistant in `chosen`"),
        ({"chosen": [USER, MORE], "rejected": [USER, BAD]}, "role assistant in `chosen`"),
        ({"chosen": "x", "rejected": [BAD]}, "both strings or both messages"),
    ],
)
def test_pairs_of_which_nobody_can_say_the_prompt(row, message):
    with pytest.raises(DataError, match=rf"^row 1: expected .*({message})"):
        preference_rows([row], DataConfig())


def test_shared_prompt_keeps_the_last_message_of_equal_conversations():
    row = {"chosen": [USER, GOOD], "rejected": [USER, GOOD]}
    assert shared_prompt(row, "r") == ([USER], [GOOD], [GOOD])
