"""Save and load: the same layout goes on bit by bit, another layout has the same weights and optimizer."""

import json
import os
import pickle
import shutil
from dataclasses import replace

import pytest
import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, MetadataIndex

from aligner.config.sections.optim import OptimConfig
from aligner.config.sections.parallel import ParallelConfig
from aligner.errors import CheckpointError
from aligner.files import file_hash
from aligner.megatron.chunks import Blocks
from tests.tiny import LLAMA, MODELS, MOE

pytestmark = pytest.mark.multirank

OPTIM = OptimConfig(lr=1e-3, schedule="linear", warmup_steps=2)  # the next learning rate depends on the step
PLAIN = replace(OPTIM, distributed=False)
TP, PP, DP = ParallelConfig(tensor=2), ParallelConfig(pipeline=2), ParallelConfig()


def same(a, b):
    return a.keys() == b.keys() and all(torch.equal(t, b[n]) for n, t in a.items())


@pytest.mark.few(3)
@pytest.mark.parametrize(
    "world, parallel, dtype, optim",
    [
        (1, DP, torch.float32, PLAIN),
        (1, DP, torch.bfloat16, OPTIM),
        (1, DP, torch.bfloat16, PLAIN),
        (2, TP, torch.float32, OPTIM),
        (2, DP, torch.bfloat16, OPTIM),
        (2, DP, torch.float32, PLAIN),
        (2, PP, torch.float32, OPTIM),
        (4, PP, torch.bfloat16, OPTIM),
        (4, ParallelConfig(tensor=2, pipeline=2), torch.bfloat16, OPTIM),
    ],
)
def test_the_same_layout_goes_on_bit_by_bit(ranks, tmp_path, world, parallel, dtype, optim):
    cfg = MODELS["qwen3"]
    out = ranks.run(
        "tests.megatron.jobs:save_and_go_on",
        world=world, folder=tmp_path / "c", parallel=parallel, cfg=cfg, dtype=dtype, optim=optim,
    )[0]  # fmt: skip
    assert out["version"] == 2
    assert same(out["loaded"], out["saved"])
    assert out["resumed"] == out["went_on"]
    assert same(out["after_resumed"], out["after"]) and not same(out["after"], out["saved"])


@pytest.mark.parametrize(
    ("cfg", "parallel", "world", "optim"),
    [(LLAMA, DP, 2, OPTIM), (LLAMA, DP, 2, None), (LLAMA, PP, 4, OPTIM), (MOE, ParallelConfig(expert=2), 4, OPTIM)],
)
def test_one_of_the_data_parallel_copies_reads_the_weights(ranks, tmp_path, cfg, parallel, world, optim):
    job = {"folder": tmp_path / "c", "cfg": cfg, "parallel": parallel, "dtype": torch.bfloat16, "optim": optim}
    told = ranks.run("tests.megatron.jobs:weights_read", world=world, **job)
    assert all(same for _, same in told)
    names = [read for read, _ in told]
    if cfg is MOE:  # rank 1 the experts that rank 0 has not
        assert names[2:] == [set(), set()] and names[1] < names[0] and all("experts" in name for name in names[1])
    elif parallel is PP:
        assert names[1] == names[3] == set() and names[0] and names[2]
    else:
        assert names[0] and names[1] == set()


@pytest.mark.slow
@pytest.mark.parametrize("tied", [True, False])
def test_other_layouts_load_the_same_state(ranks, tmp_path, tied):
    cfg = replace(LLAMA, tie_embeddings=tied)
    job = {"cfg": cfg, "optim": OPTIM}
    first = ranks.run("tests.megatron.jobs:save_and_go_on", world=2, folder=tmp_path / "0", parallel=TP, **job)[0]
    layouts = [(2, PP), (2, DP), (1, DP), (4, ParallelConfig(tensor=2, pipeline=2)), (4, ParallelConfig(context=2))]
    for i, (world, parallel) in enumerate(layouts):
        out = ranks.run(
            "tests.megatron.jobs:load_and_step",
            world=world, folder=tmp_path / f"{i}", parallel=parallel, again=tmp_path / f"{i + 1}", **job,
        )[0]  # fmt: skip
        assert out["version"] == 2 and same(out["loaded"], first["saved"]), parallel
        for name, value in first["went_on"].items():
            assert out["resumed"][name] == pytest.approx(value, rel=1e-5), (parallel, name)
        for name, value in first["after"].items():
            assert torch.allclose(out["after_resumed"][name], value, atol=2e-6), (parallel, name)


