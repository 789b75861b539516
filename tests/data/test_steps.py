"""Answers in steps: where their labels stand, and rows that are refused."""

import numpy as np
import pytest

from aligner.config.sections.data import DataConfig
from aligner.data.collate import collate_steps
from aligner.data.formats import step_rows
from aligner.data.steps import StepEncoder, StepsDataset
from aligner.errors import DataError
from aligner.types import StepTargets

ROWS = [
    {"prompt": "p", "completions": ["ab", "c"], "labels": [True, False]},
    {"prompt": "qq", "completions": ["d"], "labels": [0.25]},
]


def made(byte, rows=ROWS, separator="\n", last=False, **data):
    return StepsDataset(step_rows(rows, DataConfig(**data)), byte, DataConfig(**data), separator, last)


@pytest.mark.parametrize("separator", ["\n", "<s>"])
def test_a_label_stands_on_the_last_token_of_the_separator(byte, separator):
    first = made(byte, separator=separator)[0]
    text, at = byte.decode(first.tokens), np.flatnonzero(~np.isnan(first.labels))
    assert text == f"pab{separator}c{separator}"
    assert [byte.decode(first.tokens[: i + 1]) for i in at] == [f"pab{separator}", text]  # one token is a byte
    assert first.labels[at].tolist() == [1.0, 0.0]


def test_rows_become_one_batch(byte):
    batch = collate_steps(list(made(byte)), 0)
    assert batch.loss_mask.sum(1).tolist() == [2, 1] and batch.lengths.tolist() == [6, 4]
    assert batch.of(StepTargets).step_labels[batch.loss_mask.bool()].tolist() == [1.0, 0.0, 0.25]
    assert not batch.of(StepTargets).step_labels.isnan().any()


def test_of_a_row_the_last_label_alone_may_be_learned(byte):
    mask = collate_steps(list(made(byte, last=True)), 0).loss_mask
    assert [row.nonzero().flatten().tolist() for row in mask] == [[5], [3]]


def test_an_answer_has_the_tokens_of_training(byte):
    encoder, item = StepEncoder(byte, "\n"), made(byte)[0]
    steps = encoder.steps_of("ab\n\nc\n \n")
    assert steps == ["ab", "c"]
    tokens, ends = encoder.encode(steps)
    assert tokens == item.tokens[1:].tolist()  # behind the prompt
    assert [end + 1 for end in ends] == np.flatnonzero(~np.isnan(item.labels)).tolist()


def test_long_rows_keep_the_steps_that_fit(byte):
    rows = [*ROWS, {"prompt": "p" * 9, "completions": ["x"], "labels": [True]}]  # of that one none fits
    kept = made(byte, rows, overlong="truncate", max_tokens=5)
    assert [len(item.tokens) for item in kept] == [5, 4]
    assert np.nansum(kept[0].labels) == 1 and "1 dropped and 1 truncated" in str(kept.report)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"labels": [True]}, r"row 1: expected a list of 2 in `labels`, one for a step, found \[True\]"),
        ({"labels": [True, "no"]}, r"row 1: label 2: expected true, false, or a number from 0 to 1 .*found 'no'"),
        ({"labels": [True, 2]}, r"label 2: expected true, false, or a number from 0 to 1 .*found 2"),
        ({"labels": [True, float("nan")]}, r"label 2: expected .*found nan"),
        ({"completions": []}, r"row 1: expected a list of texts, the steps, in `completions`, found \[\]"),
        ({"completions": ["a", " "]}, r"the steps, in `completions`, found \['a', ' '\]"),
        ({"completions": "ab"}, r"the steps, in `completions`, found 'ab'"),
        ({"labels": None}, r"expected the columns \{prompt, completions, labels\}, found .*labels \(null\)"),
    ],
)
def test_rows_that_do_not_fit_are_named(byte, change, message):
    with pytest.raises(DataError, match=message):
        made(byte, [ROWS[0] | change])
