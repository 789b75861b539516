"""A strict stand-in on the CPU for `torch.nn.attention.varlen.varlen_attn`, which needs a GPU: it takes what the real
one takes, refuses what its kernels would read past, and computes the definition in float64, row by row."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterator

import torch
import torch.nn.attention.varlen as real
from torch import Tensor

SIGNATURE = inspect.signature(real.varlen_attn)
USED = {"query", "key", "value", "cu_seq_q", "cu_seq_k", "max_q", "max_k", "scale", "window_size", "enable_gqa"}


def varlen_attn(*args, **kwargs) -> Tensor:
    arguments = SIGNATURE.bind(*args, **kwargs).arguments
    assert arguments.keys() <= USED, f"not for training: {arguments.keys() - USED}"
    q, k, v, cu_q, cu_k = (arguments[name] for name in ("query", "key", "value", "cu_seq_q", "cu_seq_k"))
    scale, window = arguments.get("scale"), arguments.get("window_size", (-1, -1))
    _check_heads(q, k, v, arguments.get("enable_gqa", False))
    _check_rows(q, cu_q, arguments["max_q"])
    _check_rows(k, cu_k, arguments["max_k"])
    assert len(cu_q) == len(cu_k)
    assert scale is None or isinstance(scale, float)
    # the real one compares with a tuple to find out that it is causal
    assert isinstance(window, tuple) and window[1] == 0 and -1 <= window[0] < arguments["max_k"], window
    q_rows, k_rows, v_rows = (x.double().split(ends.diff().tolist()) for x, ends in ((q, cu_q), (k, cu_k), (v, cu_k)))
    outs = [_row(*row, scale or q.shape[2] ** -0.5, window[0]) for row in zip(q_rows, k_rows, v_rows, strict=True)]
    return torch.cat(outs).to(q.dtype)


def _check_heads(q: Tensor, k: Tensor, v: Tensor, grouped: bool) -> None:
    assert q.dim() == k.dim() == 3 and k.shape == v.shape and q.shape[2] == k.shape[2]
    assert q.dtype == k.dtype == v.dtype and q.is_contiguous() and k.is_contiguous() and v.is_contiguous()
    assert grouped == (q.shape[1] != k.shape[1]) and q.shape[1] % k.shape[1] == 0


def _check_rows(x: Tensor, ends: Tensor, longest: int) -> None:
    assert ends.dtype == torch.int32 and ends.dim() == 1 and ends.is_contiguous() and ends.device == x.device
    assert int(ends[0]) == 0 and int(ends[-1]) == len(x) and (ends.diff() > 0).all()
    assert type(longest) is int and longest == int(ends.diff().max())


def _row(q: Tensor, k: Tensor, v: Tensor, scale: float, left: int) -> Tensor:
    """The last query sees the last key, and `left` keys before its own (-1: all)."""
    assert len(q) <= len(k), "queries without a key of their own"
    index = torch.arange(len(q))[:, None] + len(k) - len(q)
    key = torch.arange(len(k))
    seen = (key <= index) & ((key >= index - left) | (left < 0))
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q, k) * scale
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(~seen, -torch.inf).softmax(-1), v)


@contextlib.contextmanager
def in_place() -> Iterator[list[int]]:
    """Where the real one is looked up, and without the question whether there is a GPU. Yields the number of queries of
    each call."""
    from aligner.megatron import varlen

    calls, kept = [], (real.varlen_attn, varlen.is_used)

    def counted(*args, **kwargs) -> Tensor:
        calls.append(len(args[0]))
        return varlen_attn(*args, **kwargs)

    counted.__signature__ = SIGNATURE
    real.varlen_attn, varlen.is_used = counted, lambda cfg, *args: cfg.varlen_attention is True
    try:
        yield calls
    finally:
        real.varlen_attn, varlen.is_used = kept