@pytest.mark.few(2)
@pytest.mark.parametrize("optim", [OPTIM, PLAIN], ids=["sharded", "plain"])
@pytest.mark.parametrize("world, parallel", [(1, DP), (2, TP), (2, PP), (2, DP)])
def test_float32_score_heads_on_bfloat16_bodies(ranks, tmp_path, world, parallel, optim):
    job = {"folder": tmp_path / "c", "optim": optim}
    saved = ranks.run("tests.megatron.jobs:save_score", world=world, parallel=parallel, **job)[0]
    assert saved["version"] == 2 and same(saved["loaded"], saved["saved"])
    assert same(saved["after_resumed"], saved["after"])
    out = ranks.run("tests.megatron.jobs:load_score", world=1, parallel=DP, **job)[0]
    assert all(torch.equal(t.float(), saved["saved"][n].float()) for n, t in out["loaded"].items())
    assert out["resumed"]["grad_norm"] == pytest.approx(saved["went_on"]["grad_norm"], rel=5e-2)
    alone = ranks.run("tests.megatron.jobs:load_score_alone", folder=tmp_path / "c")[0]
    assert same(alone["loaded"], out["loaded"]) and alone["version"] == 0


@pytest.mark.few(2)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("optim", [OPTIM, PLAIN], ids=["sharded", "plain"])
def test_the_configs_settings_count_not_the_checkpoints(ranks, tmp_path, optim, dtype):
    changes = {"lr": 2e-3, "min_lr": 1e-5, "weight_decay": 0.5, "betas": [0.5, 0.6], "eps": 1e-3, "clip_grad": 0.1}
    other = replace(optim, schedule="cosine", **changes)
    job = {"optim": optim, "dtype": dtype}
    out = ranks.run("tests.megatron.jobs:load_with_settings", folder=tmp_path / "c", other=other, **job)[0]
    assert out["resumed"] == out["went_on"] and same(out["after_resumed"], out["after"])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_alone_start_a_new_optimizer(ranks, tmp_path, dtype):
    """The optimizer's float32 copies are those of the loaded weights, not of the ones before."""
    saved = ranks.run(
        "tests.megatron.jobs:save_and_go_on", folder=tmp_path / "c", parallel=DP, dtype=dtype, optim=OPTIM
    )[0]
    out = ranks.run(
        "tests.megatron.jobs:load_weights_only", folder=tmp_path / "c", frozen=False, dtype=dtype, optim=OPTIM
    )[0]
    assert same(out["loaded"], saved["saved"]) and out["version"] == 0
    assert out["resumed"]["lr"] == OPTIM.lr / 2  # the first step of the warm-up
    for name, value in out["after"].items():
        assert (value - saved["saved"][name]).abs().max() <= (2e-3 if dtype == torch.float32 else 2e-2), name


@pytest.fixture(scope="module")
def written(ranks, tmp_path_factory):
    folder = tmp_path_factory.mktemp("checkpoint") / "c"
    return folder, ranks.run("tests.megatron.jobs:save_and_go_on", folder=folder, parallel=DP, optim=OPTIM)[0]


