"""Data sheets of devices, and the shares of their peaks and other costs that plan and rehearse count with."""

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
    fp8: tuple[str, ...] = ()  # recipes of FP8 products (`model.megatron.fp8_recipe`)


HOPPER = ("tensorwise", "blockwise")
BLACKWELL = (*HOPPER, "mxfp8")

# Peaks: NVIDIA's data sheets "A100 Tensor Core GPU" (2021), "H100 Tensor Core GPU" (SXM), "H200 Tensor Core GPU", "DGX
# B200", "GB200 NVL72" and "GB300 NVL72", the last three divided by their GPUs. The sheets' matrix rates are with
# sparsity, halved here, and their NVLink rates both directions together. Memory: what torch reports of an 80 GB and a
# 141 GB card, else the sheet's. Network: one InfiniBand adapter for each GPU, HDR (A100), XDR (GB300) or NDR. A rack of
# 72 GPUs is one node: `--gpus-per-node 72`.
DEVICES = {
    d.name: d
    for d in (
        Device("a100", 312e12, 79 * GIB, 2.039e12, 300e9, 25e9),
        Device("h100", 989.4e12, 79 * GIB, 3.35e12, 450e9, 50e9, HOPPER),
        Device("h200", 989.4e12, 139 * GIB, 4.8e12, 450e9, 50e9, HOPPER),
        Device("b200", 2250e12, 180e9, 8e12, 900e9, 50e9, BLACKWELL),
        Device("gb200", 2500e12, 186e9, 8e12, 900e9, 50e9, BLACKWELL),
        Device("gb300", 2500e12, 279e9, 8e12, 900e9, 100e9, BLACKWELL),
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
class Prices:
    """Shares of a data sheet's peaks that single kernels and messages reach, rates, and costs that no size changes.
    "H200": one card, benchmarks/gpu.md; "fitted": to the kinds' shares in its profile of an update, with products at
    0.75."""

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
    # in elements per second: kernels that read strided tensors or several dtypes, one number at a time: fitted
    slow_elements: float = 300e9
    kernel_s: float = 2.5e-6  # on the device, to start and end a kernel: an estimate
    # of host time for a kernel launched from Python: 484 kernels more in a decode step take 6.8 ms more (H200)
    launch_s: float = 14e-6
    message_s: float = 20e-6  # latency of a collective or message
    link: float = 0.70  # of the link's bandwidth: large collectives
    host_link: float = 50e9  # in bytes per second, to and from host memory (PCIe 5 x16: 64e9 on the data sheet)


@dataclass(frozen=True)
class Assumptions(Prices):
    """The prices, and what plan counts of kernels that it does not tell apart: one set for all models, layouts and
    devices. "Published": fitted to half of the runs of benchmarks/plan_check."""

    experts: float = 0.30  # of the peak: grouped products, with permutations (published)
    # of the bandwidth: kernels of a step, fast and slow ones together, as the H200's profile has it
    element_wise: float = 0.46
    # numbers that they read or write of a token in a layer's forward pass, backward twice as many, in units of the
    # stream's, of queries', keys' and values', of an MLP's and of an expert's inputs (counted in a rehearsal of 8B)
    stream_passes: float = 14
    head_passes: float = 4
    mlp_passes: float = 2.7
    routed_passes: float = 4
    # bytes that torch's operations of a linear layer's rule read or write for each that autograd keeps, backward twice
    # as many (counted in a rehearsal of Qwen3-Next, whose strided kernels are slow); passes over an engine's states
    rule_passes: float = 10
    state_passes: float = 6
    logit_bytes: float = 2  # that they read or write of a logit whose logprob is made; backward twice as many
    sampled_bytes: float = 60  # of a logit that is sampled from
    decode: float = 0.60  # of the bandwidth: products for few rows, and attention to a cache
    layer_kernels: int = 24  # of a decode step (H200)
    sampler_s: float = 4e-3  # of host time beside its layers, where kernels are launched one by one (H200)
    # an engine in its own process: host time of a decode step; of a rollout, to exchange rows and answers; and of each
    # whole tensor of a refit. Those of published runs are in benchmarks/plan_check; this project's are not measured
    engine_s: float = 0.0
    rollout_s: float = 0.0
    tensor_s: float = 0.0
    # layers' products in FP8 (`model.megatron.fp8`), with casts: their rate over bfloat16's (published)
    fp8_products: float = 1.65
    # of the time of messages in user buffers (`model.megatron.tp_comm_overlap`), the share that products hide: an
    # estimate, not measured. Rings of chunks hide more, and make products slower
    beside: float = 0.5
    # published runs have: those of experts too, by which all layers' are faster; and messages beside products, the
    # share of their time that shows
    fp8: float = 1.0
    exposed: float = 1.0
    usable: float = 0.94  # of the memory, after fragments of the allocator
    context_bytes: float = 2.5 * GIB  # of CUDA, cuBLAS workspaces and NCCL's buffers
