"""A pydantic model that validates what is assigned; of unknown underscored names pydantic takes no notice."""

from typing import Any, ClassVar

from tensorrt_llm.llmapi.llm_args import OLD

if not OLD:
    raise ImportError("No module named 'tensorrt_llm.plugin.plugin'")

_DEFAULTS = {"use_fused_mlp": True, "use_paged_context_fmha": True, "remove_input_padding": True, "context_fmha": True}


class PluginConfig:
    model_fields: ClassVar[dict] = dict(_DEFAULTS)

    def __init__(self, **kwargs: Any):
        for name, value in (_DEFAULTS | {k: v for k, v in kwargs.items() if k in _DEFAULTS}).items():
            object.__setattr__(self, name, value)

    def __setattr__(self, name: str, value: Any) -> None:
        if name not in _DEFAULTS and not name.startswith("_"):
            raise ValueError(f'"PluginConfig" object has no field "{name}"')
        object.__setattr__(self, name, value)
