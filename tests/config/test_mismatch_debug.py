"""Keys of `mismatch` and `debug`: bounds by method, and what does not go together."""

import pytest

from aligner.config.resolve import compose, compose_over
from aligner.config.sections.mismatch import MISMATCH_BOUNDS, MismatchConfig
from aligner.config.validate import validate
from aligner.errors import ConfigError

GRPO = ["stage=grpo", "data.train=pyproject.toml", "reward.functions=[{path: math}]", "batch.group=2"]


def test_bounds_are_the_methods_own_unless_told():
    for name, defaults in MISMATCH_BOUNDS.items():
        assert MismatchConfig(name).bounds(name) == defaults
    both = MismatchConfig("tis_token + geometric_mask", cap=3.0, high=1.2)
    assert both.methods == ["tis_token", "geometric_mask"]
    assert both.bounds("tis_token") == {"cap": 3.0} and both.bounds("geometric_mask") == {"low": 0.99, "high": 1.2}
    assert MismatchConfig().methods == ["none"] and MismatchConfig().bounds("none") == {}


@pytest.mark.parametrize(
    "override, message",
    [
        ("mismatch.correction=tis", "mismatch.correction='tis': expected one of auto, none, tis_token"),
        ("mismatch.correction=tis_token+icepop", "at most one of tis_token, tis_sequence, icepop"),
        ("mismatch.correction=veto+veto", "none, or different methods joined by +"),
        ("mismatch.correction=none+veto", "none, or different methods joined by +"),
        ("mismatch.cap=3", "mismatch.cap=3.0: expected 0 (each method's default) unless exactly one method"),
        ("mismatch={correction: icepop, cap: 3}", "mismatch.cap=3.0"),
        ("mismatch={correction: geometric_mask+veto, low: 0.5}", "mismatch.low=0.5"),
        ("mismatch={correction: icepop, low: 6}", "mismatch.low=6.0: expected a number below mismatch.high=5"),
        ("mismatch.high=-1", "mismatch.high=-1.0: expected a number >= 0"),
        ("mismatch.stop_above=0.5", "mismatch.stop_above=0.5: expected a number > 1"),
        ("mismatch.stop_above=-1", "mismatch.stop_above=-1.0"),
        ("debug.record=-1", "debug.record=-1: expected a number >= 0"),
        ("debug.until=-1", "debug.until=-1: expected a number >= 0"),
        ("debug.replay=no/such/run", "debug.replay='no/such/run': expected a path that exists"),
        ("debug.train_only=no/such/file", "debug.train_only='no/such/file': expected a path that exists"),
    ],
)
def test_contradicting_mismatch_and_debug_keys_are_refused(override, message):
    with pytest.raises(ConfigError) as caught:
        validate(compose([*GRPO, *override.split(" ; ")]), 1)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    "overrides, message",
    [
        ([*GRPO, "model=tiny"], "expected false for a model without experts"),
        (
            [*GRPO, "model=tiny_moe", "engine.name=trtllm"],
            "expected false with engine.name=trtllm, which does not report",
        ),
        (
            [*GRPO, "model=tiny_moe", "engine={name: recorded, answers: conf}"],
            "expected false with engine.name=recorded",
        ),
        (["stage=sft", "data.train=pyproject.toml", "model=tiny_moe"], "expected false for stage sft: grpo, "),
    ],
)
def test_routing_is_replayed_where_an_engine_tells_it(overrides, message):
    with pytest.raises(ConfigError, match=r"mismatch\.replay_routing=True: ") as caught:
        validate(compose([*overrides, "mismatch.replay_routing=true"]), 1)
    assert message in str(caught.value)
    for settings in (["engine.quantization=int8"], ["debug.train_only=conf"], ["engine.tensor_parallel=1"]):
        validate(compose([*GRPO, "model=tiny_moe", "mismatch.replay_routing=true", *settings]), 1)


def test_training_on_recordings_is_an_engine_of_its_own():
    cfg = compose(["stage=grpo", "batch.group=2", "debug.train_only=conf", "engine.cuda_graphs=true"])
    assert cfg.engine.name == "recorded" and compose_over(cfg, ["seed=1"]).seed == 1  # a config that can be read again
    validate(cfg, 1)  # neither prompts nor rewards are needed
    with pytest.raises(ConfigError, match=r"eval\.generate=True: expected false with debug\.train_only"):
        validate(compose([*GRPO, "debug.train_only=conf", "data.eval=pyproject.toml"]), 1)
