"""What a rank reads of the files: its shard, bit for bit, and nothing else."""

from dataclasses import replace

import pytest
import torch

from aligner.errors import CheckpointError, LayoutError
from aligner.families.table import family_table
from aligner.models.fused import parts_of
from aligner.models.params import from_hf, split_tp
from aligner.models.safetensors_io import HfTensors, open_hf
from aligner.models.safetensors_stream import SafetensorsFile
from aligner.models.slices import HfSource, Shard, placed, read_shard
from tests.tiny import GPT_OSS, MIXTRAL, MODELS, MOE, WINDOWS, hf_weights, transformers_model, write_folder

# as many key-value heads as the largest tensor-parallel size here
CASES = {
    name: replace(cfg, num_kv_heads=4, tie_embeddings=name not in ("qwen2", "mixtral"))
    for name, cfg in (MODELS | WINDOWS | {"qwen3_moe": MOE, "mixtral": MIXTRAL, "gpt_oss": GPT_OSS}).items()
}


class Counting(HfTensors):
    """Counts the elements that were read."""

    counted = 0

    def _read(self, name, work):
        actual = super()._read(name, work)
        self.counted += actual.numel() if isinstance(actual, torch.Tensor) else 0
        return actual


@pytest.mark.parametrize("name", CASES)
def test_shards_are_read_and_rebuild_the_whole(name, tmp_path):
    cfg = CASES[name]
    folder = write_folder(*transformers_model(cfg), tmp_path / "hf")
    plain, tensors = open_hf(folder), Counting(open_hf(folder)._listed, parts=parts_of(cfg))
    for spec in family_table(cfg):
        full = from_hf(spec, plain, cfg)
        for tensor in (1, 2, 4):
            rebuilt = torch.full(spec.shape, torch.nan)
            for first in range(0, spec.shape[0], 2) if spec.experts else (0,):
                for rank in range(tensor if spec.tp_axis is not None else 1):
                    shard = Shard(tensor, rank, first, 2 if spec.experts else 0)
                    tensors.counted = 0
                    got = read_shard(spec, tensors, cfg, shard)
                    wanted = split_tp(spec, full, tensor, rank)
                    wanted = wanted[first : first + 2] if spec.experts else wanted
                    assert torch.equal(got, wanted), (spec.canonical, shard)
                    assert tensors.counted <= got.numel(), (spec.canonical, shard)
                    for offsets, block in placed(spec, got, shard):
                        rebuilt[tuple(slice(o, o + n) for o, n in zip(offsets, block.shape, strict=True))] = block
            assert torch.equal(rebuilt, full), (spec.canonical, tensor)


def test_errors_name_the_tensor(tmp_path):
    cfg = MODELS["llama"]
    tensors = open_hf(write_folder(*transformers_model(cfg), tmp_path / "hf"))
    qkv = next(s for s in family_table(cfg) if s.transform == "qkv")
    with pytest.raises(LayoutError, match=r"parallel.tensor=4.*2 \(pieces of .*linear_qkv"):
        read_shard(qkv, tensors, cfg, Shard(4, 0))
    other = replace(cfg, hidden_size=64, head_dim=8)
    with pytest.raises(CheckpointError, match=r"q_proj.weight: shape \(32, 32\), .* \(32, 64\)"):
        read_shard(next(s for s in family_table(other) if s.transform == "qkv"), tensors, other)
    head = family_table(cfg, "score", 3)[-1]
    assert not HfSource(lambda: tensors, cfg)(head).any()
    with pytest.raises(CheckpointError, match=r"score.weight"):
        read_shard(head, tensors, cfg)


def test_a_streamed_file_is_what_safetensors_reads(tmp_path):
    weights = hf_weights(transformers_model(MODELS["qwen3"])[0])
    weights = {n: t.bfloat16() if i % 2 else t for i, (n, t) in enumerate(weights.items())}
    weights["odd"] = torch.arange(3.0).bfloat16()[:, None].expand(3, 5).t()  # not contiguous
    with SafetensorsFile(
        tmp_path / "model.safetensors", {n: (t.dtype, tuple(t.shape)) for n, t in weights.items()}
    ) as f:
        for name, tensor in weights.items():
            f.add(name, tensor)
    tensors = open_hf(tmp_path)
    assert list(tensors) and all(torch.equal(tensors[n], t) and tensors[n].dtype == t.dtype for n, t in weights.items())
    assert f.bytes == (tmp_path / "model.safetensors").stat().st_size
    with pytest.raises(RuntimeError), SafetensorsFile(tmp_path / "b.safetensors", {"a": (torch.float32, (2,))}) as f:
        raise RuntimeError("interrupted")
    assert not (tmp_path / "b.safetensors").exists()
