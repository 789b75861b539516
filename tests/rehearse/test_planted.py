"""One fault of each kind, planted, rehearsed and found."""

from pathlib import Path

import pytest

from aligner.config.resolve import compose
from aligner.plan.devices import Prices, find_device
from aligner.rehearse import command
from aligner.rehearse.report import Rehearsal

SMALL = [
    *("model=tiny", "model.vocab_size=320", "data.max_prompt_tokens=400", "data.max_tokens=800"),
    *("batch.sequences=4", "batch.prompts=4", "batch.group=2", "sampling.max_response_tokens=64"),
]
PIPELINE = ["stage=sft", "parallel.pipeline=2", *SMALL]
APART = ["stage=grpo", "model.num_layers=1", "engine.ranks=2", *SMALL]
BESIDE = ["stage=grpo", *SMALL]
TENSOR = ["stage=sft", "parallel.tensor=2", *SMALL]
SLOTS = [*BESIDE, "batch.prompts=16", "engine.max_batch=4"]
IN_LOSS = ["item", "float64", "per_token", "mixed_product", "mixed_varlen", "first_device", "freed_tensor"]
IN_LOSS += ["unawaited_stream", "unawaited_event", "unfinished_copy", "unfinished_list", "overwritten_buffer"]
IN_LOSS += ["overwritten_list", "honest"]
IN_STEP = ["strided", "mixed_gather", "split_sizes", "unawaited_sum"]
PLANTS = {
    **dict.fromkeys(("cpu_tensor", "wrong_shape", "skipped", "collectives", "pipeline_against_world"), PIPELINE),
    **dict.fromkeys((*IN_LOSS, *IN_STEP), PIPELINE),
    "mixed_attention": [*PIPELINE, "model.varlen_attention=false"],
    "slow_work": PIPELINE,
    "tensor_against_data": TENSOR,
    **dict.fromkeys(("moves_on_cpu", "no_refill", "nothing_beside"), SLOTS),
    **dict.fromkeys(("skipped_send", "cpu_engine", "refused", "unawaited_messages"), APART),
    **dict.fromkeys(("grows", "refused_beside"), BESIDE),
    "grows_within": ["stage=ppo", *SMALL, "batch.group=1", "batch.minibatch_samples=0"],  # a row for each rank
    "nothing": PIPELINE,
    "nothing_in_short_rows": [*SLOTS, "sampling.max_response_tokens=3"],
    "nothing_in_many_rows": [*BESIDE, "batch.prompts=64", "batch.group=32", "algorithm.filter_groups=true"],
}
# what one stage sees by itself is rehearsed on the last one, which has the loss
RANKS = {"tensor_against_data": "all-distinct", **dict.fromkeys((*IN_LOSS, *IN_STEP, "mixed_attention"), "2")}

pytestmark = pytest.mark.slow


def moved(case, folder):
    """The same case with its records in a folder of its own."""
    return case | {key: str(folder / Path(case[key]).name) for key in ("out", "source_record")}


@pytest.fixture(scope="module")
def rehearsals(tmp_path_factory):
    """A Rehearsal of each plant, all from one process that has imported everything. Plants share a job's files."""
    folder, jobs, own = tmp_path_factory.mktemp("planted"), {}, {}
    for plant, overrides in PLANTS.items():
        job = which, *names = RANKS.get(plant, "stages"), *overrides
        if job not in jobs:
            jobs[job] = command.cases_of(compose(names), 4, which, folder / f"job-{len(jobs)}")
        (folder / plant).mkdir()
        ready, ranks = jobs[job]
        own[plant] = ready, [moved(case, folder / plant) | {"plant": plant} for case in ranks]
    cases = [case for _, ranks in own.values() for case in ranks]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(command, "PROGRAM", "tests.rehearse.planted")
        records = iter(command.run(cases, "h100", folder))
    return {
        plant: Rehearsal(ready, 4, find_device("h100"), {case["rank"]: next(records) for case in ranks}, 0.0)
        for plant, (ready, ranks) in own.items()
    }


