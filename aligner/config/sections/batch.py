"""The section `batch`."""

from __future__ import annotations

from dataclasses import dataclass

from aligner.config.checks import at_least


@dataclass
class BatchConfig:
    prompts: int = 32  # of a rollout
    group: int = 1  # samples of a prompt
    minibatch_samples: int = 0  # 0: the whole rollout
    micro_batch_samples: int = 8  # rows of a forward and backward pass on a rank
    micro_batch_tokens: int = 0  # > 0: as many rows as fit this many padded tokens, instead of micro_batch_samples
    epochs: int = 1  # passes over a rollout
    sequences: int = 32  # stages without rollouts: sequences (rm, dpo: pairs) of one optimizer step
    logprob_tokens: int = 16384  # tokens per forward of passes without gradient
    logits_bytes: int = 1 << 30  # of logits, their softmax and gradient at a time; more is done in parts
    packing: bool = True  # rows end to end, without the padding between them
    share_prompts: bool = True  # compute what adjacent rows of a micro-batch begin with once (packing, context 1)
    balance: bool = True  # deal the rows of a minibatch to data-parallel ranks by their cost

    def __post_init__(self) -> None:
        names = ("prompts", "group", "micro_batch_samples", "epochs", "sequences", "logprob_tokens", "logits_bytes")
        for name in names:
            at_least(f"batch.{name}", getattr(self, name), 1)
        at_least("batch.minibatch_samples", self.minibatch_samples, 0)
        at_least("batch.micro_batch_tokens", self.micro_batch_tokens, 0)
