"""The only importer of megatron.core.

Megatron and torch warn about normal conditions (no TransformerEngine, no Apex, no CUDA, their own deprecations). A user
cannot change them, so those messages, and only those, are silenced before the first import.
"""

import logging
import warnings

import torch

from aligner import loading
from aligner.megatron import transformer_engine

for _message in (
    "Transformer Engine and Apex are not installed",
    "Apex is not installed",
    "full scope is deprecated",
    "MimoModelConfig is experimental",
    r"The \.grad attribute of a Tensor that is not a leaf",
    r"`torch\.distributed\.(reduce_scatter_tensor|all_gather_into_tensor)` is deprecated",
    r".*_coalescing_manager",
    "torch.distributed is disabled, unavailable or uninitialized, assuming the intent is to load",
    "The argument order of load has been changed",
    "Please use DTensor instead and we are deprecating ShardedTensor",
):
    warnings.filterwarnings("ignore", message=_message)
logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)  # "No CUDA runtime is found"


def _import_without_extras() -> None:
    """Import Megatron for the first time, on a CPU without the slow parts of its start. It decorates fused functions
    with torch.compile, which imports the compiler although none of them is called here. It imports wandb and
    TensorBoard for a timer that is not used."""
    if torch.cuda.is_available():
        import megatron.core.extensions.transformer_engine

        return
    compiler, torch.compile = torch.compile, lambda function, *args, **kwargs: function
    try:
        with loading.without("wandb", "torch.utils.tensorboard"):
            import megatron.core.jit  # noqa: F401  takes torch.compile for good
    finally:
        torch.compile = compiler
    _keep_compiler_out()


def _keep_compiler_out() -> None:
    """Use torch's optimizers on a CPU as they were before they were wrapped for the compiler. The wrapper imports the
    compiler, which takes another second."""
    from torch.optim import Adam, Optimizer

    for name in ("add_param_group", "zero_grad", "state_dict", "load_state_dict"):
        setattr(Optimizer, name, getattr(Optimizer, name).__wrapped__)
    Adam.step = torch.no_grad()(Adam.step.__wrapped__)  # AdamW's too


transformer_engine.load(_import_without_extras)
