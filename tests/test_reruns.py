"""The same seed twice gives the same bits, for every stage, with `run.deterministic=true`, and however ranks start;
another seed does not."""

import pytest

from aligner.cluster.launch import launch
from aligner.config.freeze import FILE_NAME, freeze
from aligner.config.resolve import compose
from aligner.run.launched import imports
from tests import stages

pytestmark = pytest.mark.multirank
SHORT_OF_PAGES = ["engine.page_tokens=4", "engine.kv_cache_bytes=11264", "sampling.max_response_tokens=8"]


@pytest.mark.few(1)
@pytest.mark.parametrize("stage", ["sft", "rm", "dpo", "kto", "distill", "grpo", "ppo"])
def test_the_same_seed_gives_the_same_bits(tiny_data, tiny_runs, tmp_path, stage):
    overrides = ["run.steps=3", "run.deterministic=true", "batch.micro_batch_tokens=64"]
    overrides += [f"model.init={tiny_runs['sft']}"] if stage != "sft" else []
    overrides += SHORT_OF_PAGES if stage == "grpo" else []
    overrides += [f"reward.model={tiny_runs['rm']}"] if stage == "ppo" else []
    overrides += [f"algorithm.distill={{teacher: {tiny_runs['sft']}, on_policy: 0.4}}"] if stage == "distill" else []
    first, second, other = (
        stages.stage(stage, tiny_data, tmp_path / name, *overrides, f"seed={seed}")
        for name, seed in (("first", 1), ("second", 1), ("other", 2))
    )
    assert stages.same_weights(first, second)
    assert not stages.same_weights(first, other)
    if stage == "grpo":
        assert any(record.get("engine/preempted_rows") for record in stages.records(first))


@pytest.mark.slow
def test_forked_ranks_give_the_bits_of_those_that_import_for_themselves(tiny_data, tmp_path):
    for name in ("forked", "apart"):
        cfg = compose(stages.overrides("grpo", tiny_data, tmp_path / name, "run.steps=2", "run.export=true"))
        modules = imports(cfg) if name == "forked" else ()
        assert launch(freeze(cfg, cfg.run.dir, FILE_NAME), 2, tmp_path / name, threads=1, imports=modules) == 0
    assert stages.differences(tmp_path / "forked", tmp_path / "apart") == []
    assert stages.same_weights(tmp_path / "forked", tmp_path / "apart")
