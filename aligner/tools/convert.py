"""`aligner import` and `aligner export`: Hugging Face folders to sharded checkpoints and back, with no model in memory.

Ranks share the files of the result. None needs another's data, so any number of ranks works, and the result is the
same. A rank holds one piece of one parameter at a time: the bound is in docs/how-to/models.md.
"""

from __future__ import annotations

import argparse
import json
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from aligner.cluster.env import RankEnv
from aligner.config.freeze import freeze
from aligner.config.resolve import compose
from aligner.config.sections.model.config import ModelConfig
from aligner.config.sections.model.mtp import MtpConfig
from aligner.data.tokenizer import check_vocab, load_tokenizer, stop_token_ids
from aligner.errors import CheckpointError, ConfigError
from aligner.families import load_family
from aligner.families.hf_config import config_from_hf, is_known
from aligner.families.table import family_table
from aligner.families.within import stored_name
from aligner.files import file_hash
from aligner.megatron import bridge
from aligner.megatron.checkpoint_files import FORMAT, find_checkpoint, read_checked, write_manifest
from aligner.megatron.checkpoint_index import INTEGRITY, noted_checksums
from aligner.megatron.chunks import Block, BlockFile, Blocks, StorageLocation, places_of, write_index
from aligner.megatron.groups import init_distributed, leave_distributed
from aligner.megatron.model import Head
from aligner.models.beside import Beside
from aligner.models.copies import copies, with_copies
from aligner.models.folder_check import SCORE, check_folder
from aligner.models.fused import FusedMatrix, joined, parts_of
from aligner.models.params import ParamSpec, hf_axis, to_hf
from aligner.models.safetensors_io import INDEX, SINGLE, HfTensors, open_hf
from aligner.models.safetensors_stream import SafetensorsFile
from aligner.models.slices import Shard, of_experts, placed, read_shard
from aligner.models.small_files import TOKENIZER, carry, carry_tokenizer, exported_config, write_generation
from aligner.ops.agree import by_rank_0
from aligner.ops.reduce import gathered
from aligner.refit.export import EXTRA_FILE
from aligner.roles.model_init import SOURCE, InitialModel, resolve, shape_of
from aligner.tools.adapted import Merged, Stored, export_adapter
from aligner.tools.shared_files import FilePlan, SharedFolder, into_files, peak_memory_bytes

CHECKSUMS = "checksums.sha256"  # as `sha256sum -c` reads it
TIMEOUT_S = 24 * 3600.0  # ranks wait for the slowest one


def import_hf(source: Path, target: Path, env: RankEnv, *, tensor: int, file_bytes: float, fresh: bool) -> None:
    """Convert the Hugging Face folder `source` to a run folder with one checkpoint, for `model.init` on any layout.
    Collective over the world, like `export_checkpoint`. Raises ConfigError, CheckpointError, WriteError."""
    cfg = replace(config_from_hf(source), init=str(source.resolve()))
    tensors = open_hf(source)
    head = Head("score", tensors.shape(SCORE)[0]) if SCORE in tensors else Head()
    by_rank_0(lambda: check_folder(tensors, cfg, head.kind))
    table = family_table(cfg, head.kind, head.outputs)
    where = places_of(cfg, head, torch.float32)
    files = into_files(list(_pieces(table, tensors, tensor)), file_bytes, lambda i, n: f"part-{i:05d}.distcp")
    stat = {p.name: [p.stat().st_size, p.stat().st_mtime_ns] for p in tensors.paths()}
    plan = {"import": str(source.resolve()), "files": stat, "model": asdict(cfg), "cut": [tensor, file_bytes]}
    folder = SharedFolder(target, plan, fresh)
    folder.together(lambda: _verify(source, _listed(source), env))
    folder.together(lambda: None if env.rank else check_vocab(load_tokenizer(str(source)), cfg.vocab_size))

    def write(path: Path, file: FilePlan, add: Callable[[int], None]) -> tuple[str, Any]:
        with BlockFile(path) as out:
            for spec, shard in file.parts:
                for offsets, block in placed(spec, read_shard(spec, tensors, cfg, shard), shard):
                    position = where[spec.canonical]
                    out.add(position.key, position.offsets(offsets), block.reshape(position.shape(block.shape)))
                    add(block.nbytes)
                tensors.close()
        return out.sha256, [asdict(b) for b in out.blocks]

    written = folder.write(files, write)
    folder.finish(lambda out: _as_run(out, written, where, source, target, cfg, head))
    _say(env, f"{source} -> {target}")


