"""engine.quantization, and what it decides where nothing was said."""

import pytest

from aligner.config.freeze import load_frozen, to_yaml
from aligner.config.quantization import describe
from aligner.config.resolve import compose, compose_over
from aligner.errors import ConfigError

BASE = ["stage=grpo", "batch.group=4", "reward.functions=[{path: math}]"]


@pytest.mark.parametrize(
    "overrides, correction, tolerance",
    [
        ([], "none", 0.0),
        (["engine.quantization=int8"], "tis_token", 0.05),
        (["engine.quantization=fp8"], "tis_token", 0.2),
        (["engine.quantization=fp8", "mismatch.correction=none", "refit.tolerance=0.7"], "none", 0.7),
        (["engine.quantization=fp8", "mismatch={correction: icepop, high: 3}"], "icepop", 0.2),
        (["engine.quantization=fp8", "algorithm.policy_loss=dppo"], "none", 0.2),
        (["engine=vllm", "engine.vllm.args.quantization=fp8_per_channel"], "tis_token", 0.2),
        (["engine=vllm", "engine.vllm.args.quantization_config={linear: fp8}"], "tis_token", 0.2),
        (["engine.vllm.args.quantization=fp8_per_channel"], "none", 0),  # of an engine that is not used
        (["mismatch.correction=veto"], "veto", 0.0),
        (["engine.lag=1"], "none", 0.0),
        (["engine.lag=1", "batch.epochs=2"], "tis_token", 0.0),
        (["engine.lag=1", "engine.quantization=int8"], "tis_token", 0.05),
        (["engine.lag=1", "algorithm.policy_loss=dppo"], "none", 0.0),
        (["engine.lag=1", "algorithm.old_logprobs=engine"], "none", 0.0),
        (["engine.lag=2", "algorithm.policy_loss=reinforce", "algorithm.old_logprobs=proxy"], "tis_token", 0.0),
    ],
)
def test_defaults_with_a_quantised_engine_or_one_that_lags(tmp_path, overrides, correction, tolerance):
    cfg = compose([*BASE, *overrides])
    assert (cfg.mismatch.correction, cfg.refit.tolerance) == (correction, tolerance)
    (tmp_path / "config.yaml").write_text(to_yaml(cfg))
    assert load_frozen(tmp_path) == cfg  # the choice is frozen, and made once


@pytest.mark.parametrize(
    "more, found",
    [
        (["engine.lag=1"], "engine"),
        ([], "auto"),
        (["engine.lag=1", "batch.epochs=2"], "auto"),
        (["engine.lag=1", "algorithm.policy_loss=reinforce"], "auto"),
        (["engine.lag=1", "mismatch.correction=tis_token"], "auto"),
        (["engine.lag=1", "mismatch.stop_above=2"], "auto"),
        (["engine.lag=1", "engine.quantization=int8"], "auto"),
        (["engine.lag=1", "algorithm.old_logprobs=recompute"], "recompute"),
    ],
)
def test_the_ratio_is_to_an_engine_that_lags_where_it_would_not_leave_1(more, found):
    assert compose([*BASE, *more]).algorithm.old_logprobs == found


def test_what_a_run_says():
    cfg = compose([*BASE, "engine.quantization=fp8"])
    text = describe(cfg, "somebody")
    assert "engine.quantization=fp8" in text and "by somebody" in text
    assert "mismatch.correction=tis_token, refit.tolerance=0.2" in text and "warning" not in text
    own = describe(compose([*BASE, "engine=vllm", "engine.vllm.args.quantization=fp8"]), "")
    assert "engine.vllm.args: the engine quantises the weights it gets (fp8)" in own and "refit.tolerance=0.2" in own
    plain = compose_over(compose(BASE), ["engine.quantization=int8"])  # frozen without it: the choice was none
    assert plain.mismatch.correction == "none" and plain.refit.tolerance == 0.05
    assert "warning: a quantised engine without mismatch.correction" in describe(plain, "somebody")


def test_other_formats_are_refused():
    with pytest.raises(ConfigError, match=r"engine.quantization='int4'.*none, int8, fp8"):
        compose([*BASE, "engine.quantization=int4"])
