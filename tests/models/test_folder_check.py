"""Whatever reads a folder accounts for every tensor in it."""

import json
from dataclasses import replace

import pytest
import torch
from safetensors.torch import save_file
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from aligner.config.sections.engine import EngineConfig
from aligner.engines.native.load import engine_from_folder
from aligner.errors import AlignerError, CheckpointError, ConfigError
from aligner.families.hf_config import config_from_hf, hf_config
from aligner.families.table import family_table
from aligner.megatron.model import Head
from aligner.models.folder_check import check_folder
from aligner.models.fused import joined, parts_of
from aligner.models.params import expected_hf_shapes, from_hf
from aligner.models.safetensors_io import INDEX, open_hf, write_hf
from aligner.models.slices import Shard, read_shard
from aligner.roles.model_init import InitialModel
from tests.tiny import DEEPSEEK, GPT_OSS, MIXTRAL, MODELS, MOE, MORE, WINDOWS

CASES = {**MODELS, **WINDOWS, "moe": MOE, "mixtral": MIXTRAL, "gpt_oss": GPT_OSS, "deepseek_v3": DEEPSEEK}
CASES["deepseek_v32"] = MORE["deepseek_v32"]
Q, EMBEDDING, HEAD = "model.layers.0.self_attn.q_proj.weight", "model.embed_tokens.weight", "lm_head.weight"


def weights(cfg, head="lm"):
    g = torch.Generator().manual_seed(0)
    shapes = expected_hf_shapes(cfg, head)
    return {name: torch.randn(shape, generator=g) for name, shape in shapes.items()}


def folder_of(path, cfg, tensors, head="lm", shard_bytes=1 << 30, **change):
    raw = hf_config(cfg, bos_token_id=None, eos_token_id=1, pad_token_id=0, head=head) | change
    write_hf(path, tensors.items(), raw, shard_bytes)
    return path


def as_engine(folder):
    return engine_from_folder(folder, EngineConfig(), device="cpu", dtype=torch.float32, pad_id=0)


def as_trainer(folder, head="lm"):
    return InitialModel(config_from_hf(folder), None, folder=folder).source(Head(head))


def refused(read, *words):
    with pytest.raises(AlignerError) as caught:
        read()
    text = str(caught.value)
    assert isinstance(caught.value, CheckpointError | ConfigError), text
    assert "\n" not in text and all(word in text for word in words), text


@pytest.mark.parametrize("case", CASES)
def test_a_whole_folder_is_accepted(case, tmp_path):
    for tied in (True, False):
        cfg = replace(CASES[case], tie_embeddings=tied)
        folder = folder_of(tmp_path / str(tied), cfg, weights(cfg), shard_bytes=1 << 14)
        assert check_folder(open_hf(folder), cfg) == expected_hf_shapes(cfg)


@pytest.mark.parametrize("read", [as_engine, as_trainer])
def test_trainer_and_engine_refuse_what_config_json_does_not_announce(read, tmp_path):
    cfg = MODELS["llama"]
    whole = weights(cfg)
    bias = {f"model.layers.{i}.self_attn.{x}_proj.bias": torch.zeros(32) for i in range(2) for x in "qkv"}
    cases = {
        "biases": (whole | bias, ("also hold", "q_proj.bias", "and 3 more")),
        "missing": ({n: t for n, t in whole.items() if n != Q}, ("lack", Q)),
        "layer": (whole | {n.replace("layers.1", "layers.2"): t.clone() for n, t in whole.items()}, ("layers.2.",)),
        "shape": (whole | {Q: torch.zeros(16, 32)}, (Q, "(16, 32)", "(32, 32)")),
        "integers": (whole | {Q: torch.zeros(32, 32, dtype=torch.int32)}, (Q, "I32", "F32")),
        "float8": (whole | {Q: torch.zeros(32, 32).to(torch.float8_e4m3fn)}, (Q, "F8_E4M3", "quantization_config")),
        "halves": (whole | {Q: whole[Q].half(), EMBEDDING: whole[EMBEDDING].bfloat16()}, ("F16", "BF16")),
        "a head": (whole | {HEAD: torch.zeros(101, 32)}, (HEAD, EMBEDDING, "tie_word_embeddings")),
        "another head": (whole | {HEAD: torch.zeros(100, 32)}, (HEAD, EMBEDDING, "tie_word_embeddings")),
    }
    for name, (tensors, words) in cases.items():
        folder = folder_of(tmp_path / name, cfg, tensors)
        refused(lambda folder=folder: read(folder), *words)


