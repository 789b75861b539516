"""Check of a Hugging Face folder against its config.json: no tensor is ignored silently.

All readers of such a folder use it: the trainer, `import`, and the native engine of `chat` and `eval`.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Collection

from aligner.config.sections.model.config import ModelConfig
from aligner.errors import CheckpointError, ConfigError
from aligner.families.table import family_table
from aligner.models.beside import check_beside, names_beside
from aligner.models.copies import copies
from aligner.models.params import expected_hf_shapes
from aligner.models.quantised import FLOAT8, MXFP4
from aligner.models.safetensors_io import HfTensors

LM_HEAD, SCORE = "lm_head.weight", "score.weight"
# buffers that old versions of transformers stored, and every version computes
DISPENSABLE = re.compile(r"model\.(layers\.\d+\.self_attn\.)?rotary_emb\.inv_freq")
FLOATS = ("F64", "F32", "F16", "BF16")
INTEGERS = ("I64", "I32")
ROWS = 4096  # of tied embeddings, compared at a time


def check_folder(tensors: HfTensors, cfg: ModelConfig, head: str = "lm") -> dict[str, tuple[int, ...]]:
    """Return name -> shape of the tensors of a model with this head ("lm" or "score"); a score head only if stored.

    Raises CheckpointError for tensors that are missing, unknown, of another shape or of a type other than a plain
    float, or an integer where the model has those. Also for a head that differs from tied embeddings, and for a reward
    model instead of a language model. A reward model may start from a language model, whose head is then unused.
    """
    _check_ahead(tensors, cfg)
    announced = expected_hf_shapes(cfg)
    body = {name: shape for name, shape in announced.items() if name != LM_HEAD}
    if head == "lm" and SCORE in tensors:
        raise CheckpointError(f"{tensors.where}: expected a language model, found {SCORE}: this is a reward model")
    wanted = announced if head == "lm" else body
    missing = [name for name in wanted if name not in tensors]
    beside = names_beside(tensors, cfg)
    known = {*body, LM_HEAD, SCORE, *beside, *copies(cfg)}
    unknown = [name for name in tensors if name not in known and not DISPENSABLE.fullmatch(name)]
    unknown += tensors.unlisted()
    if missing or unknown:
        faults = [f"lack {_first(missing)}"] * bool(missing) + [f"also hold {_first(unknown)}"] * bool(unknown)
        ties = str(cfg.tie_embeddings).lower()
        raise CheckpointError(
            f"{tensors.where}: its weights {' and '.join(faults)}, where config.json announces {cfg.family} with "
            f"num_hidden_layers={cfg.num_layers}, tie_word_embeddings={ties}"
        )
    for line in check_beside(tensors, cfg, beside):
        print(line, file=sys.stderr, flush=True)
    integers = {name for spec in family_table(cfg) if spec.integer for name in spec.hf}
    _check_types(tensors, wanted, integers)
    for name in filter(tensors.scale_shape, [*wanted, *beside]):
        tensors.check_scale(name)
    if cfg.tie_embeddings and LM_HEAD in tensors:
        embedding = cfg.traits.table[0].hf[0]
        remedy = "although config.json says tie_word_embeddings=true: set that to false to use both, or remove the head"
        _check_equal(tensors, LM_HEAD, embedding, remedy)
    for copy, original in copies(cfg).items():
        if copy in tensors:
            _check_equal(tensors, copy, original, "which model.mtp.layers=1 would use in its place: set that to 0")
    if head == "score" and SCORE in tensors:
        wanted = body | {SCORE: tensors.shape(SCORE)}
    tensors.close()
    return wanted


def _check_types(tensors: HfTensors, wanted: dict[str, tuple[int, ...]], integers: Collection[str]) -> None:
    halves: dict[str, str] = {}
    for name, shape in wanted.items():
        kind, scale = tensors.dtype(name), tensors.scale_shape(name)
        scaled = kind in (FLOAT8, MXFP4) and scale is not None
        if name in integers:
            if kind not in INTEGERS:
                raise CheckpointError(f"{tensors.where}: {name} is {kind}: expected {' or '.join(INTEGERS)}")
        elif not scaled and (kind not in (*FLOATS, MXFP4) or scale is not None):
            beside = "a scale, but is no float8" if scale is not None else "no scale that config.json announces"
            expected = f"{', '.join(FLOATS)}, or {FLOAT8} with a scale for each block (quantization_config)"
            raise CheckpointError(f"{tensors.where}: {name} is {kind} with {beside}: expected {expected}")
        if tensors.shape(name) != shape:
            raise CheckpointError(
                f"{tensors.where}: {name} has shape {tensors.shape(name)}, but the model config says {shape}"
            )
        halves.setdefault(kind, name)
    if "F16" in halves and "BF16" in halves:
        pair = f"{halves['F16']} is F16, {halves['BF16']} is BF16"
        raise CheckpointError(f"{tensors.where}: {pair}: expected half-precision numbers of one kind")


def _check_equal(tensors: HfTensors, copy: str, original: str, remedy: str) -> None:
    """Check that a stored copy equals its original, as a head does tied embeddings.

    transformers uses a stored head that differs despite config.json, so the intended one is unknown.
    """
    shape = tensors.shape(original)
    same = tensors.shape(copy) == shape
    for row in range(0, shape[0] if same else 0, ROWS):
        stop = min(shape[0], row + ROWS)
        same = same and bool((tensors.read(copy, 0, row, stop) == tensors.read(original, 0, row, stop)).all())
    if not same:
        raise CheckpointError(f"{tensors.where}: {copy} differs from {original}, {remedy}")


def _check_ahead(tensors: HfTensors, cfg: ModelConfig) -> None:
    """Check that a folder has as many layers for multi-token prediction as training is to learn."""
    own = tensors.announced_ahead(cfg.traits.predicts_ahead)
    if cfg.mtp.layers and own != cfg.mtp.layers:
        expected = f"0 with {tensors.where}: its config.json says {cfg.traits.predicts_ahead}={own}"
        raise ConfigError("model.mtp.layers", cfg.mtp.layers, expected)


def _first(names: Collection[str], limit: int = 3) -> str:
    listed = sorted(names)
    return ", ".join(listed[:limit]) + (f" and {len(listed) - limit} more" if len(listed) > limit else "")
