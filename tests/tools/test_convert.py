"""`aligner import` and `export`: any layout in and out bit for bit, interruption, checksums, memory."""

import contextlib
import json
import os
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from aligner.cluster.env import RankEnv
from aligner.config.freeze import freeze, load_frozen
from aligner.config.sections.model.config import ModelConfig
from aligner.config.sections.parallel import ParallelConfig
from aligner.data.tokenizer import byte_tokenizer, train_tokenizer
from aligner.errors import AlignerError
from aligner.families.hf_config import hf_config
from aligner.megatron.attention import RMSNorm
from aligner.megatron.checkpoint import load_model, save_model
from aligner.megatron.checkpoint_files import write_manifest
from aligner.megatron.checkpoint_index import read_index
from aligner.megatron.groups import init_distributed
from aligner.megatron.model import Head
from aligner.models.safetensors_io import INDEX, open_hf, write_hf
from aligner.roles.model_init import resolve
from aligner.tools import convert as tool
from aligner.tools.shared_files import peak_memory_bytes
from tests.megatron.models import build, weights
from tests.ranks import RankError
from tests.tiny import DEEPSEEK, MODELS, MOE, MORE, WINDOWS, transformers_model, wild_source, write_folder

pytestmark = pytest.mark.multirank
MODELS = {
    "gemma3": replace(WINDOWS["gemma3"], vocab_size=263),  # tied; three vocabulary rows are padding at TP=2
    "qwen2": replace(MODELS["qwen2"], vocab_size=263, tie_embeddings=False),
    "qwen3_moe": replace(MOE, vocab_size=263, tie_embeddings=False),
    "deepseek_v3": replace(DEEPSEEK, num_layers=6, vocab_size=263, moe=replace(DEEPSEEK.moe, num_experts=6, top_k=3)),
    "olmo2": replace(MORE["olmo2"], num_layers=6, vocab_size=263),
    "phi3": replace(MORE["phi3"], num_layers=6, vocab_size=263),
    "biases": replace(MORE["llama-biases"], num_layers=6, vocab_size=263),
    "gpt_oss": replace(MORE["gpt_oss"], vocab_size=263, tie_embeddings=False),
    "glm_moe_dsa": replace(
        MORE["glm_moe_dsa"], vocab_size=263, moe=replace(DEEPSEEK.moe, num_experts=4, groups=1, top_groups=1)
    ),
    "gemma4": replace(MORE["gemma4"], vocab_size=263),
    "gemma4-experts": replace(MORE["gemma4-experts"], vocab_size=263),
    "gemma4-inputs": replace(MORE["gemma4-inputs"], vocab_size=263),
    "nemotron_h": replace(MORE["nemotron_h"], vocab_size=263),
    "deepseek_v4": replace(MORE["deepseek_v4"], vocab_size=263),
}
PARTS = {"tensor": 2, "file_bytes": 60_000.0}


def converted(what: str, source: Path, goal: Path, fail_after: int = -1, fresh: bool = False, **options) -> int | str:
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
    with mock.patch.object(kind, "write", counted), contextlib.ExitStack() as reported:
        reported.push(lambda kind, error, trace: isinstance(error, AlignerError) and errors.append(str(error)) is None)
        if what == "import":
            tool.import_hf(Path(source), Path(goal), env, fresh=fresh, **options)
        else:
            tool.export_checkpoint(Path(source), Path(goal), env, fresh=fresh, **({"role": ""} | options))
    return errors[0] if errors else written


def import_beside_extra_state(source: Path, goal: Path) -> list[str]:
    """What an import's index names, where modules have a state beside their tensors, as TransformerEngine's do."""
    with mock.patch.object(RMSNorm, "get_extra_state", lambda self: torch.ones(3, dtype=torch.uint8), create=True):
        converted("import", source, goal, tensor=1, file_bytes=1e9)
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
    from aligner.models.params import expected_hf_shapes

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
        tool.export_checkpoint(root / f"run{layers}", root / f"out{layers}", env, role="", file_bytes=5e7, fresh=False)
        peaks.append(peak_memory_bytes())
    index = json.loads((root / "out40" / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] <= total
    print(peaks[2] - peaks[1], peaks[3] - peaks[1], total)


def make_folder(cfg: ModelConfig, folder: Path, head: str = "lm") -> Path:
    write_folder(*transformers_model(cfg, head, 2), folder)
    byte_tokenizer(str(folder))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [1, 7]}))
    (folder / "README.md").write_text("# A card\n")
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_folder(MODELS["gemma3"], tmp_path_factory.mktemp("convert") / "hf")


def same(a: Path, b: Path) -> bool:
    one, two = open_hf(a), open_hf(b)
    return set(one) == set(two) and all(torch.equal(one[n], two[n]) and one[n].dtype == two[n].dtype for n in one)


