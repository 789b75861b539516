"""What a folder holds beside a language model: through training, import and export byte for byte."""

import copy
import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import transformers
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from aligner.cluster.env import RankEnv
from aligner.config.sections.model.config import ModelConfig
from aligner.config.sections.model.mtp import MtpConfig
from aligner.data.tokenizer import byte_tokenizer
from aligner.errors import CheckpointError, ConfigError
from aligner.families import FAMILIES
from aligner.families.hf_config import config_from_hf, hf_config
from aligner.families.within import put_within
from aligner.megatron.groups import build_layout
from aligner.megatron.model import Head
from aligner.megatron.train import ShardedModel
from aligner.models.folder_check import check_folder
from aligner.models.fused import joined, parts_of
from aligner.models.params import expected_hf_shapes
from aligner.models.safetensors_io import INDEX, SINGLE, open_hf
from aligner.refit.export import export_hf
from aligner.roles.model_init import resolve
from aligner.tools import convert
from tests.megatron.models import ONE, plain_logits
from tests.tiny import DEEPSEEK, MORE, WINDOWS, batch, transformers_model, write_folder

pytestmark = pytest.mark.multirank
QWEN = {"depth": 2, "hidden_size": 16, "intermediate_size": 24, "num_heads": 2, "out_hidden_size": 32, "patch_size": 4}
QWEN |= {"num_position_embeddings": 16}
PIXTRAL = {"model_type": "pixtral", "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2}
PIXTRAL |= {"num_attention_heads": 2, "head_dim": 8, "image_size": 28, "patch_size": 14}
SIGLIP = {key: PIXTRAL[key] for key in PIXTRAL if key not in ("model_type", "head_dim")}
QWENS, MISTRALS = ("qwen3_5", "qwen3_5_moe"), ("mistral", "ministral3")
OUTER = {name: {"vision_config": QWEN, "image_token_id": 90, "video_token_id": 91} for name in QWENS}
OUTER |= {name: {"vision_config": PIXTRAL, "image_token_index": 90} for name in MISTRALS}
OUTER["gemma3"] = {"vision_config": SIGLIP, "mm_tokens_per_image": 4}
OUTER["gemma4"] = {f"{name}_token_id": 90 for name in ("boi", "eoi", "image", "video", "boa", "audio")}
OUTER["gemma4"] |= {"audio_config": None}
OUTER["gemma4"]["vision_config"] = {**SIGLIP, "num_key_value_heads": 2, "head_dim": 8, "position_embedding_size": 16}
OUTER["gemma4-experts"] = OUTER["gemma4-inputs"] = OUTER["gemma4"]
TIED = ("mistral", "gemma3", "gemma4", "gemma4-experts", "gemma4-inputs")
MODELS = {name: replace((WINDOWS | MORE)[name], vocab_size=263, tie_embeddings=name in TIED) for name in OUTER}


def whole_folder(name: str, folder: Path) -> tuple[Path, torch.nn.Module]:
    """A published kind of folder: a vision tower, the language model within, and heads of multi-token prediction."""
    cfg = MODELS[name]
    kind = FAMILIES[cfg.family].within[0]
    inner = hf_config(cfg, bos_token_id=None, eos_token_id=1, pad_token_id=0)
    if name in QWENS:
        inner |= {"mtp_num_hidden_layers": 1}
        inner["rope_parameters"] |= {"mrope_interleaved": True, "mrope_section": [1, 1, 0]}
    raw = put_within(OUTER[name] | {"model_type": kind}, inner)
    model = transformers.AutoModelForImageTextToText.from_config(
        transformers.AutoConfig.for_model(**copy.deepcopy(raw))
    ).eval()
    g = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.randn(p.shape, generator=g) * 0.2)
    model.save_pretrained(folder)
    tensors = load_file(folder / SINGLE)
    heads = {f"mtp.{x}.weight": torch.randn(3, 4, dtype=torch.bfloat16) for x in ("fc", "norm", "layers.0.mlp")}
    heads |= {f"mtp.layers.0.mlp.experts.{i}.up_proj.weight": torch.randn(2, 3) for i in range(2)}
    unused = f"model.language_model.layers.{cfg.num_layers - 1}.self_attn."  # of a layer that reads other keys
    keys = {f"{unused}{x}.weight": torch.randn(8, dtype=torch.bfloat16) for x in ("k_norm", "k_proj", "v_proj")}
    others = heads if name in QWENS else keys if cfg.attention.kv_shared_layers else {}
    save_file(tensors | others, folder / SINGLE, metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(raw | {"architectures": [type(model).__name__]}))
    byte_tokenizer(str(folder))
    return folder, model


