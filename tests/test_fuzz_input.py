"""Damage to every kind of file that others or an earlier run wrote: told in one line, or it made no difference.

Flips, cuts, doubled and lost pieces of the bytes; of JSON also lost keys and values of other kinds. Seeds are fixed.
What is accepted must be what an independent reader makes of the same bytes, or what the whole file held.
"""

import gzip
import json
import math
import random
import shutil
import struct
from dataclasses import fields

import pyarrow
import pytest
import torch
import transformers
from huggingface_hub.errors import StrictDataclassError
from safetensors import safe_open

from aligner.cluster import failure
from aligner.config.freeze import freeze, load_frozen
from aligner.config.resolve import compose
from aligner.config.sections.data import DataConfig
from aligner.data.formats import sft_rows
from aligner.data.readers import read_rows
from aligner.data.tokenizer import byte_tokenizer, load_tokenizer, stop_token_ids
from aligner.errors import AlignerError
from aligner.families.hf_config import config_from_hf, hf_config
from aligner.files import file_hash
from aligner.megatron.checkpoint_files import read_checked, write_manifest
from aligner.megatron.checkpoint_index import check_before_loading, noted_checksums
from aligner.megatron.chunks import Block, BlockFile, Blocks, StorageLocation, write_index
from aligner.models.folder_check import check_folder
from aligner.models.params import expected_hf_shapes
from aligner.models.safetensors_io import INDEX, SINGLE, open_hf, write_hf
from aligner.refit.export import read_extra
from aligner.run.metrics import read_jsonl
from aligner.run.stop import read_progress
from tests.tiny import MODELS, WINDOWS

CFG = MODELS["qwen3"]
ODD = (None, True, -1, 0, 0.5, 10**30, 1e308, "x", "", [], [[1]], {}, {"a": None}, float("nan"), float("inf"))
DEEP = "[" * 5000 + "]" * 5000


def damaged_bytes(data, rng):
    data = bytearray(data)
    at, size = rng.randrange(len(data)), rng.randrange(1, 9)
    kind = rng.randrange(5)
    if kind < 2:
        data[at] ^= 1 << rng.randrange(8)
    elif kind == 2:
        del data[at:]
    elif kind == 3:
        del data[at : at + size]
    else:
        data[at:at] = data[at : at + size]
    return bytes(data)


def damaged_json(data, rng):
    """A key or an element lost, or of another kind, anywhere in it."""
    value = json.loads(data)
    places, open_ = [], [value]
    while open_:
        here = open_.pop()
        keys = list(here) if isinstance(here, dict) else list(range(len(here)))
        places += [(here, key) for key in keys]
        open_ += [here[key] for key in keys if isinstance(here[key], dict | list)]
    here, key = rng.choice(places)
    if rng.random() < 0.3:
        del here[key]
    elif rng.random() < 0.1:
        here[key] = "DEEP"
    else:
        here[key] = rng.choice(ODD)
    return json.dumps(value).replace('"DEEP"', DEEP).encode()


def fuzz(path, read, same, seed, bytes_=25, json_=0):
    """`read()` is refused in one line, or `same(its result, the damaged bytes)`."""
    whole, outcomes = path.read_bytes(), {"refused": 0, "accepted": 0}
    for number in range(bytes_ + json_):
        rng = random.Random(1000 * seed + number)
        data = (damaged_bytes if number < bytes_ else damaged_json)(whole, rng)
        if data == whole:
            continue
        path.write_bytes(data)
        try:
            content = read()
        except AlignerError as error:
            text = str(error)
            assert "\n" not in text.strip() and len(text) < 1500, (number, text)
            outcomes["refused"] += 1
        else:
            assert same(content, data), (number, data[:2000])
            outcomes["accepted"] += 1
    path.write_bytes(whole)
    read()
    return outcomes


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    g = torch.Generator().manual_seed(0)
    tensors = {name: torch.randn(shape, generator=g) for name, shape in expected_hf_shapes(CFG).items()}
    folder = tmp_path_factory.mktemp("fuzz") / "hf"
    write_hf(folder, tensors.items(), hf_config(CFG, bos_token_id=None, eos_token_id=1, pad_token_id=0))
    return folder


