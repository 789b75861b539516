"""Pipeline stages exchange activations and gradients, and nothing else. That they learn the same, with micro-batches of
many lengths, is in `test_layouts.py`."""

import pytest

from aligner.config.sections.parallel import ParallelConfig
from tests.tiny import LLAMA

pytestmark = pytest.mark.multirank

LAYOUTS = {
    "pp2": (2, ParallelConfig(pipeline=2)),
    "tp2-sequence-pp2": (4, ParallelConfig(pipeline=2, tensor=2, sequence=True)),
    "cp2-pp2": (4, ParallelConfig(pipeline=2, context=2)),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_no_message_tells_a_shape(ranks, layout):
    world, parallel = LAYOUTS[layout]
    for told in ranks.run("tests.megatron.pipeline_jobs:messages", world=world, parallel=parallel):
        share = parallel.tensor if parallel.sequence else 1
        shapes = [(tokens // share, 1, LLAMA.hidden_size) for tokens in told["tokens"]]
        assert len(set(shapes)) > 1, "micro-batches of one length show nothing"
        assert told["sent"]["forward"] == ([] if told["stage"] else shapes)
        assert told["sent"]["step"] == shapes  # activations of the first stage, gradients of the last
        assert not told["waits"]


def test_the_last_stage_forgets_what_it_has_learned_from(ranks):
    """Each micro-batch is received, computed and sent back before the next one."""
    _, alive = ranks.run("tests.megatron.pipeline_jobs:received", world=2, parallel=ParallelConfig(pipeline=2))
    assert len(alive) > 3 and max(alive) == 1 and alive[-1] == 0, alive  # the schedule's variable has the one before
