"""Stage sft: supervised fine-tuning."""

from aligner.config.stage import COMPARED, SEQUENCES, Stage

STAGE = Stage(reads=SEQUENCES, unread=COMPARED)
