import subprocess
import sys

import pytest
import torch

CHILD = """
import sys, torch
before = torch.compile
import aligner.build
assert "torch._dynamo" not in sys.modules and "wandb" not in sys.modules, "slow to import"
assert torch.compile is before
import wandb
"""


@pytest.mark.skipif(torch.cuda.is_available(), reason="with CUDA the fused functions are compiled")
def test_the_first_import_is_light_and_leaves_nothing_behind():
    subprocess.run([sys.executable, "-c", CHILD], check=True)