@pytest.mark.parametrize("read", [as_engine, as_trainer])
def test_a_copy_of_tied_embeddings_and_rotary_buffers_are_no_harm(read, tmp_path):
    cfg = replace(MODELS["qwen3"], tie_embeddings=True)
    whole = weights(cfg)
    settings = {
        HEAD: whole[EMBEDDING].clone(),
        "model.rotary_emb.inv_freq": torch.ones(8),
        "mtp.fc.weight": torch.ones(2),
    }
    settings |= {"model.layers.1.self_attn.rotary_emb.inv_freq": torch.ones(8)}
    read(folder_of(tmp_path / "hf", cfg, whole | settings))


def test_reward_models_and_language_models_are_told_apart(tmp_path):
    cfg = replace(MODELS["llama"], tie_embeddings=False)
    scorer = folder_of(tmp_path / "rm", cfg, weights(cfg, "score"), "score")
    plain = folder_of(tmp_path / "lm", cfg, weights(cfg))
    as_trainer(scorer, "score")
    as_trainer(plain, "score")  # the head of the language model is not of use
    for read in (as_engine, as_trainer):
        refused(lambda read=read: read(scorer), "score.weight", "reward model")


def test_an_index_is_held_against_its_files(tmp_path):
    cfg = MODELS["llama"]
    folder = folder_of(tmp_path / "hf", cfg, weights(cfg), shard_bytes=1 << 14)
    path = folder / INDEX
    index = json.loads(path.read_text())
    files = index["weight_map"]
    other = next(file for file in files.values() if file != files[Q])
    cases = [
        ({n: f for n, f in files.items() if n != Q}, (Q, "lack", "also hold")),
        (files | {Q: other}, (Q,)),
        (files | {Q: "absent.safetensors"}, ("absent.safetensors",)),
        (files | {Q: f"../hf/{files[Q]}"}, ("../hf/",)),
        (files | {Q: 3}, ("weight_map",)),
        ({}, ("none",)),
    ]
    for changed, words in cases:
        path.write_text(json.dumps(index | {"weight_map": changed}))
        refused(lambda: as_trainer(folder), *words)
    for text, word in (("{", "not valid JSON"), ("{}", "no value for weight_map"), ("[]", "expected a JSON object")):
        path.write_text(text)
        refused(lambda: as_trainer(folder), INDEX, word)
    path.write_text(json.dumps(index))
    as_trainer(folder)
    save_file({"model.extra": torch.zeros(1)}, folder / "model.safetensors")
    refused(lambda: as_trainer(folder), "found both")


