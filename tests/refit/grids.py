"""Trainers of a number of layers, for tests without a model."""

from aligner.config.sections.model.stages import cut
from aligner.refit.plan import TrainerGrid


def trainer_of(layers: int, tensor: int = 1, pipeline: int = 1, *sizes: int, **more: int) -> TrainerGrid:
    return TrainerGrid(cut(layers, pipeline), tensor, *sizes, **more)
