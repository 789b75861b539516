"""Prices of operations and messages, on tensors without storage."""

import pytest
import torch
from torch.utils.flop_counter import flop_registry

from aligner.plan.devices import DEVICES, Prices
from aligner.rehearse.order import Communication, Order, Timeline
from aligner.rehearse.prices import Pricing
from aligner.rehearse.record import RehearsalRecord

aten, H200, PRICES = torch.ops.aten, DEVICES["h200"], Prices()
BANDWIDTH = H200.bandwidth * PRICES.memory


def meta(*shape, dtype=torch.bfloat16):
    return torch.empty(shape, dtype=dtype, device="meta")


@pytest.fixture
def pricing():
    return Pricing(RehearsalRecord(), Order({}), H200, gpus_per_node=8)


def run(pricing, func, *args, **kwargs):
    """Price an operation. Return its seconds on the device beyond a kernel's own, by kind."""
    before = pricing.record.phase.device_s.copy()
    out = func(*args, **kwargs)
    tensors = [t for a in args for t in (a if isinstance(a, list) else [a]) if isinstance(t, torch.Tensor)]
    formula = flop_registry.get(func._overloadpacket)
    operations = formula(*args, **kwargs, out_val=out) if formula else 0
    pricing.operation(func, args, kwargs, tensors, [out] if isinstance(out, torch.Tensor) else [], operations)
    return {kind: s - before[kind] - PRICES.kernel_s for kind, s in pricing.record.phase.device_s.items()}


def test_a_large_product_takes_its_operations_over_the_rate(pricing):
    a, b = meta(8192, 4096), meta(4096, 6144)
    seconds = 2 * 8192 * 4096 * 6144 / (H200.flops * PRICES.products)
    assert run(pricing, aten.mm.default, a, b) == {"products": pytest.approx(seconds)}
    wide = run(pricing, aten.mm.default, a.float(), b.float())["products"]
    assert wide == pytest.approx(seconds / PRICES.wide)


def test_a_product_of_few_rows_takes_its_bytes_over_the_bandwidth(pricing):
    size = 2 * (8 * 4096 + 4096 * 6144 + 8 * 6144)
    seconds = run(pricing, aten.mm.default, meta(8, 4096), meta(4096, 6144))["products"]
    assert seconds == pytest.approx(size / BANDWIDTH)


def test_products_of_experts_count_each_row_once():
    count = flop_registry[aten._grouped_mm]
    assert count(meta(64, 32), meta(4, 32, 48), out_val=None) == 2 * 64 * 32 * 48
    assert count(meta(32, 64), meta(64, 48), out_val=None) == 2 * 32 * 64 * 48
    assert count(meta(4, 16, 32), meta(4, 32, 48), out_val=None) == 4 * 2 * 16 * 32 * 48


def test_causal_attention_computes_half_of_the_pairs(pricing):
    query = meta(1, 8, 16384, 128)
    op = aten._scaled_dot_product_flash_attention.default
    whole, half = (4 * 8 * 16384**2 * 128 / share for share in (1, 2))
    for causal, operations in ((False, whole), (True, half)):
        out = meta(1, 8, 16384, 128)
        before = pricing.record.phase.device_s["attention"]
        pricing.operation(op, (query, query, query, 0.0, causal), {}, [query] * 3, [out], whole)
        seconds = pricing.record.phase.device_s["attention"] - before - PRICES.kernel_s
        assert seconds == pytest.approx(operations / (H200.flops * PRICES.flash_forward))


