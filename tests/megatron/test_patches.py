"""Each reason for a patch of docs/reference/dependencies.md still stands in the installed packages."""

import importlib.util
import re
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[2] / "docs/reference/dependencies.md"
REASONS = {
    "megatron/core/optimizer/distrib_optimizer.py": ["model_param.type() == 'torch.cuda.FloatTensor'"],
    "megatron/core/utils.py": ["l2_reduced = torch.norm(torch.tensor(l2))", "dst.copy_(src * scale)"],
    "megatron/core/distributed/param_and_grad_buffer.py": ["= dist_reduce_scatter_func(", " dist_all_gather_func("],
    "megatron/core/optimizer/optimizer.py": ["optimizer.has_grad_norm_group(grad_norm_group)"],
    "megatron/core/optimizer/__init__.py": ["from torch.optim import AdamW as Adam"],
    "megatron/core/optimizer/emerging_optimizers.py": ["or len(param.shape) != 2"],
    "megatron/core/dist_checkpointing/strategies/filesystem_async.py": ["ctx.Manager().Queue()"],
    "megatron/core/tensor_parallel/layers.py": ["get_global_memory_buffer().get_tensor"],
    "torch/distributed/distributed_c10d.py": ["_pickler(f).dump(obj)", "_unpickler(io.BytesIO(buf)).load()"],
    "megatron/core/jit.py": ["torch.compile"],
    "torch/optim/optimizer.py": ["@torch._disable_dynamo", "import torch._dynamo"],
    "megatron/core/timers.py": ["import wandb"],
    "megatron/core/transformer/dot_product_attention.py": ["packed_seq_params is None"],
    "megatron/core/transformer/moe/token_dispatcher.py": ["torch.cuda.Stream"],
    "megatron/core/pipeline_parallel/p2p_communication.py": ["self._communicate_shapes("],
    "megatron/core/models/common/language_module/language_module.py": ["parallel_state.get_data_parallel_rank("],
}


@pytest.mark.parametrize("file", REASONS)
def test_the_reason_still_stands(file):
    package, _, rest = file.partition("/")
    spec = importlib.util.find_spec(f"{package}.core" if package == "megatron" else package)
    home = Path(spec.origin).parents[1 if package == "torch" else 2]
    text = (home / package / rest).read_text()
    assert [reason for reason in REASONS[file] if reason not in text] == []


def test_the_page_names_these_files():
    assert set(re.findall(r"`((?:megatron|torch)/[\w/]+\.py)`", PAGE.read_text())) == set(REASONS)
