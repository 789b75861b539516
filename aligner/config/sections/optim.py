"""The sections `optim` and `ema`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from aligner.config.key import REFUSE, Section, key
from aligner.config.megatron_fields import check_fields
from aligner.config.rule import rules


def _two_betas(betas: list[float]) -> bool:
    return len(betas) == 2 and all(0 <= beta < 1 for beta in betas)


@dataclass
class OptimConfig(Section, key="optim"):
    name: str = key(
        "adam",
        "Optimizer. muon: Muon for the matrices of layers, AdamW for all else. Needs the extra `muon`.",
        choices=("adam", "muon"),
        resume=REFUSE,
    )
    lr: float = key(1e-4, "Peak learning rate.", above=0)
    min_lr: float = key(0.0, "Learning rate at the end of the decay.", least=0)
    schedule: str = key("constant", "Shape of the decay.", choices=("constant", "linear", "cosine"))
    warmup_steps: float = key(
        0.0,
        "Steps in which the learning rate rises linearly from 0. Below 1: their fraction of all steps.",
        least=0,
        valid=(lambda steps: steps < 1 or steps % 1 == 0, "a whole number, or a fraction below 1"),
    )
    decay_from: float = key(0.0, "Fraction of the steps after which the decay begins.", least=0, most=1)
    weight_decay: float = key(0.01, "Weight decay of AdamW; norms and biases have none.", least=0)
    betas: list[float] = key([0.9, 0.95], "Betas of AdamW, two numbers.", valid=(_two_betas, "two numbers in [0, 1)"))
    eps: float = key(1e-8, "Epsilon of AdamW.", above=0)
    muon_momentum: float = key(0.95, "Momentum of Muon.", least=0, below=1)
    muon_scale: float = key(
        0.2, "Size of Muon's updates. 0.2: with the same learning rate about as large as AdamW's.", above=0
    )
    muon_precision: str = key(
        "bfloat16", "Precision of Muon's Newton-Schulz products.", choices=("bfloat16", "float32")
    )
    clip_grad: float = key(1.0, "Largest norm of the gradient. 0: no clipping.", least=0)
    gradient_dtype: str = key(
        "float32",
        "Dtype of summed gradients of bfloat16 weights. bfloat16: half the memory and messages, rounded at each sum.",
        choices=("float32", "bfloat16"),
    )
    distributed: bool = key(True, "Shard the optimizer's state over data-parallel ranks.")
    megatron: dict[str, Any] = key(
        {}, "Fields of Megatron-Core's OptimizerConfig and DistributedDataParallelConfig by name."
    )

    RULES = rules("""
=> min_lr <=lr
name=muon => distributed =false | with optim.name=muon: its updates need whole matrices
name!=muon => muon_momentum =0.95 | without optim.name=muon
name!=muon => muon_scale =0.2 | without optim.name=muon
name!=muon => muon_precision =bfloat16 | without optim.name=muon
megatron.exp_avg_dtype=bfloat16 or megatron.exp_avg_sq_dtype=bfloat16
    => megatron.use_precision_aware_optimizer =true | for moments in bfloat16
megatron.exp_avg_dtype=bfloat16 or megatron.exp_avg_sq_dtype=bfloat16
    => megatron.exp_avg_dtype, megatron.exp_avg_sq_dtype =bfloat16
    | for both moments: of one alone each step makes a float32 copy
megatron.use_precision_aware_optimizer or megatron.pad_buckets_for_high_nccl_busbw => distributed =true
    | with optim.megatron.use_precision_aware_optimizer or pad_buckets_for_high_nccl_busbw
""")

    def __post_init__(self) -> None:
        check_fields("optim", self.megatron)
        super().__post_init__()

    def is_sharded(self, mixed: bool) -> bool:
        """Return whether data-parallel ranks share the state. Adam's they do in any case if a bfloat16 model has
        float32 parameters, `mixed`."""
        return self.name == "adam" and (self.distributed or mixed)

    @property
    def moment_bytes(self) -> int:
        """Bytes of a parameter's two moments."""
        return 4 if self.megatron.get("exp_avg_dtype") == "bfloat16" else 8


@dataclass
class EmaConfig(Section, key="ema"):
    """Keys of an average of the policy's weights, besides the last ones."""

    decay: float = key(
        0.0,
        "Decay of the average of the policy's weights per optimizer step, such as 0.999. 0: no average.",
        least=0,
        below=1,
    )
