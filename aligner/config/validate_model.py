"""Checks of a model's shape against the layout, the engine and the lengths of a config."""

from __future__ import annotations

from aligner.config.engines import entry_of
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
    subject, entry = RuleContext(cfg, model=model, scorer=scorer), entry_of(cfg.engine.name)
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
    """Check that this node has equal parts of replicas that read a refit's weights in memory shared by a node's
    ranks."""
    if not (cfg.engine.ranks and cfg.engine.child):
        return
    width, trainers = cfg.engine.tensor_parallel, world_size - cfg.engine.ranks
    own = [(rank - trainers) // width for rank in node if rank >= trainers]
    parts = sorted(set(map(own.count, own)))
    if len(parts) > 1 or any(width % size for size in parts):
        expected = f"replicas in equal parts on nodes, with engine.name={cfg.engine.name} and engine.ranks"
        has = f"ranks {node[0]} to {node[-1]}, of a node, are {' and '.join(map(str, parts))} of a replica"
        raise LayoutError("engine.tensor_parallel", width, f"{expected}: {has}")
