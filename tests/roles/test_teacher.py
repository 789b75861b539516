"""A teacher of another layout than its student's, on the same ranks, or one of several: what it says of a row is the
same."""

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from aligner.config.sections.batch import BatchConfig
from aligner.config.sections.distill import DistillConfig
from aligner.config.sections.parallel import ParallelConfig
from aligner.data.teacher_prompts import behind
from aligner.megatron.ema import Ema
from aligner.roles.batching import forward_rows
from aligner.roles.own_teacher import OwnTeacher
from aligner.roles.teacher import Student, Teacher, add_targets
from aligner.stages.distill import distill_loss
from aligner.types import TeacherNumbers, TeacherRows, TeacherTargets, TrainBatch
from tests.megatron.models import build
from tests.tiny import MODELS, SGD, batch, spanned, wild_source

pytestmark = pytest.mark.multirank
ONE, TP2, PP2, CP2 = ParallelConfig(), ParallelConfig(tensor=2), ParallelConfig(pipeline=2), ParallelConfig(context=2)
OTHERS = [(ONE, TP2), (TP2, ONE), (ONE, PP2), (PP2, TP2), (CP2, TP2)]


def told_of_rows(own: ParallelConfig, theirs: ParallelConfig, top_k: int) -> dict:
    """What a teacher of another shape and layout says of this rank's rows: {row: (numbers, ids)} of the tokens in loss
    masks; and its share of the teacher's head."""
    cfg = MODELS["qwen3"]
    student = build(cfg, own)
    shape = replace(cfg, num_layers=4, hidden_size=48, vocab_size=cfg.vocab_size + 3, tie_embeddings=False)
    model, layout = build(shape, theirs, source=wild_source(shape, 5)), student.layout
    other = None if own == theirs else layout
    teacher = Teacher(model, BatchConfig(logprob_tokens=32), DistillConfig(top_k=top_k), cfg.vocab_size, other)
    edges = [7 * rank // layout.data for rank in range(layout.data + 1)]
    own_slots = range(*edges[layout.dp_rank : layout.dp_rank + 2])
    rows = teacher.add_targets(batch(cfg, rows=7).select(torch.tensor(own_slots)).trim())
    parts = [rows.of(TeacherTargets).teacher, *([rows.of(TeacherTargets).teacher_ids] if top_k else [])]
    by_name = {row: [x[i][rows.loss_mask[i].bool()] for x in parts] for i, row in enumerate(own_slots)}
    return {"rows": by_name, "head": teacher.head(student).weight, "tp": layout.tp_rank}


def taught_by_two(own: ParallelConfig, theirs: ParallelConfig, top_k: int, batch_cfg: BatchConfig) -> dict:
    """Rows of two teachers of other shapes, of which the second rank has none of the first's: {row: (what is told, what
    its teacher says alone)}; and what an update by all of them counts."""
    cfg, answer = MODELS["qwen3"], DistillConfig(kind="jsd", top_k=top_k)
    student = build(cfg, own, optim=SGD)
    layout, other = student.layout, None if own == theirs else student.layout
    teachers = []
    for seed, (hidden, layers) in enumerate([(48, 4), (32, 2)]):
        shape = replace(cfg, num_layers=layers, hidden_size=hidden, vocab_size=cfg.vocab_size + seed)
        model = build(shape, theirs, source=wild_source(shape, 5 + seed))
        teachers.append(Teacher(model, batch_cfg, answer, cfg.vocab_size, other))
    rows = batch(cfg, rows=7).with_payloads(TeacherNumbers(torch.tensor([0, 1, 0, 1, 1, 1, 1])))
    edges = [7 * rank // layout.data for rank in range(layout.data + 1)]
    own_slots = range(*edges[layout.dp_rank : layout.dp_rank + 2])
    rows = rows.select(torch.tensor(own_slots))
    alone, rows = [teacher.add_targets(rows) for teacher in teachers], add_targets(teachers, rows)
    results, reports = {}, rows.of(TeacherTargets)
    for i, row in enumerate(own_slots):
        theirs_alone = alone[int(rows.of(TeacherNumbers).told_by[i])].of(TeacherTargets)
        on = rows.loss_mask[i].bool()
        width = theirs_alone.teacher.shape[2]
        assert not reports.teacher[i, ..., width:].any(), "zeros beyond what the teacher says"
        results[row] = [(reports.teacher[i, on, :width], theirs_alone.teacher[i, on])]
        results[row] += [(reports.teacher_ids[i, on], theirs_alone.teacher_ids[i, on])] if top_k else []
    heads = [] if top_k else [teacher.head(student) for teacher in teachers]
    learner = Student(student, batch_cfg, cfg=answer, vocab_size=cfg.vocab_size, heads=heads)
    stats = learner.update(rows, distill_loss(rows, answer, layout.pgs.dp))
    return {
        "rows": results,
        "stats": {name: stats[name] for name in ("distill/loss", "distill/kl", "policy/grad_norm")},
    }


@pytest.mark.few(2)
@pytest.mark.parametrize("top_k", [0, 3])
@pytest.mark.parametrize("own, theirs", OTHERS)
def test_a_teacher_of_another_layout_says_the_same(ranks, own, theirs, top_k):
    base = ranks.run(told_of_rows, world=1, own=ONE, theirs=ONE, top_k=top_k)[0]
    results = ranks.run(told_of_rows, world=2, own=own, theirs=theirs, top_k=top_k)
    assert set().union(*(out["rows"] for out in results)) == set(range(7))
    for out in results:
        for row, parts in out["rows"].items():
            torch.testing.assert_close(parts, base["rows"][row], atol=1e-4, rtol=1e-4)
    heads = [next(out["head"] for out in results if out["tp"] == rank) for rank in range(own.tensor)]
    assert torch.equal(torch.cat(heads), base["head"])


@pytest.mark.few(2)
@pytest.mark.parametrize("top_k", [0, 3])
@pytest.mark.parametrize("own, theirs", [(ONE, ONE), (ONE, TP2), (TP2, ONE), (PP2, PP2)])
def test_several_teachers_say_of_their_rows_what_each_says_alone(ranks, own, theirs, top_k):
    """And the student learns the same from them in any layout and any micro-batches."""
    whole, small = BatchConfig(micro_batch_samples=7), BatchConfig(logprob_tokens=16, micro_batch_samples=1)
    base = ranks.run(taught_by_two, world=1, own=ONE, theirs=ONE, top_k=top_k, batch_cfg=whole)[0]
    results = ranks.run(taught_by_two, world=2, own=own, theirs=theirs, top_k=top_k, batch_cfg=small)
    assert set().union(*(out["rows"] for out in results)) == set(range(7))
    for out in [base, *results]:
        assert out["stats"] == pytest.approx(base["stats"], rel=1e-4)
        for row, parts in out["rows"].items():
            for (result, alone), (same, _) in zip(parts, base["rows"][row], strict=True):
                torch.testing.assert_close(result, alone, atol=1e-6, rtol=1e-6)
                torch.testing.assert_close(result, same, atol=1e-4, rtol=1e-4)


def behind_own_prompts(own: ParallelConfig, theirs: ParallelConfig, top_k: int) -> dict:
    """An update by targets of the teacher's own rows: what it counts, and {row: targets}; on one rank the same by a
    loop over tokens in float64, from rows that are written out one by one."""
    cfg, answer = MODELS["qwen3"], DistillConfig(kind="jsd", beta=0.3, temperature=1.5, top_k=top_k)
    student, numbers = build(cfg, own, optim=SGD), BatchConfig(micro_batch_samples=2, logprob_tokens=40)
    shape = replace(cfg, num_layers=4, hidden_size=48, tie_embeddings=False)
    model, layout = build(shape, theirs, source=wild_source(shape, 5)), student.layout
    teacher = Teacher(model, numbers, answer, cfg.vocab_size, None if own == theirs else layout)
    whole = batch(cfg, rows=7)
    prompts = [torch.arange(1, 4 + 3 * i) for i in range(7)]  # from much shorter to much longer ones than the student's
    edges = [7 * rank // layout.data for rank in range(layout.data + 1)]
    own_slots = range(*edges[layout.dp_rank : layout.dp_rank + 2])
    rows = whole.select(torch.tensor(own_slots)).trim()
    plain, rows = rows, rows.with_payloads(behind([prompts[i] for i in own_slots], rows, 0))
    rows = add_targets([teacher], rows)
    assert rows.find(TeacherRows) is None
    targets, oracle = rows.of(TeacherTargets).teacher, 0.0
    by_row = {row: targets[i][plain.loss_mask[i].bool()] for i, row in enumerate(own_slots)}
    assert not targets[~plain.loss_mask.bool()].any()
    if dist.get_world_size() == 1 and not top_k:
        heads, total = [weight.double() for weight in (model.head_weight, student.head_weight)], 0
        for i in range(7):
            at = plain.loss_mask[i].nonzero().flatten()
            line = torch.cat([prompts[i], plain.tokens[i, at]])
            pairs = zip(hidden(model, line)[len(prompts[i]) :], hidden(student, plain.tokens[i])[at], strict=True)
            for both in pairs:
                p, q = ((x.double() @ w.T)[: cfg.vocab_size] / 1.5 for x, w in zip(both, heads, strict=True))
                p, q = p.log_softmax(0), q.log_softmax(0)
                middle = (0.3 * p.exp() + 0.7 * q.exp()).log()
                total += 1
                oracle += float(0.3 * (p.exp() * (p - middle)).sum() + 0.7 * (q.exp() * (q - middle)).sum())
        oracle /= total
    learner = Student(student, numbers, cfg=answer, vocab_size=cfg.vocab_size)
    learner.heads = [] if top_k else [teacher.head(student)]
    stats = learner.update(rows, distill_loss(rows, answer, layout.pgs.dp))
    return {"rows": by_row, "loss": stats["distill/loss"], "norm": stats["policy/grad_norm"], "oracle": oracle}


def hidden(model, tokens: torch.Tensor) -> torch.Tensor:
    """[T, H]: the states from which a model predicts each token of one row."""
    row = TrainBatch(tokens[None], torch.tensor([len(tokens)]), torch.ones(1, len(tokens)))
    shape, none = (model.cfg.hidden_size,), BatchConfig()
    return forward_rows(model, row, none, model.over_hidden, beyond=shape, dtype=torch.float32)[0]


def its_own_average(top_k: int) -> None:
    """A student's targets behind prompts of its own, after a step: of weights that are averaged by hand."""
    answer = DistillConfig("self", kind="jsd", top_k=top_k, on_policy=1.0, teacher_prompt="{prompt}")
    cfg, numbers = MODELS["qwen3"], BatchConfig()
    model, rows = build(cfg, ONE, optim=SGD), batch(cfg, rows=5)
    rows = rows.with_payloads(behind([torch.arange(1, 4 + i) for i in range(5)], rows, 0))
    before, model.ema = [p.detach().clone() for p in model.module.parameters()], Ema(model, 0.75)
    student = Student(model, numbers, cfg=answer, vocab_size=cfg.vocab_size)
    teacher = OwnTeacher(model, numbers, answer, cfg.vocab_size, pupil=student)
    student.update(add_targets([teacher], rows), distill_loss(rows, answer, model.layout.pgs.dp))
    after = [p.detach().clone() for p in model.module.parameters()]
    assert any(not torch.equal(*both) for both in zip(before, after, strict=True))
    targets = add_targets([teacher], rows)
    assert all(torch.equal(p, last) for p, last in zip(model.module.parameters(), after, strict=True))
    with torch.no_grad():
        for p, first, last in zip(model.module.parameters(), before, after, strict=True):
            p.copy_(0.75 * first + 0.25 * last)
    plain = Teacher(model, numbers, answer, cfg.vocab_size)
    expected = add_targets([plain], rows).of(TeacherTargets)
    torch.testing.assert_close(targets.of(TeacherTargets).teacher, expected.teacher)
    if not top_k:
        torch.testing.assert_close(student.heads[0].weight, model.head_weight)


@pytest.mark.parametrize("top_k", [0, 3])
def test_the_student_learns_what_the_teacher_says_behind_its_own_prompt(ranks, top_k):
    """Against a loop in float64; and in other layouts of either."""
    ranks.run(its_own_average, world=1, top_k=top_k)
    base = ranks.run(behind_own_prompts, world=1, own=ONE, theirs=ONE, top_k=top_k)[0]
    assert top_k or base["loss"] == pytest.approx(base["oracle"], rel=1e-5)
    for own, theirs in ((ONE, ONE), (TP2, ONE)):
        results = ranks.run(behind_own_prompts, world=2, own=own, theirs=theirs, top_k=top_k)
        assert set().union(*(out["rows"] for out in results)) == set(range(7))
        for out in results:
            assert (out["loss"], out["norm"]) == pytest.approx((base["loss"], base["norm"]), rel=1e-4)
            for row, targets in out["rows"].items():
                torch.testing.assert_close(targets, base["rows"][row], atol=1e-4, rtol=1e-4)


def spans_of_text(own: ParallelConfig, theirs: ParallelConfig) -> dict:
    """An update by a teacher's logprobs of spans of text: what it counts, and {row: targets}; on one rank the same by a
    loop over spans in float64."""
    cfg, answer = MODELS["qwen3"], DistillConfig(kind="reverse_kl", temperature=1.5)
    student, numbers = build(cfg, own, optim=SGD), BatchConfig(micro_batch_samples=2, logprob_tokens=40)
    shape = replace(cfg, num_layers=4, hidden_size=48, tie_embeddings=False, vocab_size=67)
    model, layout = build(shape, theirs, source=wild_source(shape, 5)), student.layout
    other = None if own == theirs else layout
    teacher = Teacher(model, numbers, answer, cfg.vocab_size, other, tokenizer=object())
    prompts = [torch.arange(1, 4 + 3 * i) for i in range(7)]
    edges = [7 * rank // layout.data for rank in range(layout.data + 1)]
    own_slots = range(*edges[layout.dp_rank : layout.dp_rank + 2])
    plain = batch(cfg, rows=7).select(torch.tensor(own_slots)).trim()
    plain = spanned(plain, [prompts[i] for i in own_slots], shape.vocab_size)
    rows = add_targets([teacher], plain)
    targets, whole = rows.of(TeacherTargets).teacher[..., 0], plain.of(TeacherRows)
    result = {"rows": {row: targets[i][targets[i] != 0] for i, row in enumerate(own_slots)}}
    if dist.get_world_size() == 1:
        terms = []
        for i in range(7):
            width, spans = int(whole.teacher_lengths[i]), (whole.spans[i], whole.teacher_spans[i])
            lines = (plain.tokens[i, : plain.lengths[i]], whole.teacher_tokens[i, :width])
            logprobs = [chosen(sharded, line) for sharded, line in zip((student, model), lines, strict=True)]
            for n in range(1, int(spans[0].max()) + 1):
                terms.append(
                    sum(s * x[(m == n)[: len(x)]].sum() for s, x, m in zip((1, -1), logprobs, spans, strict=True))
                )
        result["oracle"] = float(sum(terms) / len(terms))
        result["unaligned"] = 1 - float((whole.spans > 0).sum() / plain.loss_mask.sum())
    learner = Student(student, numbers, cfg=answer, vocab_size=cfg.vocab_size)
    stats = learner.update(rows, distill_loss(rows, answer, layout.pgs.dp))
    return (
        result
        | {name: stats[f"distill/{name}"] for name in ("loss", "span_tokens", "unaligned_fraction")}
        | {"norm": stats["policy/grad_norm"]}
    )


def chosen(model, tokens: torch.Tensor) -> torch.Tensor:
    """[T]: float64 logprobs of the tokens of a row at temperature 1.5, 0 for the first."""
    logits = hidden(model, tokens).double() @ model.head_weight.double().T / 1.5
    logits = logits[1:, : model.cfg.vocab_size]  # `hidden` has at t what predicts token t
    return torch.cat([torch.zeros(1), logits.log_softmax(-1).gather(1, tokens[1:, None])[:, 0]])


@pytest.mark.few(2)
@pytest.mark.parametrize("own, theirs", [(ONE, ONE), (ONE, TP2), (TP2, ONE), (PP2, TP2), (CP2, CP2)])
def test_a_student_learns_how_likely_spans_of_text_are(ranks, own, theirs):
    """To a teacher with other tokens: against a loop in float64, and in other layouts of either."""
    base = ranks.run(spans_of_text, world=1, own=ONE, theirs=ONE)[0]
    assert base["loss"] == pytest.approx(base["oracle"], rel=1e-5) and 0 < base["unaligned"] < 0.5
    assert base["unaligned_fraction"] == pytest.approx(base["unaligned"]) and 1 < base["span_tokens"] < 2
    results = ranks.run(spans_of_text, world=2, own=own, theirs=theirs)
    assert set().union(*(out["rows"] for out in results)) == set(range(7))
    for out in results:
        for name in ("loss", "norm", "span_tokens", "unaligned_fraction"):
            assert out[name] == pytest.approx(base[name], rel=1e-4), name
        for row, targets in out["rows"].items():
            torch.testing.assert_close(targets, base["rows"][row], atol=1e-4, rtol=1e-4)


def tokens_as_spans() -> None:
    """With the same tokens and spans of one token each, the gradient is in expectation that of `reverse_kl`, whatever
    the baseline: of rows that have each token in turn, by the student's probability of it."""
    cfg, numbers, size = MODELS["qwen3"], BatchConfig(micro_batch_samples=101), 101
    answer, shape, results = DistillConfig(kind="reverse_kl", temperature=1.5), replace(cfg, num_layers=4), []
    model, student = build(shape, ONE, source=wild_source(shape, 5)), build(cfg, ONE, optim=SGD)
    start = torch.tensor([5, 9, 2])
    with torch.no_grad():
        q = (hidden(student, torch.cat([start, start[:1]]))[3] @ student.head_weight.T)[:size].div(1.5).softmax(0)
    lines = torch.cat([start.expand(size, 3), torch.arange(size)[:, None]], 1)
    plain = TrainBatch(lines, torch.full((size,), 4), torch.zeros(size, 4).index_fill(1, torch.tensor([3]), 1.0))
    own, spans = behind([start] * size, plain, 0), plain.loss_mask.long()
    by_text = plain.with_payloads(replace(own, spans=spans, teacher_spans=spans, sampled=torch.zeros(size, 4)))
    for teacher, rows in (
        (Teacher(model, numbers, answer, size, tokenizer=object()), by_text),
        (Teacher(model, numbers, answer, size), plain),
    ):
        student = build(cfg, ONE, optim=SGD)
        heads = [] if rows is by_text else [teacher.head(student)]
        learner = Student(student, numbers, cfg=answer, vocab_size=size, heads=heads)
        loss = distill_loss(add_targets([teacher], rows), answer, model.layout.pgs.dp)

        def by_probability(out, batch, loss=loss):
            """Each row has the weight of its token; `q` sums to 1."""
            return loss(out._replace(divergence=size * q[batch.tokens[:, 3], None] * out.divergence), batch)

        stats = learner.update(add_targets([teacher], rows), by_probability)
        results.append(
            (
                stats["distill/loss"],
                stats["policy/grad_norm"],
                [p.detach().clone() for p in student.module.parameters()],
            )
        )
    (value, norm, weights), (expected, expected_norm, others) = results
    assert (value, norm) == pytest.approx((expected, expected_norm), rel=1e-5)
    for one, other in zip(weights, others, strict=True):
        torch.testing.assert_close(one, other, atol=1e-6, rtol=1e-6)


def test_spans_of_one_token_are_the_reverse_kl(ranks):
    ranks.run(tokens_as_spans, world=1)
