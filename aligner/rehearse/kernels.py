"""Results of operations on the device, by torch's kernels for tensors without storage.

FakeTensorMode uses rules in Python, which also hold for unknown shapes, and a cache of their results. Here all shapes
are known: the kernels in C++, whose checks and shapes CUDA's share, take a quarter of that time.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor, _meta_registrations
from torch._decomp import global_decomposition_table
from torch._subclasses.fake_impls import _is_tensor_constructor, _like_tensor_constructors, op_implementations_checks
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._pytree import tree_map_only

aten = torch.ops.aten
LOCAL_RANK = 3  # not 0, the device of whoever names none
CUDA, META = torch.device("cuda", LOCAL_RANK), torch.device("meta")
NAMESPACES = ("aten", "aligner", "rehearsed", "torch_attn")
# operations whose floating tensors CUDA wants in one dtype, where kernels without storage do not look
PRODUCTS = {"mm", "bmm", "addmm", "baddbmm", "mv", "addmv", "_grouped_mm", "convolution", "_varlen_attn"}
ALIKE = {
    *PRODUCTS,
    *(f"_scaled_dot_product_{kernel}_attention" for kernel in ("flash", "efficient", "cudnn")),
    *("index_put", "index_put_", "_index_put_impl_", "index_add", "index_add_", "index_copy", "index_copy_"),
}
# FakeTensorMode has rules of its own for these, for shapes that are not known and for devices that differ
PLAIN = {aten.view.default, aten._unsafe_view.default, aten.select.int, aten.slice.Tensor, aten.copy_.default}
_kept: list[torch.library.Library] = []  # their kernels go with them
_attributes: dict[FakeTensorMode, dict[str, Any]] = {}  # of a tensor without storage


def install() -> None:
    """Replace rules in Python where there is a kernel."""
    rules = _meta_registrations._meta_lib_dont_use_me_use_register_meta
    names = set(rules._op_impls)
    rules._destroy()
    lacking = torch.library.Library("aten", "IMPL", "Meta")
    _kept.append(lacking)
    tables = [global_decomposition_table[kind] for kind in ("pre_autograd", "post_autograd", "meta")]
    for op, rule in (tables[0] | tables[1] | tables[2]).items():
        name = op.name()
        if f"{name.replace('::', '/')}/Meta" in names and not has_kernel(name, "Meta"):
            lacking.impl(op, rule)


def has_kernel(name: str, key: str) -> bool:
    return torch._C._dispatch_has_kernel_for_dispatch_key(name, key)


@functools.cache
def plain(func: Any) -> bool:
    """Return whether the kernel gives the complete result if every tensor is on the device."""
    known = func in PLAIN or func in _like_tensor_constructors or _is_tensor_constructor(func)
    if not known and any(applies(func) for applies, _ in op_implementations_checks):
        return False
    kernel = torch._C._dispatch_has_computed_kernel_for_dispatch_key(func.name(), "Meta")
    return func.namespace in NAMESPACES and kernel


@functools.cache
def is_composite(func: Any) -> bool:
    """Return whether CUDA runs an operation as several others."""
    return func.namespace == "aten" and not has_kernel(func.name(), "CUDA") and func._can_decompose()


def refuse_mixed(func: Any, tensors: list[Tensor]) -> None:
    """Raise RuntimeError for dtypes that CUDA's kernel does not take together, or not at all."""
    name = func._overloadpacket.__name__
    if name not in ALIKE:
        return
    dtypes = {t.dtype for t in tensors if t.is_floating_point()}
    if len(dtypes) > 1 and "dtype" not in func._overloadname:  # whose result may have another
        raise RuntimeError(f"{name} of {' and '.join(sorted(map(str, dtypes)))}: CUDA wants one dtype")
    if not dtypes and name in PRODUCTS:
        raise RuntimeError(f"{name} of {tensors[0].dtype}: CUDA has no kernel for it")


def run(mode: FakeTensorMode, func: Any, args: tuple, kwargs: dict) -> Any:
    """Run a kernel as torch's `in_kernel_invocation_manager` does, without its generator."""
    if kwargs.get("device") is not None:
        kwargs = kwargs | {"device": META}
    with torch._C._DisableTorchDispatch(), torch._C._PreserveDispatchKeyGuard():
        before, mode.in_kernel_invocation = mode.in_kernel_invocation, True
        torch._C._set_meta_in_tls_dispatch_include(True)
        try:
            out = func(*args, **kwargs)
        finally:
            mode.in_kernel_invocation = before
    if isinstance(out, Tensor):
        return _on_device(mode, out)
    return tree_map_only(Tensor, lambda t: _on_device(mode, t), out)


def _on_device(mode: FakeTensorMode, t: Tensor) -> Tensor:
    """Return a kernel's result as a tensor of the device. The first one is made by FakeTensor, the others get its
    attributes, which are alike."""
    if isinstance(t, FakeTensor):
        return t
    if mode not in _attributes:
        made = FakeTensor(mode, t, CUDA)
        _attributes[mode] = dict(made.__dict__)
        return made
    made = Tensor._make_subclass(FakeTensor, t, t.requires_grad, dispatch_device=True, device_for_backend_keys=CUDA)
    torch._C._set_warn_deprecated_on_mutable_data_ptr(made)
    made.__dict__.update(_attributes[mode])
    return made
