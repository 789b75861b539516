"""The floors: formulas against torch's own counts, and the benchmark on a tiny shape."""

import json
from dataclasses import replace
from unittest.mock import patch

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from aligner.families.table import parameters
from aligner.ops.kernels import bfloat16_products
from aligner.plan.shapes import head_operations, layer_operations
from benchmarks import floors
from benchmarks.floor_phases import PHASES, WORKS, Subject, floor_s, moved_bytes, own_shapes, training_rows
from benchmarks.floors import measure
from tests.operations import counted

INF = float("inf")
WORK = WORKS["check"]


aten = torch.ops.aten


REPLACED = (  # by `ops/kernels/bfloat16_products.py`
    aten.mm.default,
    aten.bmm.default,
    aten.addmm.default,
    aten.addmm_.default,
    aten.baddbmm.default,
    aten.baddbmm_.default,
)
SLOW = (
    aten.mm,
    aten.bmm,
    aten.addmm,
    aten.addmm_,
    aten.baddbmm,
    aten.baddbmm_,
    aten._scaled_dot_product_flash_attention_for_cpu_backward,
)


def subject(name: str) -> Subject:
    return Subject(WORKS[name], torch.float32, torch.device("cpu"))


def operations(name: str) -> dict[str, dict[str, float]]:
    """By phase {"linear", "attention"}: what torch's own counter sees. Decode is a generation less its first token."""
    timed, results = subject(name), {}
    for phase in PHASES:
        results[phase] = counted(timed.action(phase))
    for piece, count in results["prefill"].items():
        results["decode"][piece] -= count
    timed.bench.close()
    return results


def stored_bytes(name: str) -> dict[str, float]:
    """Bytes of an engine's weights, of its cache for one position of one row, and of what a refit writes."""
    timed = subject(name)
    reported = timed.bench.refit()
    timed.bench.generate(WORKS[name].rows, 1)
    cache = timed.bench.engine.cache.kv
    by_name = {
        "weights": float(sum(view.nbytes for view in timed.bench.engine.model.views.values())),
        "position": cache.nbytes / cache.shape[2] / cache.shape[4],
        "refit": reported["refit/bytes"],
    }
    timed.bench.close()
    return by_name


class SlowKernels(TorchDispatchMode):
    """Calls of torch's own products in bfloat16."""

    def __enter__(self):
        self.seen: set[str] = set()
        return super().__enter__()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.overloadpacket in SLOW and func not in REPLACED and args[1].dtype is torch.bfloat16:
            self.seen.add(str(func))
        return func(*args, **(kwargs or {}))


def slow_products(name: str) -> dict[str, list[str]]:
    """By phase torch's own products in bfloat16, if the processor had no instructions for it."""
    results = {}
    with patch.object(bfloat16_products, "_slow_here", lambda: True):
        timed = Subject(WORKS[name], torch.bfloat16, torch.device("cpu"))
        for phase in PHASES:
            with SlowKernels() as heard:
                timed.action(phase)()
            results[phase] = sorted(heard.seen)
    timed.bench.close()
    return results


def measured_rows(name: str, dtype: str) -> list[dict]:
    return measure(name, dtype, 2, torch.device("cpu"))


@pytest.mark.multirank
def test_operations_are_those_that_torch_counts(ranks):
    (counted,) = ranks.run(operations, name="check")
    rows = training_rows(WORK)
    made, trained, read = WORK.prompts * WORK.prompt_tokens, int(rows.lengths.sum()), int(rows.loss_mask.sum())
    assert read < 0.5 * trained
    steps = WORK.rows * (WORK.response_tokens - 1)
    cfg = WORK.cfg

    def linear(layers: int, head: int, last: int) -> float:
        most = (cfg.num_layers - 1) * layer_operations(cfg, layers, 0)
        return most + layer_operations(cfg, layers, 0, last) + head_operations(cfg, head)

    # one position of every prompt goes through the head; the training passes leave out what is not of a response
    assert counted["prefill"]["linear"] == linear(made, WORK.prompts, made)
    assert counted["decode"]["linear"] == linear(steps, steps, steps)
    assert counted["logprobs"]["linear"] == linear(trained, read, read)
    assert counted["update"]["linear"] == 3 * linear(trained, read, read)
    assert not counted["refit"]
    for phase in ("prefill", "decode", "logprobs", "update"):
        floor = floor_s(phase, WORK, 4, 1.0, INF)  # seconds at one operation a second
        head = head_operations(cfg, WORK.prompts) if phase == "prefill" else 0
        attention = floor - counted[phase]["linear"] + head
        if phase in ("logprobs", "update"):  # of whole rows, and in the last layer of what is read
            seen, unread = float((rows.lengths * (rows.lengths + 1)).sum() / 2), WORK.prompt_tokens
            last = float((rows.lengths * (rows.lengths - 1) - unread * (unread - 1)).sum() / 2)
            pairs = (cfg.num_layers - 1) * seen + last
            wanted = 4 * cfg.num_heads * cfg.kv_channels * pairs * (3 if phase == "update" else 1)
            assert attention == pytest.approx(wanted)
        # causal attention is half of what is computed in full, and padding to the longest row comes on top
        most = 1.0 if phase == "decode" else 3.0
        assert attention > 0 and 1.0 <= counted[phase]["attention"] / attention <= most + 1e-9, phase


