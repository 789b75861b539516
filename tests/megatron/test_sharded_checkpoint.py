"""Save and load: the same layout goes on bit by bit, another layout has the same weights and optimizer."""

import json
import os
import pickle
import shutil
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint import FileSystemReader, LoadPlan, LoadPlanner
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, MetadataIndex

from aligner.config.sections.model.config import ModelConfig
from aligner.config.sections.optim import OptimConfig
from aligner.config.sections.parallel import ParallelConfig
from aligner.errors import CheckpointError
from aligner.files import file_hash
from aligner.megatron import checkpoint
from aligner.megatron.attention import RMSNorm
from aligner.megatron.checkpoint import load_model, save_model
from aligner.megatron.checkpoint_index import read_index
from aligner.megatron.chunks import Blocks
from aligner.megatron.model import Head
from aligner.ops.reduce import gathered
from tests.megatron.models import (
    ONE,
    build,
    equal_shares,
    load_and_step,
    loaded,
    one_more,
    same,
    save_and_go_on,
    stepped,
    weights,
)
from tests.ranks import on_ranks
from tests.tiny import DEEPSEEK, LLAMA, MODELS, MOE

pytestmark = pytest.mark.multirank

OPTIM = OptimConfig(lr=1e-3, schedule="linear", warmup_steps=2)  # the next learning rate depends on the step
PLAIN = replace(OPTIM, distributed=False)
TP, PP, DP = ParallelConfig(tensor=2), ParallelConfig(pipeline=2), ParallelConfig()


def refused_checkpoint(folder: Path, cfg: ModelConfig = LLAMA, **kwargs) -> str:
    model = build(cfg, ONE, **kwargs)
    with pytest.raises(CheckpointError) as caught:
        load_model(model, folder)
    return str(caught.value)


def unreadable_checkpoint(folder: Path) -> str:
    """What each rank is told where a file system fails the one that reads the weights."""
    real = FileSystemReader.read_data

    def fails(self: FileSystemReader, plan: LoadPlan, planner: LoadPlanner):
        if any(item.storage_index.fqn.startswith("decoder.") for item in plan.items):
            raise OSError("Stale file handle")
        return real(self, plan, planner)

    with pytest.MonkeyPatch.context() as patch:
        if dist.get_rank() == 0:
            patch.setattr(FileSystemReader, "read_data", fails)
        return refused_checkpoint(folder)


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
@on_ranks()
def test_the_same_layout_resumes_bit_for_bit(tmp_path, world, parallel, dtype, optim):
    job = {"cfg": MODELS["qwen3"], "parallel": parallel, "dtype": dtype, "optim": optim}
    went_on = save_and_go_on(tmp_path / "c", **job)
    resumed = load_and_step(tmp_path / "c", **job)
    assert resumed["version"] == went_on["version"] == 2 and resumed["metrics"] == went_on["metrics"]
    assert same(resumed["weights"], went_on["weights"]) and same(resumed["after"], went_on["after"])
    assert not same(went_on["after"], went_on["weights"])


@pytest.mark.parametrize(
    ("cfg", "parallel", "world", "optim"),
    [(LLAMA, DP, 2, OPTIM), (LLAMA, DP, 2, None), (LLAMA, PP, 4, OPTIM), (MOE, ParallelConfig(expert=2), 4, OPTIM)],
)
@on_ranks()
def test_one_of_the_data_parallel_copies_reads_the_weights(tmp_path, cfg, parallel, world, optim):
    job = {"cfg": cfg, "parallel": parallel, "dtype": torch.bfloat16, "optim": optim}
    first, read, real = build(**job), set[str](), FileSystemReader.read_data
    save_model(first, tmp_path / "c")

    def noted(self: FileSystemReader, plan: LoadPlan, planner: LoadPlanner):
        read.update(item.storage_index.fqn for item in plan.items)
        return real(self, plan, planner)

    with mock.patch.object(FileSystemReader, "read_data", noted):
        second = loaded(tmp_path / "c", **job)
    pairs = zip(first.module.parameters(), second.module.parameters(), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)
    names = gathered({name for name in read if not name.startswith(("optimizer.", "common_state"))})
    if cfg.moe.num_experts:  # rank 1 the experts that rank 0 has not
        assert names[2:] == [set(), set()] and names[1] < names[0] and all("experts" in name for name in names[1])
    elif parallel == PP:
        assert names[1] == names[3] == set() and names[0] and names[2]
    else:
        assert names[0] and names[1] == set()


