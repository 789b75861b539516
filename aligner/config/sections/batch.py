"""The section `batch`."""

from __future__ import annotations

from dataclasses import dataclass

from aligner.config.checks import AUTO, Auto
from aligner.config.key import REPORT, Section, key

ROWS, LOGPROB_TOKENS = 8, 16384  # in place of `auto`, where nothing is known of a machine


@dataclass
class BatchConfig(Section, key="batch"):
    prompts: int = key(32, "Prompts of a rollout.", least=1, read_for=("samples",))
    group: int = key(1, "Samples of each prompt.", least=1, read_for=("samples",))
    minibatch_samples: int = key(
        0, "Samples of one optimizer step. 0: the whole rollout.", least=0, read_for=("policy",)
    )
    micro_batch_samples: Auto = key(
        AUTO,
        "Rows of one forward and backward pass on a rank. auto: `micro_batch_tokens` by the memory (docs/memory.md).",
        auto=True,
        least=1,
        resume=REPORT,
        rollouts=False,
        read_for=("training",),
    )
    micro_batch_tokens: int = key(
        0,
        "Padded tokens of a micro-batch, in place of `micro_batch_samples`. 0: off.",
        least=0,
        resume=REPORT,
        rollouts=False,
        read_for=("training",),
    )
    epochs: int = key(1, "Passes over a rollout.", least=1, read_for=("policy",))
    sequences: int = key(32, "Sequences (stages rm and dpo: pairs) of one optimizer step.", least=1, read_for=("rows",))
    logprob_tokens: Auto = key(
        AUTO,
        "Tokens of a forward pass without gradient. auto: by the memory (docs/memory.md).",
        auto=True,
        least=1,
        resume=REPORT,
        rollouts=False,
    )
    logits_bytes: int = key(
        1 << 30,
        "Bytes of logits, their softmax and gradient at a time; more is computed in parts.",
        least=1,
        resume=REPORT,
    )
    packing: bool = key(True, "Lay rows end to end, without padding between them.", resume=REPORT, rollouts=False)
    share_prompts: bool = key(
        True,
        "Compute what neighbouring rows begin with once (with packing, parallel.context=1).",
        resume=REPORT,
        rollouts=False,
    )
    balance: bool = key(
        True,
        "Deal the rows of a minibatch to data-parallel ranks by their cost.",
        resume=REPORT,
        rollouts=False,
        read_for=("training",),
    )

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