@pytest.mark.parametrize("damage", ["flip", "cut", "gone", "metadata", "folder"])
def test_damage_is_told(ranks, written, tmp_path, damage):
    folder = tmp_path / "damaged"
    shutil.copytree(written[0], folder)
    victim = max((p for p in folder.iterdir() if p.suffix == ".distcp"), key=lambda p: p.stat().st_size)
    data = bytearray(victim.read_bytes())
    if damage == "flip":
        data[len(data) // 2] ^= 0x10
        victim.write_bytes(data)
    elif damage == "cut":
        victim.write_bytes(data[: len(data) // 2])
    elif damage == "gone":
        victim.unlink()
    elif damage == "metadata":
        (folder / ".metadata").write_bytes(b"no pickle")
    else:
        folder = tmp_path / "nowhere"
    told = ranks.run("tests.megatron.jobs:refused_checkpoint", folder=folder, optim=OPTIM)[0]
    assert str(folder) in told


def test_weights_that_one_rank_cannot_read_are_told_by_all(ranks, written):
    """The other copy would wait for them, and a run could not go on with the checkpoint before."""
    told = ranks.run("tests.megatron.jobs:unreadable_checkpoint", world=2, folder=written[0])
    assert told[0] == told[1] == f"cannot load checkpoint {written[0]}: OSError('Stale file handle') on rank 0"


def test_damage_that_one_rank_finds_is_told_by_all(ranks, written, tmp_path):
    """Each file is hashed by one rank."""
    folder = tmp_path / "damaged"
    shutil.copytree(written[0], folder)
    for path in folder.glob("*.distcp"):
        path.write_bytes(path.read_bytes()[:-1] + b"?")
    told = ranks.run("tests.megatron.jobs:refused_checkpoint", world=2, folder=folder, optim=OPTIM)
    assert told[0] == told[1] and "__0_0.distcp does not have the checksum" in told[0]


@pytest.mark.parametrize(
    "other", [replace(LLAMA, num_layers=3), replace(LLAMA, hidden_size=48), replace(LLAMA, tie_embeddings=False)]
)
def test_another_models_checkpoint_is_refused(ranks, written, other):
    """By all ranks, of which one reads the weights."""
    told = ranks.run("tests.megatron.jobs:refused_checkpoint", world=2, folder=written[0], cfg=other, optim=OPTIM)
    assert told[0] == told[1] and str(written[0]) in told[0]


class Mischief:
    """Unpickled, it makes a file."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


def noted(folder):
    """The author of a folder also writes its checksums."""
    files = {path.name: file_hash(path) for path in folder.iterdir() if path.name != "integrity.json"}
    (folder / "integrity.json").write_text(json.dumps({"algorithm": "sha256", "files": files}))


@pytest.mark.parametrize("where", ["index", "dtype", "object"])
def test_nothing_in_a_checkpoint_is_executed(ranks, written, tmp_path, where):
    folder, made = tmp_path / "c", tmp_path / "made"
    shutil.copytree(written[0], folder)
    with (folder / ".metadata").open("rb") as file:
        index = pickle.load(file)
    if where == "index":
        index.planner_data = Mischief(made)
    elif where == "dtype":
        next(x for x in index.state_dict_metadata.values() if hasattr(x, "properties")).properties = Mischief(made)
    else:
        key = next(k for k, v in index.state_dict_metadata.items() if isinstance(v, BytesStorageMetadata))
        with (folder / "objects.distcp").open("wb") as file:
            torch.save([Mischief(made)], file)
            index.storage_data[MetadataIndex(key)] = _StorageInfo("objects.distcp", 0, file.tell())
    (folder / ".metadata").write_bytes(pickle.dumps(index))
    noted(folder)
    told = ranks.run("tests.megatron.jobs:refused_checkpoint", folder=folder, optim=OPTIM)[0]
    assert "posix.mkdir" in told and str(folder) in told and "\n" not in told
    if where != "object":
        with pytest.raises(CheckpointError, match=r"posix.mkdir, which no checkpoint needs"):
            Blocks(folder)
    assert not made.exists()
    with (folder / ("objects.distcp" if where == "object" else ".metadata")).open("rb") as file:  # it would have
        (torch.load(file, weights_only=False) if where == "object" else pickle.load(file))
    assert made.exists()


def test_what_modules_would_unpickle_is_neither_written_nor_read(ranks, tmp_path):
    assert ranks.run("tests.megatron.jobs:extra_state", folder=tmp_path)[0] == (False, [])


def test_checksums_must_cover_the_index(ranks, written, tmp_path):
    shutil.copytree(written[0], tmp_path / "c")
    path = tmp_path / "c" / "integrity.json"
    content = json.loads(path.read_text())
    for change, word in (({}, "none of .metadata"), ([], "files=[]"), (None, "no value for files")):
        path.write_text(json.dumps(content | {"files": change}))
        assert word in ranks.run("tests.megatron.jobs:refused_checkpoint", folder=path.parent, optim=OPTIM)[0]
