"""What ranks run for the tests of `aligner check layouts`."""

from __future__ import annotations

import sys
from typing import Any

from aligner.config.sections.algorithm import AlgorithmConfig
from aligner.tools.layouts.cases import LayoutCase


def updated(case: LayoutCase, unsummed: bool = False, **options: Any) -> dict[str, Any]:
    """Loss, gradient norm and gradients of one update of the likelihood. `unsummed`: tensor ranks do not sum the
    gradients of norms, of which each has its tokens'."""
    from megatron.core.distributed import finalize_model_grads

    from aligner.tools.layouts.replay import gradients

    module = sys.modules[finalize_model_grads.__module__]
    kept = module._allreduce_non_tensor_model_parallel_grads
    if unsummed:
        module._allreduce_non_tensor_model_parallel_grads = lambda *arguments, **named: None
    try:
        return gradients(case, "likelihood", AlgorithmConfig(), **options)
    finally:
        module._allreduce_non_tensor_model_parallel_grads = kept
