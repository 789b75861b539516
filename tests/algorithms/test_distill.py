"""Stage distill: its loss in other cuts, what its first step must be, teachers of other shapes, and what it learns."""

import itertools
import math
import re

import pytest
import torch

from aligner.errors import AlignerError, ConfigError
from tests import stages

METRICS = [
    *("distill/loss", "distill/divergence", "distill/kl", "distill/teacher_entropy", "distill/agreement"),
    *("policy/loss", "policy/grad_norm"),
]
WIDER = ["model.num_layers=3", "model.hidden_size=48", "model.vocab_size=280", "model.tie_embeddings=false"]


@pytest.fixture(scope="module")
def teacher(tiny_data, tmp_path_factory):
    """Of another shape than the students, with more rows in its embedding."""
    overrides = ["run.steps=60", "batch.micro_batch_samples=16", "checkpoint.final=false"]
    return stages.stage("sft", tiny_data, tmp_path_factory.mktemp("teacher") / "run", *WIDER, *overrides)


def run(teacher, data, folder, *more):
    own = [f"algorithm.distill.teacher={teacher}", "run.steps=3", "run.export=false", "checkpoint.final=false"]
    return stages.records(stages.stage("distill", data, folder, *own, *more))


RUNS = {
    "plain": [],
    "padded, micro-batch 1": ["batch.packing=false", "batch.micro_batch_samples=1"],
    "logits in parts": ["batch.micro_batch_tokens=40", "batch.logits_bytes=60000", "batch.logprob_tokens=32"],
    "all tokens by name": ["algorithm.distill={top_k: 261, outside: renormalise}"],
}


@pytest.fixture(scope="module")
def first_steps(tiny_data, teacher, tmp_path_factory):
    root, made = tmp_path_factory.mktemp("distill"), {}

    def get(name):
        if name not in made:
            made[name] = run(teacher, tiny_data, root / str(len(made)), *RUNS[name])
        return made[name]

    return get


@pytest.mark.slow
def test_cuts_packing_and_a_whole_list_of_tokens_give_the_same_run(first_steps):
    runs = [first_steps(name) for name in RUNS]
    for record, *others in zip(*runs, strict=True):
        assert [m for m in METRICS if not math.isfinite(record[m])] == []
        assert record["distill/loss"] == pytest.approx(record["policy/loss"], abs=1e-6)
        for name, other in itertools.product(METRICS, others):
            assert other[name] == pytest.approx(record[name], abs=3e-4), (record["step"], name)
    assert runs[3][0]["distill/top_k_mass"] == pytest.approx(1, abs=1e-4)
    assert runs[0][0]["distill/kl"] > 0.1 and runs[0][2]["distill/kl"] < runs[0][0]["distill/kl"]


@pytest.mark.parametrize("overrides", [[], ["algorithm.distill={top_k: 4, kind: jsd}"]])
def test_a_student_that_is_its_teacher_has_nothing_to_learn(tiny_data, tiny_runs, tmp_path, overrides, monkeypatch):
    start = [f"model.init={tiny_runs['sft']}", "debug.first_step_checks=true", *overrides]
    first = run(tiny_runs["sft"], tiny_data, tmp_path / "x", *start)[0]
    assert first["distill/divergence"] < 1e-6 and first["distill/agreement"] == 1 and first["policy/grad_norm"] < 1e-4

    from aligner.roles.teacher import Student

    outputs = Student._outputs

    def other(self, hidden, batch, update):
        return outputs(self, hidden * (1.2 if update else 1.0), batch, update)

    monkeypatch.setattr(Student, "_outputs", other)
    with pytest.raises(AlignerError, match=r"distill/divergence=.* expected 0 within 1e-05"):
        run(tiny_runs["sft"], tiny_data, tmp_path / "y", *start)