def places(rehearsals, kind, phase="update"):
    lists = [record["phases"].get(phase, {kind: []})[kind] for record in rehearsals.records.values()]
    return {entry[-2] for entries in lists for entry in entries}


HONEST = ["nothing", "nothing_beside", "collectives", "honest"]
HONEST += ["nothing_in_short_rows", "nothing_in_many_rows"]


@pytest.mark.parametrize("plant", HONEST)
def test_honest_programs_have_no_fault(rehearsals, plant):
    assert rehearsals[plant].faults == []


def test_without_a_plant_nothing_is_listed(rehearsals):
    assert places(rehearsals["nothing"], "float64") == set() and not rehearsals["nothing"].one_by_one


def test_a_tensor_on_the_cpu(rehearsals):
    (fault,) = rehearsals["cpu_tensor"].faults
    assert "rank 2, phase update, aligner/roles/" in fault and "cpu" in fault


def test_a_wrong_shape_on_the_last_stage(rehearsals):
    (fault,) = rehearsals["wrong_shape"].faults
    assert "rank 2, phase update, aligner/roles/" in fault and "799" in fault


@pytest.mark.parametrize(
    ("plant", "phase", "line", "text"),
    [
        ("mixed_product", "update", "aligner/roles/", "mm of torch.bfloat16 and torch.float32"),
        ("mixed_attention", "update", "aligner/ops/", "attention of torch.bfloat16 and torch.float32"),
        ("mixed_varlen", "update", "aligner/megatron/varlen.py", "attn of torch.bfloat16 and torch.float32"),
        ("strided", "update", "aligner/roles/", "allreduce of a tensor of (6, 4) with strides (1, 6)"),
        ("mixed_gather", "update", "aligner/roles/", "allgather_base of torch.bfloat16 and torch.float32"),
        ("split_sizes", "update", "aligner/roles/", "alltoall_base of 4 rows over 2 ranks, with split sizes [2, 1]"),
        ("first_device", "update", "aligner/roles/", "a tensor on cuda:0, but this rank's device is cuda:3"),
        ("unawaited_stream", "update", "aligner/roles/", "a stream uses a tensor that is not written yet (aligner/"),
        ("unawaited_event", "update", "aligner/roles/", "a stream uses a tensor that is not written yet (aligner/"),
        (
            "freed_tensor",
            "update",
            "aligner/roles/",
            "a stream still uses the memory of a tensor that was freed (aligner/",
        ),
        ("unfinished_copy", "update", "aligner/roles/", "the host uses a tensor that is not written yet (aligner/"),
        ("unfinished_list", "update", "aligner/roles/", "the host uses a tensor that is not written yet (aligner/"),
        ("overwritten_buffer", "update", "aligner/roles/", "the host uses a tensor that is still read (aligner/"),
        ("overwritten_list", "update", "aligner/roles/", "the host uses a tensor that is still read (aligner/"),
        ("unawaited_sum", "update", "aligner/roles/", "a stream uses a tensor that is not written yet (aligner/"),
        (
            "unawaited_messages",
            "refit",
            "aligner/refit/exchange.py",
            "a stream uses a tensor that is not written yet (aligner/",
        ),
        ("moves_on_cpu", "generate", "aligner/engines/native/", "cpu"),
        ("no_refill", "generate", "aligner/engines/native/", "cpu"),
    ],
)
def test_what_only_a_device_would_refuse(rehearsals, plant, phase, line, text):
    fault = rehearsals[plant].faults[0]
    assert f"phase {phase}, {line}" in fault and text in fault


def test_a_number_that_is_read_in_a_step(rehearsals):
    extra = places(rehearsals["item"], "waits") - places(rehearsals["nothing"], "waits")
    (position,) = extra
    assert position.startswith("aligner/roles/")


def test_float64_left_over(rehearsals):
    forward, backward = sorted(places(rehearsals["float64"], "float64"), reverse=True)
    assert forward.startswith("aligner/roles/policy.py") and backward.startswith("aligner/megatron/train.py")


