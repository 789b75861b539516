"""Rows of a planned job: how many a step has, and their lengths."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import ceil

from aligner.config.derived import response_limit
from aligner.config.schema import Config
from aligner.config.stages import STAGES
from aligner.errors import ConfigError
from aligner.plan.lengths import Lengths

CHARACTERS = 4  # of a prompt's own text in a token
CRITERIA, CRITERION_TOKENS = 10, 32  # of a rubric, and of one of its criteria


@dataclass(frozen=True)
class PlannedRows:
    """Rows of one step over all ranks. Means and `longest` are in tokens."""

    count: int
    prompts: int  # distinct ones, each prefilled once
    prompt_mean: float
    prompt_longest: int
    response_mean: float
    response_longest: int
    seen: float = 0.0  # tokens that a token sees on average; 0: half of a row of mean length
    read_seen: float = 0.0  # likewise a token whose output is read; 0: as of a row of mean length
    length_counts: tuple[tuple[int, int], ...] = ()  # lengths of responses, see `lengths`

    @property
    def mean(self) -> float:
        return self.prompt_mean + self.response_mean

    @property
    def lengths(self) -> Lengths:
        """Lengths of the responses."""
        return Lengths(self.response_mean, self.response_longest, self.length_counts)

    @property
    def context(self) -> float:
        return self.seen or self.mean / 2

    @property
    def longest(self) -> int:
        return self.prompt_longest + self.response_longest

    @property
    def tokens(self) -> float:
        return self.count * self.mean


def step_rows(
    cfg: Config, prompt_tokens: float, response_tokens: float, lengths: tuple[tuple[int, int], ...]
) -> PlannedRows:
    """Return the rows of a step with their lengths. Raises ConfigError for lengths that the config does not allow."""
    stage, b = STAGES[cfg.stage.name], cfg.batch
    longest, limit = cfg.data.max_prompt_tokens, response_limit(cfg)
    if not stage.rollouts and (own := stage.passes(cfg).get("generate", 0.0)) < 1:
        longest = max(1, min(longest, cfg.data.max_tokens - 1))
        limit = max(limit if own else 1, cfg.data.max_tokens - longest)
    if lengths:
        response_tokens = sum(length * count for length, count in lengths) / sum(count for _, count in lengths)
        if lengths[-1][0] > limit:
            raise ConfigError("--lengths", lengths[-1][0], f"at most the longest, {limit}")
    group = b.group if cfg.algorithm.distill.of_group else 1
    counts = (stage.rows(cfg) * b.sequences, b.sequences // group)
    if stage.rollouts:
        counts = b.prompts * b.group, b.prompts
    tokens = prompt_tokens or longest / 2, longest, response_tokens or limit / 2, limit
    rows = PlannedRows(*counts, *tokens, length_counts=lengths)
    means = ("--prompt-tokens", rows.prompt_mean, longest), ("--response-tokens", rows.response_mean, limit)
    for key, mean, most in means:
        if not 0 < mean <= most:
            raise ConfigError(key, mean, f"a mean above 0, at most the longest, {most}")
    return rows


def teacher_rows(cfg: Config, rows: PlannedRows) -> PlannedRows:
    """Return the rows behind the prompts of `algorithm.distill.teacher_prompt`. Its columns, but the prompt, have as
    many tokens as responses."""
    written, fields = cfg.algorithm.distill.pieces
    prompts, others, text = fields.count("prompt"), len(fields) - fields.count("prompt"), ceil(written / CHARACTERS)
    mean = text + prompts * rows.prompt_mean + others * rows.response_mean
    longest = text + prompts * rows.prompt_longest + others * rows.response_longest
    longest = min(longest, max(1, cfg.model.max_position - rows.response_longest))
    return replace(rows, prompts=rows.count, prompt_mean=min(mean, longest), prompt_longest=longest)


def evaluated_rows(cfg: Config, rows: PlannedRows, gpus: int) -> PlannedRows:
    """Return the answers of an evaluation. Of all rows of data.eval, whose number is not known here, engines decode as
    many as they can together."""
    prompts = cfg.eval.prompts or cfg.engine.max_batch * gpus
    longest, limit = cfg.data.max_prompt_tokens, cfg.eval.max_response_tokens or response_limit(cfg)
    lengths = min(rows.prompt_mean, longest), longest, min(rows.response_mean, limit), limit
    return PlannedRows(prompts * cfg.eval.samples, prompts, *lengths)
