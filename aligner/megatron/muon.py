"""Muon (Jordan et al. 2024) by Megatron-Core for the matrices of layers, Adam for all other parameters.

A matrix's update is its momentum with singular values near 1, by Newton-Schulz steps. A matrix is one of a model's
files: queries, keys and values are several, which Megatron keeps in one parameter, so are gate and up, and the
experts. Tensor ranks gather a matrix that they share, so that every layout has the same update.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from megatron.core.optimizer import MegatronOptimizer, OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer.emerging_optimizers import _EMERGING_OPTIMIZERS, TensorParallelMuon
from megatron.core.optimizer.optimizer_config import ParamKey, ParamPredicate
from torch import Tensor

from aligner.config.sections.optim import OptimConfig
from aligner.families.matrices import is_matrix, rows_of_group
from aligner.families.rows import ParamSpec
from aligner.families.table import family_table
from aligner.megatron.optimizer_state import parameters_and_mains
from aligner.megatron.weights import local_parameters

if TYPE_CHECKING:
    from aligner.megatron.train import ShardedModel

NAME = "muon"
MATRIX = "is_muon_matrix"  # an attribute of parameters
PRECISIONS = {"bfloat16": "medium", "float32": "highest"}  # Megatron's words


class MatrixMuon(TensorParallelMuon):
    """Megatron's Muon, also of parameters that hold a matrix for each expert."""

    def orthogonalize(self, p: Tensor, grad: Tensor, **group: Any) -> Tensor:
        if grad.dim() == 2:
            return super().orthogonalize(p, grad, **group)
        return super().orthogonalize(p, grad.flatten(0, -3), **group).view_as(grad)


def build_muon(model: ShardedModel, optim: OptimConfig, **fields: Any) -> MegatronOptimizer:
    """Return the optimizer of a model that is in Megatron's buffers. `fields`: of Megatron's OptimizerConfig, also
    Adam's. Collective."""
    config = OptimizerConfig(
        optimizer=NAME,
        muon_momentum=optim.muon_momentum,
        muon_extra_scale_factor=optim.muon_scale,
        muon_fp32_matmul_prec=PRECISIONS[optim.muon_precision],
        muon_tp_mode="duplicated",  # others depend on the layout, or compute more with small matrices
        **fields,
    )
    named, table = local_parameters(model.module), family_table(model.cfg, model.head.kind, model.head.outputs)
    specs = {id(named[spec.canonical]): spec for spec in table if spec.canonical in named and is_matrix(spec)}
    for param in model.module.parameters():
        setattr(param, MATRIX, id(param) in specs)
    others = ParamKey(predicate=ParamPredicate(name="no_matrix", fn=lambda param: not getattr(param, MATRIX)))
    _EMERGING_OPTIMIZERS[NAME] = replace(
        _EMERGING_OPTIMIZERS[NAME], optimizer_cls=MatrixMuon, default_param_overrides={others: {"optimizer": "adam"}}
    )
    pgs = model.layout.pgs
    optimizer = get_megatron_optimizer(config, [model.wrapped], use_gloo_process_groups=False, pg_collection=pgs)
    for param, main in parameters_and_mains(optimizer):
        if id(param) in specs:
            _describe(main, specs[id(param)], model)
    return optimizer


def _describe(main: Tensor, spec: ParamSpec, model: ShardedModel) -> None:
    """Tell Megatron's Muon how tensor ranks share a parameter, and the rows of its matrices."""
    shared = spec.tp_axis is not None and not spec.experts and model.layout.tensor > 1
    main.partition_dim = spec.tp_axis if shared else -1
    main.is_qkv = spec.transform in ("qkv", "linear_in", "gate_up")
    if main.is_qkv:
        gate_up = spec.transform == "gate_up"
        main.qkv_split_shapes = [len(main) // 2] * 2 if gate_up else rows_of_group(spec, model.cfg)
