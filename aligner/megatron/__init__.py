"""The only importer of megatron.core.

Megatron and torch warn about what is normal here (no TransformerEngine, no Apex, no CUDA, their own deprecations); a
user can do nothing about any of it, so those messages, and only those, are silenced before the first import.
"""

import logging
import warnings

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