def test_a_student_learns_not_to_say_what_is_outside(tiny_data, tiny_runs, tmp_path):
    """With outside=zero also one that is its own teacher: the loss is -log of the k tokens' mass, which grows."""
    overrides = ["algorithm.distill={top_k: 4, outside: zero}", "debug.first_step_checks=true", "optim.lr=1e-2"]
    records = run(tiny_runs["sft"], tiny_data, tmp_path / "x", f"model.init={tiny_runs['sft']}", *overrides)
    losses = [record["distill/divergence"] for record in records]
    assert losses[0] >= -math.log(records[0]["distill/top_k_mass"]) > 1e-3 and losses[2] < losses[0]
    assert all(record["distill/kl"] == pytest.approx(record["distill/divergence"], abs=1e-6) for record in records)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["forward_kl", "reverse_kl", "mixed", "jsd"])
def test_it_comes_to_do_what_its_teacher_does(tiny_data, teacher, tmp_path, kind):
    overrides = [f"algorithm.distill.kind={kind}", "run.steps=40", "batch.micro_batch_samples=16", "optim.lr=1e-2"]
    records = run(teacher, tiny_data, tmp_path / "run", *overrides)
    assert records[-1]["distill/kl"] < 0.2 * records[0]["distill/kl"]
    assert records[-1]["distill/agreement"] > max(0.3, records[0]["distill/agreement"])


def test_sft_is_learned_beside_it(tiny_data, teacher, tmp_path):
    overrides = [
        "algorithm.distill={sft_coef: 0.5, top_k: 3, temperature: 2.0}",
        f"data.eval={tiny_data / 'eval.jsonl'}",
    ]
    records = run(teacher, tiny_data, tmp_path / "run", *overrides)
    for record in records:
        both = record["distill/divergence"] + 0.5 * record["distill/nll"]
        assert record["distill/loss"] == pytest.approx(both, abs=1e-5)
    assert records[-1]["eval/loss"] > 0 and 0 < records[0]["distill/top_k_mass"] < 1


def test_documents_do_not_see_each_other(tiny_data, teacher, tmp_path):
    """Three in a row, against one by one: for teacher and student alike."""
    rows = stages.write_jsonl(tmp_path / "text.jsonl", [{"text": f"{c}bcdefghij" * 2} for c in "abcdef"])
    overrides = ["data.format=text", f"data.train={rows}", "data.shuffle=false", "run.steps=1"]
    one, three = (
        run(teacher, tiny_data, tmp_path / str(size), *overrides, f"data.max_tokens={size}", f"batch.sequences={count}")
        for size, count in ((21, 6), (63, 2))
    )
    for name in METRICS:
        assert one[0][name] == pytest.approx(three[0][name], abs=1e-5), name


@pytest.fixture
def store(tiny_data, teacher, tmp_path, monkeypatch, capsys):
    """Run with the teacher's five most likely tokens from a folder, in files of eight rows: (records, lines about
    it)."""
    from aligner.data import stored_targets

    monkeypatch.setattr(stored_targets, "BLOCK", 8)

    def go(name, *overrides):
        own = ["algorithm.distill.top_k=5", f"algorithm.distill.store={tmp_path / 'store'}", *overrides]
        capsys.readouterr()
        folder = stages.stage("distill", tiny_data, tmp_path / name, "run.steps=3", "run.export=false", *own)
        output = [line for line in capsys.readouterr().out.splitlines() if "teacher's" in line]
        return (stages.records(folder) if (folder / "metrics.jsonl").exists() else []), output

    return go


def test_stored_tokens_are_the_teachers(store, teacher, tiny_data, tmp_path):
    """The same run; computed once, by a run that does nothing else; then without a teacher."""
    live = run(teacher, tiny_data, tmp_path / "live", "algorithm.distill.top_k=5")
    here = f"algorithm.distill.teacher={teacher}"
    records, lines = store("first", here, "run.steps=0")
    assert not records and "4 of 4 files" in lines[0] and not (tmp_path / "first/checkpoints").exists()
    for name, overrides in (("again", [here]), ("alone", [])):
        records, lines = store(name, *overrides)
        assert len(lines) == 1 and "5 most likely tokens from" in lines[0]
        for record, other in zip(records, live, strict=True):
            for metric in METRICS:
                assert record[metric] == pytest.approx(other[metric], abs=1e-6), (name, metric)