@pytest.mark.parametrize("case", ["qwen3", "llama3", "gemma3"])
def test_config_json(case, tmp_path):
    """What is accepted means what it means to transformers, or is what the whole file meant."""
    cfg = (MODELS | WINDOWS)[case]
    path = tmp_path / "config.json"
    path.write_text(json.dumps(hf_config(cfg, bos_token_id=None, eos_token_id=1, pad_token_id=0)))
    whole = config_from_hf(tmp_path)

    def same(ours, data):
        if ours == whole:
            return True
        raw = json.loads(data)
        try:
            theirs = transformers.AutoConfig.for_model(raw.pop("model_type"), **raw)
        except StrictDataclassError:  # an integer where it wants a float, a null where we take the default
            return sum(getattr(ours, f.name) != getattr(whole, f.name) for f in fields(ours)) == 1
        rope = theirs.rope_parameters.get("full_attention", theirs.rope_parameters)
        return (
            (ours.hidden_size, ours.num_layers, ours.num_heads, ours.vocab_size)
            == (theirs.hidden_size, theirs.num_hidden_layers, theirs.num_attention_heads, theirs.vocab_size)
            and (ours.ffn_hidden_size, ours.norm_eps) == (theirs.intermediate_size, theirs.rms_norm_eps)
            and (ours.rope_base, ours.tie_embeddings) == (rope["rope_theta"], theirs.tie_word_embeddings)
            and ours.max_position == theirs.max_position_embeddings
            and ours.rope_scaling.type == rope["rope_type"].replace("default", ours.rope_scaling.type)
        )

    fuzz(path, lambda: config_from_hf(tmp_path), same, 1, bytes_=20, json_=40)


def read_folder(folder):
    cfg, tensors = config_from_hf(folder), open_hf(folder)
    return {name: tensors[name] for name in check_folder(tensors, cfg)}


def test_safetensors_and_their_index(folder, tmp_path):
    """Headers; what the tensors hold has no checksum."""
    whole = read_folder(folder)

    def same(found, _):
        return found.keys() == whole.keys() and all(torch.equal(found[n], t) for n, t in whole.items())

    one = shutil.copytree(folder, tmp_path / "one")
    path = one / SINGLE
    data = path.read_bytes()
    (size,) = struct.unpack("<Q", data[:8])
    for number in range(60):
        rng = random.Random(number)
        header = (damaged_bytes if number % 2 else damaged_json)(data[8 : 8 + size], rng)
        length = size if number % 3 == 0 else len(header)  # with and without the right length
        path.write_bytes(struct.pack("<Q", length) + header + data[8 + size :])
        try:
            content = read_folder(one)
        except AlignerError as error:
            assert "\n" not in str(error).strip(), number
        else:
            assert same(content, b""), (number, header[:500])
    many = tmp_path / "many"
    config = json.loads((folder / "config.json").read_text())
    write_hf(many, whole.items(), config, 20_000)
    assert fuzz(many / INDEX, lambda: read_folder(many), same, 2, 20, 20)["refused"] >= 20


@pytest.fixture(scope="module")
def sharded(tmp_path_factory):
    """A checkpoint of two tensors and the objects beside them, as `aligner import` writes it."""
    folder = tmp_path_factory.mktemp("sharded")
    tensors = {"a": torch.arange(12.0).view(4, 3), "b": torch.arange(5.0)}
    with BlockFile(folder / "part-00000.distcp") as out:
        for name, t in tensors.items():
            out.add(name, (0,) * t.dim(), t)
    blocks = [Block(b.key, b.offsets, b.shape, b.dtype, b.start, b.length) for b in out.blocks]
    places = {n: StorageLocation(n, tuple(t.shape), None, t.dtype) for n, t in tensors.items()}
    write_index(folder, {"part-00000.distcp": blocks}, places)
    files = {path.name: file_hash(path) for path in folder.iterdir()}
    (folder / "integrity.json").write_text(json.dumps({"algorithm": "sha256", "files": files}))
    return folder, tensors


