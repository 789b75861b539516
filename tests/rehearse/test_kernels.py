"""Operations on tensors without storage, against the same ones on real tensors."""

import subprocess
import sys

import pytest

CASES = """
import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._pytree import tree_leaves, tree_map_only
from aligner.rehearse import kernels

kernels.install()
mode, aten = FakeTensorMode(), torch.ops.aten
x, y, flat = torch.rand(4, 6, 8), torch.rand(6, 1), torch.rand(5)
square, index = torch.rand(8, 8), torch.tensor([3, 0])
CASES = [
    (aten.mul.Tensor, x, y),
    (aten.mul.Tensor, x.bfloat16(), y),
    (aten.mul.Tensor, x, 0.5),
    (aten.addcmul_.default, x, x, y),
    (aten.pow.Tensor_Scalar, x.transpose(0, 2), 2),
    (aten.mean.dim, x, [-1], True),
    (aten.sum.dim_IntList, x.transpose(0, 1), [1]),
    (aten.where.self, x > 0, x.double(), y),
    (aten.view.default, x, [24, 8]),
    (aten.transpose.int, x, 0, 2),
    (aten.slice.Tensor, x, 1, 1, 5, 2),
    (aten.select.int, x, 1, -1),
    (aten.split.Tensor, x, 4, -1),
    (aten.detach.default, x),
    (aten.index_select.default, x, 0, index),
    (aten.gather.default, square, 1, index.view(1, 2)),
    (aten.cat.default, [x, x.transpose(0, 0)], 2),
    (aten.clone.default, x.transpose(0, 2)),
    (aten.mm.default, square.t(), square),
    (aten.addmm_.default, square, square, square),
    (aten.bmm.default, x, x.transpose(1, 2)),
    (aten._softmax.default, x, -1, False),
    (aten.topk.default, x, 3),
    (aten.copy_.default, x, x.double()),
    (aten._fused_rms_norm.default, x, [8], None, 1e-5),
    (aten.embedding.default, square, index),
]


def told(out, first):
    shared = lambda t: t.untyped_storage()._cdata == first.untyped_storage()._cdata
    return [(t.shape, t.stride(), t.storage_offset(), t.dtype, shared(t)) for t in tree_leaves(out)]


def without_storage(t):
    return FakeTensor(mode, torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device="meta"), kernels.CUDA)


for op, *args in CASES:
    given = tree_map_only(torch.Tensor, without_storage, tuple(args))
    out = kernels.run(mode, op, given, {}) if kernels.plain(op) else op(*given)
    real, found = told(op(*args), tree_leaves(args)[0]), told(out, tree_leaves(given)[0])
    if real != found or any(t.device.type != "cuda" for t in tree_leaves(out)):
        print(op, real, found)
for op, *args in ((aten.mm.default, x[0], x[0]), (aten.view.default, x, [5, -1]), (aten.add.Tensor, flat, square)):
    try:
        print(op, kernels.run(mode, op, tree_map_only(torch.Tensor, without_storage, tuple(args)), {}).shape)
    except RuntimeError:
        pass
print(sum(kernels.plain(op) for op, *_ in CASES))
"""


@pytest.mark.slow  # replaces torch's rules for a whole process, which takes some seconds to come
def test_shapes_strides_dtypes_and_aliases_are_those_of_real_tensors():
    done = subprocess.run([sys.executable, "-c", CASES], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    *wrong, plain = done.stdout.splitlines()
    assert not wrong and int(plain) == 25
