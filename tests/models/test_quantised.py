"""DeepSeek-V4's published folders: names without `model.`, float8 beside experts in float8 or MXFP4."""

import json
from dataclasses import replace
from itertools import product

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from aligner.data.tokenizer import byte_tokenizer
from aligner.errors import CheckpointError
from aligner.families.hf_config import config_from_hf
from aligner.families.table import family_table
from aligner.models.folder_check import check_folder
from aligner.models.params import from_hf
from aligner.models.safetensors_io import INDEX, SINGLE, open_hf
from aligner.models.slices import Shard, read_shard
from tests.models.test_beside import converted, stored, through_training
from tests.tiny import MORE, batch, transformers_model, write_folder

pytestmark = pytest.mark.multirank
V4 = MORE["deepseek_v4"]
# ranks cut through blocks of 12 x 16 and groups of 32
MOE = replace(V4.moe, ffn_hidden_size=96, shared_ffn_hidden_size=96)
CFG = replace(V4, vocab_size=263, hidden_size=64, ffn_hidden_size=96, moe=MOE)
PLAIN = ("attn_norm", "ffn_norm", "q_norm", "attn.norm", "compressor", "weights_proj", "gate", "embed", "norm.", "head")
BLOCK = (12, 16)
W2, MTP = "layers.1.ffn.experts.3.w2", "mtp.0.ffn.experts.1.w1.scale"


def published_name(name: str) -> str:
    name = name.replace(".attn.norm.", ".attn.kv_norm.")  # which transformers writes and does not look for
    for own, theirs in (("model.embed_tokens.", "embed."), ("model.hc_head.hc_", "hc_head_"), ("model.", "")):
        if name.startswith(own):
            return theirs + name.removeprefix(own)
    return name


