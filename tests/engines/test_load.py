import torch
from torch import Tensor

from aligner.config.sections.engine import EngineConfig
from aligner.engines.native import load
from aligner.families.hf_config import hf_config
from aligner.models.safetensors_io import HfTensors, write_hf
from aligner.ops.kernels.checksum import tensor_checksum
from tests.engines.contract import LLAMA, reference
from tests.tiny import hf_weights


def test_files_are_let_go_while_they_are_read(tmp_path, monkeypatch):
    """Else their pages would be memory of this process beside the engine's own weights."""
    weights = hf_weights(reference(LLAMA))
    write_hf(tmp_path, weights.items(), hf_config(LLAMA, bos_token_id=None, eos_token_id=1, pad_token_id=0), 1 << 30)
    read, most = HfTensors.__getitem__, max(map(Tensor.numel, weights.values())) * 4
    held, since = [], [0]

    def reading(self: HfTensors, name: str) -> Tensor:
        since[0] = (since[0] if self._open else 0) + weights[name].nbytes
        held.append(since[0])
        return read(self, name)

    monkeypatch.setattr(HfTensors, "__getitem__", reading)
    monkeypatch.setattr(load, "_MAPPED", most)
    engine = load.engine_from_folder(tmp_path, EngineConfig(), device="cpu", dtype=torch.float32, pad_id=0)
    assert most < max(held) <= 2 * most < sum(w.nbytes for w in weights.values())
    assert engine.checksums() == {name: tensor_checksum(weight) for name, weight in weights.items()}