def _pieces(table: list[ParamSpec], tensors: HfTensors, tensor: int) -> Iterator[tuple[tuple[ParamSpec, Shard], int]]:
    """Yield (content of one block or two of the checkpoint, about its bytes)."""
    for spec in table:
        size = tensors.itemsize(spec.hf[0])
        cut = 1 if hf_axis(spec) is None else tensor
        for expert in range(spec.shape[0] if spec.experts else 1):
            for rank in range(cut):
                shard = Shard(cut, rank, expert, 1 if spec.experts else 0)
                yield (spec, shard), size * math.prod(of_experts(spec, shard).shape) // cut


def _as_run(
    out: Path,
    written: dict[str, tuple[str, Any]],
    where: dict[str, StorageLocation],
    source: Path,
    target: Path,
    cfg: ModelConfig,
    head: Head,
) -> None:
    """Make a run folder around the shards, which lie in `out`, as `model.init` expects it."""
    step = out / "checkpoints" / "step-00000000"
    model = step / ("model" if head.kind == "score" else "policy")
    model.mkdir(parents=True, exist_ok=True)
    for name in written:
        (out / name).rename(model / name)
    blocks = {name: [_block(b) for b in notes] for name, (_, notes) in written.items()}
    write_index(model, blocks, where)
    hashes = {name: digest for name, (digest, _) in written.items()}
    for path in model.iterdir():
        hashes.setdefault(path.name, file_hash(path))
    content = {"algorithm": "sha256", "files": hashes}
    (model / INTEGRITY).write_text(json.dumps(content, indent=1, sort_keys=True), encoding="utf-8")
    identity = {"stage": "rm" if head.kind == "score" else "import", "model": shape_of(cfg), "outputs": head.outputs}
    state = {"format": FORMAT, "identity": identity, "step": 0, "world_size": 1, "metric": None, "state": {}}
    (step / "state.json").write_text(json.dumps(state, indent=1), encoding="utf-8")
    write_manifest(step)
    kept = out / SOURCE
    kept.mkdir(exist_ok=True)
    carry(source, kept, "config.json", EXTRA_FILE, *TOKENIZER)
    if (beside := Beside.of(source, cfg, head.kind)).names:
        metas = {name: beside.meta(name, torch.float32) for name in beside.names}
        shapes = {name: (t.dtype, tuple(t.shape)) for name, t in metas.items()}
        with SafetensorsFile(kept / SINGLE, shapes) as file:
            for name in beside.names:
                file.add(name, beside.read(name, torch.float32))
    config = compose([])
    config.model, config.run.dir = cfg, str(target)
    freeze(config, out)


def _block(raw: dict[str, Any]) -> Block:
    return Block(**raw | {name: tuple(raw[name]) for name in ("offsets", "shape")})


