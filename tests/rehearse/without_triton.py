"""`python -m aligner.rehearse.rank` where our kernels find no Triton. Megatron-Core itself imports it."""

import importlib.util
import sys
from unittest import mock

with mock.patch.object(importlib.util, "find_spec", lambda name: None):
    from aligner.ops.kernels import fused

assert not fused.DEVICES

from aligner.rehearse import rank  # noqa: E402

if __name__ == "__main__":
    rank.main(sys.argv[1])
