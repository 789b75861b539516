"""Whole GRPO runs with TensorRT-LLM over the fake in its own process: chosen by config, refitted and verified."""

import json
import os
import sys
from pathlib import Path

import pytest
import torch.distributed as dist

from aligner.__main__ import main
from aligner.errors import EngineError, RefitError
from tests import stages
from tests.engines.trtllm.setup import FAKE, ROOT, forget_fake, use_fake
from tests.run.jobs import run_stage

RUN = ["run.steps=3", "refit.verify=checksum", "checkpoint.final=false", "run.deterministic=false"]
RUN += ["logging.samples_shown=32", "run.samples_every=1"]


def trtllm(arguments: list[str], crashes: dict[int, str] | None = None) -> str:
    """`run_stage` over the fake, whose process ends on the ranks of `crashes` at the call named there; how it ended."""
    os.environ["PYTHONPATH"] = os.pathsep.join([str(FAKE), str(ROOT)])
    os.environ["FAKE_TRTLLM_CRASH"] = (crashes or {}).get(dist.get_rank(), "")
    sys.path.insert(0, str(FAKE))
    try:
        run_stage(arguments)
    except EngineError as error:
        return str(error)
    finally:
        sys.path.remove(str(FAKE))
        forget_fake()
    return ""


def samples(run: Path) -> list:
    return [json.loads(line)["response"] for line in (run / "samples.jsonl").read_text().splitlines()]


def equal(actual: Path, wanted: Path) -> list[dict]:
    """Check that a run is that of the native engine; return its records."""
    records = stages.records(actual)
    assert all(r["refit/sentinel_error"] < 1e-5 and r["mismatch/logprob_abs_max"] < 1e-4 for r in records)
    assert samples(actual) == samples(wanted) and stages.same_weights(actual, wanted)
    return records


@pytest.fixture(autouse=True)
def no_fake_left():
    yield
    forget_fake()


@pytest.fixture
def grpo(tiny_data, tiny_runs, tmp_path):
    def run(name: str, engine: str, *more: str) -> Path:
        more = (f"engine={engine}", f"model.init={tiny_runs['sft']}", *RUN, *more)
        return stages.stage("grpo", tiny_data, tmp_path / name, *more)

    return run


@pytest.mark.slow
def test_a_run_equals_that_of_the_native_engine(grpo, monkeypatch, tmp_path):
    """The fake computes with the native engine: only what the adapter gets wrong can make a difference."""
    use_fake(monkeypatch, log=str(tmp_path / "log"))
    monkeypatch.setenv("PMI_RANK", "0")
    monkeypatch.setenv("PMI_SIZE", "2")  # the package would wait for the other rank
    records = equal(grpo("trtllm", "trtllm"), grpo("native", "native"))
    assert [r["step"] for r in records] == [1, 2, 3] and [r["refit/version"] for r in records] == [0, 1, 2]
    # nearer to the current weights than to the previous ones, by nearly the whole step
    assert all(abs(r["refit/sentinel_progress"] - 1) < 1e-2 for r in records[1:])
    calls = [line.split()[0] for line in (tmp_path / "log").read_text().splitlines()]
    assert calls.count("LLM") == 1 and calls[-1] == "shutdown"
    updates = [i for i, call in enumerate(calls) if call == "reload" and calls[i - 1] == "modules"]
    assert len(updates) == 3


@pytest.fixture
def on_several(ranks, tiny_data, tiny_runs, tmp_path):
    def run(name: str, work, world: int, *layout: str) -> Path:
        overrides = (f"model.init={tiny_runs['sft']}", *RUN, "engine.tensor_parallel=2", *layout)
        arguments = stages.overrides("grpo", tiny_data, tmp_path / name, *overrides)
        assert not any(ranks.run(work, world=world, arguments=arguments))
        return tmp_path / name

    return run


@pytest.mark.slow
@pytest.mark.multirank
def test_an_engine_of_two_ranks_equals_the_native_one_of_two(on_several):
    """Each of the fake's processes computes its share of the native engine."""
    records = equal(on_several("trtllm", trtllm, 2, "engine=trtllm"), on_several("native", run_stage, 2))
    assert [r["refit/version"] for r in records] == [0, 1, 2]