def export_checkpoint(
    source: Path, target: Path, env: RankEnv, *, role: str, file_bytes: float, fresh: bool, merge: bool = False
) -> None:
    """Convert a checkpoint (or the newest of a run folder) to a Hugging Face folder `target`. A checkpoint of adapters
    is written as `peft` reads it or, with `merge`, merged into the model that they were trained with.

    `role`: the model of the checkpoint to export. Raises ConfigError, CheckpointError, WriteError."""
    checkpoint, folder, initial = _exported(source, role, merge)
    cfg, blocks = initial.config, Blocks(folder)
    head = Head() if folder.name == "policy" else Head("score", blocks.size("output_layer.weight")[0])
    adapted = bool(initial.adapters)
    table, parts = family_table(cfg, head.kind, head.outputs), parts_of(cfg)
    where = places_of(cfg, head, torch.float32)
    if not adapted:
        _check_sizes(blocks, table, where)
    weights = Merged.of(initial, head, where) if adapted else Stored(blocks, where, cfg)
    beside = Beside.of(initial.origin, cfg, head.kind)
    norm = next(spec for spec in table if spec.canonical == "decoder.final_layernorm.weight")
    dtype = weights.dtype(norm)
    config = exported_config(cfg, initial.tokenizer, beside, head.kind, head.outputs, str(dtype).removeprefix("torch."))
    others = [((name, 0), beside.meta(name, dtype).nbytes) for name in beside.names]
    files = into_files([*_units(table, weights, parts, cfg), *others], file_bytes, _file_name)
    stat = {p: [(folder / p).stat().st_size, (folder / p).stat().st_mtime_ns] for p in sorted(blocks.files())}
    plan = {
        "export": str(folder.resolve()),
        "files": stat,
        "model": asdict(cfg),
        "cut": [file_bytes, *["merged"] * merge, *beside.names],
    }
    shared = SharedFolder(target, plan, fresh)
    listed = noted_checksums(folder, blocks.index)
    shared.together(lambda: _verify(folder, listed, env))
    if adapted and not merge:
        shared.finish(partial(export_adapter, checkpoint, initial, head))
        return _say(env, f"{folder} -> {target}")

    def stored(spec: ParamSpec | str, first: int, meta: bool) -> Iterator[tuple[str, Tensor]]:
        if isinstance(spec, str):
            tensor = beside.meta(spec, dtype) if meta else beside.read(spec, dtype)
            yield stored_name(spec, cfg.traits, config), tensor
            return
        shape = torch.empty(spec.shape, dtype=weights.dtype(spec), device="meta")
        whole = to_hf(spec, shape, cfg) if meta else weights.tensors(spec, first)
        for name, tensor in with_copies(joined(whole.items(), parts), cfg):
            yield stored_name(name, cfg.traits, config), tensor

    def write(path: Path, file: FilePlan, add: Callable[[int], None]) -> tuple[str, Any]:
        metas = (pair for spec, first in file.parts for pair in stored(spec, first, meta=True))
        shapes = {name: (t.dtype, tuple(t.shape)) for name, t in metas}
        with SafetensorsFile(path, shapes) as out:
            for spec, first in file.parts:
                for name, tensor in stored(spec, first, meta=False):
                    out.add(name, tensor)
                    add(tensor.nbytes)
        return out.sha256, list(shapes)

    written = shared.write(files, write)
    total = sum(f.bytes for f in files)
    shared.finish(lambda out: _as_hf(out, written, total, initial, head, config))
    _say(env, f"{folder} -> {target}")


def _exported(source: Path, role: str, merge: bool) -> tuple[Path, Path, InitialModel]:
    """Return the checkpoint, its folder to export, and the model it holds. Raises ConfigError, CheckpointError."""
    checkpoint = by_rank_0(lambda: find_checkpoint(source))
    initial = resolve(compose([]).model, str(checkpoint), 0, "RUN_DIR")
    own = initial.adapters[-1][0] if initial.adapters else initial.checkpoint
    if ahead := read_checked(checkpoint)["identity"]["model"].get("mtp"):
        initial.config = replace(initial.config, mtp=MtpConfig(**ahead))
    assert own is not None
    folder = checkpoint / role if role else own
    if not (folder / ".metadata").is_file():
        roles = ", ".join(p.parent.name for p in sorted(checkpoint.glob("*/.metadata")))
        raise ConfigError("--part", folder.name, f"one of {roles}")
    if initial.adapters and folder != own:
        raise ConfigError("--part", role, f"{own.name}, of a run with model.lora")
    if merge and not initial.adapters:
        raise ConfigError("--merge", True, f"a run with model.lora.rank > 0: {checkpoint} holds whole weights")
    return checkpoint, folder, initial


def _units(
    table: list[ParamSpec], weights: Stored | Merged, parts: Mapping[str, FusedMatrix], cfg: ModelConfig
) -> Iterator[tuple[tuple[ParamSpec, int], int]]:
    """Yield ((parameter, or one expert of it where files do not stack them; that expert's number), bytes as stored).
    Copies of a tensor count with it."""
    copied = Counter(copies(cfg).values())
    for spec in table:
        size = weights.dtype(spec).itemsize * (1 + copied[spec.hf[0]])
        apart = spec.experts and spec.hf[0] not in parts
        for expert in range(spec.shape[0] if apart else 1):
            one = of_experts(spec, Shard(first=expert, count=1)) if apart else spec
            yield (one, expert), math.prod(one.shape) * size


