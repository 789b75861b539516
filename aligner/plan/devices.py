"""Data sheets of devices, and the share of their peaks that a program gets. These numbers are no measurements of this
project."""

from __future__ import annotations

import re
from dataclasses import dataclass

from aligner.errors import ConfigError

GIB = 1 << 30


@dataclass(frozen=True)
class Device:
    """A GPU and its share of a node's network. Bandwidths are in one direction, in bytes per second."""

    name: str
    flops: float  # bfloat16 matrix products without sparsity, operations per second
    memory_bytes: float
    bandwidth: float  # of its memory
    nvlink: float  # to the other GPUs of its node
    network: float  # to other nodes


# Peaks: NVIDIA's data sheets "A100 Tensor Core GPU" (2021), "H100 Tensor Core GPU" (SXM), "H200 Tensor Core GPU", "DGX
# B200", "GB200 NVL72" and "GB300 NVL72", the last three divided by their GPUs. The sheets' matrix rates are with
# sparsity, halved here, and their NVLink rates both directions together. Memory: what torch reports of an 80 GB and a
# 141 GB card, else the sheet's. Network: one InfiniBand adapter for each GPU, HDR (A100), XDR (GB300) or NDR. A rack of
# 72 GPUs is one node: `--gpus-per-node 72`.
DEVICES = {
    d.name: d
    for d in (
        Device("a100", 312e12, 79 * GIB, 2.039e12, 300e9, 25e9),
        Device("h100", 989.4e12, 79 * GIB, 3.35e12, 450e9, 50e9),
        Device("h200", 989.4e12, 139 * GIB, 4.8e12, 450e9, 50e9),
        Device("b200", 2250e12, 180e9, 8e12, 900e9, 50e9),
        Device("gb200", 2500e12, 186e9, 8e12, 900e9, 50e9),
        Device("gb300", 2500e12, 279e9, 8e12, 900e9, 100e9),
    )
}


def sheet_of(name: str) -> Device | None:
    """Return the data sheet of a card by the name that CUDA gives it; None for unknown ones and those in PCIe slots."""
    words = re.findall(r"\w+", name.lower())
    return None if "pcie" in words else next((device for key, device in DEVICES.items() if key in words), None)


def find_device(name: str, key: str = "--device") -> Device:
    if name not in DEVICES:
        raise ConfigError(key, name, "one of " + ", ".join(DEVICES))
    return DEVICES[name]


@dataclass(frozen=True)
class Assumptions:
    """Shares of the peaks and other numbers that no data sheet gives: one set for all models, layouts and devices. The
    shares are the project's goals on a GPU (benchmarks/gpu), not measurements; docs/how-to/plan.md says how far
    published runs are from them."""

    matrix: float = 0.47  # of the peak: dense layers in training, logprobs and prefill, element-wise work included
    experts: float = 0.25  # likewise, products of experts: smaller matrices, uneven loads, permutations
    memory_bandwidth: float = 0.60  # of the peak: decode, optimizer
    link: float = 0.70  # of the link's bandwidth: large collectives
    message_s: float = 20e-6  # per collective, and per hop of a pipeline
    layer_s: float = 70e-6  # of host time for a layer of a decode step: some 14 kernels, launched one by one
    usable: float = 0.94  # of the memory, after fragments of the allocator
    context_bytes: float = 2.5 * GIB  # of CUDA, cuBLAS workspaces and NCCL's buffers


@dataclass(frozen=True)
class Prices:
    """Shares of a data sheet's peaks that single kernels and messages reach, and costs that no size changes. "H200":
    one card, benchmarks/gpu.md; "fitted": to the kinds' shares in its profile of an update, with products at 0.75."""

    products: float = 0.75  # of the peak, large bfloat16 products (H200: 762 of 989 TFLOP/s, 0.77, for one of 8,192^3)
    wide: float = 1 / 16  # of that, float32 and float64 products outside of tensor cores (data sheets of A100 and H100)
    # attention by its own operations, half of all pairs where causal. torch's flash kernel is FlashAttention-2, which
    # FlashAttention-3's authors measured at 35 to 40 % of an H100 (arXiv:2407.08608); its backward at three quarters
    flash_forward: float = 0.38
    flash_backward: float = 0.29
    # likewise torch's memory-efficient kernel, which computes masked pairs too: an estimate, not measured here
    masked_forward: float = 0.13
    masked_backward: float = 0.10
    memory: float = 0.80  # of the bandwidth, bytes read and written by element-wise kernels: fitted (H200: copies 0.89)
    # elements per second of kernels that read strided tensors or several dtypes, one number at a time: fitted
    slow_elements: float = 300e9
    kernel_s: float = 2.5e-6  # on the device, to start and end a kernel: an estimate
    # of host time for a kernel launched from Python: 484 kernels more in a decode step take 6.8 ms more (H200)
    launch_s: float = 14e-6
    message_s: float = 20e-6  # latency of a collective or message, as in Assumptions
    link: float = 0.70  # of the link's bandwidth, large collectives, as in Assumptions
    host_link: float = 50e9  # bytes per second between host memory and the device (PCIe 5 x16: 64 on the data sheet)
