"""Which models can be talked to, and how. Talking itself is in test_pages_of_runs."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from aligner.board.chat import MOST, Model, ServedModel, ServedModels, has_template, known, open_talk
from aligner.board.runs import Board
from aligner.data.tokenizer import byte_tokenizer
from aligner.errors import AlignerError, DataError
from aligner.foreign import JsonObject
from tests.board.recordings import run_folder


def test_models_are_those_of_runs_checkpoints_and_folders(tmp_path):
    for name in ("done", "runs_on"):
        (run_folder(tmp_path / name) / "checkpoints" / "step-00000004").mkdir(parents=True)
    (tmp_path / "done" / "checkpoints" / "step-00000008.tmp").mkdir()  # one that is being written
    for folder in (tmp_path / "done" / "hf", tmp_path / "published"):
        folder.mkdir()
        (folder / "config.json").write_text("{}")
    board = Board([tmp_path])
    actual = known(board)
    names = ["done", "done step-00000004", "runs_on step-00000004", str(tmp_path / "published")]
    assert list(actual) == names and actual[names[1]].run == tmp_path / "done" and actual["done"].run is None
    with pytest.raises(DataError, match="expected one of the board's 4 models"):
        open_talk(board, JsonObject({"model": "/etc"}, "test", DataError))


@pytest.mark.parametrize("template", [None, "{{ messages[0].content }}"])
def test_a_model_without_a_chat_template_is_known_as_such(tmp_path, template):
    byte_tokenizer(str(tmp_path), chat_template=template)
    assert has_template(tmp_path) == (template is not None)


def test_models_at_a_time_are_few_and_those_that_have_ended_are_gone(tmp_path):
    talks = ServedModels()
    for i in range(MOST):
        process = _process("print('http://here/v1: a model', flush=True); input()")
        talks.by_name[str(i)] = ServedModel(process, tempfile.TemporaryDirectory(dir=tmp_path), False)
    model = next(iter(known(Board([_published(tmp_path)])).values()))
    assert talks.open("1", model) is talks.by_name["1"]
    with pytest.raises(AlignerError, match=f"at most {MOST} models at a time"):
        talks.open("another", model)
    assert talks.by_name["1"].url() == "http://here/v1"
    talks.by_name["0"].process.kill()
    talks.by_name["0"].process.wait()
    assert talks.living() == ["1"]
    talks.close()
    assert process.returncode == -9 and [path.name for path in tmp_path.iterdir()] == ["published"]
    with pytest.raises(DataError, match="expected a model that is open"):
        list(talks.say("1", {}))


def test_a_model_that_is_closed_while_it_loads_is_not_waited_for(tmp_path):
    talks, process = ServedModels(), _process("input()")
    talks.by_name["slow"] = ServedModel(process, tempfile.TemporaryDirectory(dir=tmp_path), False)
    with ThreadPoolExecutor(1) as threads:
        opened = threads.submit(talks.open, "slow", Model(tmp_path))
        until = time.monotonic() + 120
        while not talks.by_name["slow"]._lock.locked():  # whoever opens it waits for its address
            assert time.monotonic() < until and not opened.done()
            time.sleep(0.01)
        talks.close("slow")
        with pytest.raises(AlignerError):
            opened.result(300)
    assert process.returncode == -9 and not list(tmp_path.iterdir())


@pytest.mark.slow
def test_a_board_that_is_interrupted_leaves_no_model_behind(tmp_path):
    """The process of a model that loads, and the folder for what it says."""
    published, temporary = _published(tmp_path), tmp_path / "tmp"
    temporary.mkdir()
    argv = [sys.executable, "-m", "aligner", "board", str(tmp_path), "--port", "0"]
    with subprocess.Popen(
        argv,
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"TMPDIR": str(temporary)},
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a test in the background ignores it
    ) as board:
        url = board.stdout.readline().strip()
        with ThreadPoolExecutor(1) as threads:
            asked = threads.submit(httpx.post, f"{url}api/open_talk", json={"model": str(published)}, timeout=None)
            while not any(temporary.glob("aligner-chat-*/log")):
                assert not asked.done()
                time.sleep(0.05)
            board.send_signal(signal.SIGINT)
            assert board.wait(300) == -signal.SIGINT
    assert not any(temporary.glob("aligner-chat-*"))


def _process(code):
    return subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def _published(folder):
    (folder / "published").mkdir()
    (folder / "published" / "config.json").write_text("{}")
    return folder / "published"
