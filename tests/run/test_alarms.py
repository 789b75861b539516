"""Each alarm goes off when its sign is there, once, and names the cause; a healthy run is quiet."""

from __future__ import annotations

import json
import math

import pytest

from aligner.config.derived import response_limits
from aligner.config.schema import Config
from aligner.config.sections.environment import EnvironmentConfig
from aligner.run.alarms import STREAK, TEXTS, Alarms

HEALTHY = {
    "policy/entropy": 2.0,
    "kl/ref_k3": 0.01,
    "critic/explained_variance": 0.3,
    "policy/clip_fraction": 0.1,
    "reward/degenerate_groups": 0.5,
    "response/eos_fraction": 0.9,
    "response/tokens_mean": 20.0,
    "reward/mean": 0.5,
    "eval/accuracy": 0.5,
    "window/steps": 100.0,
    "window/waited_for": 0.0,
    "window/samples_paused": 7.0,
    "response/tokens_max": 40.0,
    "engine/idle_fraction": 0.1,
    "time/generate_s": 60.0,
}
BAD = {
    "entropy": {"policy/entropy": 0.1},
    "k3": {"kl/ref_k3": -0.01},
    "explained_variance": {"critic/explained_variance": -0.5},
    "far_values": {"critic/explained_variance": -42413.0},
    "clip_fraction": {"policy/clip_fraction": 0.5},
    "equal": {"preference/equal_answers": 0.75},
    "one_label": {"kto/desirable": 1.0},
    "unmatched": {"kto/unmatched": 1.0},
    "degenerate": {"reward/degenerate_groups": 1.0},
    "no_eos": {"response/eos_fraction": 0.0},
    "length": {"response/tokens_mean": 64.0},
    "window_small": {"window/waited_for": 3.0},
    "window_large": {"window/samples_paused": 0.0},
    "idle": {"engine/idle_fraction": 0.5},
}
WORDS = {
    "entropy": "entropy collapsed to 0.1 nats from 2",
    "k3": "kl/ref_k3=-0.01 is negative",
    "explained_variance": "critic/explained_variance=-0.5",
    "far_values": "critic/explained_variance=-4.24e+04: the critic's values are far from the returns",
    "clip_fraction": "policy/clip_fraction=0.5 is above 0.4",
    "equal": "preference/equal_answers=0.75: most pairs",
    "one_label": "kto/desirable=1: all answers",
    "unmatched": "kto/unmatched=1: the samples",
    "degenerate": "all groups are degenerate",
    "no_eos": "no response ends in EOS",
    "length": "sampling.max_response_tokens=64",
    "window_small": "engine.window=100 is too small. About 400 fits",
    "window_large": "the longest response, 40, fits engine.window=100",
    "idle": "engine/idle_fraction=0.5: engines spend this share",
}


def alarms() -> Alarms:
    return Alarms({"sampling.max_response_tokens": 64}, critic_warmup_steps=2)


def test_what_cuts_trajectories_is_named():
    cfg = Config(environment=EnvironmentConfig(tools=["a.py:a"], max_tokens=3000, max_turns=4))
    ends, length = run(
        [{"response/eos_fraction": 0.0, "response/tokens_mean": 2900.0}], watch=Alarms(response_limits(cfg))
    )
    one = f"sampling.max_response_tokens={cfg.sampling.max_response_tokens}"
    assert f"all are cut by environment.max_tokens=3000 or environment.max_turns=4 or {one}." in ends
    assert "as long as they may be: response/tokens_mean=2900, environment.max_tokens=3000. Most are cut off" in length


def run(records, start: int = 1, watch: Alarms | None = None) -> list[str]:
    watch = watch or alarms()
    return [line for step, record in enumerate(records, start) for line in watch.check(record, step)]


def test_a_healthy_run_is_quiet():
    assert run([HEALTHY] * 20) == []


def test_no_metrics_and_nan_are_no_alarm():
    assert run([{}] * 5 + [dict.fromkeys(HEALTHY, math.nan)] * 5 + [dict.fromkeys(HEALTHY)] * 5) == []