@pytest.mark.parametrize("name", [".metadata", "common.distcp", "metadata.json", "integrity.json"])
@pytest.mark.parametrize("checksums", [True, False], ids=["checked", "unchecked"])
def test_sharded_checkpoints(sharded, name, checksums, tmp_path):
    """Without the checksums, as of a folder whose author made them: nothing but one line, and no code of it runs."""
    folder, tensors = shutil.copytree(sharded[0], tmp_path / "c"), sharded[1]

    def read():
        index = check_before_loading(folder)
        noted = noted_checksums(folder, index)
        wrong = [n for n, digest in noted.items() if (folder / n).is_file() and file_hash(folder / n) != digest]
        if wrong and checksums:
            raise AlignerError(f"{wrong}")
        blocks = Blocks(folder)
        return {n: blocks.region(n, (0,) * t.dim(), tuple(t.shape)) for n, t in tensors.items()}

    def same(found, _):
        return not checksums or all(torch.equal(found[n], t) for n, t in tensors.items())

    fuzz(folder / name, read, same, 3, bytes_=40 if name == ".metadata" else 12, json_=10 * name.endswith(".json"))


def test_state_json_and_its_manifest(tmp_path):
    state = {"format": 2, "identity": {"stage": "sft", "model": {"num_layers": 2}}, "step": 3, "world_size": 1}
    state |= {"metric": 0.5, "state": {"stream": {"cursor": 40, "epoch": 1}}}
    (tmp_path / "state.json").write_text(json.dumps(state, indent=1))
    write_manifest(tmp_path)
    whole = read_checked(tmp_path)
    for name in ("state.json", "manifest.json"):
        fuzz(tmp_path / name, lambda: read_checked(tmp_path), lambda actual, _: actual == whole, 4, 15, 15)


def plain_rows(data):
    """Row by row, by the standard library alone."""
    lines = data.decode("utf-8-sig").split("\n")
    return [json.loads(line) for line in lines if line.strip()]


def equal(a, b):
    return json.dumps(a) == json.dumps(b)  # NaN too


def test_rows_of_data(tmp_path):
    path = tmp_path / "x.jsonl"
    rows = [{"prompt": f"{i} + 1 =", "completion": str(i + 1), "extra": {"n": [i]}} for i in range(4)]
    rows.append({"prompt": "gr\u00fc\u00df \u2028", "completion": "\N{GRINNING FACE}", "extra": None})
    path.write_text("".join(json.dumps(row, ensure_ascii=i % 2 == 0) + "\n" for i, row in enumerate(rows)))

    def read():
        rows = read_rows(str(path))
        list(sft_rows(rows, DataConfig()))
        return list(rows)

    fuzz(path, read, lambda rows, data: equal(rows, plain_rows(data)), 5, bytes_=50)
    path.write_text(json.dumps(rows[0]))
    fuzz(path, read, lambda rows, data: equal(rows, plain_rows(data)), 6, bytes_=0, json_=25)
    path.write_text('{"prompt": "a", "completion": "b"}\n{"prompt": "\\ud800", "completion": "b"}\n')
    with pytest.raises(AlignerError, match=r"x.jsonl:2: expected Unicode text, found '\\ud800'"):
        read()