@pytest.mark.multirank
def test_bytes_are_those_of_the_engine(ranks):
    (stored,) = ranks.run(stored_bytes, name="check")
    steps, first = WORK.response_tokens - 1, WORK.prompt_tokens + 1
    positions = WORK.rows * sum(range(first, first + steps))
    assert floor_s("decode", WORK, 4, INF, 1.0) == steps * stored["weights"] + positions * stored["position"]
    assert floor_s("refit", WORK, 4, INF, 1.0) == 2 * stored["refit"] == moved_bytes("refit", WORK, 4)


def test_floors_scale_with_rates_and_sizes():
    deeper = [replace(WORK, cfg=replace(WORK.cfg, num_layers=n * WORK.cfg.num_layers)) for n in (1, 2, 3)]
    for phase in ("prefill", "logprobs"):  # products alone
        one, two, three = (floor_s(phase, work, 4, 1.0, 1.0) for work in deeper)
        assert floor_s(phase, WORK, 4, 2.0, 1.0) == pytest.approx(one / 2) and floor_s(phase, WORK, 4, INF, 1.0) == 0
        assert three - two == pytest.approx(two - one)
        # the layers that logprobs gain are whole, unlike the last one; they have a head too
        assert two == pytest.approx(2 * one) if phase == "prefill" else two != pytest.approx(2 * one)
    slow, fast = floor_s("decode", WORK, 4, 1.0, INF), floor_s("decode", WORK, 4, INF, 1.0)
    assert floor_s("decode", WORK, 4, 1.0, 1.0) == pytest.approx(max(slow, fast))
    assert floor_s("decode", WORK, 2, INF, 1.0) == fast / 2
    products, optimizer = floor_s("update", WORK, 4, 1.0, INF), floor_s("update", WORK, 4, INF, 1.0)
    assert floor_s("update", WORK, 4, 1.0, 1.0) == pytest.approx(products + optimizer)
    # float32: weight, gradient and two moments read, all but the gradient written
    assert optimizer == 4 * (4 + 3) * parameters(WORK.cfg) == moved_bytes("update", WORK, 4)


@pytest.mark.parametrize("phase", ["prefill", "decode", "logprobs", "update"])
def test_own_shapes_are_all_products_of_a_pass(phase):
    actual = own_shapes(phase, WORK)
    layer, last, head = (sum(2.0 * m * n * k for m, n, k in child) for _, child in actual)
    layers, one, heads = (often for often, _ in actual)
    assert (layers, one, heads) == (WORK.cfg.num_layers - 1, 1, int(phase != "prefill"))
    tokens, trains = actual[0][1][0][0], phase in ("logprobs", "update")
    rows = training_rows(WORK)
    read = round(tokens * float(rows.loss_mask.sum() / rows.lengths.sum())) if trains else tokens
    times = 3 if phase == "update" else 1
    assert layer == times * layer_operations(WORK.cfg, tokens, 0)
    assert last == times * layer_operations(WORK.cfg, tokens, 0, read)
    assert head == times * head_operations(WORK.cfg, read)


@pytest.mark.multirank
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_every_phase_is_measured(ranks, dtype):
    for _ in range(8):  # what comes between the measurements of rates and phases makes a floor too high, now and then
        (rows,) = ranks.run(measured_rows, name="check", dtype=dtype)
        if all(row["ratio"] <= 1.5 for row in rows):
            break
    assert [row["phase"] for row in rows] == list(PHASES)
    for row in rows:
        assert 0 < row["floor_s"] < INF and row["seconds"] > 0 and 0 < row["ratio"] <= 1.5, row
        assert row["matrix_gflops"] >= row["own_gflops"] > 0 and row["bound"] in ("products", "memory")
    refit = rows[-1]
    assert refit["bytes"] == parameters(WORK.cfg) * (4 if dtype == "float32" else 2)
    assert refit["x_copy"] > 0 and refit["judged"] is False  # it is within every cache


@pytest.mark.multirank
def test_no_product_is_in_bfloat16_where_there_are_no_instructions_for_it(ranks):
    """Torch's are 8 to 90 times slower there; those with `out=` and the fused attention's are not replaced."""
    (result,) = ranks.run(slow_products, name="check")
    assert result.keys() == set(PHASES) and not any(result.values()), result


def row(model: str, judged: bool, x_copy: float) -> dict:
    numbers = dict.fromkeys(("seconds", "floor_s", "ratio", "own_shapes", "matrix_gflops", "own_gflops"), 0.5)
    by_name = {"model": model, "dtype": "float32", "phase": "refit", "bound": "memory", "copy_gb_s": None} | numbers
    return by_name | {"bytes": 120e6, "judged": judged, "x_copy": x_copy, "pack_x_copy": 5.0}


@pytest.mark.parametrize(("judged", "x_copy", "code"), [(True, 2.5, 1), (True, 1.9, 0), (False, 2.5, 0)])
def test_a_slow_refit_beyond_the_cache_fails(monkeypatch, tmp_path, capsys, judged, x_copy, code):
    monkeypatch.setattr(floors, "measure", lambda name, *unused: [row(name, judged, x_copy)])
    monkeypatch.setattr("aligner.megatron.groups.init_distributed", lambda *unused: floors.torch.device("cpu"))
    path = tmp_path / "floors.json"
    assert floors.main(["--models", "30m", "--json", str(path)]) == code
    out = capsys.readouterr().out
    assert ("30m: a refit of 120 MB takes 2.50 x a plain copy: above 2" in out) == bool(code)
    content = json.loads(path.read_text())
    assert content["rows"][0]["model"] == "30m" and content["about"]["clock"] and content["about"]["repeats"] == 7
    assert content["about"]["versions"].keys() >= {"python", "torch", "megatron-core", "commit"}
    assert content["about"]["machine"].keys() >= {"processor", "cores", "cache_bytes", "load"}
