"""What the process of `setup.Shared` runs."""

import gc

from aligner.engines.vllm.worker import Worker, import_vllm


class Kept(Worker):
    """vLLM looks for garbage several times where an engine takes another's place, each time through all that was ever
    imported: most of such a change. Here what is imported stays out of it."""

    def __init__(self, settings):
        import_vllm()
        gc.freeze()
        gc.unfreeze = lambda: None
        super().__init__(settings)