def quantised(tensor, block):
    """Float8 and scales, as the Qwen3-*-FP8 folders have them: the largest number of a block becomes 448."""
    rows, columns = (-(-n // b) for n, b in zip(tensor.shape, block, strict=True))
    stored, scales = torch.empty(tensor.shape, dtype=torch.float8_e4m3fn), torch.empty(rows, columns)
    for i in range(rows):
        for j in range(columns):
            at = (slice(i * block[0], (i + 1) * block[0]), slice(j * block[1], (j + 1) * block[1]))
            scales[i, j] = tensor[at].abs().max() / 448
            stored[at] = (tensor[at] / scales[i, j]).to(torch.float8_e4m3fn)
    return stored, scales


def float8_folder(path, cfg, block, kind=torch.bfloat16, **change):
    """(folder, weight -> its numbers in float64); `kind`: dtype of scales."""
    stored, exact = {}, {}
    for name, tensor in weights(cfg).items():
        if name.endswith(("_proj.weight", "_with_mqa.weight")):
            stored[name], scales = quantised(tensor, block)
            stored[f"{name}_scale_inv"] = scales.to(kind)
            scales = scales.to(kind).double().repeat_interleave(block[0], 0).repeat_interleave(block[1], 1)
            exact[name] = stored[name].double() * scales[: tensor.shape[0], : tensor.shape[1]]
        else:
            stored[name] = tensor.bfloat16()
            exact[name] = stored[name].double()
    reports = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": list(block)}
    return folder_of(path, cfg, stored, quantization_config=reports | change), exact


@pytest.mark.parametrize("case", ["qwen3", "moe", "deepseek_v3", "deepseek_v32"])
def test_float8_blocks_are_dequantised(case, tmp_path):
    """Of the whole tensors, of the shards of tensor ranks that cut through blocks, and in the engine."""
    cfg, block = replace(CASES[case], hidden_size=40), (12, 16)  # no multiples of each other
    powers = {"scale_fmt": "ue8m0", "kind": torch.float8_e8m0fnu} if case == "deepseek_v32" else {}
    folder, exact = float8_folder(tmp_path / "hf", cfg, block, **powers)
    assert config_from_hf(folder).num_layers == cfg.num_layers
    tensors = open_hf(folder)
    assert check_folder(tensors, cfg).keys() == exact.keys() == set(tensors)
    for name, wanted in exact.items():
        assert torch.equal(tensors[name].double(), wanted.float().double()), name
    plain = {name: t.float() for name, t in exact.items()}
    for spec in family_table(cfg):
        whole = from_hf(spec, plain, cfg)
        if spec.tp_axis is not None and not spec.experts and spec.transform != "gate_up" and not spec.padded:
            parts = [read_shard(spec, tensors, cfg, Shard(2, rank)) for rank in (0, 1)]
            assert torch.equal(torch.cat(parts, spec.tp_axis), whole), spec.canonical
        assert torch.equal(read_shard(spec, tensors, cfg), whole), spec.canonical
    sums = as_engine(folder).checksums()
    folder_of(tmp_path / "plain", cfg, plain)
    assert sums == as_engine(tmp_path / "plain").checksums()


def test_the_layer_that_predicts_further_tokens_is_reported_and_not_read(tmp_path, capsys):
    """As in DeepSeek-V3's folders, in float8 too; in no other family, and no other layer."""
    folder, exact = float8_folder(tmp_path / "hf", DEEPSEEK, (16, 16), num_nextn_predict_layers=1)
    assert check_folder(open_hf(folder), DEEPSEEK).keys() == exact.keys() and not capsys.readouterr().err
    ahead = {f"model.layers.3.{name}.weight": torch.zeros(32) for name in ("enorm", "shared_head.norm")}
    product = {"model.layers.3.eh_proj.weight": torch.zeros(32, 64).to(torch.float8_e4m3fn)}
    product["model.layers.3.eh_proj.weight_scale_inv"] = torch.ones(2, 4)
    stored = {name: t.bfloat16() for name, t in exact.items()}
    reports = {"quant_method": "fp8", "weight_block_size": [16, 16]}
    folder = folder_of(tmp_path / "more", DEEPSEEK, stored | ahead | product, quantization_config=reports)
    assert check_folder(open_hf(folder), DEEPSEEK).keys() == exact.keys()
    assert "3 tensors (model.layers) are not trained; exports have them unchanged" in capsys.readouterr().err
    assert as_engine(folder).checksums().keys() == exact.keys()
    beyond = {"model.layers.4.enorm.weight": torch.zeros(32)}
    refused(lambda: as_trainer(folder_of(tmp_path / "beyond", DEEPSEEK, stored | beyond)), "model.layers.4.enorm")
    llama = weights(MODELS["llama"]) | {"model.layers.2.enorm.weight": torch.zeros(32)}
    refused(lambda: as_trainer(folder_of(tmp_path / "llama", MODELS["llama"], llama)), "model.layers.2.enorm")


def test_other_quantisations_are_refused_by_name(tmp_path):
    cfg = MODELS["qwen3"]
    folder, _ = float8_folder(tmp_path / "hf", cfg, (16, 16))
    content = json.loads((folder / "config.json").read_text())
    cases = [
        ({"quant_method": "gptq", "bits": 4}, ("quant_method='gptq'",)),
        ({"quant_method": "awq"}, ("quant_method='awq'",)),
        ({"quant_method": "mxfp4"}, ("quant_method='mxfp4'",)),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, ("quant_method='modelopt', quant_algo='NVFP4'",)),
        ({"quant_method": "compressed-tensors", "format": "pack-quantized"}, ("format='pack-quantized'",)),
        ({"quant_method": "fp8", "fmt": "e4m3"}, ("weight_block_size=None",)),
        ({"quant_method": "fp8", "fmt": "e5m2", "weight_block_size": [16, 16]}, ("fmt='e5m2'",)),
        ({"quant_method": "fp8", "activation_scheme": "static", "weight_block_size": [16, 16]}, ("static",)),
        ({"quant_method": "fp8", "weight_block_size": [16]}, ("weight_block_size=[16]",)),
        ({"quant_method": "fp8", "weight_block_size": [16, 0]}, ("weight_block_size=[16, 0]",)),
        ({"quant_method": "fp8", "weight_block_size": [8, 16]}, ("scale_inv", "shape")),
        ("fp8", ("quantization_config='fp8'",)),
        (None, ("weight_scale_inv",)),
    ]
    for change, words in cases:
        (folder / "config.json").write_text(json.dumps(content | {"quantization_config": change}))
        refused(lambda: as_trainer(folder), *words)
    for algorithm, words in ((None, "weight_scale_inv"), ("NVFP4", "hf_quant_config.json has quant_algo='NVFP4'")):
        (folder / "hf_quant_config.json").write_text(json.dumps({"quantization": {"quant_algo": algorithm}}))
        refused(lambda: as_trainer(folder), words)
    (folder / "hf_quant_config.json").unlink()
    (folder / "config.json").write_text(json.dumps(content))
    as_trainer(folder)
    tensors = open_hf(folder)
    plain = {name: tensors._read(name, lambda file, name=name: file.get_tensor(name)) for name in tensors._listed}
    plain[f"{Q}_scale_inv"][0, 0] = float("nan")
    write_hf(folder, plain.items(), content)
    with pytest.raises(CheckpointError, match=r"q_proj.weight_scale_inv: expected positive finite"):
        open_hf(folder)[Q]


PACKED = replace(GPT_OSS, hidden_size=64, ffn_hidden_size=96, moe=replace(GPT_OSS.moe, ffn_hidden_size=96))
TOLD = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]}


