"""Checks of a model's shape against the layout, the engine and the lengths of a config."""

from __future__ import annotations

from aligner.config.engines import ENGINES
from aligner.config.rules import RuleContext
from aligner.config.schema import Config
from aligner.config.sections.model.config import ModelConfig
from aligner.config.sections.model.kernels import check_te
from aligner.errors import LayoutError


def validate_model(cfg: Config, model: ModelConfig, scorer: bool = False) -> None:
    """Check a model's shape: `cfg.model`, or the shape in the folder of `model.init`. With `scorer` it is that of a
    reward model or critic, which may be dense beside a policy with experts."""
    if model is cfg.model and cfg.model.init != "random":
        return
    subject, entry = RuleContext(cfg, model=model, scorer=scorer), ENGINES[cfg.engine.name]
    check_te(model)
    subject.check("layout")
    if not scorer:
        if subject.generates and entry.check is not None:
            entry.check(cfg, model)
        subject.check("engine's model", "shares")
    subject.check("lengths")


def validate_on_gpu(cfg: Config, model: ModelConfig) -> None:
    """Check what only a GPU requires."""
    RuleContext(cfg, model=model).check("on a GPU")


def validate_shares(cfg: Config, model: ModelConfig, key: str = "model") -> None:
    """Check the shares of a native engine's ranks."""
    RuleContext(cfg, model=model, key=key).check("shares")


def check_node(cfg: Config, node: range, world_size: int) -> None:
    """Check that all ranks of a replica are on this node, or none, unless they may be on several: a child process
    that reads other ranks' memory reaches only its own node's."""
    if cfg.engine.can.several_nodes and not (cfg.engine.ranks and cfg.engine.child):
        return
    width = cfg.engine.tensor_parallel
    for first in range(world_size - cfg.engine.ranks if cfg.engine.ranks else 0, world_size, width):
        last = first + width - 1
        if (first in node) != (last in node):
            expected = f"replicas within a node of {len(node)} ranks with engine.name={cfg.engine.name}"
            expected += " and engine.ranks" * cfg.engine.can.several_nodes
            raise LayoutError("engine.tensor_parallel", width, f"{expected}: ranks {first} to {last} are on two")