def _check_sizes(blocks: Blocks, table: list[ParamSpec], where: dict[str, StorageLocation]) -> None:
    for spec in table:
        position = where[spec.canonical]
        size = blocks.size(position.key)
        expected = (max(size[0], position.size[0]), *position.size[1:]) if spec.padded else position.size
        if size != expected:
            raise CheckpointError(
                f"{blocks.folder}: {position.key} has size {size}, the model's shape says {position.size}"
            )


def _file_name(number: int, count: int) -> str:
    return SINGLE if count == 1 else f"model-{number + 1:05d}-of-{count:05d}.safetensors"


def _as_hf(
    out: Path,
    written: dict[str, tuple[str, Any]],
    total: int,
    initial: InitialModel,
    head: Head,
    config: dict[str, Any],
) -> None:
    """Write the small files of a Hugging Face folder."""
    if len(written) > 1:
        index = {
            "metadata": {"total_size": total},
            "weight_map": {n: f for f, (_, names) in written.items() for n in names},
        }
        (out / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
    tokenizer = initial.tokenizer
    (out / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    carry_tokenizer(tokenizer, out)
    carry(initial.origin, out)
    if head.kind == "lm":
        write_generation(out, config, stop_token_ids(tokenizer))
    if initial.extra:
        (out / EXTRA_FILE).write_text(json.dumps(initial.extra, indent=2) + "\n", encoding="utf-8")
    lines = [f"{digest}  {name}\n" for name, (digest, _) in sorted(written.items())]
    (out / CHECKSUMS).write_text("".join(lines), encoding="utf-8")


def _listed(folder: Path) -> dict[str, str]:
    path = folder / CHECKSUMS
    if not path.is_file():
        return {}
    pairs = (line.split(maxsplit=1) for line in path.read_text(encoding="utf-8").splitlines() if line.strip())
    return {name.lstrip("*"): digest for digest, name in pairs}


def _verify(folder: Path, listed: dict[str, str], env: RankEnv) -> None:
    """Check this rank's share of the files against their checksums."""
    for name in sorted(listed)[env.rank :: env.world_size]:
        path = folder / name
        if not path.is_file() or file_hash(path) != listed[name]:
            raise CheckpointError(f"{path} does not have its recorded SHA-256")


@contextmanager
def _joined(env: RankEnv, folder: Path) -> Iterator[None]:
    init_distributed(env, "auto", TIMEOUT_S, folder)
    try:
        yield
    finally:
        leave_distributed()


def _say(env: RankEnv, text: str) -> None:
    peaks = gathered(peak_memory_bytes())
    if env.rank == 0:
        ranks = f" on the largest of {len(peaks)} ranks" if len(peaks) > 1 else ""
        print(f"{text} (used {max(peaks) / 1e9:.2f} GB of host memory{ranks})", flush=True)


def main(args: argparse.Namespace, env: RankEnv) -> int:
    source, target = Path(args.source).expanduser(), Path(args.target).expanduser()
    common = {"file_bytes": args.file_bytes, "fresh": args.fresh}
    if args.file_bytes < 1:
        raise ConfigError("--file-bytes", args.file_bytes, "a number >= 1")
    if args.command == "import" and args.tensor < 1:
        raise ConfigError("--tensor", args.tensor, "a number >= 1")
    if args.family:
        load_family(args.family)
    if args.command == "import" and not (source / "config.json").is_file():
        raise ConfigError("FOLDER", args.source, "a Hugging Face folder, which has a config.json")
    if args.command == "import" and not is_known(source) and bridge.has_bridge():
        bridge.import_folder(source, target, env.world_size)
        return 0
    if args.command == "export" and bridge.is_bridged(source):
        bridge.export_folder(source, target, env.world_size)
        return 0
    with _joined(env, target.parent):
        if args.command == "import":
            import_hf(source, target, env, tensor=args.tensor, **common)
        else:
            export_checkpoint(source, target, env, role=args.part, merge=args.merge, **common)
    return 0