def pairs(shape: tuple[int, int], g: torch.Generator) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Random bytes, scales, and the numbers that they mean, the lower half of a byte first."""
    rows, columns = shape
    stored = torch.randint(0, 256, (rows, columns // 2), generator=g, dtype=torch.uint8)
    scales = torch.randint(119, 123, (rows, columns // 32), generator=g, dtype=torch.uint8)
    bytes_, powers, out = stored.tolist(), scales.tolist(), []
    for i, j in product(range(rows), range(columns)):
        half = bytes_[i][j // 2] >> 4 if j % 2 else bytes_[i][j // 2] % 16
        sign, exponent, last = half // 8, half // 2 % 4, half % 2
        size = (1 + last / 2) * 2.0 ** (exponent - 1) if exponent else last / 2
        out.append((-size if sign else size) * 2.0 ** (powers[i][j // 32] - 127))
    exact = torch.tensor(out, dtype=torch.float64).view(shape)
    return stored.view(torch.int8), scales.view(torch.float8_e8m0fnu), exact


def blocks(tensor: torch.Tensor, kind: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    grid = [-(-n // size) for n, size in zip(tensor.shape, BLOCK, strict=True)]
    scales, out = torch.empty(grid), torch.empty(tensor.shape, dtype=torch.float64)
    numbers = torch.empty(tensor.shape, dtype=torch.float8_e4m3fn)
    for i, j in product(*map(range, grid)):
        at = slice(i * BLOCK[0], (i + 1) * BLOCK[0]), slice(j * BLOCK[1], (j + 1) * BLOCK[1])
        scales[i, j] = (tensor[at].abs().max() / 256).to(kind).float()
        numbers[at] = (tensor[at] / scales[i, j]).to(numbers.dtype)
        out[at] = numbers[at].double() * scales[i, j].double()
    return numbers, scales.to(kind), out


def published(folder, experts: str, change=lambda tensors: None):
    """(folder, transformers' name -> its numbers in float64, tensors of heads that predict ahead, in exports)."""
    write_folder(*transformers_model(CFG), folder)
    byte_tokenizer(str(folder))
    g, own = torch.Generator().manual_seed(0), load_file(folder / SINGLE)
    tensors, exact = {}, {}
    kind = torch.float32 if experts == "fp8" else torch.float8_e8m0fnu
    for name, tensor in own.items():
        theirs, scaled = published_name(name), True
        if ".experts." in name and experts == "fp4":
            numbers, scales, exact[name] = pairs(tensor.shape, g)
        elif name.endswith(".weight") and tensor.dim() == 2 and not any(x in theirs for x in PLAIN):
            numbers, scales, exact[name] = blocks(tensor, kind)
        else:
            numbers, scaled, exact[name] = tensor, False, tensor.double()
        tensors[theirs] = numbers
        if scaled:
            tensors[theirs.replace(".weight", ".scale")] = scales
    ahead = {"mtp.0.enorm.weight": torch.randn(64).bfloat16(), "mtp.0.hc_head_fn": torch.randn(3, 4)}
    ahead |= {f"mtp.0.ffn.experts.{i}.w1.bias": torch.randn(4) for i in range(2)}
    tensors |= ahead
    names = [f"mtp.0.ffn.experts.{i}.w1" for i in range(2)]
    for name in names:
        made = pairs((8, 32), g) if experts == "fp4" else blocks(torch.randn(16, 20, generator=g), kind)
        tensors[f"{name}.weight"], tensors[f"{name}.scale"], ahead[f"{name}.weight"] = *made[:2], made[2].float()
    change(tensors)
    (folder / SINGLE).unlink()
    files = {name: f"{name.endswith('.scale')}.safetensors" for name in tensors}
    for file in set(files.values()):
        save_file({name: t for name, t in tensors.items() if files[name] == file}, folder / file)
    (folder / INDEX).write_text(json.dumps({"weight_map": files}))
    raw = json.loads((folder / "config.json").read_text())
    scheme = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": list(BLOCK), "scale_fmt": "ue8m0"}
    far = raw.pop("rope_parameters")["compress"]
    for key in ("layer_types", "mlp_layer_types", "partial_rotary_factor"):
        del raw[key]
    raw |= {"compress_ratios": [0, 4, 128, 4, 0], "num_hash_layers": 2, "qk_rope_head_dim": 4, "rope_scaling": far}
    raw |= {"quantization_config": scheme, "num_nextn_predict_layers": 1}
    (folder / "config.json").write_text(json.dumps(raw | ({"expert_dtype": "fp4"} if experts == "fp4" else {})))
    return folder, exact, ahead


@pytest.mark.parametrize("experts", ["fp8", "fp4"])
def test_published_folders_hold_the_decoded_model(ranks, tmp_path, experts):
    """Whole tensors, the shards of tensor ranks, logits, and exports."""
    folder, exact, ahead = published(tmp_path / "hf", experts)
    cfg, tensors = config_from_hf(folder), open_hf(folder)
    plain = {name.replace("head.weight", "lm_head.weight", name == "head.weight"): t for name, t in exact.items()}
    assert check_folder(tensors, cfg).keys() == plain.keys() == set(tensors) - ahead.keys()
    for name, wanted in plain.items():
        assert torch.equal(tensors[name].double(), wanted.float().double()), name
    decoded = {name: t if t.dtype == torch.int64 else t.float() for name, t in plain.items()}
    for spec in family_table(cfg):
        whole = from_hf(spec, decoded, cfg)
        if spec.tp_axis is not None and spec.transform not in ("gate_up", "experts_gate_up") and not spec.padded:
            parts = [read_shard(spec, tensors, cfg, Shard(2, rank)) for rank in (0, 1)]
            assert torch.equal(torch.cat(parts, spec.tp_axis), whole), spec.canonical
        assert torch.equal(read_shard(spec, tensors, cfg), whole), spec.canonical

    theirs = tmp_path / "theirs"  # transformers reads the published names, of decoded tensors
    write_folder(*transformers_model(CFG), theirs)
    save_file(
        {published_name(name): t.float() if t.is_floating_point() else t for name, t in exact.items()},
        theirs / SINGLE,
        metadata={"format": "pt"},
    )
    model, info = transformers.AutoModelForCausalLM.from_pretrained(theirs, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    rows = batch(CFG, rows=2, width=11)
    job = {"folder": str(folder), "out": tmp_path / "out", "tokens": rows.tokens, "lengths": rows.lengths}
    logits = ranks.run(through_training, **job)[0]
    real = torch.arange(11)[None] < rows.lengths[:, None]
    with torch.no_grad():
        wanted = model(rows.tokens, attention_mask=real.long()).logits
    assert (logits - wanted)[real].abs().max() <= 1e-4 and wanted[real].std() > 0.1
    ranks.run(converted, folder=folder, run=tmp_path / "run", out=tmp_path / "later", file_bytes=1e6)
    for out in (tmp_path / "out", tmp_path / "later"):
        after, raw = stored(out), json.loads((out / "config.json").read_text())
        assert after.keys() == exact.keys() | ahead.keys() and not {"quantization_config", "expert_dtype"} & raw.keys()
        assert raw["num_nextn_predict_layers"] == 1
        assert all(after[name].dtype == t.dtype and torch.equal(after[name], t) for name, t in ahead.items())
        assert all(torch.equal(after[name].double(), t.float().double()) for name, t in exact.items())
        model = transformers.AutoModelForCausalLM.from_pretrained(out)
        with torch.no_grad():
            assert torch.equal(model(rows.tokens, attention_mask=real.long()).logits, wanted)


def put(name, change):
    return lambda tensors: tensors.__setitem__(name, change(tensors[name]))


@pytest.mark.parametrize(
    "experts, change, words",
    [
        ("fp8", lambda tensors: tensors.pop(f"{W2}.scale"), f"{W2}.weight is F8_E4M3 with no scale"),
        ("fp4", lambda tensors: tensors.pop(f"{W2}.scale"), f"{W2}.weight is I8 with no scale"),
        ("fp8", put(f"{W2}.scale", lambda t: t[:-1].clone()), rf"{W2}.scale has shape \(5, 6\): expected \(6, 6\)"),
        (
            "fp4",
            put(f"{W2}.scale", lambda t: t[:, :-1].clone()),
            rf"{W2}.scale has shape \(64, 2\): expected \(64, 3\)",
        ),
        ("fp4", put(f"{W2}.weight", lambda t: t[:-1].clone()), rf"{W2}.weight has shape \(63, 96\), .* \(64, 96\)"),
        ("fp4", put(f"{W2}.weight", lambda t: t[:, :-4].clone()), rf"{W2}.weight has rows of 88: .* multiple of 32"),
        ("fp4", put(MTP, lambda t: t[:-1].clone()), rf"{MTP} has shape \(7, 1\): expected \(8, 1\)"),
        ("fp4", put(f"{W2}.scale", lambda t: t.float()), f"{W2}.scale is F32: expected F8_E8M0"),
        ("fp4", lambda tensors: tensors.update({f"model.{W2}.scale": torch.ones(1)}), f"{W2}.scale is there twice"),
    ],
)
def test_damaged_folders_are_refused(tmp_path, experts, change, words):
    folder = published(tmp_path, experts, change)[0]
    with pytest.raises(CheckpointError, match=words):
        check_folder(open_hf(folder), config_from_hf(folder))


@pytest.mark.parametrize("experts, words", [("fp8", "positive finite"), ("fp4", "up to 252, found 255")])
def test_scales_are_numbers(tmp_path, experts, words):
    none = put(f"{W2}.scale", lambda t: t.fill_(float("nan")))
    tensors = open_hf(published(tmp_path, experts, none)[0])
    with pytest.raises(CheckpointError, match=rf"{W2}.scale: expected .*{words}"):
        tensors.read(f"model.{W2}.weight", 1, 0, 48)
