"""A model family in a user's file: it passes what the project's pass (tests/tiny.py has it among them), runs from a
folder, and is refused before a run if nothing here computes what it has."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import transformers

from aligner import families
from aligner.__main__ import main
from aligner.config.freeze import outside_code
from aligner.config.resolve import compose
from aligner.data.tokenizer import load_tokenizer
from aligner.engines.native.load import engine_from_folder
from aligner.errors import ConfigError, FamilyCodeError
from aligner.models.small_files import carry_tokenizer
from tests import stages
from tests.tiny import MORE, transformers_model, write_folder

EXAMPLE = "examples/own_family.py:SEED_OSS"


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return stages.make_data(tmp_path_factory.mktemp("data"))


@pytest.fixture(scope="module")
def folder(data, tmp_path_factory):
    tokenizer = load_tokenizer(str(data / "tokenizer"))
    model, raw = transformers_model(replace(MORE["seed_oss"], vocab_size=len(tokenizer), tie_embeddings=False))
    path = Path(write_folder(model, raw, tmp_path_factory.mktemp("model") / "hf"))
    carry_tokenizer(tokenizer, path)
    return path


def test_a_run_from_a_folder_leaves_one_that_transformers_reads(data, folder, tmp_path, capsys, monkeypatch):
    line = stages.overrides("sft", data, tmp_path / "run", f"model.family={EXAMPLE}", f"model.init={folder}")
    line = [word for word in line if "model.max_position" not in word]
    run = stages.run([*line, "run.steps=1"])
    exported = transformers.AutoModelForCausalLM.from_pretrained(run / "hf").eval()
    assert type(exported).__name__ == "SeedOssForCausalLM" and exported.model.layers[1].self_attn.q_proj.bias.any()
    capsys.readouterr()
    assert main(["plan", *line]) == 0
    assert f"policy {exported.num_parameters() / 1e6:.3g}M" in capsys.readouterr().out
    engine = engine_from_folder(run / "hf", compose([]).engine, device="cpu", dtype=torch.float32, pad_id=0)
    tokens = torch.arange(3, 23)[None]
    with torch.no_grad():
        wanted = exported(tokens).logits.log_softmax(-1)[0, :-1].gather(1, tokens[0, 1:, None])[:, 0]
    assert torch.allclose(engine.logprobs(tokens, torch.tensor([20]))[0, 1:], wanted, atol=1e-4)
    # a checkpoint names the family, which is imported only where the command line names it too
    (state,) = (run / "checkpoints").glob("step-*/state.json")
    assert json.loads(state.read_text())["identity"]["model"]["family"] == EXAMPLE
    monkeypatch.delitem(families.OUTSIDE, EXAMPLE)
    monkeypatch.delitem(families.SAME, "seed_oss")
    assert main(["export", str(state.parent), str(tmp_path / "out")]) == 2
    assert f"or --family {EXAMPLE}" in capsys.readouterr().err
    assert main(["export", str(state.parent), str(tmp_path / "out"), "--family", EXAMPLE]) == 0
    same = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out").state_dict()
    assert all(torch.equal(tensor, same[name]) for name, tensor in exported.state_dict().items())


LIKE = """
from dataclasses import replace
from aligner import api

FAMILY = {}
"""
LLAMA = 'api.Family("own", "Own", api.rows.COMMON + api.rows.MLP{})'
NORM = "api.rows.COMMON[1]"


@pytest.mark.parametrize(
    "family, message",
    [
        ("None", "expected a Family `FAMILY` in {path}, which has none"),
        ("api.Family", "expected a Family `FAMILY` in {path}, which has none"),
        ("api.Familie()", "expected an importable Family, but importing {path} raised AttributeError"),
        (LLAMA.replace('"own"', '"llama"'), "it has model_type 'llama': expected another one than of this project has"),
        (LLAMA.replace('"own"', '"kimi_k2"'), "model_type 'kimi_k2': expected another one than deepseek_v3 has"),
        ('api.Family("own", "Own", api.rows.MLP)', "no row 'decoder.final_layernorm.weight': expected those that"),
        (
            LLAMA.format('+ (api.rows.layer("mlp.lora.weight", "x", "ffn"),)'),
            "a row 'decoder.layers.{{layer}}.mlp.lora",
        ),
        (LLAMA.format(f"+ (replace({NORM}, shape=('ffn',)),)"), "shape=('ffn',) in the row 'decoder.layers.{{layer}}"),
        (LLAMA.format(f"+ (replace({NORM}, kind='sprase'),)"), "kind='sprase' in the row"),
        (LLAMA.format(f"+ (replace({NORM}, when='norm'),)"), "when='norm' in the row"),
        (LLAMA.format(', keys=(("qk_nrom", "qk_norm", True),)'), "the key 'qk_nrom' for qk_norm: expected one of"),
        (LLAMA.format(', served_by=("trtllm_engine",)'), "served_by with 'trtllm_engine': expected vllm"),
    ],
)
def test_a_family_that_nothing_computes_is_refused(tmp_path, family, message):
    path = tmp_path / "own.py"
    path.write_text(LIKE.format(family.replace("{}", "")))
    with pytest.raises(FamilyCodeError) as error:
        compose([f"model.family={path}:FAMILY"])
    assert message.format(path=path) in str(error.value)
    assert f"{path}:FAMILY" not in families.OUTSIDE


def test_its_rules_are_those_of_its_rows(tmp_path, monkeypatch):
    """Experts and latent attention: as with the project's own, also where a folder decides the shape."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own.py").write_text(
        "from aligner import api\nfrom aligner.families import FAMILIES\nfrom dataclasses import replace\n"
        'DEEP = replace(FAMILIES["deepseek_v3"], model_type="deep", also=())\n'
    )
    with pytest.raises(ConfigError, match=r"at least 1|>= 1"):
        compose(["model.family=own.py:DEEP"])
    cfg = compose(["model.family=own.py:DEEP", "model.init=there"])  # the shape of which is read later
    assert cfg.model.family == "own.py:DEEP"
    with pytest.raises(FamilyCodeError, match=r"own.py:LATER.*expected a Family `LATER` in own.py, which has DEEP"):
        compose(["model.family=own.py:LATER"])
    assert list(outside_code(cfg)) == ["model.family"]


def test_a_family_of_an_installed_package_is_named_by_its_module(tmp_path, monkeypatch):
    package = tmp_path / "own_models"
    package.mkdir()
    (package / "__init__.py").write_text(LIKE.format(LLAMA.format("").replace('"own"', '"packaged"')))
    monkeypatch.syspath_prepend(tmp_path)
    assert compose(["model.family=own_models:FAMILY"]).model.traits.model_type == "packaged"
    with pytest.raises(ConfigError, match=r"one of .*llama.*, or module:Family, path\.py:Family"):
        compose(["model.family=packaged"])
    other = tmp_path / "other.py"
    other.write_text(LIKE.format(LLAMA.format("").replace('"own"', '"packaged"')))
    with pytest.raises(FamilyCodeError, match="expected another one than own_models:FAMILY has"):
        compose([f"model.family={other}:FAMILY"])