N = 1 << 24
BYTES = {
    "an addition": (aten.add.Tensor, (meta(N), meta(N)), 6),
    "in place": (aten.add_.Tensor, (meta(N), meta(N)), 6),
    "a copy": (aten.copy_.default, (meta(N), meta(N)), 4),
    "a fill": (aten.zero_.default, (meta(N),), 2),
    "expanded": (aten.cat.default, ([meta(1, 64).expand(N // 64, 64)],), 2),
    "rows": (aten.index_select.default, (meta(4 * N, 1), 0, meta(N, dtype=torch.int64)), 4),
    "lists": (aten._foreach_add_.List, ([meta(N // 2)] * 2, [meta(N // 2)] * 2), 6),
    "long rows": (aten._log_softmax.default, (meta(64, N // 64, dtype=torch.float32), -1, False), 16),
}


@pytest.mark.parametrize("name", BYTES)
def test_element_wise_kernels_take_their_bytes_over_the_bandwidth(pricing, name):
    func, args, width = BYTES[name]
    seconds = run(pricing, func, *args)["element-wise"]
    assert seconds == pytest.approx(N * width / BANDWIDTH, rel=1e-4)


def test_several_dtypes_and_strides_are_slower(pricing):
    mixed = aten.add_.Tensor, meta(N, dtype=torch.float32), meta(N)
    strided = aten.mul.Tensor, meta(N // 64, 128)[:, :64], meta(N // 64, 64)
    for func, *args in (mixed, strided):
        assert run(pricing, func, *args)["element-wise"] == pytest.approx(N / PRICES.slow_elements)
    rounded = run(pricing, aten.copy_.default, meta(N), meta(N, dtype=torch.float32))["element-wise"]
    assert rounded == pytest.approx(6 * N / BANDWIDTH)


def test_views_and_empty_tensors_cost_nothing(pricing):
    for func, *args in ((aten.view.default, meta(8, 8), [64]), (aten.new_empty.default, meta(8), [N])):
        assert run(pricing, func, *args) == {}
    assert pricing.record.phase.kernels == 0 and pricing.record.phase.seconds == 0


def large(pricing):
    """Run a kernel of 0.1 s."""
    pricing._kernel("element-wise", 0.1)


def test_streams_overlap_until_one_waits_for_the_other(pricing):
    phase, order, side = pricing.record.phase, pricing.order, Timeline()
    large(pricing)
    order.current = side
    large(pricing)
    assert phase.seconds == pytest.approx(0.1, rel=1e-3) and phase.device_s["element-wise"] == pytest.approx(0.2)
    order.default.join(side.release())
    order.current = order.default
    large(pricing)
    assert phase.seconds == pytest.approx(0.2, rel=1e-3)


def test_a_message_overlaps_until_it_is_awaited(pricing):
    phase, order = pricing.record.phase, pricing.order
    for waits, seconds in ((False, 0.1), (True, 0.3)):
        before = phase.seconds
        message = Communication()
        pricing.send(0.1, ("group", ""), message)
        if waits:
            order.arrive(message)
        large(pricing)
        if waits:
            large(pricing)
        assert phase.seconds - before == pytest.approx(seconds, rel=1e-3)
    assert phase.device_s["communication"] == pytest.approx(0.2)


def test_a_device_without_work_is_idle(pricing):
    """After the host has waited for the device, or while each kernel takes less than its launch."""
    phase, order = pricing.record.phase, pricing.order
    large(pricing)
    large(pricing)
    assert phase.idle_s == pytest.approx(PRICES.launch_s)  # before the first one
    order.host.join(order.current.release())
    large(pricing)
    assert phase.idle_s == pytest.approx(2 * PRICES.launch_s)
    order.host.join(order.current.release())
    for _ in range(1000):
        pricing._kernel("element-wise", PRICES.kernel_s)
    assert phase.idle_s == pytest.approx(1000 * (PRICES.launch_s - PRICES.kernel_s), rel=1e-2)
    assert phase.seconds == pytest.approx(0.3 + 1000 * PRICES.launch_s, rel=1e-2)
    assert phase.launch_s == pytest.approx(1003 * PRICES.launch_s)


GB = 1 << 30
NVLINK, NETWORK = H200.nvlink * PRICES.link, H200.network * PRICES.link


@pytest.mark.parametrize(
    ("what", "ranks", "peer", "seconds", "hops"),
    [
        ("allgather_base", range(8), None, 7 / 8 * GB / NVLINK, 1),
        ("allreduce", range(8), None, 7 / 4 * GB / NVLINK, 1),
        ("allreduce_coalesced", range(8), None, 7 / 4 * GB / NVLINK, 1),
        ("broadcast", range(8), None, GB / NVLINK, 1),
        ("reduce", range(8), None, GB / NVLINK, 1),
        ("reduce_scatter_base", range(8), None, 7 / 8 * GB / NVLINK, 1),
        ("allgather_base", range(0, 64, 8), None, 7 / 8 * GB / NETWORK, 4),  # and three doublings of nodes
        ("allgather_base", range(0, 64, 4), None, 15 / 16 * GB / (2 * NETWORK), 4),  # two adapters of each node
        ("alltoall_base", range(16), None, 8 / 16 * GB / NETWORK, 2),
        ("send", range(16), 1, GB / NVLINK, 1),
        ("send", range(16), 8, GB / NETWORK, 1),
    ],
)
def test_messages_take_their_bytes_over_the_links_of_the_span(pricing, what, ranks, peer, seconds, hops):
    assert pricing.seconds_of(what, GB, ranks, 0, peer) == pytest.approx(seconds + hops * PRICES.message_s, rel=1e-9)


def test_a_rack_is_one_node():
    rack = Pricing(RehearsalRecord(), Order({}), H200, gpus_per_node=72)
    assert rack.seconds_of("send", GB, range(64), 0, 63) == pytest.approx(GB / NVLINK + PRICES.message_s)
