"""Families without a table: Megatron-Bridge where it is installed (a strict fake of its calls here), else one line."""

import importlib.machinery
import json
import sys
import types

import pytest

from aligner.__main__ import main


@pytest.fixture
def folder(tmp_path):
    source = tmp_path / "hf"
    source.mkdir()
    (source / "config.json").write_text(json.dumps({"model_type": "nemotron", "hidden_size": 8}))
    return source


def test_without_it_one_line_says_so(folder, tmp_path, capsys):
    assert main(["import", str(folder), str(tmp_path / "out")]) == 2
    output = capsys.readouterr().err.strip()
    assert "\n" not in output and "'nemotron'" in output and "Megatron-Bridge" in output and "qwen3_moe" in output
    assert not (tmp_path / "out").exists()


def test_with_it_folders_go_in_and_out(folder, tmp_path, monkeypatch, capsys):
    calls = []

    class AutoBridge:
        @classmethod
        def import_ckpt(cls, hf_model_id: str, megatron_path: str):
            calls.append(("in", hf_model_id, megatron_path))

        @classmethod
        def from_hf_pretrained(cls, path: str):
            calls.append(("open", path))
            return cls()

        def export_ckpt(self, megatron_path: str, hf_path: str):
            calls.append(("out", megatron_path, hf_path))

    fake = types.ModuleType("megatron.bridge")
    fake.AutoBridge, fake.__spec__ = AutoBridge, importlib.machinery.ModuleSpec("megatron.bridge", None)
    monkeypatch.setitem(sys.modules, "megatron.bridge", fake)
    out, back = tmp_path / "out", tmp_path / "back"
    assert main(["import", str(folder), str(out)]) == 0
    assert main(["import", str(folder), str(out)]) == 2
    assert "a folder that does not exist yet" in capsys.readouterr().err
    assert main(["export", str(out), str(back)]) == 0
    assert calls == [
        ("in", str(folder), str(out / "megatron")),
        ("open", str(folder)),
        ("out", str(out / "megatron"), str(back)),
    ]
    monkeypatch.delitem(sys.modules, "megatron.bridge")
    assert main(["export", str(out), str(tmp_path / "other")]) == 2
    assert "imported by Megatron-Bridge, which is not installed here" in capsys.readouterr().err
