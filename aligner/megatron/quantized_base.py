"""Frozen base weights in 4 or 8 bits (QLoRA, arXiv:2305.14314). The layers' matrices are held as in
`ops/kernels/frozen.py` and made dense for each product.

A held matrix leaves an empty parameter of its shape (device meta): tables and plans see what they saw before, and
reading it without `dense` fails.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel import copy_to_tensor_model_parallel_region, gather_from_sequence_parallel_region
from torch import Tensor

from aligner.config.sections.model.config import ModelConfig
from aligner.errors import LayoutError
from aligner.megatron.weights import OUTPUT, local_modules, local_parameters
from aligner.models.adapters import held_sites
from aligner.ops.kernels.frozen import BLOCK, Frozen, frozen_linear


def check_held(cfg: ModelConfig, tensor: int) -> None:
    """Check that tensor ranks cut no blocks, which would change the held numbers. Raises LayoutError."""
    if cfg.lora.quantize_base == "none" or tensor == 1:
        return
    for site in held_sites(cfg):
        columns = site.base.shape[-1]
        if site.split == "in" and not site.base.experts and columns // tensor % BLOCK:
            expected = f"a number of ranks with multiples of {BLOCK} of the {columns} columns of {site.base.canonical}"
            raise LayoutError("parallel.tensor", tensor, f"with model.lora.quantize_base {expected}")


@torch.no_grad()
def hold(model: GPTModel, cfg: ModelConfig) -> list[Frozen]:
    """Hold the matrices of a stage whose weights are loaded, and return them."""
    parameters, modules, frozen = local_parameters(model), local_modules(model), []
    for site in held_sites(cfg):
        param = parameters.get(site.base.canonical)
        if param is None:
            continue
        module, empty = modules[site.module], torch.nn.Parameter(torch.empty_like(param, device="meta"), False)
        empty.__dict__.update(param.__dict__)  # Megatron's marks
        empty.held = Frozen.of(param, cfg.lora.quantize_base)
        frozen.append(empty.held)
        setattr(module, site.base.canonical.rsplit(".", 1)[1], empty)
        if not site.base.experts:
            module._forward_impl = partial(_product, empty.held)
    return frozen


def share_frozen(model: GPTModel, trunk: GPTModel) -> None:
    """Give a stage the very parameters of `trunk`, held or not, except for the head. Its own are freed."""
    theirs, their_modules, modules = local_parameters(trunk), local_modules(trunk), local_modules(model)
    for name in local_parameters(model).keys() - {OUTPUT}:
        module, attribute = name.rsplit(".", 1)
        setattr(modules[module], attribute, theirs[name])
        if "_forward_impl" in vars(their_modules[module]):
            modules[module]._forward_impl = their_modules[module]._forward_impl


@torch.no_grad()
def round_base(model: GPTModel, cfg: ModelConfig) -> None:
    """Round the matrices that `hold` would hold to the values that it would hold."""
    parameters = local_parameters(model)
    for site in held_sites(cfg) if cfg.lora.quantize_base != "none" else ():
        param = parameters.get(site.base.canonical)
        if param is not None:
            param.copy_(Frozen.of(param, cfg.lora.quantize_base).dense(param.dtype))


def _product(held: Frozen, input: Tensor, weight: Tensor, bias: Tensor | None, **options: Any) -> Tensor:
    """Replace Megatron's product with a frozen matrix, with the same collectives."""
    if options["sequence_parallel"]:
        input = gather_from_sequence_parallel_region(input, tensor_parallel_output_grad=True, group=options["tp_group"])
    elif options["allreduce_dgrad"]:
        input = copy_to_tensor_model_parallel_region(input, group=options["tp_group"])
    out = frozen_linear(input, held)
    return out if bias is None else out + bias
