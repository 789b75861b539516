"""The rules of an adapter_config.json of `peft` (0.21), as peft reads them: its modules, and their rank and alpha.
Keys of other methods than LoRA, rsLoRA or DoRA are refused by name.

Names of modules are those of the base model, `model.layers.0.self_attn.q_proj`. Rules as in peft's
`check_target_module_exists` (tuners/tuners_utils.py) and `get_pattern_key` (utils/other.py).
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any, NoReturn

from aligner.config.sections.model.lora import LoraConfig
from aligner.errors import CheckpointError
from aligner.foreign import JsonObject, record

# read here and in peft.py, or without effect on the factors' meaning
_KNOWN = {
    *("peft_type", "r", "lora_alpha", "use_rslora", "use_dora", "init_lora_weights", "rank_pattern", "alpha_pattern"),
    *("target_modules", "exclude_modules", "layers_to_transform", "layers_pattern"),
    *("peft_version", "task_type", "base_model_name_or_path", "revision", "inference_mode", "auto_mapping"),
    *("lora_dropout", "megatron_core", "qalora_group_size", "runtime_config", "ephemeral_gpu_offload"),
    *("loftq_config", "eva_config", "corda_config", "lora_ga_config"),  # of an init_lora_weights; refused there
}
_EMPTY = ("modules_to_save", "target_parameters", "layer_replication", "megatron_config")  # no effect if empty
_SAME_BASE = (True, False, "gaussian", "orthogonal", "eva")  # init_lora_weights that do not change the base
_ALL_LINEAR = "all-linear"


def check_kind(config: JsonObject, lora: LoraConfig) -> None:
    """Check that it is LoRA, rsLoRA or DoRA as in `lora`. Raises CheckpointError, naming the key."""
    if config.text("peft_type") != "LORA":
        config.refuse("peft_type", "LORA")
    for key, wanted, name in (("use_rslora", lora.rslora, "rslora"), ("use_dora", lora.dora, "dora")):
        if config.flag(key, False) != wanted:
            config.refuse(key, f"{json.dumps(wanted)}, the value of model.lora.{name}: set that to the adapter's")
    if config.fields.get("init_lora_weights", True) not in _SAME_BASE:
        config.refuse("init_lora_weights", "one that does not change the base: merge the adapter into its base first")
    for key, value in config.fields.items():
        # an empty object may turn a variant on: only null and false are off everywhere
        idle = value is None or value is False or (key in _EMPTY and not value) or (key, value) == ("bias", "none")
        if key not in _KNOWN and not idle:
            config.refuse(key, "nothing: only plain LoRA, rsLoRA and DoRA are supported")


class Rules:
    """The rules of one adapter_config.json. Raises CheckpointError, naming the key, for values that peft would not
    understand."""

    def __init__(self, config: JsonObject):
        self._config = config
        self._target = self._names("target_modules")
        self._exclude = self._names("exclude_modules") if config.fields.get("exclude_modules") else None
        self._layers, self._in_layer = self._layer_rule()
        nothing = record({}, config.where, CheckpointError)
        self._patterns = {key: config.record(f"{key}_pattern", nothing) for key in ("rank", "alpha")}
        self._compiled = {
            key: [(text, self._compile(patterns, text, rf"(.*\.)?({text})$")) for text in patterns]
            for key, patterns in self._patterns.items()
        }

    def adapts(self, module: str) -> bool:
        """Return whether peft adapts this module, which is linear and not the output layer."""
        if self._exclude is not None and self._exclude(module):
            return False
        if not self._target(module):
            return False
        chosen = self._config.fields["target_modules"]
        if self._layers is None or isinstance(chosen, str) or module in chosen:  # a full name includes its layer
            return True
        index = self._in_layer(module)
        return index is not None and index in self._layers

    def rank(self, module: str) -> float:
        return self._value("rank", module, self._config.number("r"))

    def alpha(self, module: str) -> float:
        return self._value("alpha", module, self._config.number("lora_alpha"))

    def has_pattern(self, kind: str, module: str) -> bool:
        """Return whether a pattern of `rank` or `alpha` matches the module."""
        return self._pattern(kind, module) is not None

    def refuse(self, kind: str, module: str, expected: str) -> NoReturn:
        """Raise CheckpointError for the key that sets the module's `rank` or `alpha`."""
        pattern = self._pattern(kind, module)
        if pattern is None:
            self._config.refuse({"rank": "r", "alpha": "lora_alpha"}[kind], expected)
        self._patterns[kind].refuse(pattern, expected)

    @property
    def narrowed(self) -> str:
        """The key that removes modules from the targets; empty without one."""
        keys = ("layers_to_transform", "exclude_modules")
        return next((key for key in keys if self._config.fields.get(key) not in (None, [], "")), "")

    def refuse_targets(self, expected: str) -> NoReturn:
        """Raise CheckpointError for the choice of modules."""
        self._config.refuse(self.narrowed or "target_modules", expected)

    def _pattern(self, kind: str, module: str) -> str | None:
        return next((text for text, regex in self._compiled[kind] if regex.match(module)), None)

    def _value(self, kind: str, module: str, default: float) -> float:
        pattern = self._pattern(kind, module)
        return default if pattern is None else self._patterns[kind].number(pattern)

    def _names(self, key: str) -> Callable[[str], Any]:
        """Return a matcher of modules: a pattern of whole names, or a list of names and their ends."""
        value = self._config.fields.get(key)
        if isinstance(value, str):
            if key == "target_modules" and value.lower() == _ALL_LINEAR:
                return lambda module: True
            return self._compile(self._config, key, value).fullmatch
        if not isinstance(value, list) or not value or not all(isinstance(x, str) for x in value):
            self._config.refuse(key, "names of modules, or a pattern of them")
        whole, ends = set(value), tuple(f".{x}" for x in value)
        return lambda module: module in whole or module.endswith(ends)

    def _layer_rule(self) -> tuple[set[int] | None, Callable[[str], int | None]]:
        """Return (the layers, None for all; a function module -> layer)."""
        config = self._config
        layers, patterns = (config.fields.get(key) for key in ("layers_to_transform", "layers_pattern"))
        for key, value in (("layers_to_transform", layers), ("layers_pattern", patterns)):
            if value is not None and isinstance(config.fields["target_modules"], str):
                config.refuse(key, "null where target_modules is a pattern")
        if patterns and layers is None:
            config.refuse("layers_pattern", "null without layers_to_transform")
        if layers is None or layers == []:
            return None, lambda module: None
        if isinstance(layers, int) and not isinstance(layers, bool):
            layers = [layers]
        elif not isinstance(layers, list) or not all(isinstance(x, int) and not isinstance(x, bool) for x in layers):
            config.refuse("layers_to_transform", "an integer, or a list of them")
        patterns = [patterns] if patterns and isinstance(patterns, str) else patterns or []
        if not isinstance(patterns, list) or not all(isinstance(x, str) for x in patterns):
            config.refuse("layers_pattern", "a name, or a list of them")
        texts = [rf"(?:^|.*?\.){x}\.(?P<idx>\d+)\." for x in patterns] or [r".*?\.[^.]*\.(?P<idx>\d+)\."]
        regexes = [self._compile(config, "layers_pattern", text) for text in texts]

        def layer(module: str) -> int | None:
            matched = next((match for regex in regexes if (match := regex.match(module))), None)
            return int(matched["idx"]) if matched else None

        return set(layers), layer

    def _compile(self, holder: JsonObject, key: str, text: str) -> re.Pattern[str]:
        try:
            return re.compile(text)
        except (re.error, RecursionError, OverflowError) as error:
            holder.refuse(key, f"a regular expression ({error})")