def packed_folder(path, change=lambda tensors: None, message=TOLD):
    """(folder, its tensors): experts as random bytes, which are all of MXFP4's numbers."""
    g, parts, stored = torch.Generator().manual_seed(0), parts_of(PACKED), {}
    for name, tensor in joined(weights(PACKED).items(), parts):
        if name.endswith(("gate_up_proj", "down_proj")):
            experts, columns, rows = tensor.shape
            shape = (experts, rows, columns // 32)
            stored[f"{name}_blocks"] = torch.randint(0, 256, (*shape, 16), generator=g, dtype=torch.uint8)
            stored[f"{name}_scales"] = torch.randint(110, 135, shape, generator=g, dtype=torch.uint8)
        else:
            stored[name] = tensor.bfloat16()
    change(stored)
    return folder_of(path, PACKED, stored, **({"quantization_config": message} if message else {})), stored


def test_packed_experts_are_those_of_transformers(tmp_path):
    """Whole, of the shards of tensor ranks that cut through blocks, in the engine, and in transformers' own model."""
    folder, stored = packed_folder(tmp_path / "hf")
    plain = {name: t for name, t in stored.items() if not name.endswith(("_blocks", "_scales"))}
    for name in (name.removesuffix("_blocks") for name in stored if name.endswith("_blocks")):
        plain[name] = convert_moe_packed_tensors(stored[f"{name}_blocks"], stored[f"{name}_scales"])
    tensors, wanted = open_hf(folder), open_hf(folder_of(tmp_path / "plain", PACKED, plain))
    assert check_folder(tensors, PACKED).keys() == set(wanted) == set(tensors)
    assert all(torch.equal(tensors[name], wanted[name].float()) for name in wanted)
    for spec in (spec for spec in family_table(PACKED) if ".mlp." in spec.canonical):
        for shard in (Shard(), Shard(2, 1, 1, 2), Shard(4, 2)):
            read = [read_shard(spec, source, PACKED, shard).float() for source in (tensors, wanted)]
            assert torch.equal(*read), (spec.canonical, shard)
    assert as_engine(folder).checksums() == as_engine(tmp_path / "plain").checksums()


def test_damaged_packed_experts_are_refused(tmp_path):
    blocks, scales = (f"model.layers.1.mlp.experts.down_proj_{end}" for end in ("blocks", "scales"))

    def damage(name, tensor):
        return lambda tensors: tensors.__setitem__(name, tensor(tensors[name]))

    cases = {
        "no scales": (lambda tensors: tensors.pop(scales), TOLD, (blocks, "also hold")),
        "not told": (lambda tensors: None, None, ("_blocks", "also hold")),
        "another": (lambda tensors: None, TOLD | {"quant_method": "gptq"}, ("quant_method='gptq'",)),
        "shape": (damage(blocks, lambda t: t[:, :-1].clone()), TOLD, (blocks, "shape")),
        "rows": (damage(scales, lambda t: t[..., :-1].clone()), TOLD, (scales, "shape")),
        "type": (damage(scales, lambda t: t.float()), TOLD, (scales, "F32", "U8")),
        "no number": (damage(scales, lambda t: t.fill_(255)), TOLD, (scales, "255")),
        "too large": (damage(scales, lambda t: t.fill_(254)), TOLD, (scales, "254")),
    }
    for name, (change, reported, words) in cases.items():
        folder, _ = packed_folder(tmp_path / name, change, reported)
        refused(lambda folder=folder: as_engine(folder), *words)
