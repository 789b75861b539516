"""How often the host waits for the device, counted on the CPU by which tensors would be on a GPU."""

from collections import Counter
from dataclasses import replace

import pytest

from aligner.config.sections.parallel import ParallelConfig
from tests.tiny import LLAMA, MODELS, MOE, WINDOWS

pytestmark = pytest.mark.multirank
CPU_ALONE = {("logprobs.py", "of"), ("experts.py", "grouped_linear")}
NORM, METRICS = ("clip_grads.py", "get_grad_norm_fp32"), ("train.py", "reduce_outputs")
SENT, LOAD = ("moe.py", "_compute"), ("expert_load.py", "metrics")
AUX = replace(MOE, moe=replace(MOE.moe, aux_coef=0.1))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("cfg", "layout", "world"),
    [
        (MODELS["qwen3"], {}, 1),
        (WINDOWS["gemma3"], {"context": 2}, 2),
        (replace(LLAMA, recompute="full"), {"tensor": 2, "sequence": True}, 2),
        (LLAMA, {"pipeline": 2}, 2),
        (MOE, {}, 1),
        (MOE, {"expert": 2}, 2),
        (AUX, {"tensor": 2, "sequence": True}, 2),  # with padding
    ],
)
def test_the_host_waits_for_numbers_it_needs_and_no_others(ranks, cfg, layout, world):
    parallel = ParallelConfig(**layout)
    for rank, told in enumerate(ranks.run("tests.megatron.wait_jobs:waits", world=world, cfg=cfg, parallel=parallel)):
        last = rank >= world - world // parallel.pipeline
        wanted, passes = Counter({NORM: 1}), told["micro_batches"] * cfg.num_layers
        if last:
            wanted[METRICS] = 1
        if cfg.moe.num_experts:
            wanted[LOAD] = 1
        if parallel.expert > 1:
            wanted[SENT] = passes  # how many tokens go where: the network is told by the host
        assert {place: n for place, n in told["step"].items() if place not in CPU_ALONE} == wanted
        read = {place for place in told["logprobs"] if place not in CPU_ALONE}
        assert read <= {("batching.py", "forward_rows"), SENT} and (SENT not in read or parallel.expert > 1)
        assert told["logprobs"].get(("batching.py", "forward_rows"), 0) <= 1, "once for all micro-batches"
