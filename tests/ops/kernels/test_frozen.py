import pytest
import torch

from aligner.ops.kernels.frozen import BLOCK, KINDS, NF4, Frozen, _by_bitsandbytes, frozen_linear, held_bytes


def matrix(rows=24, columns=192, seed=0):
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed)) * 0.05


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_nf4_has_the_bits_of_bitsandbytes(dtype):
    bnb = pytest.importorskip("bitsandbytes.functional")
    weight = matrix().to(dtype)
    weight[3, 64:128] = 0
    codes, state = bnb.quantize_4bit(weight, blocksize=BLOCK, quant_type="nf4")
    held = Frozen.of(weight, "nf4")
    assert torch.equal(held.codes.flatten(), codes.flatten())
    assert torch.equal(held.scales.flatten(), state.absmax)
    assert torch.equal(NF4, state.code)
    for numbers in (held.dense(dtype), _by_bitsandbytes(held, dtype)):  # plain torch's, and as on a GPU
        assert torch.equal(numbers, bnb.dequantize_4bit(codes, state))


def test_nf4_is_the_nearest_of_the_published_numbers():
    weight = matrix()
    blocks = weight.view(24, -1, BLOCK)
    top = blocks.abs().amax(-1, keepdim=True)
    wanted = NF4[(blocks[..., None] / top[..., None] - NF4).abs().argmin(-1)] * top
    assert (Frozen.of(weight, "nf4").dense(torch.float32) - wanted.view(24, -1)).abs().max() < 1e-7


@pytest.mark.parametrize("kind, worst", [("int8", 1 / 254), ("fp8", 1 / 28), ("nf4", (1 - 0.6961928) / 2)])
def test_no_number_is_farther_off_than_half_a_step(kind, worst):
    weight = matrix()
    top = weight.view(24, -1, BLOCK).abs().amax(-1, keepdim=True).expand(-1, -1, BLOCK).reshape(24, -1)
    error = (Frozen.of(weight, kind).dense(torch.float32) - weight).abs() / top
    assert 0 < error.max() <= worst * 1.001
    again = Frozen.of(Frozen.of(weight, kind).dense(torch.float32), kind)
    assert torch.equal(again.dense(torch.float32), Frozen.of(weight, kind).dense(torch.float32))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", [(6, 101), (3, 2, 5, 64), (4, 37)])
def test_rows_of_any_length_and_matrices_of_experts(kind, shape):
    weight = matrix(1, 10_000).flatten()[: torch.Size(shape).numel()].view(shape)
    held, rows = Frozen.of(weight, kind), weight.view(-1, shape[-1])
    assert held.dense(torch.float32).shape == shape
    assert held.nbytes == held_bytes(len(rows), shape[-1], kind)
    one = Frozen.of(rows[2], kind).dense(torch.float32)  # a row is held alike wherever it stands
    assert torch.equal(held.dense(torch.float32).view(rows.shape)[2], one)


@pytest.mark.parametrize("kind", KINDS)
def test_a_shard_of_whole_blocks_is_the_shard_of_what_is_held(kind):
    weight = matrix()
    whole = Frozen.of(weight, kind).dense(torch.float32)
    assert torch.equal(Frozen.of(weight[:, 64:128], kind).dense(torch.float32), whole[:, 64:128])


@pytest.mark.parametrize("kind", KINDS)
def test_product_and_gradient_are_those_of_the_dense_matrix(kind):
    held = Frozen.of(matrix(), kind)
    x = torch.randn(2, 5, 192, requires_grad=True)
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        y = frozen_linear(x, held)
    assert not saved  # no dense matrix waits for backward
    dense = held.dense(torch.float32)
    torch.testing.assert_close(y, x @ dense.T)
    y.square().sum().backward()
    torch.testing.assert_close(x.grad, 2 * (x.detach() @ dense.T) @ dense)