def stored(folder: Path) -> dict[str, torch.Tensor]:
    out = {}
    for path in folder.glob("*.safetensors"):
        with safe_open(path, "pt") as file:
            out |= {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    return out


def through_training(folder: str, out: Path, tokens: torch.Tensor, lengths: torch.Tensor, ahead=0) -> torch.Tensor:
    initial = resolve(ModelConfig(dtype="float32", mtp=MtpConfig(ahead)), folder, 0)
    source = initial.source(Head())
    model = ShardedModel(initial.config, build_layout(ONE), Head(), torch.float32, torch.device("cpu"), source)
    export_hf(model, out, initial.tokenizer, None, initial.origin)
    return plain_logits(model, tokens, lengths)


def converted(folder: Path, run: Path, out: Path, file_bytes: float) -> None:
    convert.import_hf(folder, run, RankEnv(), tensor=1, file_bytes=file_bytes, fresh=False)
    convert.export_checkpoint(run, out, RankEnv(), role="", file_bytes=file_bytes, fresh=False)


def check_same(folder: Path, out: Path) -> None:
    before, after = stored(folder), stored(out)
    experts = {name for name in before if ".experts." in name and not name.startswith("mtp.")}  # stacked in exports
    assert before.keys() - experts == {name for name in after if ".experts." not in name or name.startswith("mtp.")}
    for name in before.keys() - experts:
        assert before[name].dtype == after[name].dtype and torch.equal(before[name], after[name]), name
    assert sorted(open_hf(folder)) == sorted(open_hf(out))
    assert bool(experts) == any(name.endswith(".experts.gate_up_proj") for name in after)
    theirs, ours = (json.loads((f / "config.json").read_text()) for f in (folder, out))
    text = {key for key in theirs["text_config"] if theirs["text_config"][key] != ours["text_config"].get(key)}
    assert text <= {"eos_token_id", "bos_token_id", "pad_token_id"}
    assert ours | {"text_config": 0} == theirs | {"text_config": 0}


@pytest.mark.parametrize("name", MODELS)
def test_what_nothing_trains_is_exported_byte_for_byte(ranks, tmp_path, capsys, name):
    folder, model = whole_folder(name, tmp_path / "hf")
    rows = batch(MODELS[name], rows=3, width=11)
    job = {"folder": str(folder), "out": tmp_path / "out", "tokens": rows.tokens, "lengths": rows.lengths}
    logits = ranks.run(through_training, **job)[0]
    real = torch.arange(11)[None] < rows.lengths[:, None]
    with torch.no_grad():
        wanted = model(rows.tokens, attention_mask=real.long()).logits
    assert (logits - wanted)[real].abs().max() <= 1e-4 and wanted[real].std() > 0.1
    ranks.run(converted, folder=folder, run=tmp_path / "run", out=tmp_path / "later", file_bytes=2e4)
    assert (tmp_path / "later" / INDEX).exists()
    for out in (tmp_path / "out", tmp_path / "later"):
        check_same(folder, out)
        loaded, info = type(model).from_pretrained(out, output_loading_info=True)
        assert not info["missing_keys"] and all(key.startswith("mtp.") for key in info["unexpected_keys"])
        with torch.no_grad():
            assert torch.equal(loaded(rows.tokens, attention_mask=real.long()).logits, wanted)
        if name in QWENS:
            text = transformers.AutoModelForCausalLM.from_pretrained(out, output_loading_info=True)[1]
            assert not text["missing_keys"], "the language model alone"


@pytest.mark.parametrize("name", QWENS)
def test_a_layer_that_is_trained_goes_back_to_where_it_was(ranks, tmp_path, name):
    """Beside a vision tower, in a file whose experts are stacked."""
    folder, _ = whole_folder(name, tmp_path / "hf")
    cfg, g = replace(MODELS[name], mtp=MtpConfig(1)), torch.Generator().manual_seed(1)
    own = [(n, torch.randn(s, generator=g)) for n, s in expected_hf_shapes(cfg).items() if n.startswith("mtp.")]
    rest = {n: t for n, t in load_file(folder / SINGLE).items() if not n.startswith("mtp.")}
    parts = {n: matrix for n, matrix in parts_of(cfg).items() if n.startswith("mtp.")}
    save_file(rest | dict(joined(own, parts)), folder / SINGLE, metadata={"format": "pt"})
    assert bool(parts) == ("mtp.layers.0.mlp.experts.gate_up_proj" in stored(folder))
    rows = batch(MODELS[name], rows=3, width=11)
    job = {"folder": str(folder), "out": tmp_path / "out", "tokens": rows.tokens, "lengths": rows.lengths}
    ranks.run(through_training, **job, ahead=1)
    check_same(folder, tmp_path / "out")
    save_file(rest, folder / SINGLE, metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=r"its weights lack mtp\.fc\.weight"):
        check_folder(open_hf(folder, ahead=True), cfg)


def test_a_scorer_is_exported_alone(ranks, tmp_path):
    folder, _ = whole_folder("qwen3_5", tmp_path / "hf")
    ranks.run(score_export, folder=str(folder), out=tmp_path / "out")
    config = json.loads((tmp_path / "out/config.json").read_text())
    assert config["model_type"] == "qwen3_5_text" and "vision_config" not in config
    names = set(stored(tmp_path / "out"))
    assert not [name for name in names if "visual" in name or "language_model" in name or "mtp" in name]
    loaded = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not loaded[1]["missing_keys"] and not loaded[1]["unexpected_keys"]


def score_export(folder: str, out: Path) -> None:
    initial = resolve(ModelConfig(dtype="float32"), folder, 0)
    head = Head("score", 1)
    model = ShardedModel(
        initial.config, build_layout(ONE), head, torch.float32, torch.device("cpu"), initial.source(head)
    )
    export_hf(model, out, initial.tokenizer, None, initial.origin)


def test_heads_that_predict_ahead_are_exported(ranks, tmp_path, capsys):
    """In DeepSeek's kind of folder, a further layer; and where nothing else is beside the language model."""
    cases = {}
    for cfg in (DEEPSEEK, MORE["glm4_moe"], MORE["glm_moe_dsa"]):
        names = (f"model.layers.{cfg.num_layers}.{name}.weight" for name in ("enorm", "shared_head.norm"))
        cases[cfg.family] = cfg, {name: torch.randn(4) for name in names}, {"num_nextn_predict_layers": 1}
    cases["qwen3_next"] = MORE["qwen3_next"], {"mtp.fc.weight": torch.randn(4)}, {}
    names = ("0.eh_proj", "0.mixer.q_proj", "1.mixer.gate", "1.mixer.experts.0.up_proj", "1.mixer.experts.1.up_proj")
    heads = {f"mtp.layers.{name}.weight": torch.randn(4) for name in names}  # attention, then experts
    announced = {"num_nextn_predict_layers": 1, "mtp_hybrid_override_pattern": "*E"}
    cases["nemotron_h"] = MORE["nemotron_h"], heads, announced
    for name, (cfg, tensors, keys) in cases.items():
        model, raw = transformers_model(replace(cfg, vocab_size=263))
        folder = Path(write_folder(model, raw | keys, tmp_path / name))
        save_file(load_file(folder / SINGLE) | tensors, folder / SINGLE)
        byte_tokenizer(str(folder))
        rows = batch(cfg, rows=1, width=3)
        out = tmp_path / f"{name}-out"
        ranks.run(through_training, folder=str(folder), out=out, tokens=rows.tokens, lengths=rows.lengths)
        after = stored(out)
        assert all(torch.equal(after[name], tensor) for name, tensor in tensors.items())
        assert json.loads((out / "config.json").read_text()).items() >= keys.items()
        write_folder(model, raw | keys, tmp_path / name)
        check_folder(open_hf(folder), config_from_hf(folder))
        count = len(keys.get("mtp_hybrid_override_pattern", "1"))
        line = f"{folder}: layers by config.json's num_nextn_predict_layers: expected {count}, found none"
        lines = [f"{line}: exports have none either"] if keys else []
        assert [line for line in capsys.readouterr().err.splitlines() if "config.json" in line] == lines
    whole = load_file(folder / SINGLE) | {name: t for name, t in heads.items() if ".1." not in name}
    save_file(whole, folder / SINGLE)
    with pytest.raises(CheckpointError, match="num_nextn_predict_layers: expected 2, found 1"):
        check_folder(open_hf(folder), config_from_hf(folder))


def test_an_incomplete_folder_is_refused(tmp_path, capsys):
    folder, _ = whole_folder("qwen3_5", tmp_path / "hf")
    cfg, whole = config_from_hf(folder), load_file(folder / SINGLE)
    config = json.loads((folder / "config.json").read_text())
    block = "model.visual.blocks.1."

    def refused(tensors, message, **keys):
        save_file(tensors, folder / SINGLE)
        (folder / "config.json").write_text(json.dumps(config | keys))
        with pytest.raises((CheckpointError, ConfigError), match=message):
            check_folder(open_hf(folder), config_from_hf(folder))

    def without(*starts):
        return {name: t for name, t in whole.items() if not name.startswith(starts)}

    refused(without(block + "attn.qkv.bias"), r"visual.blocks.0.attn.qkv.bias, but no model.visual.blocks.1.attn.qkv")
    refused(without(block), r"by config.json's vision_config.depth: expected 2, found 1")
    refused(without("mtp.layers.0.mlp.experts.0"), r"but no mtp.layers.0.mlp.experts.0.up_proj.weight")
    inner = config["text_config"]
    two = inner | {"mtp_num_hidden_layers": 2}
    refused(whole, r"text_config.mtp_num_hidden_layers: expected 2, found 1", text_config=two)
    refused(whole, r"model_type qwen3_5 around text_config.model_type qwen3_5_text.*'qwen2_vl'", model_type="qwen2_vl")
    refused(whole, r"tie_word_embeddings=False: expected True, as beside", tie_word_embeddings=True)
    twice = whole | {"model.norm.weight": whole["model.language_model.norm.weight"].clone()}
    refused(twice, r"model.norm.weight .* twice")
    (folder / SINGLE).rename(folder / "part.safetensors")
    index = {"weight_map": dict.fromkeys(twice, "part.safetensors")}
    (folder / INDEX).write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match=rf"{INDEX}: model.norm.weight .* twice"):
        open_hf(folder)
    (folder / INDEX).unlink()
    save_file(without("mtp.", "model.visual."), folder / SINGLE)
    (folder / "config.json").write_text(json.dumps(config))
    check_folder(open_hf(folder), cfg)  # nothing beside it is complete too
    line = "layers by config.json's text_config.mtp_num_hidden_layers: expected 1, found none: exports have none either"
    assert capsys.readouterr().err.splitlines()[-1] == f"{folder}: {line}"