def convert(ranks, what, source, target, world=1, error="", **options):
    """Every rank's bytes; or, with `error`, all of them must end with that."""
    options = (PARTS if what == "import" else {"file_bytes": 60_000.0}) | options
    results = ranks.run(converted, world=world, what=what, source=source, goal=target, **options)
    assert all(re.search(error, str(t)) if error else isinstance(t, int) for t in results), results
    return results


@pytest.mark.few(1)
@pytest.mark.parametrize(
    "name, head, world, parallel",
    [
        ("gemma3", "lm", 2, ParallelConfig(tensor=2)),
        ("gemma3", "score", 2, ParallelConfig(pipeline=2)),
        ("qwen2", "lm", 4, ParallelConfig(tensor=2, pipeline=2)),
        ("qwen3_moe", "lm", 4, ParallelConfig(tensor=2, expert=2)),
        ("olmo2", "lm", 2, ParallelConfig(tensor=2)),
        ("biases", "lm", 2, ParallelConfig(tensor=2)),
        ("phi3", "lm", 2, ParallelConfig(tensor=2)),
        ("gpt_oss", "lm", 4, ParallelConfig(tensor=2, expert=2)),
        ("gemma4", "lm", 4, ParallelConfig(tensor=2, pipeline=2)),
        ("gemma4-experts", "lm", 4, ParallelConfig(tensor=2, expert=2)),
        ("gemma4-inputs", "lm", 2, ParallelConfig(tensor=2, sequence=True)),
        ("deepseek_v3", "lm", 2, ParallelConfig(tensor=2)),
        ("glm_moe_dsa", "lm", 4, ParallelConfig(tensor=2, pipeline=2)),
        ("nemotron_h", "lm", 4, ParallelConfig(tensor=2, expert=2)),
        ("deepseek_v4", "lm", 4, ParallelConfig(tensor=2, pipeline=2)),
    ],
)
def test_any_layout_in_and_out(ranks, tmp_path, name, head, world, parallel):
    """Import a folder on 2 ranks, load it on a layout, save from there, export on 2 ranks: the folder's bits."""
    source = make_folder(MODELS[name], tmp_path / "hf", head)
    (source / "aligner.json").write_text('{"bias": 0.5}')
    run, out = tmp_path / "run", tmp_path / "out"
    convert(ranks, "import", source, run, world=2)
    job = {"run": run, "parallel": parallel, "outputs": 2 if head == "score" else 0}
    weights = ranks.run(load_and_save, world=world, **job)[0]
    before = open_hf(source)
    assert set(weights) == set(before) and all(torch.equal(weights[n], before[n]) for n in before)
    convert(ranks, "export", run, out, world=2)
    assert same(source, out) and (out / INDEX).exists()
    assert json.loads((out / "aligner.json").read_text()) == {"bias": 0.5}
    for file in ("generation_config.json", "README.md", "tokenizer.json", "chat_template.jinja"):
        assert (out / file).read_bytes() == (source / file).read_bytes()
    theirs, ours = (json.loads((f / "config.json").read_text()) for f in (source, out))
    differ = {key for key in theirs | ours if theirs.get(key) != ours.get(key)}
    assert differ <= {"eos_token_id", "bos_token_id", "pad_token_id"}  # of the tokenizer, where there were none
    if name == "gemma3" and head == "lm":  # a run that started from the imported one
        shutil.copytree(run, tmp_path / "next", ignore=shutil.ignore_patterns("source"))
        config = load_frozen(run)
        config.model.init = str(run)
        freeze(config, tmp_path / "next")
        convert(ranks, "export", tmp_path / "next", tmp_path / "later")
        assert same(source, tmp_path / "later") and (tmp_path / "later/README.md").read_text() == "# A card\n"
    if head == "score":  # a critic beside the policy
        step = run / "checkpoints/step-00000000"
        (step / "model").rename(step / "critic")
        write_manifest(step)
        convert(ranks, "export", run, tmp_path / "critic", role="critic")
        assert same(source, tmp_path / "critic")
    assert not list(tmp_path.glob("*.partial"))
    checked = subprocess.run(["sha256sum", "-c", "checksums.sha256"], cwd=out, capture_output=True, text=True)
    assert checked.returncode == 0 and checked.stdout.count("OK") == len(list(out.glob("*.safetensors"))) > 2


def test_an_import_writes_no_extra_state(ranks, folder, tmp_path):
    names = ranks.run(import_beside_extra_state, source=folder, goal=tmp_path / "run")[0]
    assert "decoder.final_layernorm.weight" in names and not [name for name in names if "_extra_state" in name]


