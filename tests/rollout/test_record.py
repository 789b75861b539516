"""Recorded rollouts: what is written is read, whatever the number of ranks; what does not fit is refused."""

import dataclasses
import json
import math
from types import SimpleNamespace

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from aligner.errors import ConfigError, DataError
from aligner.rewards.composite import Scores
from aligner.rollout.record import Origin, file_name, join_rollouts, join_scores, read_header, read_recording
from aligner.rollout.record import write_recording as write
from aligner.rollout.replay import RecordedSource, check_origin, find_recordings
from aligner.rollout.sharing import share
from aligner.types import Prompt, RolloutBatch, Sample

PAD, PROMPTS, GROUP = 9, 4, 3
ORIGIN = Origin("0123456789abcdef", 300, PROMPTS, GROUP, 1.0, "shape", "grpo")


def make(slots=range(PROMPTS), seed=0, cut=True) -> tuple[RolloutBatch, Scores]:
    """Ragged rows of these prompt slots: the same numbers for a slot whatever slots are made with it."""
    rows, samples, total, raw, second = [], [], [], [], []
    for slot in slots:
        g = torch.Generator().manual_seed(100 * seed + slot)
        prompt = Prompt(7 * slot, tuple(torch.randint(10, 90, (1 + slot % 3,), generator=g).tolist()), f"p{slot}\n€ ✓")
        for i in range(GROUP):
            response = tuple(torch.randint(10, 90, (1 + (slot + i) % 4,), generator=g).tolist())
            rows.append((slot, prompt, response, torch.randn(8, 2, generator=g)))
            samples.append(Sample(prompt, i, f"r{slot}{i}\x00é", response, bool((slot + i) % 2), 5))
            invalid = (slot, i) == (1, 2)
            total.append(math.nan if invalid else float(slot + i / 3))
            raw.append(math.nan if invalid else 2.0 * (slot + i / 3))
            second.append(None if i else 0.25)
    lengths = torch.tensor([len(p.tokens) + len(r) for _, p, r, _ in rows])
    width = int(lengths.max())
    tokens = torch.full((len(rows), width), PAD)
    mask, logprobs, sampled = (torch.zeros(len(rows), width) for _ in range(3))
    for k, (_, prompt, response, noise) in enumerate(rows):
        start, n = len(prompt.tokens), int(lengths[k])
        tokens[k, :n] = torch.tensor(prompt.tokens + response)
        mask[k, start:n] = 1
        logprobs[k, start:n], sampled[k, start:n] = noise[: n - start, 0], noise[: n - start, 1]
    valid = [not math.isnan(v) for v in total]
    rollout = RolloutBatch(
        tokens=tokens,
        lengths=lengths,
        response_mask=mask,
        rollout_logprobs=logprobs,
        rewards=torch.tensor(total),
        valid=torch.tensor(valid),
        group=torch.tensor([slot for slot, *_ in rows]),
        finished=torch.tensor([s.finished for s in samples]),
        weight_version=5,
        samples=samples,
        sampled_logprobs=sampled if cut else None,
    )
    first = [None if math.isnan(v) else v for v in total]
    return rollout, Scores(total, raw, {"a": first, "b": second}, valid, [s.prompt.id % 2 == s.index for s in samples])


def assert_same(actual: tuple[RolloutBatch, Scores], wanted: tuple[RolloutBatch, Scores]) -> None:
    (a, x), (b, y) = actual, wanted
    assert a.tensors().keys() == b.tensors().keys() and a.weight_version == b.weight_version
    for name, t in b.tensors().items():
        assert a.tensors()[name].dtype == t.dtype and a.tensors()[name].shape == t.shape, name
        assert torch.equal(a.tensors()[name].nan_to_num(nan=1e9), t.nan_to_num(nan=1e9)), name
    assert a.samples == b.samples
    assert repr(x) == repr(y)


@pytest.mark.parametrize("cut", [False, True])
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_every_number_of_ranks_reads_what_it_would_have_made(tmp_path, cut, ranks):
    write(tmp_path / "a", *make(cut=cut), ORIGIN, 3)
    for rank in range(ranks):
        own = share(PROMPTS, ranks, rank)
        slots = range(own.start, own.stop)
        recording = read_recording(tmp_path / "a", slots)
        assert_same((recording.rollout, recording.scores), make(slots, cut=cut))
    assert (recording.header.step, recording.header.weight_version, recording.header.origin) == (3, 5, ORIGIN)


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_the_file_does_not_know_how_many_ranks_wrote_it(tmp_path, ranks):
    write(tmp_path / "whole", *make(), ORIGIN, 1)
    parts = [make(range(PROMPTS)[share(PROMPTS, ranks, rank)]) for rank in range(ranks)]
    write(tmp_path / "parts", join_rollouts([r for r, _ in parts], PAD), join_scores([s for _, s in parts]), ORIGIN, 1)
    assert (tmp_path / "whole").read_bytes() == (tmp_path / "parts").read_bytes()


def test_rows_are_group_major_whatever_their_order(tmp_path):
    rollout, scores = make()
    order = torch.arange(len(rollout.lengths)).view(PROMPTS, GROUP).T.reshape(-1)
    mixed = dataclasses.replace(rollout.select(order), samples=[rollout.samples[i] for i in order.tolist()])

    def pick(values):
        return [values[i] for i in order.tolist()]

    components = {name: pick(values) for name, values in scores.components.items()}
    inputs = Scores(pick(scores.total), pick(scores.raw), components, pick(scores.valid), pick(scores.clipped))
    write(tmp_path / "a", mixed, inputs, ORIGIN, 1)
    recording = read_recording(tmp_path / "a")
    assert_same((recording.rollout, recording.scores), (rollout, scores))


