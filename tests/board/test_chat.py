"""Which models can be talked to, and how. Talking itself is in test_pages_of_runs."""

from __future__ import annotations

import subprocess
import sys
import tempfile

import pytest

from aligner.board.chat import MOST, Talk, Talks, has_template, known, open_talk
from aligner.board.runs import Board
from aligner.data.tokenizer import byte_tokenizer
from aligner.errors import AlignerError, DataError
from aligner.foreign import Record
from tests.board.recordings import run_folder


def test_models_are_those_of_runs_checkpoints_and_folders(tmp_path):
    for name in ("done", "runs_on"):
        (run_folder(tmp_path / name) / "checkpoints" / "step-00000004").mkdir(parents=True)
    (tmp_path / "done" / "checkpoints" / "step-00000008.tmp").mkdir()  # one that is being written
    for folder in (tmp_path / "done" / "hf", tmp_path / "published"):
        folder.mkdir()
        (folder / "config.json").write_text("{}")
    board = Board([tmp_path])
    found = known(board)
    names = ["done", "done step-00000004", "runs_on step-00000004", str(tmp_path / "published")]
    assert list(found) == names and found[names[1]].run == tmp_path / "done" and found["done"].run is None
    with pytest.raises(DataError, match="expected one of the board's 4 models"):
        open_talk(board, Record({"model": "/etc"}, "test", DataError))


@pytest.mark.parametrize("template", [None, "{{ messages[0].content }}"])
def test_a_model_without_a_chat_template_is_known_as_such(tmp_path, template):
    byte_tokenizer(str(tmp_path), chat_template=template)
    assert has_template(tmp_path) == (template is not None)


def test_models_at_a_time_are_few_and_those_that_have_ended_are_gone(tmp_path):
    talks = Talks()
    for i in range(MOST):
        process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
        talks.by_name[str(i)] = Talk(process, tempfile.TemporaryDirectory(dir=tmp_path), False)
    model = next(iter(known(Board([_published(tmp_path)])).values()))
    assert talks.open("1", model) is talks.by_name["1"]
    with pytest.raises(AlignerError, match=f"at most {MOST} models at a time"):
        talks.open("another", model)
    for name in list(talks.by_name):
        talks.close(name)
    assert process.returncode == -9 and [path.name for path in tmp_path.iterdir()] == ["published"]
    with pytest.raises(DataError, match="expected a model that is open"):
        list(talks.say("1", {}))


def _published(folder):
    (folder / "published").mkdir()
    (folder / "published" / "config.json").write_text("{}")
    return folder / "published"