@pytest.mark.slow
def test_a_store_is_finished_and_never_mistaken(store, teacher, tiny_data, tiny_runs, tmp_path):
    here = f"algorithm.distill.teacher={teacher}"
    store("first", here, "run.steps=0")
    (folder,) = (tmp_path / "store").iterdir()
    rights = {path.stat().st_mode for path in folder.iterdir()}
    assert len(rights) == 1  # files of tensors too have those of the umask: runs share the folder
    files = sorted(folder.glob("*.safetensors"))
    assert [file.name for file in files] == [f"rows-{n:08d}.safetensors" for n in (0, 8, 16, 24)]
    whole, kept = files[1].read_bytes(), files[0].stat().st_mtime_ns
    files[1].write_bytes(whole[:99])  # torn
    files[2].unlink()
    with pytest.raises(ConfigError, match=r"algorithm.distill.teacher=.* to compute 2 of 4 files"):
        store("alone")
    assert "2 of 4 files" in store("second", here)[1][0]
    assert files[1].read_bytes() == whole and files[0].stat().st_mtime_ns == kept
    with pytest.raises(ConfigError, match="has another top_k"):
        store("other", "algorithm.distill.top_k=4")
    rows = stages.write_jsonl(tmp_path / "rows.jsonl", [{"prompt": "say x:", "completion": "y"}] * 32)
    with pytest.raises(ConfigError, match="has another data"):
        store("rows", f"data.train={rows}", "batch.sequences=4", "batch.micro_batch_samples=4")
    store("a second teacher", f"algorithm.distill.teacher={tiny_runs['sft']}", "run.steps=0")
    with pytest.raises(ConfigError, match="the teacher to take, of the 2"):
        store("which")


@pytest.fixture(scope="module")
def named(tiny_data, tmp_path_factory):
    """Rows of which every other one names its teacher a, the rest b; and those of each alone."""
    root = tmp_path_factory.mktemp("named")
    rows = [{"prompt": f"say {c}:", "completion": c, "teacher": "ab"[i % 2]} for i, c in enumerate(stages.LETTERS[:16])]
    for name in ("ab", "a", "b"):
        stages.write_jsonl(root / f"{name}.jsonl", [row for row in rows if row["teacher"] in name])
    return root


@pytest.mark.parametrize("overrides", [[], ["algorithm.distill.top_k=4", "batch.micro_batch_samples=2"]])
def test_each_row_has_targets_of_the_teacher_that_it_names(tiny_runs, tiny_data, teacher, named, tmp_path, overrides):
    """The mean over all answers is that of both halves, which have as many tokens, each with its teacher alone."""
    both = {"a": teacher, "b": tiny_runs["sft"]}
    own = [f"algorithm.distill.teachers={{a: {both['a']}, b: {both['b']}}}", "run.steps=1", "run.export=false"]
    own += [f"data.train={named / 'ab.jsonl'}", "checkpoint.final=false", *overrides]
    together = stages.records(stages.stage("distill", tiny_data, tmp_path / "ab", *own))[0]
    halves = [
        run(
            path,
            tiny_data,
            tmp_path / x,
            *overrides,
            f"data.train={named / x}.jsonl",
            "batch.sequences=8",
            "run.steps=1",
        )
        for x, path in both.items()
    ]
    for name in METRICS[:5]:
        one, two = (records[0][name] for records in halves)
        assert together[name] == pytest.approx((one + two) / 2, abs=1e-6), name
    assert abs(halves[0][0]["distill/kl"] - halves[1][0]["distill/kl"]) > 1e-3


