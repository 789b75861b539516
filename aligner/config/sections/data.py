"""The section `data`: where rows come from and how they become tokens."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from aligner.config.key import IGNORE, Section, key
from aligner.config.rule import rules
from aligner.errors import ConfigError

DATA_FORMATS = (
    *("auto", "messages", "prompt_completion", "unpaired", "preference", "prompt", "text", "steps"),
    *("alpaca", "sharegpt"),
)
RENDERING = {"messages", "tools", "chat_template", "add_generation_prompt", "tokenize"}  # no template_arguments


@dataclass
class SourceConfig(Section, key="data.sources[]"):
    path: str = key("", "File or folder with rows, like data.train.", resume=IGNORE)
    weight: float = key(1.0, "Weight of the source's share (data.weight_by), relative to the other sources.")
    name: str = key("", "Name in metrics and errors. Empty: the file's name up to its first dot.")
    format: str = key("", "Format of the rows. Empty: data.format.", choices=("", *DATA_FORMATS), function=True)
    columns: dict[str, str] = key({}, "Map of our column names to the file's. Empty: data.columns.")
    prompt_template: str = key("", "Format string that builds `prompt`. Empty: data.prompt_template.")

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.path:
            raise ConfigError("data.sources[].path", self.path, "a file or folder with rows")
        if not (math.isfinite(self.weight) and self.weight > 0):
            expected = "a finite number > 0: leave out a source that is not wanted"
            raise ConfigError("data.sources[].weight", self.weight, f"{expected} ({self.path})")
        if not re.fullmatch(r"[\w-]+", self.label):
            raise ConfigError("data.sources[].name", self.label, "letters, digits, - and _", f"Name {self.path!r}.")

    @property
    def label(self) -> str:
        return self.name or Path(self.path).name.partition(".")[0]


@dataclass
class DataConfig(Section, key="data"):
    train: str = key("", "Training data: a file or folder of rows (docs/reference/data.md).", resume=IGNORE)
    sources: list[SourceConfig] = key(
        [], "Several files or folders in fixed shares, instead of `train`. They inherit unset keys from this section."
    )
    weight_by: str = key("rows", "Unit of the shares of `sources`.", choices=("rows", "tokens"), read_for=("training",))
    eval: str = key("", "Held-out rows. Empty: no evaluation.", resume=IGNORE, read_for=("training",))
    format: str = key(
        "auto",
        "Format of the rows. auto: detect by the columns (docs/reference/data.md). A function of yours makes them.",
        choices=DATA_FORMATS,
        function=True,
    )
    columns: dict[str, str] = key({}, "Map of our column names to the file's.")
    prompt_template: str = key("", "Python format string over the row's columns that builds a missing `prompt`.")
    completion_template: str = key("", "Python format string that builds a missing `completion`.")
    max_prompt_tokens: int = key(
        512, "Maximum tokens of a prompt. Longer ones: see overlong.", least=1, read_for=("generation", "evaluation")
    )
    max_tokens: int = key(1024, "Maximum tokens of prompt and response.", least=2, read_for=("rows",))
    overlong: str = key("drop", "Treatment of rows that are too long.", choices=("drop", "truncate"))
    empty_answers: str = key(
        "refuse",
        "Treatment of answers without text. refuse: raise an error; drop: leave out their rows.",
        choices=("refuse", "drop"),
        read_for=("comparisons",),
    )
    shuffle: bool = key(True, "Shuffle the rows anew in each epoch.", read_for=("training",))
    loss_on: str = key("assistant", "Tokens to learn.", choices=("assistant", "all"), read_for=("likelihood",))
    across_documents: bool = key(
        False,
        "Let attention and positions continue across the documents of a row (format text).",
        rollouts=False,
        read_for=("likelihood",),
    )
    chat_template: str = key(
        "auto",
        "Chat template: auto (the tokenizer's), the name of a shipped one, or a file (docs/reference/data.md).",
        resume=IGNORE,
    )
    template_arguments: dict[str, Any] = key({}, "Variables of the chat template, such as {enable_thinking: false}.")

    RULES = rules("sources => train = | with data.sources: rows come from one of the two")

    def __post_init__(self) -> None:
        super().__post_init__()
        labels = [source.label for source in self.sources]
        for label in labels:
            if labels.count(label) > 1:
                raise ConfigError("data.sources[].name", label, "another name for each source")
        for name in sorted(RENDERING & set(self.template_arguments)):
            expected = "a variable of the chat template: this one is set for each rendering"
            raise ConfigError(f"data.template_arguments.{name}", self.template_arguments[name], expected)

    @property
    def source_paths(self) -> list[str]:
        return [source.path for source in self.sources]

    @property
    def formats(self) -> list[str]:
        """Formats of the rows and of those of the sources."""
        return [self.format, *(source.format for source in self.sources)]

    def of(self, source: SourceConfig) -> DataConfig:
        """Return the config for reading the rows of one source."""
        return replace(
            self,
            train=source.path,
            sources=[],
            format=source.format or self.format,
            columns=source.columns or self.columns,
            prompt_template=source.prompt_template or self.prompt_template,
        )
