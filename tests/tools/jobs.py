"""What the ranks run for the tests of this folder."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist

from aligner.cluster.env import RankEnv
from aligner.config.sections.model.config import ModelConfig
from aligner.config.sections.parallel import ParallelConfig
from aligner.errors import AlignerError
from aligner.megatron.attention import RMSNorm
from aligner.megatron.checkpoint import load_model, save_model
from aligner.megatron.checkpoint_files import write_manifest
from aligner.megatron.checkpoint_index import read_index
from aligner.megatron.groups import init_distributed
from aligner.megatron.model import Head
from aligner.models.hf_config import hf_config
from aligner.models.safetensors_io import write_hf
from aligner.roles.model_init import resolve
from aligner.tools import convert as tool
from aligner.tools.shared_files import peak_memory_bytes
from tests.megatron.jobs import build, weights
from tests.tiny import wild_source


def convert(what: str, source: Path, goal: Path, fail_after: int = -1, fresh: bool = False, **options) -> int | str:
    """Bytes that went through this rank; with `fail_after` the disk is full after so many of them. Or the error."""
    from aligner.megatron.chunks import BlockFile
    from aligner.models.safetensors_stream import SafetensorsFile

    kind = BlockFile if what == "import" else SafetensorsFile
    plain, written, errors = kind.write, 0, []

    def counted(self, data):
        nonlocal written
        written += memoryview(data).nbytes
        if 0 <= fail_after < written * dist.get_world_size():
            self._file.close()
            self._file = open("/dev/full", "wb", buffering=0)  # noqa: SIM115
        return plain(self, data)

    env = RankEnv(dist.get_rank(), 0, dist.get_world_size(), dist.get_world_size())
    with mock.patch.object(kind, "write", counted), contextlib.ExitStack() as told:
        told.push(lambda kind, error, trace: isinstance(error, AlignerError) and errors.append(str(error)) is None)
        if what == "import":
            tool.import_hf(Path(source), Path(goal), env, fresh=fresh, **options)
        else:
            tool.export_checkpoint(Path(source), Path(goal), env, fresh=fresh, **({"part": ""} | options))
    return errors[0] if errors else written


def import_beside_extra_state(source: Path, goal: Path) -> list[str]:
    """What an import's index names, where modules have a state beside their tensors, as TransformerEngine's do."""
    with mock.patch.object(RMSNorm, "get_extra_state", lambda self: torch.ones(3, dtype=torch.uint8), create=True):
        convert("import", source, goal, tensor=1, file_bytes=1e9)
    return sorted(read_index(goal / "checkpoints/step-00000000/policy").state_dict_metadata)


def load_and_save(run: Path, parallel: ParallelConfig, outputs: int) -> dict[str, torch.Tensor]:
    """Load an imported checkpoint on a layout, and save it from there in its place; the full weights."""
    initial = resolve(ModelConfig(dtype="float32"), str(run), 0)
    head = Head("score", outputs) if outputs else Head()
    model = build(initial.config, parallel, head=head, source=wild_source(initial.config, seed=5))
    load_model(model, initial.checkpoint, with_optimizer=False)
    dist.barrier()  # all have read it
    if dist.get_rank() == 0:
        for path in [*initial.checkpoint.iterdir()]:
            path.unlink()
    dist.barrier()
    save_model(model, initial.checkpoint)
    if dist.get_rank() == 0:
        write_manifest(initial.checkpoint.parent)
    return weights(model)


def memory_of_a_round_trip(folder: str) -> None:
    """Prints how much more memory importing and exporting a large model takes than a small one, and its bytes."""
    from aligner.data.tokenizer import byte_tokenizer
    from aligner.models.families import expected_hf_shapes

    init_distributed(RankEnv(), "auto", 60)
    root, env = Path(folder), RankEnv()
    peaks, total = [], 0
    for layers in (1, 40):
        cfg = ModelConfig(
            family="llama", num_layers=layers, hidden_size=512, ffn_hidden_size=1536, num_heads=8, num_kv_heads=2,
            vocab_size=300, tie_embeddings=False,
        )  # fmt: skip
        shapes, hf = expected_hf_shapes(cfg), root / f"hf{layers}"
        raw = hf_config(cfg, bos_token_id=None, eos_token_id=None, pad_token_id=None, dtype="bfloat16")
        tensors = ((n, torch.randn(s, dtype=torch.bfloat16)) for n, s in shapes.items())
        write_hf(hf, tensors, raw, max_shard_bytes=4 << 20)
        byte_tokenizer(str(hf))
        total = sum(p.stat().st_size for p in hf.glob("*.safetensors"))
        tool.import_hf(hf, root / f"run{layers}", env, tensor=1, file_bytes=5e7, fresh=False)
        peaks.append(peak_memory_bytes())
        tool.export_checkpoint(root / f"run{layers}", root / f"out{layers}", env, part="", file_bytes=5e7, fresh=False)
        peaks.append(peak_memory_bytes())
    index = json.loads((root / "out40" / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] <= total
    print(peaks[2] - peaks[1], peaks[3] - peaks[1], total)
