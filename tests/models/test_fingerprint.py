"""What the hash of a model folder notices."""

import pytest
import torch

from aligner.models import fingerprint
from aligner.models.fingerprint import digest, file_fingerprint, folder_view
from aligner.models.safetensors_io import save_whole


@pytest.fixture
def large(tmp_path, monkeypatch):
    """A file that is not hashed whole: 200 kB, of which 1 kB and 16 blocks of 64 bytes are read."""
    for name, value in (("WHOLE_BYTES", 10_000), ("HEAD_BYTES", 1_000), ("BLOCK_BYTES", 64), ("BLOCKS", 16)):
        monkeypatch.setattr(fingerprint, name, value)
    path = tmp_path / "model.safetensors"
    save_whole(path, {"a": torch.randn(25_000, generator=torch.Generator().manual_seed(0)), "b": torch.zeros(100)}, {})
    return path


def change(path, offset):
    content = bytearray(path.read_bytes())
    content[offset] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize("offset", [0, 12, 999, "middle", -64, -1])
def test_head_and_end_of_a_large_file_count(large, offset):
    before = file_fingerprint(large)
    assert file_fingerprint(large) == before
    change(large, large.stat().st_size // 2 - 32 if offset == "middle" else offset)  # where a block ends
    assert file_fingerprint(large) != before


def test_a_training_step_counts(large):
    """Every weight by the last bit of its float32."""
    before = file_fingerprint(large)
    content = bytearray(large.read_bytes())
    content[1000::4] = bytes(byte ^ 1 for byte in content[1000::4])
    large.write_bytes(content)
    assert file_fingerprint(large) != before


def test_the_size_of_a_file_counts(large):
    before = file_fingerprint(large)
    large.write_bytes(large.read_bytes() + b"\0")
    assert file_fingerprint(large) != before


def test_a_folder_is_its_model_and_tokenizer(large):
    folder, before = large.parent, digest(folder_view(large.parent))
    (folder / "README.md").write_text("a card")
    (folder / ".git").mkdir()
    assert digest(folder_view(folder)) == before
    seen = {before}
    for name in ("config.json", "tokenizer.json", "aligner.json", "model-2.safetensors"):
        (folder / name).write_text("{}")
        seen.add(digest(folder_view(folder)))
        (folder / name).unlink()
    assert len(seen) == 5
