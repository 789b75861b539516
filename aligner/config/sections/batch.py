"""The section `batch`."""

from __future__ import annotations

from dataclasses import dataclass

from aligner.config.checks import AUTO, Auto, at_least, auto_or

ROWS, LOGPROB_TOKENS = 8, 16384  # in place of `auto`, where nothing is known of a machine


@dataclass
class BatchConfig:
    prompts: int = 32  # of a rollout
    group: int = 1  # samples of a prompt
    minibatch_samples: int = 0  # 0: the whole rollout
    # rows of a forward and backward pass on a rank; auto: `micro_batch_tokens` by the memory (docs/memory.md)
    micro_batch_samples: Auto = AUTO
    micro_batch_tokens: int = 0  # > 0: as many rows as fit this many padded tokens, instead of micro_batch_samples
    epochs: int = 1  # passes over a rollout
    sequences: int = 32  # stages without rollouts: sequences (rm, dpo: pairs) of one optimizer step
    logprob_tokens: Auto = AUTO  # per forward of passes without gradient; auto: by the memory (docs/memory.md)
    logits_bytes: int = 1 << 30  # of logits, their softmax and gradient at a time; more is done in parts
    packing: bool = True  # rows end to end, without the padding between them
    share_prompts: bool = True  # compute what adjacent rows of a micro-batch begin with once (packing, context 1)
    balance: bool = True  # deal the rows of a minibatch to data-parallel ranks by their cost

    def __post_init__(self) -> None:
        for name in ("prompts", "group", "epochs", "sequences", "logits_bytes"):
            at_least(f"batch.{name}", getattr(self, name), 1)
        for name in ("micro_batch_samples", "logprob_tokens"):
            setattr(self, name, auto_or(f"batch.{name}", getattr(self, name), 1))
        at_least("batch.minibatch_samples", self.minibatch_samples, 0)
        at_least("batch.micro_batch_tokens", self.micro_batch_tokens, 0)

    @property
    def micro_batch_rows(self) -> int:
        """`micro_batch_samples` as far as it is known."""
        return ROWS if isinstance(self.micro_batch_samples, str) else self.micro_batch_samples

    @property
    def logprob_budget(self) -> int:
        """`logprob_tokens` as far as it is known."""
        return LOGPROB_TOKENS if isinstance(self.logprob_tokens, str) else self.logprob_tokens

    @property
    def sizes_itself(self) -> bool:
        """Micro-batches are sized by the memory."""
        return self.micro_batch_samples == AUTO and not self.micro_batch_tokens
