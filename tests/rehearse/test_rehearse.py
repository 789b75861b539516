"""The command on small models."""

import json

import pytest

from aligner.__main__ import main

TINY = ["model=tiny", "model.vocab_size=320", "parallel.pipeline=2"]


@pytest.mark.slow
def test_a_pipeline_without_faults(tmp_path, capsys):
    out = tmp_path / "found.json"
    assert main(["rehearse", "--gpus", "4", "--json", str(out), "stage=dpo", "data.eval=x.jsonl", *TINY]) == 0
    content = json.loads(out.read_text())
    assert content["faults"] == [] and sorted(content["ranks"]) == ["0", "2"]
    first, last = (content["ranks"][rank]["phases"] for rank in ("0", "2"))
    for phases in (first, last):
        assert {"build", "load", "logprobs", "update", "eval", "save", "export"} <= set(phases)
        assert not any("engine" in name for phase in phases.values() for name in phase["held"])  # nothing generates
        held = phases["update"]["held"]
        assert held["policy gradients"] == pytest.approx(2 * held["policy weights"], rel=0.01)  # float32 of bfloat16
        assert held["policy optimizer"] == pytest.approx(3 * held["policy weights"], rel=0.01)  # 12 bytes over 2 ranks
        assert phases["update"]["peak_bytes"] == pytest.approx(phases["update"]["planned_bytes"], rel=0.25)
    sent, received = (
        sum(size for _, what, _, size in phases["update"]["collectives"] if what == kind)
        for phases, kind in ((first, "send"), (last, "recv"))
    )
    assert sent == received > 0
    assert "no fault" in capsys.readouterr().out


@pytest.mark.slow
def test_judges_answers_to_held_out_prompts_and_an_export(tmp_path, capsys):
    """Of the run's own engine and of one with frozen weights; stages tell each other what each exports."""
    out = tmp_path / "found.json"
    own, other = (
        "{name: own, kind: rubric, question: '{response} {criterion}'}",
        "{name: b, model: x, question: '{prompt} {response}'}",
    )
    small = ["batch.prompts=4", "batch.group=2", "sampling.max_response_tokens=16", "data.eval=x.jsonl"]
    overrides = ["stage=grpo", f"reward.judges=[{own}, {other}]", *small, *TINY]
    assert main(["rehearse", "--gpus", "2", "--json", str(out), *overrides]) == 0, capsys.readouterr().out
    for rank in json.loads(out.read_text())["ranks"].values():
        score, update = rank["phases"]["score"], rank["phases"]["update"]
        # the engine wakes for questions; the judge's own weights are as many as the policy's on both stages
        assert score["held"]["judge.0 weights"] == rank["phases"]["generate"]["held"]["engine weights"]
        assert score["flops"] > 0 and rank["phases"]["eval"]["flops"] > 0 and rank["phases"]["export"]["kernels"] > 0
        assert score["peak_bytes"] > update["held"]["judge.0 weights"]


def test_a_layout_that_does_not_divide_is_refused(capsys):
    assert main(["rehearse", "--gpus", "3", *TINY]) == 2
    assert "world size=3" in capsys.readouterr().err
    assert main(["rehearse", "--gpus", "4", "stage=ppo", "batch.prompts=4", "batch.group=1", *TINY]) == 2
    assert "batch.minibatch_samples=64: expected a divisor" in capsys.readouterr().err