@pytest.mark.slow
@pytest.mark.multirank
def test_ranks_that_only_generate_get_their_shares_by_the_plan(on_several):
    run = on_several("apart", trtllm, 3, "engine=trtllm", "engine.ranks=2", "engine.lag=1", "run.export=false")
    records = stages.records(run)
    assert [r["refit/version"] for r in records] == [0, 1, 2]
    assert all(r["refit/sentinel_error"] < 1e-5 for r in records)


@pytest.mark.slow
def test_a_built_engine_serves_a_run(grpo, monkeypatch, tmp_path):
    """Another sampler: other responses than the native engine's, the same numbers for them as the trainer's."""
    use_fake(monkeypatch, version="1.2.1", log=str(tmp_path / "log"))
    actual = grpo("built", "trtllm_engine", "run.steps=2")
    records = stages.records(actual)
    assert [r["refit/version"] for r in records] == [0, 1]
    assert all(r["refit/sentinel_error"] < 1e-4 and r["mismatch/logprob_abs_max"] < 1e-3 for r in records)
    assert abs(records[1]["refit/sentinel_progress"] - 1) < 2e-2
    calls = [line.split()[0] for line in (tmp_path / "log").read_text().splitlines()]
    assert calls.count("build") == 1 and calls.count("refit_cuda_engine") == 2


@pytest.mark.slow
def test_stale_weights_stop_the_run(grpo, monkeypatch):
    """The package reports success and has every tensor; what it computes with is old."""
    use_fake(monkeypatch, stale="1")
    with pytest.raises(RefitError, match="sentinel: nearer to the previous weights than to the current ones"):
        grpo("run", "trtllm", "refit.tolerance=10")


@pytest.mark.slow
def test_stale_weights_in_decode_steps_alone_stop_the_run(grpo, monkeypatch):
    """As of graphs that were captured before a refit: scores are those of the new weights, and hashes too."""
    use_fake(monkeypatch, stale_graphs="1")
    with pytest.raises(
        RefitError, match="rank 0: sentinel, generated tokens: nearer to the previous weights"
    ) as caught:
        grpo("run", "trtllm", "refit.tolerance=10")
    assert caught.value.args[0].count("nearer") == 1


@pytest.mark.slow
def test_logprobs_of_tokens_other_than_those_that_were_accepted_stop_the_run(grpo, monkeypatch):
    """With drafts, as of samplers of versions up to 1.3 where another model drafts."""
    use_fake(monkeypatch, drafts="drawn")
    with pytest.raises(RefitError, match="rank 0: sentinel, generated tokens"):
        grpo("run", "trtllm", "engine.draft_tokens=3")


@pytest.mark.slow
def test_a_run_with_drafts_equals_that_without(grpo, monkeypatch):
    use_fake(monkeypatch)
    records = equal(grpo("drafts", "trtllm", "engine.draft_tokens=3"), grpo("native", "native"))
    assert all(1 < r["engine/mean_acceptance_length"] < 4 for r in records)


@pytest.mark.slow
@pytest.mark.multirank
def test_each_rank_has_an_engine_and_its_end_stops_and_saves_all(ranks, tiny_data, tiny_runs, tmp_path):
    overrides = (
        "engine=trtllm",
        f"model.init={tiny_runs['sft']}",
        *RUN,
        "batch.micro_batch_samples=8",
        "run.export=false",
    )
    line = stages.overrides("grpo", tiny_data, tmp_path / "run", *overrides, "run.steps=2")
    # the sentinel's 8 rows and what follows them, then a rollout: 10 calls of each step
    first, second = ranks.run(trtllm, world=2, arguments=line, crashes={1: "run:20"})
    assert "on rank 1: " in first and all("illegal memory access" in text for text in (first, second))
    assert [r["step"] for r in stages.records(tmp_path / "run")] == [1]
    assert stages.checkpoints(tmp_path / "run") == [1]


def test_without_the_package_one_line_names_the_extra(tiny_data, tiny_runs, tmp_path, capsys, monkeypatch):
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    arguments = stages.overrides(
        "grpo", tiny_data, tmp_path / "run", "engine=trtllm", f"model.init={tiny_runs['sft']}", *RUN
    )
    assert main(["run", *arguments]) == 2
    error = capsys.readouterr().err.strip()
    assert error.count("\n") == 0 and "pip install 'aligner[trtllm]'" in error and "engine.name=trtllm" in error