@pytest.mark.slow
@pytest.mark.parametrize("tied", [True, False])
def test_other_layouts_load_the_same_state(ranks, tmp_path, tied):
    job = {"cfg": replace(LLAMA, tie_embeddings=tied, num_layers=3), "optim": OPTIM}
    first = ranks.run(save_and_go_on, world=2, folder=tmp_path / "0", parallel=TP, **job)[0]
    layouts = [(2, PP), (2, DP), (1, DP), (4, ParallelConfig(tensor=2, pipeline=2)), (4, ParallelConfig(context=2))]
    for i, (world, parallel) in enumerate(layouts):
        folders = {"folder": tmp_path / f"{i}", "again": tmp_path / f"{i + 1}"}
        out = ranks.run(load_and_step, world=world, parallel=parallel, **folders, **job)[0]
        assert out["version"] == 2 and same(out["weights"], first["weights"]), parallel
        for name, value in first["metrics"].items():
            assert out["metrics"][name] == pytest.approx(value, rel=1e-5), (parallel, name)
        for name, value in first["after"].items():
            assert torch.allclose(out["after"][name], value, atol=2e-6), (parallel, name)


def test_experts_shared_by_other_ranks_load_the_same_state(ranks, tmp_path):
    """By tensor ranks, by these and data ranks, by nobody; with the optimizer, to the bit."""
    job = {"cfg": MOE, "optim": OPTIM, "share": equal_shares}
    folded, four = ParallelConfig(tensor=2, expert=2, sequence=True), ParallelConfig(tensor=2, expert=4)
    first = ranks.run(save_and_go_on, world=4, folder=tmp_path / "0", parallel=folded, **job)[0]
    for i, (world, parallel) in enumerate([(4, four), (1, ONE), (2, replace(folded, sequence=False)), (4, folded)]):
        folders = {"folder": tmp_path / f"{i}", "again": tmp_path / f"{i + 1}"}
        out = ranks.run(load_and_step, world=world, parallel=parallel, **folders, **job)[0]
        assert out["version"] == 2 and same(out["weights"], first["weights"]), parallel
        assert out["metrics"]["grad_norm"] == pytest.approx(first["metrics"]["grad_norm"], rel=1e-5)
        for name, value in first["after"].items():
            assert torch.allclose(out["after"][name], value, atol=2e-6), (parallel, name)
    assert same(out["after"], first["after"])  # through all the others, and back


@pytest.mark.parametrize("cfg", [replace(LLAMA, num_layers=5), replace(DEEPSEEK, num_layers=5)], ids=["alike", "mixed"])
def test_stages_of_other_lengths_load_the_same_state(ranks, tmp_path, cfg):
    job = {"folder": tmp_path / "c", "cfg": cfg, "optim": OPTIM}
    saved = ranks.run(save_and_go_on, world=2, parallel=PP, **job)[0]
    for world, turns, sizes in ((2, 1, [4, 1]), (2, 2, []), (3, 1, []), (1, 1, [])):
        parallel = ParallelConfig(pipeline=world, virtual_stages=turns, stage_layers=sizes)
        out = ranks.run(load_and_step, world=world, parallel=parallel, **job)[0]
        assert same(out["weights"], saved["weights"])
        for name, value in saved["after"].items():
            assert torch.allclose(out["after"][name], value, atol=2e-6), (parallel, name)


@pytest.mark.few(2)
@pytest.mark.parametrize("optim", [OPTIM, PLAIN], ids=["sharded", "plain"])
@pytest.mark.parametrize("world, parallel", [(1, DP), (2, TP), (2, PP), (2, DP)])
def test_float32_score_heads_on_bfloat16_bodies(ranks, tmp_path, world, parallel, optim):
    job = {"folder": tmp_path / "c", "cfg": LLAMA, "optim": optim, "head": Head("score", 2), "dtype": torch.bfloat16}
    saved = ranks.run(save_and_go_on, world=world, parallel=parallel, **job)[0]
    again = ranks.run(load_and_step, world=world, parallel=parallel, **job)[0]
    assert again["version"] == 2 and same(again["weights"], saved["weights"]) and same(again["after"], saved["after"])
    out = ranks.run(load_and_step, **job)[0]
    assert all(torch.equal(t.float(), saved["weights"][n].float()) for n, t in out["weights"].items())
    assert out["metrics"]["grad_norm"] == pytest.approx(saved["metrics"]["grad_norm"], rel=5e-2)
    (alone,) = ranks.run(frozen, **job | {"optim": None})
    assert same(alone, out["weights"])


def frozen(**job) -> dict[str, torch.Tensor]:
    """The weights of a reference, which has no optimizer."""
    model = loaded(with_optimizer=False, **job)
    assert model.step_count == 0
    return weights(model)


@pytest.mark.few(2)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("optim", [OPTIM, PLAIN], ids=["sharded", "plain"])
@on_ranks(1)
def test_the_configs_settings_count_not_the_checkpoints(tmp_path, optim, dtype):
    """A step with settings that were changed in place, and one after a load into a model that was built with them."""
    changes = {"lr": 2e-3, "min_lr": 1e-5, "weight_decay": 0.5, "betas": [0.5, 0.6], "eps": 1e-3, "clip_grad": 0.1}
    other = replace(optim, schedule="cosine", **changes)
    first = stepped(LLAMA, 1, optim=optim, dtype=dtype)
    save_model(first, tmp_path / "c")
    second = loaded(tmp_path / "c", LLAMA, optim=other, dtype=dtype)
    first.optim = other
    for group in first.optimizer.param_groups:
        group.update(betas=tuple(other.betas), eps=other.eps)
    first.optimizer.config.clip_grad = other.clip_grad
    went_on, resumed = one_more(first), one_more(second)
    assert resumed["metrics"] == went_on["metrics"] and same(resumed["after"], went_on["after"])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@on_ranks(1)
