"""Partial loading into fused modules, as strict as the order allows. Newer ones keep a state during an update."""

import os

from tensorrt_llm.calls import note


class ModelLoader:
    def __init__(self, executor):
        self.executor, self.updating = executor, False

    def reload(self, model, weights: dict, allow_partial_loading: bool = False) -> None:
        note("reload", str(len(weights)))
        self.executor.require_control("reload")
        if not self.updating and hasattr(self, "begin_update_weights"):
            raise RuntimeError("reload without begin_update_weights")
        if allow_partial_loading and not model.partial:
            raise TypeError("load_weights() got an unexpected keyword argument 'allow_partial_loading'")
        extra = {"allow_partial_loading": True} if allow_partial_loading else {}
        model.load_weights(weights, **extra)

    if os.environ.get("FAKE_TRTLLM_VERSION", "1.4.0rc1").startswith("1.4"):

        def begin_update_weights(self) -> None:
            note("begin")
            self._be(False, True)

        def finalize_update_weights(self) -> None:
            note("finalize")
            self._be(True, False)

        def abort_update_weights(self) -> None:
            note("abort")
            self._be(True, False)

    def _be(self, before: bool, after: bool) -> None:
        self.executor.require_control("an update")
        if self.updating != before:
            raise RuntimeError(f"an update is {'under way' if self.updating else 'not under way'}")
        self.updating = after
