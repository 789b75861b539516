"""The doctor finds what would stop a run."""

import pytest

from aligner.cluster.env import RankEnv
from aligner.config.resolve import compose
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


def test_a_tokenizer_is_loaded_and_needs_eos(tmp_path):
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    for eos in (None, "<eos>"):
        inner = Tokenizer(models.WordLevel({"a": 0, "<eos>": 1}, unk_token="a"))
        PreTrainedTokenizerFast(tokenizer_object=inner, eos_token=eos).save_pretrained(tmp_path)
        status, detail = statuses(f"model.tokenizer='{tmp_path}'")["tokenizer"]
        assert (status, "EOS" in detail) == (doctor.OK if eos else doctor.FAIL, True)


def test_built_in_rewards_load():
    assert statuses("stage=grpo", "reward.functions=[{path:math}]")["reward.functions[0]"][0] == doctor.OK
