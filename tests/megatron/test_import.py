import subprocess
import sys

import pytest
import torch

CHILD = """
import sys, torch
before = torch.compile
import aligner.builders.stage
assert not {"torch._dynamo", "wandb", "tensorboard"} & sys.modules.keys(), "slow to import"
assert torch.compile is before
weight = torch.nn.Parameter(torch.ones(3))
for _ in range(2):
    adam = torch.optim.AdamW([weight], lr=0.5, fused=True)
    (weight * torch.arange(3.0)).sum().backward()
    adam.step()
    adam.zero_grad()
    adam.load_state_dict(adam.state_dict())
assert "torch._dynamo" not in sys.modules, "slow to start"
assert weight.requires_grad and weight.grad is None and torch.is_grad_enabled()
torch.testing.assert_close(weight.data, torch.tensor([0.99, 0, 0]), atol=0.02, rtol=0)
from aligner.run.trackers.tensorboard import TensorBoard
TensorBoard()
assert not {"boto3", "botocore"} & sys.modules.keys(), "slow to import"
import wandb, torch.utils.tensorboard
"""


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="with CUDA the fused functions are compiled")
def test_the_first_import_is_light_and_leaves_nothing_behind():
    subprocess.run([sys.executable, "-c", CHILD], check=True)
