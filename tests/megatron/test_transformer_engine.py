"""TransformerEngine's own Python, over a stand-in for its extension, against modules of our own."""

from dataclasses import replace

import pytest
import torch

from aligner.config.sections.batch import BatchConfig
from aligner.config.sections.parallel import ParallelConfig
from tests.megatron import models, te_stand_in
from tests.needs import lacking
from tests.ranks import Ranks
from tests.tiny import ADAM, LLAMA, MODELS, MOE, SGD, relative

pytestmark = pytest.mark.multirank
SEQUENCE = ParallelConfig(tensor=2, sequence=True)
LAYOUTS = {  # the longest of the rows has 13 tokens, and becomes one of 14 or 16
    "alone": (1, ParallelConfig()),
    "tp2-sequence": (2, SEQUENCE),
    "cp2": (2, ParallelConfig(context=2)),
    "cp2-heads": (2, ParallelConfig(context=2, context_mode="alltoall")),
    "cp2-tp2-sequence": (4, ParallelConfig(tensor=2, context=2, sequence=True)),
    "tp2-pp2-sequence": (4, ParallelConfig(tensor=2, pipeline=2, sequence=True)),
}
BASE = BatchConfig(micro_batch_samples=3)


@pytest.fixture(scope="module")
def te_ranks():
    if not te_stand_in.is_there():
        lacking("TransformerEngine's Python is not in .te-python: launchers/te_python.sh")
    pool = Ranks(first=te_stand_in.__name__)
    yield pool
    pool.close()


def train(ranks, world, bc=BASE, **kwargs):
    return ranks.run(models.train, world=world, bc=bc, **kwargs)[0]


def same(got, wanted, start):
    for a, b in zip(got["metrics"], wanted["metrics"], strict=True):
        assert {name: pytest.approx(value, rel=1e-5, abs=1e-6) for name, value in b.items()} == a
    torch.testing.assert_close(got["logprobs"], wanted["logprobs"], rtol=1e-5, atol=1e-5)
    for name, value in wanted["weights"].items():
        assert relative(got["weights"][name], value, value - start[name]) <= 1e-3, name


@pytest.mark.slow
@pytest.mark.parametrize("optim", [SGD, ADAM], ids=["gradients", "adam"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_it_learns_what_modules_of_our_own_learn(ranks, te_ranks, layout, optim):
    world, parallel = LAYOUTS[layout]
    start = train(ranks, 1, cfg=LLAMA, optim=optim, steps=0)["weights"]
    wanted = train(ranks, 1, cfg=LLAMA, optim=optim)
    same(train(te_ranks, world, cfg=LLAMA, parallel=parallel, optim=optim), wanted, start)


@pytest.mark.slow
@pytest.mark.parametrize("bc", [BatchConfig(micro_batch_samples=1), BatchConfig(packing=False)], ids=["one", "padded"])
@pytest.mark.parametrize("layout", ["tp2-sequence", "cp2"])
def test_the_longest_row_may_be_lengthened(ranks, te_ranks, layout, bc):
    """Rows of odd lengths, each alone: a multiple of the tensor ranks is longer than all of them."""
    world, parallel = LAYOUTS[layout]
    start = train(ranks, 1, cfg=LLAMA, optim=SGD, steps=0)["weights"]
    wanted = train(ranks, 1, cfg=LLAMA, optim=SGD)
    same(train(te_ranks, world, bc, cfg=LLAMA, parallel=parallel, optim=SGD), wanted, start)


@pytest.mark.slow
@pytest.mark.parametrize(
    "cfg",
    [
        replace(MODELS["llama3"], num_kv_heads=2),
        MODELS["qwen2"],
        MODELS["qwen3"],
        replace(LLAMA, recompute="full"),
        MOE,
    ],
    ids=["llama3", "qwen2", "qwen3", "recompute", "experts"],
)
def test_other_models_learn_the_same(ranks, te_ranks, cfg):
    start = train(ranks, 1, cfg=cfg, optim=SGD, steps=0)["weights"]
    wanted = train(ranks, 1, cfg=cfg, optim=SGD)
    same(train(te_ranks, 2, cfg=cfg, parallel=SEQUENCE, optim=SGD), wanted, start)
