"""What may draft for a model in vLLM: the checks of the folder of `engine.draft_model` before the child starts."""

from __future__ import annotations

from aligner.config.sections.engine import EngineConfig
from aligner.config.sections.model.config import ModelConfig
from aligner.config.sections.vllm import check_shape, request_shares
from aligner.errors import CheckpointError, ConfigError
from aligner.families.draft_folder import KEY, EagleHead, drafting, eagle_head, exported
from aligner.models.folder_check import check_folder
from aligner.models.safetensors_io import open_hf

METHODS = {EagleHead: "eagle3", ModelConfig: "draft_model"}  # of vLLM


def vllm_drafter(config: EngineConfig, model: ModelConfig) -> ModelConfig | EagleHead:
    """Return the shape of what drafts for a model. Raises ConfigError unless vLLM can draft with it."""
    folder = config.draft_model
    shape = eagle_head(folder) or drafting(folder)
    if isinstance(shape, ModelConfig):
        _check_shape(folder, shape)
    elif shape.hidden_size != model.hidden_size:
        expected = f"a head for hidden states of {model.hidden_size} numbers, not of {shape.hidden_size}"
        raise ConfigError(KEY, folder, expected)
    if shape.vocab_size != model.vocab_size:
        expected = f"vocab_size={model.vocab_size} in its config.json with engine.name=vllm, not {shape.vocab_size}"
        raise ConfigError(KEY, folder, expected, "engine.name=native drafts with another padding of a vocabulary.")
    ranks = config.tensor_parallel // request_shares(config.vllm.args, config.tensor_parallel)
    if shape.num_heads % ranks or (shape.num_kv_heads % ranks and ranks % shape.num_kv_heads):
        expected = f"heads that {ranks} ranks can share, not {shape.num_heads} with {shape.num_kv_heads} of keys"
        raise ConfigError(KEY, folder, expected, "Lower engine.tensor_parallel.")
    _check_weights(folder, shape)
    return shape


def _check_shape(folder: str, shape: ModelConfig) -> None:
    try:
        check_shape(shape)
    except ConfigError as error:
        raise ConfigError(KEY, folder, "a model that vLLM serves", str(error)) from error
    if len({shape.attention.is_local(layer) for layer in range(shape.num_layers)}) > 1:
        raise ConfigError(KEY, folder, "a model whose layers all have the same window, or none, with engine.name=vllm")


def _check_weights(folder: str, shape: ModelConfig | EagleHead) -> None:
    path = exported(folder)
    if isinstance(shape, EagleHead):  # some are not published as safetensors
        if not any(next(path.glob(f"*.{kind}"), None) for kind in ("safetensors", "bin")):
            raise ConfigError(KEY, folder, "a folder with the head's weights (*.safetensors or *.bin)")
        return
    try:
        check_folder(open_hf(path), shape)
    except CheckpointError as error:
        raise ConfigError(KEY, folder, "a folder with the weights of its config.json", str(error)) from error
