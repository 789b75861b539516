"""Attention of rows of any length in one call against attention by padded segments."""

from dataclasses import replace

import pytest
import torch
import torch.nn.attention.varlen
from hypothesis import given, settings
from hypothesis import strategies as st

from aligner.config.sections.model.attention import AttentionConfig
from aligner.config.sections.model.moe import MoeConfig
from aligner.errors import ConfigError
from aligner.megatron import attention, model, transformer_engine, varlen
from aligner.ops.kernels.scored_attention import ScoreRule
from aligner.ops.kernels.upload import upload
from aligner.ops.packing import needed
from aligner.ops.packing.needed import narrowed, without_unread
from aligner.ops.packing.pack import pack
from aligner.ops.packing.windows import windowed
from tests import varlen_stand_in
from tests.tiny import LLAMA, MODELS, MORE

CASES = st.fixed_dictionaries(
    {
        # tokens that rows have in common, and their own
        "rows": st.lists(st.tuples(st.sampled_from([0, 6, 15]), st.integers(1, 20)), min_size=1, max_size=6),
        "how": st.sampled_from(["packed", "padded", "shared", "gathered", "over heads"]),
        "context": st.sampled_from([2, 3]),
        "multiple": st.sampled_from([1, 2, 3]),
        "window": st.sampled_from([0, 1, 4, 11, 64]),
        "reads": st.sampled_from(["all", "responses", "last"]),
        "kv_heads": st.sampled_from([1, 2, 4]),
        "scale": st.sampled_from([None, 0.3]),
    }
)


def layouts(case, ragged: bool):
    """The micro-batch as each rank has it, and which of its tokens are read."""
    begin, own = torch.tensor(case["rows"]).T
    lengths = begin + own
    width = int(lengths.max()) + 1
    column = torch.arange(width)
    tokens = torch.where(column < begin[:, None], 7, 8 + torch.arange(len(lengths))[:, None])
    options = {"multiple": case["multiple"], "ragged": ragged, "padded": case["how"] == "padded"}
    if case["how"] in ("gathered", "over heads"):
        options |= {"context": case["context"], "over_heads": case["how"] == "over heads"}
    options |= {"share": tokens} if case["how"] == "shared" else {}
    first = {"all": 0, "responses": begin[:, None], "last": lengths[:, None] - 1}[case["reads"]]
    wanted = (column >= first) & (column < lengths[:, None])
    for rank in range(options.get("context", 1)):
        p = pack(lengths, width, rank=rank, **options)
        if case["reads"] != "all" and "context" not in options:
            p = narrowed(without_unread(p, wanted), wanted)
        yield p


def inputs(p, case):
    """Queries, keys and values of the stream, or of all ranks' streams."""
    everywhere = p.tokens * (case["context"] if case["how"] in ("gathered", "over heads") else 1)
    queries = everywhere if case["how"] == "over heads" else p.tokens
    g = torch.Generator().manual_seed(len(p.source))
    sizes = [(queries, 4), (everywhere, case["kv_heads"]), (everywhere, case["kv_heads"])]
    return [torch.randn(*size, 8, generator=g, dtype=torch.float64, requires_grad=True) for size in sizes]


def outputs(p, case, q, k, v):
    """Attention of the stream and, where there is one, of its `Final`, and the gradients of their sum."""
    p = windowed(p, case["window"]) if case["window"] else p
    p = p.additive(torch.float64)
    results = [attention._segments(q, k, v, p, ScoreRule(case["scale"]), varlen.flash)]
    if p.final is not None:
        results.append(attention._segments(q[p.final.kept], k, v, p.final, ScoreRule(case["scale"]), varlen.flash))
    weights = [torch.linspace(-1, 1, out.numel(), dtype=torch.float64).view(out.shape) for out in results]
    return [*results, *torch.autograd.grad([(o * w).sum() for o, w in zip(results, weights, strict=True)], (q, k, v))]


