"""The file of the samples in flight: read by the run that wrote it, whole, or not at all."""

import pytest
import torch

from aligner.rollout.bank import Bank, Whole, read_bank, write_bank
from aligner.types import STOP, Generations


@pytest.fixture
def bank():
    tokens, lengths = torch.arange(12).view(4, 3), torch.tensor([3, 1, 0, 2])
    rows = Generations(tokens, lengths, torch.rand(4, 3), torch.full((4,), STOP), -1, versions=torch.ones_like(tokens))
    return Bank(2, [5, 8], rows, torch.tensor([1, 0, 0, 2]))


def parts(folder, key="this run"):
    return Whole(folder, key, None, 8)  # its layout is not asked: rank 0 writes all


@pytest.fixture
def stored(tmp_path, bank):
    parts(tmp_path).write(3, 7, lambda path: write_bank(bank, path), {"groups": bank.numbers})
    return tmp_path / "step-00000003"


def test_it_is_read_as_it_was_written(stored, bank):
    manifest = parts(stored.parent).whole(3)
    assert manifest[0]["weight_version"] == 7 and manifest[0]["groups"] == [5, 8]
    (found,) = parts(stored.parent).read(3, manifest, lambda *part: read_bank(bank, *part))
    for name, tensor in bank.rows.tensors().items():
        assert torch.equal(found.rows.tensors()[name], tensor), name
    assert torch.equal(found.ended, bank.ended)


def test_one_of_another_run_is_left_out_and_deleted(stored, capsys):
    assert parts(stored.parent, "another run").whole(3) is None
    assert not stored.exists() and capsys.readouterr().out == ""


@pytest.mark.parametrize(
    "torn, told", [("missing", ""), ("half", "damaged"), ("empty", "damaged"), ("altered", "damaged")]
)
def test_a_torn_description_is_none(stored, capsys, torn, told):
    """A kill before it is written, a file system that lost its end, an edit."""
    (path,) = stored.glob("*.json")
    text = path.read_bytes()
    if torn == "missing":
        path.unlink()
    else:
        path.write_bytes(
            {"half": text[: len(text) // 2], "empty": b"", "altered": text.replace(b"[5, 8]", b"[5, 9]")}[torn]
        )
    assert parts(stored.parent).whole(3) is None
    out = capsys.readouterr().out
    assert told in out and ("generated again" in out) == bool(told) and not stored.exists()