def test_every_alarm_is_covered():
    assert set(BAD) | {"hacking"} == set(TEXTS)


@pytest.mark.parametrize("name", list(BAD))
def test_fires_once_with_the_cause_in_one_line(name):
    lines = run([HEALTHY] * 5 + [{**HEALTHY, **BAD[name]}] * 20 + [HEALTHY] * 5 + [{**HEALTHY, **BAD[name]}] * 20)
    assert len(lines) == 1
    assert WORDS[name] in lines[0]
    assert "\n" not in lines[0]


def test_short_generations_may_wait():
    assert run([{**HEALTHY, **BAD["idle"], "time/generate_s": 2.0}] * 20) == []


def test_equal_rewards_leave_a_gradient_where_there_is_a_critic():
    alone = {"reward/degenerate_groups": 1.0}
    for variance in (0.5, 0.0, math.nan, None):
        (line,) = run([alone | {"critic/explained_variance": variance}])
        assert "no gradient" not in line and "critic" in line
    (line,) = run([alone])
    assert "so there is no gradient" in line and "critic" not in line


@pytest.mark.parametrize("name", ["entropy", "explained_variance", "window_small", "window_large", "idle"])
def test_noisy_signs_must_last(name):
    bad = {**HEALTHY, **BAD[name]}
    assert run([HEALTHY] * 5 + ([bad] * (STREAK - 1) + [HEALTHY]) * 5) == []
    assert len(run([HEALTHY] * 5 + [bad] * STREAK)) == 1


def test_explained_variance_waits_for_the_warm_up():
    watch = Alarms(critic_warmup_steps=50)
    bad = {"critic/explained_variance": -1.0}
    assert run([bad] * 50, watch=watch) == []
    assert len(run([bad] * 5, start=51, watch=watch)) == 1


def test_values_far_from_all_returns_are_reported_at_once():
    """Also in the warm-up, in which somewhat wrong values are usual."""
    watch = Alarms(critic_warmup_steps=50)
    assert run([{"critic/explained_variance": value} for value in (-0.5, -9.0, -99.0)], watch=watch) == []
    (line,) = run([{"critic/explained_variance": -101.0}], start=4, watch=watch)
    assert line.startswith("alarm at step 4: critic/explained_variance=-101: ")


def test_a_policy_that_starts_certain_has_not_collapsed():
    assert run([{"policy/entropy": 0.01}] * 20) == []


def evaluated(pairs) -> list[dict]:
    """Two training records, then one with an evaluation."""
    return [
        r
        for reward, acc in pairs
        for r in ({"reward/mean": reward},) * 2 + ({"reward/mean": reward, "eval/accuracy": acc},)
    ]


def test_reward_rising_while_eval_falls():
    lines = run(evaluated([(0.1, 0.3), (0.3, 0.4), (0.5, 0.3), (0.7, 0.2), (0.9, 0.1)]))
    assert len(lines) == 1
    assert "rose from 0.3 to 0.7 while eval/accuracy fell from 0.4 to 0.2" in lines[0]


@pytest.mark.parametrize(
    "pairs",
    [
        [(0.1, 0.3), (0.3, 0.4), (0.5, 0.5), (0.7, 0.6)],  # both rise
        [(0.7, 0.6), (0.5, 0.5), (0.3, 0.4), (0.1, 0.3)],  # both fall
        [(0.1, 0.4), (0.3, 0.3), (0.5, 0.41), (0.7, 0.35), (0.9, 0.42)],  # noise
    ],
)
def test_no_hacking_alarm(pairs):
    assert run(evaluated(pairs)) == []


def test_a_resumed_run_does_not_repeat_and_goes_on_counting():
    first = alarms()
    bad = {**HEALTHY, **BAD["degenerate"], **BAD["entropy"]}
    assert len(run([HEALTHY] * 5 + [bad] * (STREAK - 1), watch=first)) == 1  # degenerate; entropy is not yet due
    second = alarms()
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    lines = run([bad] * 5, start=10, watch=second)
    assert len(lines) == 1
    assert "alarm at step 10: entropy collapsed" in lines[0]
