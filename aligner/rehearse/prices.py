"""Seconds of operations and messages on a device, by `plan`'s prices. A rehearsed rank has a clock: the host launches
one kernel after the other, and each stream runs them as they come.

A kernel takes the longer of its operations over their rate and its bytes over the memory's bandwidth. The host's own
work between launches is free.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import register_flop_formula

from aligner.plan.devices import Device, Prices
from aligner.plan.traffic import CollectiveCalls, message_seconds
from aligner.rehearse.order import Communication, Order
from aligner.rehearse.record import RehearsalRecord

PRODUCTS, ATTENTION, ELEMENTWISE = "products", "attention", "element-wise"
COMMUNICATION, TRANSFERS = "communication", "transfers"  # between ranks; between host and device
FREE = {"_unsafe_view", "unsafe_split", "unsafe_chunk", "resize_", "set_", "record_stream"}  # also `empty...`, views
FILLS = {"copy_", "fill_", "zero_", "normal_", "uniform_", "random_", "bernoulli_", "exponential_"}  # read no target
GATHERS = {"index", "index_select", "gather", "embedding", "take", "take_along_dim"}
SCATTERS = {"index_put", "index_add", "index_copy", "scatter", "scatter_add", "_index_put_impl"}
ROWWISE, CACHED_ROW = {"_softmax", "_log_softmax"}, 1 << 18  # bytes of a longer row are read for maximum, sum, result


@register_flop_formula(torch.ops.aten._grouped_mm)
def _grouped_operations(a: torch.Size, b: torch.Size, *arguments: Any, **options: Any) -> int:
    """Count operations of products whose rows, or whose inner dimension, are divided among experts."""
    each = len(a) if len(a) == 2 or len(b) == 3 else 2  # leading dimensions of `a` that count, with its columns
    return 2 * math.prod(a[-each:]) * b[-1]


class KernelKind(NamedTuple):
    name: str
    kind: str
    written: tuple[tuple[int, str], ...]  # arguments
    overwrites: bool  # what it writes, without reading it
    causal: int  # number of the argument `is_causal`, or -1
    pointwise: bool


@functools.cache
def kernel_of(func: Any) -> KernelKind | None:
    """Return how an operation is priced, None for one without a kernel."""
    name, arguments = func._overloadpacket.__name__, func._schema.arguments
    if func.is_view or name in FREE or name.startswith(("empty", "new_empty")):
        return None
    kind = ATTENTION if "attention" in name or "_attn" in name else ELEMENTWISE
    written = tuple((i, a.name) for i, a in enumerate(arguments) if a.alias_info is not None and a.alias_info.is_write)
    overwrites = name in FILLS or any(a.is_out for a in arguments)
    causal = next((i for i, a in enumerate(arguments) if a.name == "is_causal"), -1)
    pointwise = torch.Tag.pointwise in func.tags or name in ("copy_", "_to_copy")
    return KernelKind(name, kind, written, overwrites, causal, pointwise)


def is_slow(name: str, tensors: Sequence[Tensor], made: Sequence[Tensor]) -> bool:
    """Return whether torch's kernel for each element reads tensors that are strided, or of several dtypes."""
    dtype, mixed = None, False
    for t in (*tensors, *made):
        if not t.is_contiguous():
            return True
        if t.is_floating_point():
            mixed |= t.dtype is not (dtype := dtype or t.dtype)
    rounds = name in ("copy_", "_to_copy") and made[0].itemsize < tensors[-1].itemsize  # has a kernel of its own
    return mixed and not rounds


def _size(tensors: Sequence[Tensor]) -> int:
    """Return the bytes of tensors in memory: what is expanded is there once."""
    size = 0
    for t in tensors:
        size += min(t.nbytes, t.untyped_storage().nbytes()) if 0 in t.stride() else t.nbytes
    return size


def moved_bytes(rule: KernelKind, args: tuple, kwargs: dict, tensors: Sequence[Tensor], made: Sequence[Tensor]) -> int:
    """Return the bytes that an operation reads and writes."""
    name = rule.name.rstrip("_")
    if name in GATHERS:
        return 2 * _size(made)
    if name in SCATTERS:  # rows are read, added or replaced; a copy of the whole, unless in place
        return 3 * _size(tensors[-1:]) + (0 if rule.written else 2 * _size(made))
    written = made
    if rule.written and not made:  # lists of tensors
        arguments = [args[i] if i < len(args) else kwargs.get(argument) for i, argument in rule.written]
        written = [t for t in tree_leaves(arguments) if isinstance(t, Tensor)]
    size = _size(written)
    reads = 3 if name in ROWWISE and tensors[0].shape[-1] * tensors[0].element_size() > CACHED_ROW else 1
    return reads * _size(tensors) + (0 if rule.overwrites else size)


