"""The section `data`: where rows come from and how they become tokens."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from aligner.config.checks import at_least, one_of
from aligner.errors import ConfigError

DATA_FORMATS = (
    *("auto", "messages", "prompt_completion", "unpaired", "preference", "prompt", "text", "steps"),
    *("alpaca", "sharegpt"),
)
RENDERING = {"messages", "tools", "chat_template", "add_generation_prompt", "tokenize"}  # no template_arguments


@dataclass
class SourceConfig:
    path: str = ""  # as data.train
    weight: float = 1.0  # share of the rows (data.weight_by), beside the other sources' weights
    name: str = ""  # in metrics and errors; empty: the file's, up to its first dot
    format: str = ""  # empty: data.format
    columns: dict[str, str] = field(default_factory=dict)  # empty: data.columns
    prompt_template: str = ""  # empty: data.prompt_template

    def __post_init__(self) -> None:
        if not self.path:
            raise ConfigError("data.sources[].path", self.path, "a file or folder with rows")
        if not (math.isfinite(self.weight) and self.weight > 0):
            expected = "a finite number > 0: leave out a source that is not wanted"
            raise ConfigError("data.sources[].weight", self.weight, f"{expected} ({self.path})")
        if not re.fullmatch(r"[\w-]+", self.label):
            raise ConfigError("data.sources[].name", self.label, "letters, digits, - and _", f"Name {self.path!r}.")
        one_of("data.sources[].format", self.format, ("", *DATA_FORMATS))

    @property
    def label(self) -> str:
        return self.name or Path(self.path).name.partition(".")[0]


@dataclass
class DataConfig:
    train: str = ""  # JSONL, Parquet, or a `datasets` folder (docs/data.md)
    # in place of `train`, several files (or folders) in fixed shares; what a source does not say it has from here
    sources: list[SourceConfig] = field(default_factory=list)
    weight_by: str = "rows"  # rows, tokens: what the weights of `sources` are shares of
    eval: str = ""  # held-out rows, likewise; empty: no evaluation
    format: str = "auto"  # DATA_FORMATS; auto: told from the columns (docs/data.md)
    columns: dict[str, str] = field(default_factory=dict)  # our name -> the file's column name
    prompt_template: str = ""  # python format string over the row's columns, makes `prompt` where there is none
    completion_template: str = ""  # likewise `completion`
    max_prompt_tokens: int = 512  # longer prompts: see overlong
    max_tokens: int = 1024  # prompt + response
    overlong: str = "drop"  # drop, truncate
    empty_answers: str = (
        "refuse"  # stages dpo and kto: answers without text end the start; drop: their rows are left out
    )
    shuffle: bool = True  # anew in each epoch
    loss_on: str = "assistant"  # assistant, all
    across_documents: bool = False  # format text: attention and positions go on over the documents of a row
    chat_template: str = "auto"  # auto: the tokenizer's (docs/data.md); a shipped one's name, or a file
    template_arguments: dict[str, Any] = field(default_factory=dict)  # of the chat template: {enable_thinking: false}

    def __post_init__(self) -> None:
        one_of("data.format", self.format, DATA_FORMATS)
        at_least("data.max_prompt_tokens", self.max_prompt_tokens, 1)
        at_least("data.max_tokens", self.max_tokens, 2)
        one_of("data.weight_by", self.weight_by, ("rows", "tokens"))
        one_of("data.overlong", self.overlong, ("drop", "truncate"))
        one_of("data.empty_answers", self.empty_answers, ("refuse", "drop"))
        one_of("data.loss_on", self.loss_on, ("assistant", "all"))
        if self.sources and self.train:
            raise ConfigError("data.train", self.train, "empty with data.sources: rows come from one of the two")
        labels = [source.label for source in self.sources]
        for label in labels:
            if labels.count(label) > 1:
                raise ConfigError("data.sources[].name", label, "another name for each source")
        for name in sorted(RENDERING & set(self.template_arguments)):
            expected = "a variable of the chat template: this one is set for each rendering"
            raise ConfigError(f"data.template_arguments.{name}", self.template_arguments[name], expected)

    def of(self, source: SourceConfig) -> DataConfig:
        """How the rows of one source are read."""
        return replace(
            self,
            train=source.path,
            sources=[],
            format=source.format or self.format,
            columns=source.columns or self.columns,
            prompt_template=source.prompt_template or self.prompt_template,
        )
