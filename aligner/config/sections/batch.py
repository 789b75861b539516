"""The section `batch`."""

from __future__ import annotations

from dataclasses import dataclass

from aligner.config.checks import AUTO, Auto
from aligner.config.key import REPORT, Section, key

ROWS, LOGPROB_TOKENS = 8, 16384  # for `auto`, if nothing is known about a machine


@dataclass
class BatchConfig(Section, key="batch"):
    prompts: int = key(32, "Prompts per rollout.", least=1, read_for=("samples",))
    group: int = key(1, "Samples per prompt.", least=1, read_for=("samples", "distill"))
    minibatch_samples: int = key(0, "Samples per optimizer step. 0: the whole rollout.", least=0, read_for=("policy",))
    micro_batch_samples: Auto = key(
        AUTO,
        "Rows per forward and backward pass of a rank. auto: set `micro_batch_tokens` by memory "
        "(docs/explanation/memory.md).",
        auto=True,
        least=1,
        resume=REPORT,
        rollouts=False,
        read_for=("training",),
    )
    micro_batch_tokens: int = key(
        0,
        "Maximum padded tokens per micro-batch, instead of `micro_batch_samples`. 0: off.",
        least=0,
        resume=REPORT,
        rollouts=False,
        read_for=("training",),
    )
    epochs: int = key(1, "Passes over each rollout.", least=1, read_for=("policy",))
    sequences: int = key(32, "Sequences (stages rm and dpo: pairs) per optimizer step.", least=1, read_for=("rows",))
    logprob_tokens: Auto = key(
        AUTO,
        "Tokens per forward pass without gradient. auto: by memory (docs/explanation/memory.md).",
        auto=True,
        least=1,
        resume=REPORT,
        rollouts=False,
    )
    logits_bytes: int = key(
        1 << 30,
        "Maximum bytes of logits, their softmax and gradient at a time. More is computed in parts.",
        least=1,
        resume=REPORT,
    )
    packing: bool = key(True, "Lay rows end to end, without padding between them.", resume=REPORT, rollouts=False)
    share_prompts: bool = key(
        True,
        "Compute the common beginning of neighbouring rows once (with packing, parallel.context=1).",
        resume=REPORT,
        rollouts=False,
    )
    balance: bool = key(
        True,
        "Assign a minibatch's rows to data-parallel ranks by cost.",
        resume=REPORT,
        rollouts=False,
        read_for=("training",),
    )

    @property
    def micro_batch_rows(self) -> int:
        """`micro_batch_samples`, or a default for `auto`."""
        return ROWS if isinstance(self.micro_batch_samples, str) else self.micro_batch_samples

    @property
    def logprob_budget(self) -> int:
        """`logprob_tokens`, or a default for `auto`."""
        return LOGPROB_TOKENS if isinstance(self.logprob_tokens, str) else self.logprob_tokens

    @property
    def sizes_itself(self) -> bool:
        """Whether micro-batches are sized by memory."""
        return self.micro_batch_samples == AUTO and not self.micro_batch_tokens
