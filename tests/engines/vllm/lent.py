"""What the process of `setup.Shared` runs."""

import gc

from aligner.engines.vllm.worker import VllmWorker

__all__ = ["VllmWorker"]

# vLLM calls it where an engine ends, and then looks for garbage several times through all that was ever imported, which
# `import_vllm` and vLLM itself had taken out of it: most of the time in which another engine takes its place
gc.unfreeze = lambda: None