@pytest.mark.slow
def test_own_answers_have_targets_of_the_teachers_of_their_prompts(
    tiny_runs, tiny_data, teacher, named, tmp_path, monkeypatch
):
    """And a run that was stopped goes on with them bit by bit, wherever the teachers' weights lie."""
    from aligner.data.tokenizer import load_tokenizer
    from aligner.stages import distill
    from aligner.types import TeacherNumbers

    tokenizer, tell, seen = load_tokenizer(str(tiny_data / "tokenizer")), distill.add_targets, []

    def watched(teachers, rows):
        for tokens, number in zip(rows.tokens.tolist(), rows.of(TeacherNumbers).told_by.tolist(), strict=True):
            letter = tokenizer.decode(tokens).partition(":")[0][-1]
            assert number == stages.LETTERS.index(letter) % 2, letter
            seen.append(letter)
        return tell(teachers, rows)

    monkeypatch.setattr(distill, "add_targets", watched)
    own = [f"algorithm.distill.teachers={{a: {teacher}, b: {tiny_runs['sft']}}}", "algorithm.distill.on_policy=0.5"]
    own += [f"data.train={named / 'ab.jsonl'}", "checkpoint.every=2", "optim.schedule=constant"]
    straight = stages.stage("distill", tiny_data, tmp_path / "straight", *own, "run.steps=4")
    assert sorted(seen) == sorted(stages.LETTERS[:16] * 4)
    assert [record["distill/on_policy"] for record in stages.records(straight)] == [0, 1, 0, 1]
    stages.stage("distill", tiny_data, tmp_path / "run", *own, "run.steps=2", "memory.offload=[weights]")
    resumed = stages.stage("distill", tiny_data, tmp_path / "run", *own, "run.steps=4", "memory.offload=[weights]")
    assert stages.differences(resumed, straight) == [] and stages.same_weights(resumed, straight)


OWN = ["algorithm.distill.on_policy=1", "algorithm.distill.kind=reverse_kl", "sampling.max_response_tokens=4"]


@pytest.mark.slow
def test_its_own_answers_are_what_it_learns_from(tiny_data, teacher, tmp_path):
    """From prompts alone, with the engine's weights those of each step."""
    prompts = stages.write_jsonl(tmp_path / "prompts.jsonl", [{"prompt": f"say {c}:"} for c in stages.LETTERS])
    overrides = [*OWN, f"data.train={prompts}", "run.steps=30", "batch.micro_batch_samples=16", "optim.lr=1e-2"]
    records = run(teacher, tiny_data, tmp_path / "run", *overrides)
    assert records[-1]["distill/kl"] < 0.4 * records[0]["distill/kl"]
    assert [record["refit/version"] for record in records] == list(range(30))
    assert all(record["distill/on_policy"] == 1 and 1 <= record["response/tokens_mean"] <= 4 for record in records)


def test_a_share_of_the_steps_is_its_own(tiny_data, teacher, tmp_path):
    """And of the others the rows are what they would be alone."""
    overrides = [*OWN[1:], "run.steps=5", "optim.lr=1e-9"]
    mixed = run(teacher, tiny_data, tmp_path / "mixed", "algorithm.distill.on_policy=0.4", *overrides)
    assert [record["distill/on_policy"] for record in mixed] == [0, 0, 1, 0, 1]
    alone = run(teacher, tiny_data, tmp_path / "alone", *overrides)
    theirs = [record["distill/kl"] for record in mixed if not record["distill/on_policy"]]
    assert theirs == pytest.approx([record["distill/kl"] for record in alone[:3]], abs=1e-5)


def test_a_student_learns_what_only_its_teacher_reads(tiny_data, teacher, tmp_path, monkeypatch):
    """The letter, of prompts that do not name it; the teacher reads the student's own answers. Stopped and resumed it
    is the same run."""
    from aligner.data.tokenizer import load_tokenizer
    from aligner.stages import distill
    from aligner.types import TeacherRows

    tokenizer, ask, pairs = load_tokenizer(str(tiny_data / "tokenizer")), distill.add_targets, []

    def watched(teachers, rows):
        own = rows.of(TeacherRows)
        sides = (rows.tokens, rows.lengths), (own.teacher_tokens, own.teacher_lengths)
        pairs.extend(zip(*([tokenizer.decode(x[:n]) for x, n in zip(*s, strict=True)] for s in sides), strict=True))
        return ask(teachers, rows)

    monkeypatch.setattr(distill, "add_targets", watched)
    rows = [{"prompt": f"{i}?", "letter": c} for i, c in enumerate(stages.LETTERS[:16])]
    prompts = stages.write_jsonl(tmp_path / "prompts.jsonl", rows)
    own = [*OWN, f"data.train={prompts}", "optim.lr=1e-2", "optim.schedule=constant", "checkpoint.every=15"]
    own += [f"algorithm.distill.teacher={teacher}", "algorithm.distill.teacher_prompt='say {letter}:'"]
    straight = stages.stage("distill", tiny_data, tmp_path / "straight", *own, "run.steps=30")
    for student, other in pairs:
        number, answer = re.search(r"(\d+)\?(.*)", student, re.S).groups()
        assert other.endswith(f"say {rows[int(number)]['letter']}:{answer}")
    records = stages.records(straight)
    assert records[-1]["distill/kl"] < 0.4 * records[0]["distill/kl"]
    stages.stage("distill", tiny_data, tmp_path / "run", *own, "run.steps=15")
    resumed = stages.stage("distill", tiny_data, tmp_path / "run", *own, "run.steps=30")
    assert stages.differences(resumed, straight) == [] and stages.same_weights(resumed, straight)