class Pricing:
    """Clock of a rehearsed rank. Adds to the phase of its `record`."""

    def __init__(self, record: RehearsalRecord, order: Order, device: Device, gpus_per_node: int):
        self.record, self.order, self.device, self.gpus_per_node = record, order, device, gpus_per_node
        self.prices = Prices()
        self._end = 0.0  # of all work on the device and of messages so far
        self._now = 0.0
        self._links: dict[tuple[str, str], float] = {}  # (group, direction): end of its last message

    def operation(
        self, func: Any, args: tuple, kwargs: dict, tensors: Sequence[Tensor], made: Sequence[Tensor], operations: float
    ) -> None:
        """Run a kernel on the current stream."""
        rule = kernel_of(func)
        if rule is None:
            return
        kind = rule.kind
        if operations and kind != ATTENTION:
            kind = PRODUCTS
            self.record.phase.product_flops += operations
        seconds = moved_bytes(rule, args, kwargs, tensors, made) / (self.device.bandwidth * self.prices.memory)
        if rule.pointwise and made and is_slow(rule.name, tensors, made):
            seconds = max(seconds, made[0].numel() / self.prices.slow_elements)
        if operations:
            if rule.causal >= 0 and (args[rule.causal] if rule.causal < len(args) else kwargs.get("is_causal")):
                operations /= 2
            seconds = max(seconds, operations / (self.device.flops * self._share(rule, tensors)))
        self._kernel(kind, seconds + self.prices.kernel_s)

    def _share(self, rule: KernelKind, tensors: Sequence[Tensor]) -> float:
        """Return the share of the peak that an operation with products reaches."""
        if rule.kind != ATTENTION:
            width = next(t for t in tensors if t.is_floating_point()).element_size()
            return self.prices.products * (2 / width if width <= 2 else self.prices.wide)
        masked, backward = "efficient" in rule.name, "backward" in rule.name
        if masked:
            return self.prices.masked_backward if backward else self.prices.masked_forward
        return self.prices.flash_backward if backward else self.prices.flash_forward

    def transfer(self, size: int) -> None:
        """Copy bytes between host and device on the current stream."""
        self._kernel(TRANSFERS, size / self.prices.host_link + self.prices.kernel_s)

    def _kernel(self, kind: str, seconds: float) -> None:
        self._launch()
        phase, stream = self.record.phase, self.order.current
        phase.kernels += 1
        phase.device_s[kind] += seconds
        stream.s = max(stream.s, self.order.host.s) + seconds
        self._end = max(self._end, stream.s)
        self.advance()

    def _launch(self) -> None:
        phase, host = self.record.phase, self.order.host
        host.s += self.prices.launch_s
        phase.launch_s += self.prices.launch_s
        phase.idle_s += max(0.0, host.s - max(self._end, self._now))

    def advance(self) -> None:
        """Let the phase last as long as its host and its work on the device."""
        now = max(self._now, self._end, self.order.host.s)
        self.record.phase.seconds += now - self._now
        self._now = now

    def seconds_of(self, what: str, size: int, ranks: Sequence[int], rank: int, peer: int | None) -> float:
        """Return the seconds of a message of `ranks` in the job, or from `rank` to its `peer`, as `plan` prices it."""
        ops = {"allreduce": "all_reduce", "alltoall": "all_to_all", "broadcast": "broadcast"}
        op = ops.get(what.split("_")[0], "broadcast" if what == "reduce" else "all_gather")
        if peer is not None:
            op, ranks = "send", (rank, peer)
        here = sum(other // self.gpus_per_node == rank // self.gpus_per_node for other in ranks)
        return message_seconds(CollectiveCalls("", op, size), len(ranks), here, self.device, self.prices)

    def send(self, seconds: float, link: tuple[str, str], message: Communication | None) -> None:
        """Send a message behind the current stream's work and the link's last message; None: from host to host, which
        waits."""
        phase, host = self.record.phase, self.order.host
        if message is None:
            host.s = max(host.s, self._links.get(link, 0.0)) + seconds
            self.advance()
            return
        self._launch()
        phase.device_s[COMMUNICATION] += seconds
        message.s = max(host.s, self.order.current.s, self._links.get(link, 0.0)) + seconds
        self._links[link] = message.s
        self._end = max(self._end, message.s)
        self.advance()