def test_other_tools_can_read_the_file(tmp_path):
    write(tmp_path / "a", *make(), ORIGIN, 1)
    with safe_open(str(tmp_path / "a"), framework="np") as file:
        metadata, tokens = file.metadata(), file.get_tensor("tokens")
    header = json.loads(metadata["header"])
    assert (header["format"], header["version"]) == ("aligner-rollout", 1) and str(tokens.dtype) == "int32"
    assert [p["id"] for p in header["prompts"]] == [0, 7, 14, 21] and header["prompts"][1]["text"] == "p1\n€ ✓"
    assert header["origin"]["tokenizer"] == ORIGIN.tokenizer and header["responses"][0] == "r00\x00é"


def altered(path, target, **change):
    """The same file with another header."""
    with safe_open(str(path), framework="pt") as file:
        tensors, known = {n: file.get_tensor(n) for n in file.keys()}, json.loads(file.metadata()["header"])  # noqa: SIM118
    save_file(tensors, str(target), metadata={"header": json.dumps(known | change)})
    return target


def test_what_is_no_recording_is_refused(tmp_path):
    write(tmp_path / "a", *make(), ORIGIN, 1)
    with pytest.raises(DataError, match=r"b: format version 2: expected 1"):
        read_header(altered(tmp_path / "a", tmp_path / "b", version=2))
    with pytest.raises(DataError, match=r"expected a recorded rollout \(debug.record\), a safetensors file"):
        save_file({"x": torch.zeros(1)}, str(tmp_path / "c"))
        read_header(tmp_path / "c")
    (tmp_path / "d").write_bytes((tmp_path / "a").read_bytes()[:100])
    with pytest.raises(DataError, match="d: cannot be read as a recorded rollout"):
        read_header(tmp_path / "d")
    origin = dataclasses.asdict(dataclasses.replace(ORIGIN, group=5))
    with pytest.raises(DataError, match="12 samples: expected 4 prompts x 5, as its header says"):
        read_recording(altered(tmp_path / "a", tmp_path / "e", origin=origin))


@pytest.mark.parametrize(
    "change, message",
    [
        ({"tokenizer": "ffff"}, r"another tokenizer or vocabulary \(tokenizer 0123456789abcdef, model.vocab_size 300"),
        ({"vocab_size": 301}, "expected tokenizer 0123456789abcdef, model.vocab_size 301"),
        ({"prompts": 8}, "4 prompts x 3 samples: expected batch.prompts=8 x batch.group=3"),
        ({"group": 2}, "expected batch.prompts=4 x batch.group=2"),
        ({"temperature": 0.5}, "sampled at temperature 1: expected sampling.temperature=0.5"),
    ],
)
def test_a_recording_of_another_kind_is_refused(tmp_path, change, message):
    path = tmp_path / file_name(1)
    write(path, *make(), ORIGIN, 1)
    own, layout = dataclasses.replace(ORIGIN, **change), SimpleNamespace(data=1, dp_rank=0)
    with pytest.raises(DataError, match=message):
        RecordedSource.open(str(tmp_path), 1, own, layout, lambda: 0, print)


def test_another_model_is_only_told(tmp_path):
    write(tmp_path / "a", *make(), ORIGIN, 1)
    assert check_origin(tmp_path / "a", read_header(tmp_path / "a"), ORIGIN) == ""
    other = dataclasses.replace(ORIGIN, model="other", stage="ppo")
    reported = check_origin(tmp_path / "a", read_header(tmp_path / "a"), other)
    assert reported.endswith("was recorded by another model and another stage")


def test_where_recordings_are_found(tmp_path):
    for step in (2, 1, 10):
        write(tmp_path / "rollouts" / file_name(step), *make(seed=step), ORIGIN, step)
    one = tmp_path / "rollouts" / file_name(2)
    for folder in (tmp_path, tmp_path / "rollouts"):
        assert [read_header(path).step for path in find_recordings(str(folder))] == [1, 2, 10]
    assert find_recordings(str(one)) == [one]
    with pytest.raises(ConfigError, match=r"debug\.train_only"):
        find_recordings(str(tmp_path / "nothing"))
    layout = SimpleNamespace(data=2, dp_rank=1, pgs=SimpleNamespace(dp=None))
    with pytest.raises(ConfigError, match=r"run\.steps=4: expected at most the 3 recorded rollouts"):
        RecordedSource.open(str(tmp_path), 4, ORIGIN, layout, lambda: 0, print)
    source = RecordedSource.open(str(tmp_path), 3, ORIGIN, layout, lambda: 6, print)
    rollout, metrics, scores = source.next(3)
    assert_same((rollout, scores), make(range(2, 4), seed=10))
    assert metrics == {"staleness/mean": 1.0, "staleness/max": 1.0}
    paused, scores = make()
    paused.versions = torch.full_like(paused.tokens, 5)
    paused.versions[paused.finished] = 4  # whole rows
    write(one, paused, scores, ORIGIN, 2)
    age = (6 - paused.versions)[6:][paused.response_mask[6:].bool()].double()
    metrics = source.next(2)[1]
    assert metrics["staleness/max"] == 2 and metrics["staleness/mean"] == float(age.mean()) < 2