def test_right_answers_of_its_group_teach_the_others(tiny_data, teacher, tmp_path, monkeypatch):
    """The student's average says of each answer what it would say behind the next right one of its group; the others
    are not learned. Stopped and resumed it is the same run."""
    from aligner.data.tokenizer import decode_responses, load_tokenizer
    from aligner.stages import distill
    from aligner.types import TeacherRows

    tokenizer, ask, batches = load_tokenizer(str(tiny_data / "tokenizer")), distill.add_targets, []

    def watched(teachers, rows):
        batches.append(rows)
        return ask(teachers, rows)

    monkeypatch.setattr(distill, "add_targets", watched)
    prompts = stages.write_jsonl(tmp_path / "prompts.jsonl", [{"prompt": f"{i % 10}?"} for i in range(16)])
    own = [*OWN, *WIDER, f"model.init={teacher}", f"data.train={prompts}", "ema.decay=0.5", "batch.group=4"]
    own += ["algorithm.distill.teacher=self", "algorithm.distill.teacher_prompt='like {right_answer}:'"]
    own += ["reward.functions=[{path: tests/assets/tiny_rewards.py:even_first}]", "optim.schedule=constant"]
    own += ["checkpoint.every=2"]
    straight = stages.stage("distill", tiny_data, tmp_path / "straight", *own, "run.steps=4")
    for rows, record in zip(list(batches), stages.records(straight), strict=True):
        begin, theirs = len(tokenizer("0?")["input_ids"]), rows.of(TeacherRows)
        replies = decode_responses(tokenizer, rows.tokens[:, begin:], rows.lengths - begin)
        right = [reply != "" and ord(reply[0]) % 2 == 0 for reply in replies]
        for at, mask in enumerate(rows.loss_mask):
            others = [at - at % 4 + (at + step) % 4 for step in (1, 2, 3)]
            other = next((replies[j] for j in others if right[j]), None)
            assert bool(mask.any()) == (other is not None)
            if other is not None:
                line = tokenizer.decode(theirs.teacher_tokens[at, : theirs.teacher_lengths[at]])
                assert line == f"like {other}:" + tokenizer.decode(rows.tokens[at, begin : rows.lengths[at]])
        assert record["distill/right"] == pytest.approx(sum(right) / 16)
        assert record["distill/taught"] == pytest.approx(float(rows.loss_mask.any(1).float().mean()))
    assert 0 < sum(record["distill/taught"] for record in stages.records(straight)) < 4
    stages.stage("distill", tiny_data, tmp_path / "run", *own, "run.steps=2")
    resumed = stages.stage("distill", tiny_data, tmp_path / "run", *own, "run.steps=4", "memory.offload=[optimizer]")
    assert stages.differences(resumed, straight) == [] and stages.same_weights(resumed, straight)


