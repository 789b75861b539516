"""Multi-token prediction (DeepSeek-V3, arXiv:2412.19437, section 2.2): `model.mtp.*`."""

from __future__ import annotations

from dataclasses import dataclass

from aligner.config.key import REFUSE, Section, key


@dataclass
class MtpConfig(Section, key="model.mtp"):
    """Keys of a layer behind the last, which predicts the token after the next: from the model's last hidden state and
    the next token."""

    layers: int = key(
        0,
        "Such layers, which training learns: 0 or 1. `engine.draft_tokens` then drafts with it. With 0 exports have "
        "those of `model.init`.",
        least=0,
        most=1,
    )
    loss: float = key(0.1, "Factor of their loss, which is added to the stage's.", above=0, resume=REFUSE)
    detach: bool = key(True, "Their loss changes no weights but their own.", resume=REFUSE)