def test_weights_alone_start_a_new_optimizer(tmp_path, dtype):
    """The optimizer's float32 copies are those of the loaded weights, not of the ones before."""
    saved = save_and_go_on(tmp_path / "c", LLAMA, dtype=dtype, optim=OPTIM)["weights"]
    out = one_more(loaded(tmp_path / "c", LLAMA, with_optimizer=False, dtype=dtype, optim=OPTIM))
    assert same(out["weights"], saved) and out["version"] == 0
    assert out["metrics"]["lr"] == OPTIM.lr / 2  # the first step of the warm-up
    for name, value in out["after"].items():
        assert (value - saved[name]).abs().max() <= (2e-3 if dtype == torch.float32 else 2e-2), name


@pytest.fixture(scope="module")
def written(ranks, tmp_path_factory):
    folder = tmp_path_factory.mktemp("checkpoint") / "c"
    return folder, ranks.run(save_and_go_on, folder=folder, cfg=LLAMA, optim=OPTIM)[0]


@pytest.mark.parametrize("damage", ["flip", "cut", "gone", "metadata", "folder"])
def test_damage_is_reported(ranks, written, tmp_path, damage):
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
    results = ranks.run(refused_checkpoint, folder=folder, optim=OPTIM)[0]
    assert str(folder) in results


def test_weights_that_one_rank_cannot_read_are_reported_by_all(ranks, written):
    """The other copy would wait for them, and a run could not go on with the checkpoint before."""
    results = ranks.run(unreadable_checkpoint, world=2, folder=written[0])
    assert results[0] == results[1] == f"cannot load checkpoint {written[0]}: OSError('Stale file handle') on rank 0"


def test_damage_that_one_rank_finds_is_reported_by_all(ranks, written, tmp_path):
    """Each file is hashed by one rank."""
    folder = tmp_path / "damaged"
    shutil.copytree(written[0], folder)
    for path in folder.glob("*.distcp"):
        path.write_bytes(path.read_bytes()[:-1] + b"?")
    results = ranks.run(refused_checkpoint, world=2, folder=folder, optim=OPTIM)
    assert results[0] == results[1] and "__0_0.distcp does not have the checksum" in results[0]


@pytest.mark.parametrize(
    "other", [replace(LLAMA, num_layers=3), replace(LLAMA, hidden_size=48), replace(LLAMA, tie_embeddings=False)]
)
def test_another_models_checkpoint_is_refused(ranks, written, other):
    """By all ranks, of which one reads the weights."""
    results = ranks.run(refused_checkpoint, world=2, folder=written[0], cfg=other, optim=OPTIM)
    assert results[0] == results[1] and str(written[0]) in results[0]


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
    results = ranks.run(refused_checkpoint, folder=folder, optim=OPTIM)[0]
    assert "posix.mkdir" in results and str(folder) in results and "\n" not in results
    if where != "object":
        with pytest.raises(CheckpointError, match=r"posix.mkdir, which no checkpoint needs"):
            Blocks(folder)
    assert not made.exists()
    with (folder / ("objects.distcp" if where == "object" else ".metadata")).open("rb") as file:  # it would have
        (torch.load(file, weights_only=False) if where == "object" else pickle.load(file))
    assert made.exists()


@on_ranks(1)
def test_what_modules_would_unpickle_is_neither_written_nor_read(tmp_path):
    """With modules that have some state, as TransformerEngine's do, and a checkpoint of a version that saved it."""
    taken: list = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RMSNorm, "get_extra_state", lambda self: torch.ones(3, dtype=torch.uint8), raising=False)
        patch.setattr(RMSNorm, "set_extra_state", lambda self, state: taken.append(state), raising=False)
        model = build(LLAMA)
        save_model(model, tmp_path / "new")
        with pytest.MonkeyPatch.context() as earlier:
            reports = {"dp_cp_group": model.layout.pgs.dp_cp}
            earlier.setattr(checkpoint, "weight_state", lambda model: model.module.sharded_state_dict(metadata=reports))
            save_model(model, tmp_path / "old")
        assert any("_extra_state" in key for key in read_index(tmp_path / "old").state_dict_metadata)
        load_model(model, tmp_path / "old")
    assert not any("_extra_state" in key for key in read_index(tmp_path / "new").state_dict_metadata) and not taken


def test_checksums_must_cover_the_index(ranks, written, tmp_path):
    shutil.copytree(written[0], tmp_path / "c")
    path = tmp_path / "c" / "integrity.json"
    content = json.loads(path.read_text())
    for change, word in (({}, ".metadata, __0_0.distcp have none"), ([], "files=[]"), (None, "no value for files")):
        path.write_text(json.dumps(content | {"files": change}))
        assert word in ranks.run(refused_checkpoint, folder=path.parent, optim=OPTIM)[0]
