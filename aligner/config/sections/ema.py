"""The section `ema`: an average of the policy's weights beside the last ones."""

from __future__ import annotations

from dataclasses import dataclass

from aligner.config.key import Section, key


@dataclass
class EmaConfig(Section, key="ema"):
    decay: float = key(
        0.0,
        "Decay of the average of the policy's weights per optimizer step, as 0.999. 0: no average.",
        least=0,
        below=1,
    )
