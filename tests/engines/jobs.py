"""What the ranks run for the tests of this folder."""

from __future__ import annotations

import os
import sys

import torch.distributed as dist

from aligner.errors import EngineError
from tests.engines.trtllm.setup import FAKE, ROOT, forget_fake
from tests.run.jobs import run_stage


def trtllm(arguments: list[str], crashes: dict[int, str]) -> str:
    """`run_stage` over the fake, whose process ends on the ranks of `crashes` at the call named there; how it ended."""
    os.environ["PYTHONPATH"] = os.pathsep.join([str(FAKE), str(ROOT)])
    os.environ["FAKE_TRTLLM_CRASH"] = crashes.get(dist.get_rank(), "")
    sys.path.insert(0, str(FAKE))
    try:
        run_stage(arguments)
    except EngineError as error:
        return str(error)
    finally:
        sys.path.remove(str(FAKE))
        forget_fake()
    return ""
