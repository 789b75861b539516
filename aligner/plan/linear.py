"""Parameters, operations and memory of layers of linear attention (`ops/kernels/linear_rules.py`).

Names: H hidden; G heads of keys with dk numbers, V heads of values with dv; W the width of the first product's output
for a head of keys; M its mixed channels of K inputs each.
"""

from __future__ import annotations

from importlib.util import find_spec

from aligner.config.sections.model.config import ModelConfig

CHUNK = 64  # tokens, as in `ops/kernels/delta_rule.py` and `mamba2.py`, which import torch


def linear_matrices(m: ModelConfig) -> tuple[int, int]:
    """Return the elements of the first product, H G W, and of the last, V dv H."""
    linear = m.linear
    return m.hidden_size * linear.key_heads * linear.width, linear.value_heads * linear.value_head_dim * m.hidden_size


def linear_alike(m: ModelConfig) -> int:
    """Return the elements that every tensor rank holds alike, whose gradients are summed in backward: G M K + dv, or G
    M (K + 1) of Mamba-2."""
    channels, mamba = m.linear.key_heads * m.linear.mixed_width, m.traits.mamba
    return channels * (m.linear.conv + mamba) + (0 if mamba else m.linear.value_head_dim)


def rule_operations(m: ModelConfig, tokens: float) -> float:
    """Return the operations of the rule by chunks of C tokens, for each head of values: products with the state, 3 of 2
    dk dv. Between the tokens of a chunk: 2 C (dk + dv) twice and the triangular system's C (dk + dv). Mamba-2: 2 of 2
    dk dv, and 2 C (dk + dv)."""
    dk, dv = m.linear.key_head_dim, m.linear.value_head_dim
    if m.traits.mamba:
        return tokens * m.linear.value_heads * (4 * dk * dv + 2 * CHUNK * (dk + dv))
    return tokens * m.linear.value_heads * (6 * dk * dv + 5 * CHUNK * (dk + dv))


def row_bytes(m: ModelConfig, drafts: int = 0) -> int:
    """Return the bytes that an engine keeps of a row in float32, independent of its length: V dk dv and the last K - 1
    inputs; with drafts also the inputs and numbers of a step's tokens, of which the kept ones change the state."""
    linear = m.linear
    state = linear.value_heads * linear.key_head_dim * linear.value_head_dim
    inputs = max(0, linear.conv - 1) * linear.key_heads * linear.mixed_width
    fed = (1 + drafts) * gathered_width(m) if drafts else 0
    return 4 * len(m.layers_of("linear")) * (state + inputs + fed)


def gathered_width(m: ModelConfig) -> int:
    """Return the numbers of a token that context-parallel ranks exchange: its channels and the numbers of each head."""
    return m.linear.key_heads * (m.linear.mixed_width + m.linear.numbers)


def package_installed() -> bool:
    """Return whether this Python finds flash-linear-attention, and not only a folder of its name."""
    spec = find_spec("fla")
    return spec is not None and spec.origin is not None


def rule_activations(m: ModelConfig, package: bool = False) -> float:
    """Return the bytes of a token that autograd keeps between the products. In float32 (measured on one CPU, seven
    shapes, within a hundredth) V (5 C + 10 dk + 8 dv + dk dv / C) + 3 G M numbers, or of Mamba-2 V (3 C + 6 dk + 10 dv
    + dk dv / C) + 4 G dk. By the `package` in 16 bits V (C + 9 dv + 16) + 2 G dk + G M, 8 dv of them for the norm of
    outputs (rehearsed without context parallelism, within 3 %, and Mamba-2's shape of Nemotron 3)."""
    linear = m.linear
    dk, dv, mixed = linear.key_head_dim, linear.value_head_dim, linear.key_heads * linear.mixed_width
    if package:
        return 2 * (linear.value_heads * (CHUNK + 9 * dv + 16) + 2 * linear.key_heads * dk + mixed)
    if m.traits.mamba:
        each = 3 * CHUNK + 6 * dk + 10 * dv + dk * dv / CHUNK
        return 4 * (linear.value_heads * each + 4 * linear.key_heads * dk)
    return 4 * (linear.value_heads * (5 * CHUNK + 10 * dk + 8 * dv + dk * dv / CHUNK) + 3 * mixed)


def rule_forward(m: ModelConfig, package: bool = False) -> float:
    """Return the bytes of a token in a layer's pass without gradient, in proportion to what autograd keeps (rehearsed
    with context parallelism of 1, 2 and 4, within 4 % of a rank's memory)."""
    share = 1.45 if package else 0.62 if m.traits.mamba else 0.48
    return share * rule_activations(m, package)


def rule_bytes(m: ModelConfig, passes: float, package: bool) -> float:
    """Return the bytes of a token that a forward pass of the rule reads and writes: by torch's operations `passes`
    times what autograd keeps. By the `package` in 16 bits the mixing's inputs and outputs, and what kernels hand on."""
    linear = m.linear
    dk, dv = linear.key_head_dim, linear.value_head_dim
    if not package:
        return passes * rule_activations(m)
    each = 2 * (dk + 4 * dv + CHUNK + dk * dv / CHUNK)  # written once and read once
    return 2 * (linear.value_heads * each + linear.key_heads * (6 * dk + 2 * linear.mixed_width))
