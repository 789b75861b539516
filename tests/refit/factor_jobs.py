"""What the ranks run for `test_factors`."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from aligner.config.sections.engine import EngineConfig, RefitConfig
from aligner.config.sections.model.config import ModelConfig
from aligner.config.sections.parallel import ParallelConfig
from aligner.errors import RefitError
from aligner.megatron.groups import neighbours
from aligner.refit.factors import FactorExchange
from aligner.refit.transfer import Refit
from tests.megatron.models import build
from tests.megatron.test_lora import FAST, shake
from tests.refit.jobs import Packed


class Refusing(Packed):
    """An engine that cannot be written where it is told."""

    refuses = ""

    def place(self, name: str, start: int, stop: int, afresh: bool = False):
        if name == self.refuses:
            raise RuntimeError("no memory left")
        return super().place(name, start, stop, afresh)


def _engine(cfg: ModelConfig, tensor: int, dtype: torch.dtype) -> Refusing:
    return Refusing(cfg, EngineConfig(), device="cpu", dtype=dtype, pad_id=0, group=neighbours(tensor))


def both(
    cfg: ModelConfig,
    parallel: ParallelConfig,
    tensor: int,
    dtype: torch.dtype = torch.float32,
    engine_dtype: torch.dtype | None = None,
) -> list[dict]:
    """An engine that gets merged weights and one that gets factors, of the same model, before two changes of the
    adapters and after each: metrics, and all checksums."""
    model, told = build(cfg, parallel, FAST, dtype=dtype), []
    engines = {way: _engine(cfg, tensor, engine_dtype or dtype) for way in ("merged", "factors")}
    refits = {
        way: Refit(model, engine, RefitConfig(bucket_bytes=3000, verify="checksum", adapters=way))
        for way, engine in engines.items()
    }
    for _ in range(3):
        found = {way: refit() for way, refit in refits.items()}
        sums = {way: dict(engine.checksums()) for way, engine in engines.items()}
        told.append({"metrics": found, "checksums": sums, "trainer": refits["factors"].checksums})
        shake(model, 0.1)
        model.step_count += 1
    return told


def torn(cfg: ModelConfig, parallel: ParallelConfig, name: str) -> dict:
    """The last rank's engine refuses a tensor in the first refit and in the second one, and then loses a factor; after
    each a refit without it. Messages, numbers of bytes, and versions of the engine in between."""
    model = build(cfg, parallel, FAST)
    engine, last = _engine(cfg, 1, torch.float32), dist.get_rank() == dist.get_world_size() - 1
    refit = Refit(model, engine, RefitConfig(bucket_bytes=3000, verify="checksum", adapters="factors"))
    found = {"messages": [], "bytes": [], "versions": [], "right": []}

    def fails() -> None:
        with pytest.raises(RefitError) as caught:
            refit()
        found["messages"].append(str(caught.value))
        if last:
            with pytest.raises(RefitError, match="no complete weights"):
                engine.generate([[1, 2]], [[0]], None)
        found["versions"].append(engine.weight_version)

    def works() -> None:
        found["bytes"].append(refit()["refit/bytes"])
        found["right"].append(dict(engine.checksums()) == refit.checksums)

    for _ in range(2):
        engine.refuses = name if last else ""
        fails()
        engine.refuses = ""
        works()
        shake(model, 0.1)
        model.step_count += 1
    exchange = refit.exchange
    assert isinstance(exchange, FactorExchange)
    share = exchange._merger.factors
    place, lost = share.place, "model.layers.1.mlp.up_proj.lora_B.weight" if last else ""
    share.place = lambda n, a, *b: torch.empty(b[0] - a, cfg.lora.rank) if n == lost else place(n, a, *b)
    fails()
    share.place = place
    works()
    return found