H100, PRICES = find_device("h100"), Prices()
SLOW_S = {
    "element-wise": (64 << 30) / (H100.bandwidth * PRICES.memory),
    "communication": (16 << 30) / (H100.nvlink * PRICES.link),
    "products": 2 * 16384**3 / (H100.flops * PRICES.products * PRICES.wide),
}


def test_slow_work_costs_its_own_kind_alone(rehearsals):
    """In each of two steps, where the host launches behind it."""
    before, after = (rehearsals[name].records[2]["phases"]["update"] for name in ("nothing", "slow_work"))
    for name in before["device_s"]:
        seconds = SLOW_S.get(name, 0)
        grown = after["device_s"][name] - before["device_s"][name]
        assert grown == pytest.approx(2 * seconds, rel=0.01, abs=0.01 * min(SLOW_S.values())), name
    longer, seconds = rehearsals["slow_work"].update[0] - rehearsals["nothing"].update[0], sum(SLOW_S.values())
    assert seconds - before["seconds"] / before["entries"] < longer < 1.01 * seconds


def test_a_collective_that_one_stage_skips(rehearsals):
    (mismatch,) = rehearsals["skipped"].mismatches
    assert mismatch["group"].startswith("pp 0..2 ")
    first, second = mismatch["calls"]
    assert first["rank"] == 0 and "allreduce 4 bytes float32 cuda" in first["call"]
    assert "aligner/roles/policy.py" in first["stack"] and second["rank"] == 2
    assert "group pp 0..2" in rehearsals["skipped"].faults[0]


def test_two_groups_in_another_order_on_another_stage(rehearsals):
    (fault,) = rehearsals["pipeline_against_world"].faults
    first, second = rehearsals["pipeline_against_world"].circle
    assert fault.startswith("ranks wait for each other: rank 0: pp 0..2 ") and "| rank 2: world 0..3 " in fault
    assert "aligner/roles/" in first["stack"] and "aligner/roles/" in second["stack"]


def test_four_ranks_of_which_each_waits_for_the_next(rehearsals):
    (fault,) = rehearsals["tensor_against_data"].faults
    calls = [call["call"].partition(" ")[0] for call in rehearsals["tensor_against_data"].circle]
    assert fault.startswith("ranks wait for each other: ") and calls == ["tp", "dp", "tp", "dp"]


def test_weights_that_one_trainer_does_not_send(rehearsals):
    (mismatch,) = rehearsals["skipped_send"].mismatches
    assert mismatch["group"] == "job 0 to 2"
    silent, waiting = mismatch["calls"]
    assert (silent["rank"], silent["call"]) == (0, "no further call") and "aligner/refit/transfer.py" in silent["stack"]
    assert waiting["rank"] == 2 and "aligner/refit/serve.py" in waiting["stack"]


def test_an_engine_on_a_rank_of_its_own_with_a_tensor_on_the_cpu(rehearsals):
    (fault,) = rehearsals["cpu_engine"].faults
    assert "rank 2, phase refit, aligner/engines/native/" in fault and "cpu" in fault


def test_an_engine_on_a_rank_of_its_own_that_refuses_weights(rehearsals):
    """The rank that generates leaves it to the others to raise, which are not there."""
    (fault,) = rehearsals["refused"].faults
    assert "rank 2, phase refit, aligner/engines/" in fault and "this engine's rank holds" in fault


def test_an_engine_beside_the_trainer_that_refuses_weights(rehearsals):
    fault = rehearsals["refused_beside"].faults[0]
    assert "rank 0, phase refit, aligner/engines/" in fault and "this engine's rank holds" in fault


def test_a_tensor_for_each_token(rehearsals):
    lines = [line.split() for line in rehearsals["per_token"].one_by_one]
    assert {(phase, position.partition(":")[0]) for phase, position, *_ in lines} == {
        ("update", "aligner/roles/policy.py"),
        ("update", "aligner/megatron/train.py"),
    }


@pytest.mark.parametrize("plant", ["grows", "grows_within"])
def test_what_the_engine_keeps_of_each_token(rehearsals, plant):
    faults = rehearsals[plant].faults
    assert faults and all("step of the engine" in fault and "aligner/engines/native/" in fault for fault in faults)
