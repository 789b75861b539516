"""What attention hands to CUDA's kernels, with tensors that only claim to be there."""

from contextlib import ExitStack

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from aligner.megatron import attention, cpu
from aligner.ops.kernels.scored_attention import ScoreRule
from aligner.ops.kernels.upload import upload
from aligner.ops.packing.pack import pack

HEADS, KV_HEADS, HEAD_DIM, LENGTH = 8, 2, 64, 8192
CONTEXT = {"context": 2, "rank": 1}  # half of the queries against all keys: a bias, not a mask


def flash(query, key, value, attn_mask, is_causal, enable_gqa, scale):
    """As torch would choose, which needs the device's properties; a bias is `is_causal` to this kernel."""
    assert enable_gqa == (query.shape[1] != key.shape[1])
    return torch.ops.aten._scaled_dot_product_flash_attention(query, key, value, 0.0, True, scale=scale)[0]


@pytest.fixture
def on_cuda(monkeypatch):
    """(dtype, lengths, layout of the packing) -> heads of the keys in each call, bytes kept for backward."""
    monkeypatch.setattr(cpu, "_is_cuda", lambda device: False)  # where it was installed, it would bring them to the CPU

    def run(dtype, lengths, **layout):
        heads, kept = [], {}

        def kernel(query, key, value, **options):
            heads.append(key.shape[1])
            return flash(query, key, value, **options)

        def keep(tensor):
            storage = tensor.untyped_storage()
            kept[storage._cdata] = storage.nbytes()
            return tensor

        monkeypatch.setattr("torch.nn.functional.scaled_dot_product_attention", kernel)
        monkeypatch.setattr("torch.nn.attention.bias.causal_lower_right", lambda *size: size)  # no plain tensor
        packing, ours = pack(torch.tensor(lengths), max(lengths), **layout), sum(lengths) // layout.get("context", 1)
        with ExitStack() as stack:
            stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
            made = [(ours, HEADS), (sum(lengths), KV_HEADS), (sum(lengths), KV_HEADS)]
            q, k, v = (torch.empty(*m, HEAD_DIM, dtype=dtype, device="cuda", requires_grad=True) for m in made)
            stack.enter_context(torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor))
            attention._segments(q, k, v, upload(packing.additive(dtype), torch.device("cuda")), ScoreRule(), None)
        return heads, sum(kept.values())

    return run


def test_grouped_heads_stay_grouped_with_context_parallelism(on_cuda):
    heads, kept = on_cuda(torch.bfloat16, [LENGTH], **CONTEXT)
    assert heads == [KV_HEADS, KV_HEADS]
    # bfloat16 queries and outputs of this rank; of its two chunks the keys and values they see: 2 and 3 of 4
    wanted = 2 * HEAD_DIM * (2 * LENGTH // 2 * HEADS + 2 * LENGTH * KV_HEADS * 5 // 4)
    assert wanted <= kept < 1.1 * wanted


def test_whole_rows_need_no_copies(on_cuda):
    assert on_cuda(torch.bfloat16, [64, 64])[0] == [KV_HEADS]


@pytest.mark.parametrize("dtype, lengths", [(torch.float32, [LENGTH]), (torch.bfloat16, [40, 50])])
def test_what_flash_attention_refuses_gets_every_head(on_cuda, dtype, lengths):
    assert set(on_cuda(dtype, lengths, **CONTEXT)[0]) == {HEADS}
