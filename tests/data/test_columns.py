import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from aligner.config.sections.data import DataConfig
from aligner.data.columns import columns_of, lookup
from aligner.data.formats import prompt_rows, scored_rows
from aligner.data.readers import read_rows
from aligner.errors import DataError

DAPO = {
    "prompt": [{"role": "user", "content": "1+1?"}],
    "reward_model": {"ground_truth": "2", "style": "rule"},
    "choices": [{"text": "x"}, {"text": "y"}],
    "a.b": "dotted",
    "none": None,
}


def test_nested_columns_by_their_path(tmp_path):
    data = DataConfig(columns={"answer": "reward_model.ground_truth", "second": "choices.1.text", "odd": "a.b"})
    (tmp_path / "x.jsonl").write_text(json.dumps(DAPO))
    pq.write_table(pa.Table.from_pylist([DAPO]), tmp_path / "x.parquet")
    for name in ("x.jsonl", "x.parquet"):
        fields = prompt_rows(read_rows(str(tmp_path / name)), data)[0].fields
        assert (fields["answer"], fields["second"], fields["odd"]) == ("2", "y", "dotted")
        assert fields["reward_model"] == DAPO["reward_model"]
    typed = scored_rows([{"prompt": "p", "completion": "c", "scores": {"help": 3}}], DataConfig(), ["scores.help"])
    assert typed[0].scores == (3.0,)


@pytest.mark.parametrize(
    "path, message",
    [
        ("reward_model.truth", r"one of the columns prompt, reward_model, .*`reward_model` has ground_truth, style\)"),
        ("reward.ground_truth", "no column `reward`"),
        ("choices.2.text", "`choices` is a list of 2, without `2`"),
        ("reward_model.ground_truth.x", "`reward_model.ground_truth` is a str, without `x`"),
        ("none.x", "`none` is a NoneType, without `x`"),
    ],
)
def test_paths_that_lead_nowhere(path, message):
    with pytest.raises(DataError, match=rf"^f, row 2: data\.columns\.answer='{path}': expected .*{message}"):
        columns_of(DAPO, DataConfig(columns={"answer": path}), "f, row 2")
    with pytest.raises(LookupError):
        lookup(DAPO, path)


@pytest.mark.parametrize(
    "template, text",
    [
        ("{q}{q!r:>5} {n:03d}", "Q  'Q' 007"),
        ("{r.g} {r[g]} {l.0.t} {l[0][t]}", "G G T T"),
        (r"{q} \boxed{{}} \boxed{{answer}} \boxed{{{q}}} {{ }}", r"Q \boxed{} \boxed{answer} \boxed{Q} { }"),
        (r"{q} ends with {{answer}}", "Q ends with {answer}"),
        ("All the same {{x}}", "All the same {x}"),
        (r"\n{q} {with blank}", r"\nQ B"),
    ],
)
def test_templates_fill_in_columns(template, text):
    row = {"q": "Q", "n": 7, "r": {"g": "G"}, "l": [{"t": "T"}], "with blank": "B", "answer": "A"}
    assert columns_of(row, DataConfig(prompt_template=template), "r")["prompt"] == text
    assert columns_of(row, DataConfig(completion_template=template), "r")["completion"] == text


@pytest.mark.parametrize(
    "template, message",
    [
        (r"{q} in \boxed{answer}", r"expected \\boxed{{answer}} for \\boxed{answer} as a text.*\\boxed{{{answer}}}"),
        (r"{q} \text {q}", r"the column `q` would fill"),
        (r"{q} \boxed{}", r"braces without a column's name.*Double the braces of the text itself"),
        (r"{q} \boxed{your answer}", r"no column `your answer`.*Double the braces"),
        (r"{q} \frac{1}{2}", r"Double the braces"),
        (r'{q} {"a": 1}', r"Double the braces"),
        (r"{q} }", r"Single '}'.*Double the braces"),
        (r"{q} {none}", r"`none` is null in this row"),
        (r"{q:d}", "Unknown format code"),
        (r"{{q}}", "a column, {q}, found doubled braces only"),
        (r"Q: {{ q }} \boxed{{}}", r"every row would be 'Q: { q } \\\\boxed{}'"),
    ],
)
def test_braces_of_the_text_get_their_hint(template, message):
    row = {"q": "Q", "answer": "SECRET", "none": None}
    with pytest.raises(DataError, match=r"^r: data\.prompt_template=.*expected ") as caught:
        columns_of(row, DataConfig(prompt_template=template), "r")
    import re

    assert re.search(message.replace("{", r"\{").replace("}", r"\}"), str(caught.value)), str(caught.value)
    assert "SECRET" not in str(caught.value)
