"""Pages of samples, against the files they are of."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from aligner.board import recorded
from aligner.board.query import Query
from aligner.board.runs import Board
from aligner.board.samples import PAGE, Table, sample_tokens, samples
from aligner.data.tokenizer import byte_tokenizer
from aligner.errors import AlignerError, DataError
from aligner.foreign import JsonObject
from aligner.rollout.record import read_recording, write_recording
from tests.board.recordings import record, run_folder, write_rows

ASSET = Path(__file__).parents[1] / "assets/rollout.safetensors"


def ask(board: Board, answer=samples, **asked):
    return answer(board, JsonObject(asked, "test", DataError))


@pytest.fixture
def board(tmp_path):
    run_folder(tmp_path / "old", rows=30)
    record(run_folder(tmp_path / "new", rows=2), 7)
    run_folder(tmp_path / "void")
    return Board([tmp_path])


def test_rows_are_found_by_step_prompt_and_reward(board):
    (view,) = ask(board, run="old")["views"]
    assert [row["step"] for row in view["rows"]] == list(range(29, 29 - PAGE, -1)) and view["more"]
    (view,) = ask(board, run="old", page=2)["views"]
    assert [row["step"] for row in view["rows"]] == list(range(5, -1, -1)) and not view["more"]
    (view,) = ask(board, run="old", text="QUESTION 1", low=3, order="worst")["views"]
    wanted = sorted((i % 5, i) for i in range(30) if i % 3 == 1 and i % 5 >= 3)
    assert [row["reward"] for row in view["rows"]] == [reward for reward, _ in wanted]
    assert {row["step"] for row in view["rows"]} == {i for _, i in wanted}
    (view,) = ask(board, run="old", step="4")["views"]
    assert [row["step"] for row in view["rows"]] == [4]


def test_a_file_is_read_as_it_grows_and_anew_where_it_is_another(tmp_path):
    table = Table(run_folder(tmp_path / "run", rows=3) / "samples.jsonl")
    assert table.steps() == [0, 1, 2]
    whole = table.path.read_bytes()
    with table.path.open("ab") as file:  # half a row, then its rest and a damaged one
        file.write(b'{"step": 3, "prompt": "p"')
    assert table.steps() == [0, 1, 2]
    with table.path.open("ab") as file:
        file.write(b', "reward": NaN}\n{"step": 4,\n[]\n{"step": "5"}\n')
    assert table.steps() == [0, 1, 2, 3]
    write_rows(table.path.parent, [6])
    rows, _ = table.page(Query())
    assert [row["step"] for row in rows] == [6, 3, 2, 1, 0] and rows[1]["reward"] is None
    aside = tmp_path / "aside"
    aside.write_bytes(whole.splitlines(True)[0])
    aside.rename(table.path)
    assert table.steps() == [0]


def test_groups_of_a_recording_with_the_numbers_of_each_token(board, tmp_path):
    columns = record(tmp_path / "new", 8)
    (view,) = ask(board, run="new")["views"]  # the last one recorded
    assert (view["step"], view["recorded"], view["steps"]) == ("8", [7, 8], [0, 1])
    assert [[s["row"] for s in group["samples"]] for group in view["groups"]] == [[0, 1], [2, 3]] and view["more"]
    sample = view["groups"][0]["samples"][1]
    assert (sample["reward"], sample["scores"]) == (1.0, {"math": None})
    reported = sample["tokens"]
    assert reported["ids"] == list(b"<x> ") and reported["made"] == [True, True, False, True]
    difference = columns["trained/old_logprobs"][1, 3:] - columns["rollout_logprobs"][1, 3:]
    kl = columns["trained/old_logprobs"][1, 3:] - columns["trained/ref_logprobs"][1, 3:]
    wanted = {"advantage": columns["trained/advantages"][1, 3:], "difference": difference, "kl": kl}
    assert reported["numbers"].keys() == {*wanted, "logprob"}
    for name, values in wanted.items():
        actual = reported["numbers"][name]
        assert actual[2] is None
        assert np.allclose([actual[i] for i in (0, 1, 3)], values[[0, 1, 3]], rtol=1e-4)
    (view,) = ask(board, run="new", low=4, order="best")["views"]
    assert [group["id"] for group in view["groups"]] == [12] and not view["more"]


def test_what_a_recorder_wrote_reads_as_the_trainer_reads_it(board, tmp_path):
    folder = tmp_path / "new" / "rollouts"
    shutil.copy(ASSET, folder / "step-00000001.safetensors")
    byte_tokenizer(str(tmp_path / "new" / "hf"))
    known = read_recording(ASSET)
    rows = [s for page in range(4) for s in _rows(ask(board, run="new", step="1", page=page))]
    assert [row["response"] for row in rows] == [sample.response for sample in known.rollout.samples]
    assert [row["reward"] for row in rows] == pytest.approx(known.scores.total)
    for row, sample in zip(rows, known.rollout.samples, strict=True):
        text = "".join(row["tokens"]["texts"]).removesuffix("<eos>")
        assert tuple(row["tokens"]["ids"]) == sample.tokens and row["tokens"]["numbers"].keys() == {"logprob"}
        if sample.response.isascii():
            assert text == sample.response


def test_numbers_of_a_step_are_those_that_its_recorder_wrote(board, tmp_path):
    known = read_recording(ASSET)
    by_name = {name: torch.randn(known.rollout.tokens.shape) for name in ("old_logprobs", "ref_logprobs", "advantages")}
    rollout = replace(known.rollout, **by_name)
    path = tmp_path / "new" / "rollouts" / "step-00000009.safetensors"
    write_recording(path, rollout, known.scores, known.header.origin, 9, by_name.keys())
    sample = _rows(ask(board, run="new", step="9"))[2]
    prompt, reported = len(rollout.samples[2].prompt.tokens), sample["tokens"]["numbers"]
    span = slice(prompt, int(rollout.lengths[2]))
    assert reported["advantage"] == pytest.approx(by_name["advantages"][2, span].tolist(), rel=1e-4)
    difference = (by_name["old_logprobs"] - rollout.rollout_logprobs)[2, span].tolist()
    assert reported["difference"] == pytest.approx(difference, rel=1e-3, abs=1e-4)
    assert reported.keys() == {"advantage", "difference", "kl", "logprob"}


def _rows(answer):
    return [sample for view in answer["views"] for group in view["groups"] for sample in group["samples"]]


def test_a_page_has_a_bounded_number_of_tokens(board, monkeypatch):
    monkeypatch.setattr(recorded, "PAGE_TOKENS", 15)  # two samples of 7
    answer = [sample["tokens"] is not None for sample in _rows(ask(board, run="new"))]
    assert answer == [True, True, False, False]
    assert ask(board, sample_tokens, run="new", step=7, row=3)["ids"] == list(b"<x> ")
    monkeypatch.setattr(recorded, "SAMPLE_TOKENS", 2)
    reported = ask(board, sample_tokens, run="new", step=7, row=3)
    assert reported["cut"] and reported["ids"] == list(b"<x") and len(reported["numbers"]["advantage"]) == 2


def test_a_report_has_the_newest_of_each_run(board, monkeypatch):
    monkeypatch.setattr("aligner.board.samples.REPORTED", 16)
    answer = ask(board, report=True)
    assert [(view["run"], view["step"]) for view in answer["views"]] == [("new", "7"), ("old", "table")]
    assert len(answer["views"][0]["groups"]) == 1 and len(answer["views"][1]["rows"]) == 8
    json.dumps(answer, allow_nan=False)


def test_what_cannot_be_read_is_reported(board, tmp_path):
    folder = tmp_path / "new" / "rollouts"
    (folder / "step-00000007.safetensors").write_bytes(b"no")
    (folder / "step-x.safetensors").write_bytes(b"")
    wrong = [
        ({"run": "../old"}, "expected one of the board's 3 runs"),
        ({"run": "old", "step": "../4"}, "expected a number, or table"),
        ({"run": "old", "order": "x"}, "expected one of newest"),
        ({"run": "old", "page": -1}, "page=-1"),
    ]
    for asked, text in wrong:
        with pytest.raises(AlignerError, match=text):
            ask(board, **asked)
    assert "cannot be read as a recorded rollout" in ask(board, run="new")["views"][0]["damage"]
    assert [view["step"] for view in ask(board, report=True)["views"]] == ["table", "table"]
    record(tmp_path / "new", 7)
    with pytest.raises(DataError, match="row 6: expected one from 0 to 5"):
        ask(board, sample_tokens, run="new", step=7, row=6)
    (view,) = ask(board, run="void")["views"]
    assert view["rows"] == view["groups"] == [] and "debug.record" in ask(board)["hint"]


def test_calls_of_a_terminal_and_their_output_read_as_on_a_screen(tmp_path):
    written = 'look\nbash({"command": "ls\\n<b>"})\npython({"code": "1 + 1"})'
    others = 'bash({"command": 3})\nedit({"path": "a"})\nbash({"command": "a'
    out = "\x1b[01;34md\x1b[0m\x1b]0;title\x07\n10 %\r 20 %\r100 %\r\nx\x1b(B\n(exit status 1)"
    turns = [{"role": "assistant", "text": written, "tokens": 3}, {"role": "tool", "text": out, "seconds": 0.1}]
    turns += [{"role": "assistant", "text": others, "tokens": 2}, {"role": "tool", "text": "(a list)"}, {"role": 3}]
    row = {"step": 1, "prompt": "p", "response": "r", "reward": 1.0, "trajectory": {"stop": "answer", "turns": turns}}
    (run_folder(tmp_path / "run") / "samples.jsonl").write_text(json.dumps(row) + "\n")
    first, output, second, listed, _ = ask(Board([tmp_path]))["views"][0]["rows"][0]["turns"]
    assert first["text"] == "look" and first["typed"] == [["$", "ls\n<b>"], [">>>", "1 + 1"]] and first["tokens"] == 3
    assert output == {"role": "tool", "text": "d\n100 %\r\nx", "end": "(exit status 1)", "seconds": 0.1}
    assert second["text"] == others and second["typed"] == [] and listed["text"] == "(a list)"