@pytest.mark.parametrize("suffix", [".gz", ".zst"])
def test_archives_of_rows(tmp_path, suffix):
    """A .gz has a checksum: nothing damaged passes but in its header; of a .zst what is not told may have changed."""
    path = tmp_path / f"x.jsonl{suffix}"
    text = "".join(json.dumps({"prompt": f"{i} + 1 =", "completion": str(i + 1)}) + "\n" for i in range(30)).encode()
    path.write_bytes(gzip.compress(text) if suffix == ".gz" else pyarrow.compress(text, "zstd", asbytes=True))
    whole = plain_rows(text)
    same = lambda actual, _: suffix == ".zst" or equal(actual, whole)  # noqa: E731
    assert fuzz(path, lambda: list(read_rows(str(path))), same, 14, bytes_=60)["refused"] > 30


def test_records_of_metrics(tmp_path):
    path = tmp_path / "metrics.jsonl"
    rows = [{"step": i, "wall_time": 1.5 * i, "sft/loss": 1 / i, "none": None} for i in range(1, 5)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))

    def same(actual, data):
        """All of it; of a file that was cut all whole lines."""
        lines = [line for line in data.split(b"\n") if line.strip(b" \r\t\0")]
        return len(actual) >= len(lines) - 1 and all(
            equal(row, json.loads(line)) for row, line in zip(actual, lines, strict=False)
        )

    fuzz(path, lambda: read_jsonl(path), same, 7, bytes_=40)


def test_small_notes_of_a_run_are_whole_or_not_there(tmp_path):
    """progress.json and the last words of a rank: their readers go on without them."""
    path = tmp_path / "progress.json"
    path.write_text(json.dumps({"step": 3, "steps": 9, "time": 1.5, "saves_s": [0.5, 2.0]}))
    finite = lambda actual, _: all(isinstance(s, float) and math.isfinite(s) for s in actual)  # noqa: E731
    assert fuzz(path, lambda: read_progress(tmp_path)[1], finite, 8, 20, 25)["refused"] == 0
    path = tmp_path / "failure-0000.json"
    path.write_text(json.dumps({"time_s": 1.5, "text": "a word", "exit_code": 93}))

    def typed(found, _):
        return found is None or (math.isfinite(found.time_s) and isinstance(found.text, str))

    assert fuzz(path, lambda: failure.read(path), typed, 9, 20, 25)["refused"] == 0


def test_what_lies_beside_the_weights(tmp_path):
    tokenizer = byte_tokenizer(str(tmp_path))
    path = tmp_path / "generation_config.json"
    path.write_text(json.dumps({"eos_token_id": [1, 7], "temperature": 0.5}))
    whole = stop_token_ids(tokenizer)

    def ends(actual, data):
        listed = json.loads(data).get("eos_token_id")
        listed = [] if listed is None else listed if isinstance(listed, list) else [listed]
        return set(actual) == {*listed, tokenizer.eos_token_id}

    assert whole == (1, 7)
    fuzz(path, lambda: stop_token_ids(tokenizer), ends, 10, 15, 15)
    path = tmp_path / "aligner.json"
    path.write_text(json.dumps({"bias": 0.5, "std": 2.0, "attributes": []}))
    fuzz(path, lambda: read_extra(tmp_path), lambda content, data: equal(content, json.loads(data)), 11, 15, 15)
    for name, count in (("tokenizer_config.json", 15), ("tokenizer.json", 15)):  # their own words may change
        fuzz(tmp_path / name, lambda: load_tokenizer(str(tmp_path)), lambda *_: True, 12, count, 10)


def test_config_yaml(tmp_path):
    path = freeze(compose(["stage=grpo"]), tmp_path)

    def same(found, _):
        return type(found.optim.lr) is float and type(found.run.steps) is int

    fuzz(path, lambda: load_frozen(tmp_path), same, 13, bytes_=25)


def test_the_headers_that_are_damaged_above_are_read_by_safetensors(folder):
    """The tests above would prove nothing on files that are never read."""
    with safe_open(str(folder / SINGLE), framework="pt") as file:
        assert set(file.keys()) == set(expected_hf_shapes(CFG))
