"""Partial loading into fused modules, as strict as the order allows."""

from tensorrt_llm.calls import note


class ModelLoader:
    def __init__(self, executor):
        self.executor = executor

    def reload(self, model, weights: dict, allow_partial_loading: bool = False) -> None:
        note("reload", str(len(weights)))
        self.executor.require_control("reload")
        if allow_partial_loading and not model.partial:
            raise TypeError("load_weights() got an unexpected keyword argument 'allow_partial_loading'")
        extra = {"allow_partial_loading": True} if allow_partial_loading else {}
        model.load_weights(weights, **extra)