def test_a_step_without_a_right_answer_learns_nothing(tiny_data, teacher, tmp_path):
    """Also without an average, which is then the student as it is."""
    own = [*OWN, "algorithm.distill.teacher=self", "algorithm.distill.teacher_prompt='{prompt} {right_answer}'"]
    own += ["batch.group=2", "eval.full_score=2", "reward.functions=[{path: tests/assets/tiny_rewards.py:even_first}]"]
    records = run("self", tiny_data, tmp_path / "run", *own, "optim.weight_decay=0")
    assert [record["distill/taught"] for record in records] == [0, 0, 0]
    assert all(record["policy/grad_norm"] == record["policy/loss"] == 0 for record in records)
    assert all(record["distill/loss"] is None for record in records)


def test_a_teacher_with_another_tokenizer_judges_spans_of_text(tiny_data, tiny_runs, tmp_path, monkeypatch):
    """The first loss is what transformers' models say of the two texts. Stopped and resumed it is the same run."""
    from transformers import AutoModelForCausalLM

    from aligner.data.tokenizer import load_tokenizer, train_tokenizer
    from aligner.stages import distill
    from aligner.types import TeacherRows

    student, byte, ask, batches = (
        tiny_runs["sft"],
        load_tokenizer(str(tiny_data / "tokenizer")),
        distill.add_targets,
        [],
    )
    pairs = train_tokenizer([f"say {c}: {c}" for c in stages.LETTERS] * 3, str(tmp_path / "pairs"), 300)
    own = [f"model.tokenizer={tmp_path / 'pairs'}", "model.hidden_size=48", "run.steps=30", "checkpoint.final=false"]
    other = stages.stage("sft", tiny_data, tmp_path / "teacher", *own)

    def watched(teachers, rows):
        batches.append(rows)
        return ask(teachers, rows)

    monkeypatch.setattr(distill, "add_targets", watched)
    prompts = stages.write_jsonl(tmp_path / "prompts.jsonl", [{"prompt": f"say {c}:"} for c in stages.LETTERS[:16]])
    own = [*OWN, f"model.init={student}", f"data.train={prompts}", f"algorithm.distill.teacher={other}"]
    own += ["algorithm.distill={teacher_prompt: '{prompt}', temperature: 2}", "sampling.temperature=2"]
    own += ["optim.schedule=constant", "checkpoint.every=3", "run.export=false", "batch.micro_batch_samples=16"]
    straight = stages.stage("distill", tiny_data, tmp_path / "straight", *own, "run.steps=6")
    record, rows, theirs = stages.records(straight)[0], batches[0], batches[0].of(TeacherRows)
    models = [AutoModelForCausalLM.from_pretrained(x / "hf", dtype=torch.float64) for x in (student, other)]
    gaps, sizes = [], []
    for i in range(16):
        sides = (
            (rows.tokens[i, : rows.lengths[i]], theirs.spans[i]),
            (
                theirs.teacher_tokens[i, : theirs.teacher_lengths[i]],
                theirs.teacher_spans[i],
            ),
        )
        for n in range(1, int(theirs.spans[i].max()) + 1):
            ids = [tokens[spans[: len(tokens)] == n] for tokens, spans in sides]
            assert byte.decode(ids[0]).replace("<pad>", "") == pairs.decode(ids[1])
            sizes.append(len(ids[1]))
            sums = []
            for model, (tokens, spans) in zip(models, sides, strict=True):
                with torch.no_grad():
                    logprobs = (model(tokens[None]).logits[0] / 2).log_softmax(-1)
                at = (spans[: len(tokens)] == n).nonzero()[:, 0]
                sums.append(float(logprobs[at - 1, tokens[at]].sum()))
            gaps.append(sums[0] - sums[1])
        assert pairs.decode(sides[1][0]).partition(":")[0] == byte.decode(sides[0][0]).partition(":")[0]
    assert max(sizes) > 1 and record["distill/loss"] == pytest.approx(sum(gaps) / len(gaps), rel=1e-4)
    assert 0 <= record["distill/unaligned_fraction"] < 0.3
    stages.stage("distill", tiny_data, tmp_path / "run", *own, "run.steps=3")
    resumed = stages.stage("distill", tiny_data, tmp_path / "run", *own, "run.steps=6")
    assert stages.differences(resumed, straight) == [] and stages.same_weights(resumed, straight)
