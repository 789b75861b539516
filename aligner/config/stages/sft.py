"""Stage sft: supervised fine-tuning."""

from aligner.config.stage import SEQUENCES, Stage

STAGE = Stage(reads=SEQUENCES)