@pytest.mark.few(1)
@pytest.mark.parametrize("what", ["import", "export"])
def test_an_interrupted_conversion_resumes(ranks, folder, tmp_path, what):
    source = folder
    if what == "export":
        source = tmp_path / "run"
        convert(ranks, "import", folder, source)
    target, whole = tmp_path / "target", tmp_path / "whole"
    total = convert(ranks, what, source, whole)[0]
    convert(ranks, what, source, target, world=2, fail_after=total * 2 // 3, error="No space left")
    out = target.with_name("target.partial") / "out"
    finished = sorted(p.name for p in out.iterdir() if not p.name.endswith(".tmp"))
    assert finished and not target.exists()
    before = {name: (out / name).stat().st_mtime_ns for name in finished}
    damaged = out / finished[0]
    damaged.write_bytes(damaged.read_bytes()[:-1] + b"?")
    again = convert(ranks, what, source, target)[0]  # on one rank now
    assert 0 < again < total  # and not all of it once more
    kept = {p.name: p.stat().st_mtime_ns for p in target.rglob("*") if p.name in before}
    assert {n for n in before if kept[n] == before[n]} == set(finished[1:])
    for path in whole.rglob("*"):
        if path.suffix in (".distcp", ".safetensors", ".metadata"):
            assert path.read_bytes() == (target / path.relative_to(whole)).read_bytes(), path.name
    # other options: what had been written is of no use
    shutil.rmtree(target)
    convert(ranks, what, source, target, fail_after=total // 2, error="No space left")
    assert convert(ranks, what, source, target, file_bytes=1e9)[0] > 0.9 * total  # less the headers of more files
    convert(ranks, what, source, target, error="a folder that does not exist yet")


@pytest.mark.slow
def test_damage_is_found(ranks, folder, tmp_path):
    run, out = tmp_path / "run", tmp_path / "out"
    convert(ranks, "import", folder, run)
    convert(ranks, "export", run, out)
    weights = sorted(out.glob("*.safetensors"))[1]
    weights.write_bytes(weights.read_bytes()[:-1] + b"?")
    convert(
        ranks, "import", out, tmp_path / "again", world=2, error=rf"{weights.name} does not have its recorded SHA-256"
    )
    piece = run / "checkpoints/step-00000000/policy/part-00001.distcp"
    piece.write_bytes(piece.read_bytes()[:-1] + b"?")
    convert(
        ranks, "export", run, tmp_path / "other", world=2, error=r"part-00001.distcp does not have its recorded SHA-256"
    )
    with pytest.raises(RankError, match="part-00001"):
        ranks.run(load_and_save, run=run, parallel=ParallelConfig(), outputs=0)
    (tmp_path / "other.partial/plan.json").unlink()
    state = run / "checkpoints/step-00000000/state.json"
    state.write_text(state.read_text().replace('"rope_base": 1', '"rope_base": 2'))
    convert(ranks, "export", run, tmp_path / "wrong", world=2, error="state.json does not have the checksum of manif")
    state.write_text(state.read_text().replace('"rope_base": 2', '"rope_base": 1'))
    convert(ranks, "export", run, tmp_path / "third", role="critic", error="--part='critic': expected one of policy")


def test_import_needs_a_tokenizer_that_fits(ranks, folder, tmp_path):
    for change in ("none", "larger"):
        source = shutil.copytree(folder, tmp_path / change)
        if change == "none":
            (source / "tokenizer.json").unlink()
            expected = "found none of its files"
        else:
            train_tokenizer(["hello world"] * 50, str(source), 265)
            expected = "model.vocab_size=263: expected at least 26"
        convert(ranks, "import", source, tmp_path / "run", world=2, error=expected)


@pytest.mark.slow
def test_memory_is_bounded_by_a_piece(tmp_path):
    """90 MB of weights, of which no tensor has more than 3 MB."""
    code = "from tests.tools.test_convert import memory_of_a_round_trip as f; import sys; f(sys.argv[1])"
    output = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=True)
    imported, exported, total = (int(text) for text in output.stdout.split()[-3:])
    assert total > 80e6
    assert max(imported, exported) < total / 2, (imported, exported)  # most of it for the names of more layers


@pytest.mark.slow
def test_the_command_line_imports_and_exports(folder, tmp_path):
    def run(*args):
        command = [sys.executable, "-m", "aligner", *map(str, args)]
        environ = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
        return subprocess.run(command, capture_output=True, text=True, env=environ)

    first = run("import", folder, tmp_path / "run", "--ranks", 2, "--tensor", 2)
    assert first.returncode == 0, first.stderr
    assert " GB of host memory on the largest of 2 ranks)" in first.stdout
    second = run("export", tmp_path / "run", tmp_path / "out")
    assert " GB of host memory)" in second.stdout
    assert second.returncode == 0 and same(folder, tmp_path / "out"), second.stderr