@settings(deadline=None, max_examples=80)
@given(CASES)
def test_rows_of_any_length_equal_padded_segments(case):
    for plain, rows in zip(layouts(case, ragged=False), layouts(case, ragged=True), strict=True):
        assert not any(piece.segments for piece in (rows, rows.final) if piece)
        tensors = inputs(plain, case)
        with varlen_stand_in.in_place() as calls:
            got = outputs(rows, case, *tensors)
        read = [] if plain.final is None else [len(plain.final.kept)]
        assert calls == [len(tensors[0]), *read]  # not one padded query
        for a, b in zip(got, outputs(plain, case, *tensors), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("how", ["packed", "shared", "gathered", "over heads"])
def test_the_real_operator_takes_what_it_is_given(how):
    """Forward and backward without numbers: torch's own checks of arguments and shapes."""
    rows = [(15, 5), (15, 19), (15, 2), (0, 20)]
    case = {"rows": rows, "how": how, "context": 2, "multiple": 1, "reads": "responses", "kv_heads": 2, "scale": 0.3}
    meta = torch.device("meta")
    for p in layouts(case, ragged=True):
        p = upload(windowed(p, 4).additive(torch.bfloat16), meta)
        tensors = [x.detach().to(meta, torch.bfloat16).requires_grad_() for x in inputs(p, case)]
        out = varlen.attend(*tensors, p.ragged, ScoreRule(case["scale"]), varlen.flash)
        gradients = torch.autograd.grad(out.float().sum(), tensors)
        assert [x.shape for x in (out, *gradients)] == [tensors[0].shape, *(t.shape for t in tensors)]


@pytest.mark.parametrize("how", ["packed", "padded", "shared", "gathered"])
def test_nothing_is_moved_where_rows_lie_in_order(how):
    case = {"rows": [(15, 5), (15, 19), (15, 2), (0, 20)], "how": how, "context": 2, "multiple": 1, "reads": "all"}
    for p in layouts(case, ragged=True):
        rows = p.ragged
        assert rows.order is None and (rows.k_index is None) == (how in ("packed", "padded"))


def test_without_masks_rows_may_be_long(monkeypatch):
    monkeypatch.setattr("aligner.ops.packing.pack.SHARED_MASK", 30)
    monkeypatch.setattr(needed, "LAST_LAYER_MASK", 30)
    case = {"rows": [(15, 5), (15, 6), (15, 4)], "how": "shared", "multiple": 1, "reads": "last"}
    ((with_masks,), (without,)) = (layouts(case, ragged) for ragged in (False, True))
    assert with_masks.final is None and with_masks.tokens == 60
    assert without.final is not None and without.tokens == 30


CPU, HALF = torch.device("cpu"), torch.bfloat16


@pytest.mark.parametrize(
    "changes, dtype, gpu, says",
    [
        ({}, HALF, None, "needs a CUDA device, and this is cpu"),
        ({}, HALF, (7, 5), "compute capability 8.0, and this GPU has 7.5"),
        ({}, torch.float32, (9, 0), "the model is float32 (model.dtype)"),
        ({"head_dim": 12}, HALF, (9, 0), "these have 12"),
        (
            {"family": "gemma2", "attention": AttentionConfig(softcap=50.0, query_scale_dim=8)},
            HALF,
            (9, 0),
            "scores are capped (model.attention.softcap=50)",
        ),
        (
            {"family": "gpt_oss", "moe": MoeConfig(4, 2, 16)},
            HALF,
            (9, 0),
            "it does not support attention sinks, which model.family=gpt_oss has",
        ),
        ({"head_dim": 512}, HALF, (9, 0), "up to 256 numbers, and these have 512"),
        ({}, HALF, (9, 0), None),
        ({}, torch.float16, (8, 0), None),
    ],
)
def test_what_the_kernel_cannot_do_is_refused(monkeypatch, changes, dtype, gpu, says):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: gpu)
    device = torch.device("cuda") if gpu else CPU
    auto = replace(LLAMA, **changes)
    assert varlen.is_used(auto, dtype, device) == (says is None)
    assert not varlen.is_used(replace(auto, varlen_attention=False), dtype, device)
    cfg = replace(auto, varlen_attention=True)
    if says is None:
        model.check_kernels(cfg, dtype, device)
        assert varlen.is_used(cfg, dtype, device)
        return
    with pytest.raises(ConfigError) as caught:
        model.check_kernels(cfg, dtype, device)
    assert "model.varlen_attention=True: expected false or auto" in str(caught.value) and says in str(caught.value)


def test_a_torch_that_groups_heads_unasked_is_not_asked(monkeypatch):
    called = []

    def older(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, *, scale=None, window_size=(-1, -1)):
        called.append((query.shape[1], key.shape[1]))
        return query

    monkeypatch.setattr(torch.nn.attention.varlen, "varlen_attn", older)
    monkeypatch.setattr(varlen, "_grouped", varlen._grouped.__wrapped__)  # without what it remembers
    p = next(layouts({"rows": [(0, 5)], "how": "packed", "multiple": 1, "reads": "all"}, ragged=True))
    varlen.attend(torch.zeros(5, 4, 8), torch.zeros(5, 2, 8), torch.zeros(5, 2, 8), p.ragged, ScoreRule(), varlen.flash)
    assert called == [(4, 2)]


@pytest.mark.parametrize("name", MODELS | MORE)
def test_transformer_engine_has_the_attention_of_what_it_supports(monkeypatch, name):
    monkeypatch.setattr(model.TE, "lacks", "")
    monkeypatch.setattr(transformer_engine, "unfused", lambda cfg: "")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    cfg, device = (MODELS | MORE)[name], torch.device("cuda")
    kernels = [model.modules_of(c, HALF, device)["rows"] for c in (cfg, replace(cfg, varlen_attention=False))]
    others = {"gemma2", "gemma4", "gemma4-experts", "gemma4-inputs"}  # heads of 4 numbers
    others |= {"deepseek_v3", "deepseek_v3-direct"}  # of 18
    others |= {"glm4_moe_lite", "deepseek_v32", "glm_moe_dsa", "deepseek_v4"}  # of 18, indexers, and entries
    assert kernels == [None if name in others else transformer_engine.attend] * 2


def test_torchs_attention_is_used_where_it_is_set(monkeypatch):
    monkeypatch.setattr(model.TE, "lacks", "")
    monkeypatch.setattr(transformer_engine, "unfused", lambda cfg: "")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    modules = model.modules_of(replace(LLAMA, varlen_attention=True), HALF, torch.device("cuda"))
    assert modules["rows"] is varlen.flash and modules["norm"] is model.te.TENorm
    monkeypatch.setattr(model.TE, "lacks", "it is not installed")
    modules = model.modules_of(LLAMA, HALF, torch.device("cuda"))
    assert modules["rows"] is varlen.flash and modules["norm"] is attention.RMSNorm
