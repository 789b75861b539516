"""The rungs on a CPU, and faults that they have to name."""

import json
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest

from aligner.__main__ import main
from aligner.config.resolve import compose
from aligner.config.validate import validate
from aligner.families import FAMILIES
from aligner.plan.devices import DEVICES
from aligner.shakedown import command, jobs, rungs
from aligner.shakedown.jobs import CheckedMachine, RungError, Starter, distances
from aligner.shakedown.toy import STAGES, family_keys


@pytest.fixture(scope="module")
def machine(tmp_path_factory):
    machine = CheckedMachine(tmp_path_factory.mktemp("shakedown"), 0, 2)
    machine.data.make()
    return machine


def test_every_family_has_a_small_model_with_all_its_parts(machine, tmp_path):
    for name, family in FAMILIES.items():
        cfg = compose(machine.data.arguments("sft", tmp_path, *family_keys(name)))
        validate(cfg, 1)
        assert bool(cfg.model.attention.window) == ("attention.window" in family.varies), name
        assert bool(cfg.model.moe.num_experts) == bool(family.moe)


@pytest.mark.parametrize("rung", ["bfloat16", "stages", "layouts", "engines"])
def test_every_job_can_be_started(rung, machine, tmp_path, monkeypatch):
    seen = set()

    def composed(self, name, stage, *overrides, ranks=1, on_cpu=False, nodes=1):
        seen.add(stage)
        validate(compose(machine.data.arguments(stage, tmp_path / name, *overrides)), ranks)
        return SimpleNamespace(wait=lambda: tmp_path)

    monkeypatch.setattr(Starter, "start", composed)
    for module in (jobs, rungs):
        monkeypatch.setattr(module, "metrics", lambda run: [{"step": 1, "policy/loss": 1.0}])
    assert rungs.RUNGS[rung].climb(machine)
    assert rung != "stages" or seen == {*STAGES}


def test_what_is_further_apart_than_a_share_comes_with_the_furthest_first():
    old = [{"step": 1, "loss": 2.0, "small": 1e-9, "name": "a"}]
    new = [{"step": 1, "loss": 2.1, "small": 9e-7, "name": "b"}]
    assert distances(new, old, 1e-3) == ["/0/name: b instead of a", "/0/loss: 2.1 instead of 2.0"]
    assert distances(new, old, 0.1, "loss") == [] and distances(new, old, 1e-3, "loss")
    assert distances(old, old, 0.1, "los") == ["no metric ends with los"]
    assert distances([{"loss": float("nan")}], [{"loss": 1.0}], 0.1) and distances([], old, 0.1)


def test_unknown_rungs_and_machines_without_a_gpu_are_refused(capsys, monkeypatch):
    assert main(["shakedown", "--cpu", "--only", "famlies"]) == 2
    assert "--only='famlies': expected rungs of machine, links, families" in capsys.readouterr().err
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert main(["shakedown"]) == 2
    assert "expected a machine with a GPU. --cpu tries the jobs without one." in capsys.readouterr().err


def test_a_slow_card_is_named(machine, monkeypatch):
    sheet = DEVICES["h100"].flops
    card = {"name": "NVIDIA H100", "rates": {"products": (0.4 * sheet, sheet, 0.55)}}
    printed = type("Done", (), {"returncode": 0, "stdout": json.dumps({"cards": [card]})})
    monkeypatch.setattr(rungs.subprocess, "run", lambda *args, **kwargs: printed)
    with pytest.raises(RungError, match=r"NVIDIA H100: products 3.96e.14, expected 55% of the data sheet's 9.89e.14"):
        rungs.card_rates(machine)


def reports(*rates, wrong=0, card="NVIDIA H100 80GB HBM3"):
    """What ranks of `health --all-reduce` print."""
    text = "1024 MB in 0.0050 s, {} GB/s, {} wrong\n"
    lines = [f"node{i} rank {i} ({card}): " + text.format(rate, wrong) for i, rate in enumerate(rates)]
    return lambda *args, **kwargs: SimpleNamespace(returncode=int(wrong > 0), stdout="".join(lines), stderr="")


def test_slow_or_wrong_links_are_named(machine, monkeypatch):
    gpus = CheckedMachine(machine.folder, 2, 2, nodes=2)
    monkeypatch.setattr(rungs.subprocess, "run", reports(300.0, 2.95e2))
    assert rungs.links(gpus)["all-reduce, GB/s"]["node1 rank 1 (NVIDIA H100 80GB HBM3)"] == 295
    monkeypatch.setattr(rungs.subprocess, "run", reports(300.0, 40.5))
    with pytest.raises(RungError, match=r"node1 rank 1 \(.*\): all-reduce at 40.5 GB/s, expected 50% of .* 450"):
        rungs.links(gpus)
    assert rungs.links(CheckedMachine(machine.folder, 0, 2))  # a CPU has no data sheet
    monkeypatch.setattr(rungs.subprocess, "run", reports(*[10.0] * 4))
    monkeypatch.setattr(rungs, "LAYOUTS", {})
    monkeypatch.setattr(rungs, "own_address", lambda: "node0")
    with pytest.raises(RungError, match=r"all-reduce at 10 GB/s, expected 50% of the data sheet's 50"):
        rungs.across_nodes(gpus)
    monkeypatch.setattr(rungs.subprocess, "run", reports(300.0, 300.0, wrong=7))
    with pytest.raises(RungError, match=r"(?s)all-reduce over 2 ranks: exit code 1.*rank 1 .* 7 wrong"):
        rungs.links(gpus)
    monkeypatch.setattr(rungs.subprocess, "run", reports(300.0))
    with pytest.raises(RungError, match=r"all-reduce over 2 ranks: 1 reported a rate"):
        rungs.links(gpus)
    monkeypatch.undo()
    monkeypatch.setattr(rungs, "TIMEOUT_S", 0.01)
    with pytest.raises(RungError, match=r"all-reduce over 2 ranks: no end after 0 s"):
        rungs.links(gpus)


def test_memory_far_from_the_rehearsal_is_named(machine, monkeypatch, tmp_path):
    gib, record = (
        1 << 30,
        {"memory/update_peak_bytes": 11 << 30, "memory/refit_peak_bytes": 1 << 30, "time/update_s": 2.0},
    )

    def run(command, **how):
        assert "model.kernels=own" in command  # else TransformerEngine's, which fail in a rehearsal
        if command[3] == "rehearse":
            phases = {name: {"peak_bytes": gib, "seconds": 0.0, "entries": 1} for name in ("build", "refit")}
            phases["update"] = {"peak_bytes": 10 * gib, "planned_bytes": 12 * gib, "seconds": 3.0, "entries": 2}
            out = Path(command[command.index("--json") + 1])
            out.write_text(json.dumps({"ranks": {"0": {"phases": phases}}}))
        return SimpleNamespace(returncode=0, stdout=json.dumps({"time": {"update": {"seconds": 1.5}}}), stderr="")

    def start(starter, name, stage, *keys):
        assert "model.kernels=own" in keys
        return SimpleNamespace(wait=lambda: tmp_path)

    monkeypatch.setattr(rungs.subprocess, "run", run)
    monkeypatch.setattr(Starter, "start", start)
    monkeypatch.setattr(rungs, "read_jsonl", lambda path: [record])
    monkeypatch.setattr(rungs, "device_name", lambda machine: "h100")
    monkeypatch.setattr(CheckedMachine, "jobs", lambda self, rung: nullcontext(Starter(self, tmp_path)))
    gpu = CheckedMachine(tmp_path, 1, 1)
    update = {"bytes": 11 * gib, "rehearsed": 10 * gib, "planned": 12 * gib, "seconds": 2.0, "planned seconds": 1.5}
    update["rehearsed seconds"] = 1.5
    assert rungs.prediction(gpu)["phases"]["update"] == update
    record["memory/update_peak_bytes"] = 13 << 30
    with pytest.raises(
        RungError, match=r"memory/update_peak_bytes 1.396e\+10, expected 1.074e\+10, as rehearsed, within 15%"
    ):
        rungs.prediction(gpu)
    assert rungs.prediction(CheckedMachine(tmp_path, 0, 2))["phases"].keys() == {"refit", "update"}
    record.clear()
    with pytest.raises(RungError, match=r"prediction: no memory/<phase>_peak_bytes in "):
        rungs.prediction(gpu)


def test_what_a_machine_lacks_leaves_a_rung_out(machine, monkeypatch):
    monkeypatch.setattr(command, "RUNGS", {name: rungs.RUNGS[name] for name in ("links", "nodes", "published")})
    one = CheckedMachine(machine.folder / "lacking", 1, 1)
    one.folder.mkdir()
    lacks = {name: command.climb(one, name)["why"] for name in command.RUNGS}
    assert lacks["links"] == "it needs 2 GPUs, this machine has 1"
    assert lacks["nodes"].startswith("it needs 2 nodes") and lacks["published"].startswith("it needs a model and data")
    monkeypatch.setattr(rungs.subprocess, "run", lambda *args, **how: SimpleNamespace(stdout="Some Card\n"))
    assert rungs.RUNGS["prediction"].needs(one) == "plan and rehearse do not know this card"
    assert main(["shakedown", "--cpu", "--band", "high"]) == 2


@pytest.mark.slow
def test_a_report_has_every_result_and_passed_rungs_are_not_repeated(machine, monkeypatch, capsys):
    monkeypatch.setattr(command, "RUNGS", {name: rungs.RUNGS[name] for name in ("machine", "layouts", "learning")})
    monkeypatch.setattr(command, "CPU_RANKS", 1)
    assert main(["shakedown", "--cpu", str(machine.folder)]) == 0
    printed = capsys.readouterr().out
    assert "2/3 layouts: Losses and gradients on two ranks" in printed
    assert "left out: it needs 2 GPUs, this machine has 0" in printed
    assert main(["shakedown", "--cpu", str(machine.folder)]) == 0
    assert capsys.readouterr().out.count(": earlier") == 2
    report = json.loads((machine.folder / "report.json").read_text())
    assert [r["outcome"] for r in report["results"]] == ["passed", "left out", "passed"]
    assert report["results"][2]["measured"]["of the last 5"] > 0.5
    page = (machine.folder / "report.html").read_text()
    assert report["sha256"] in page and "GRPO raises the mean reward." in page


@pytest.mark.slow
def test_a_device_with_other_numbers_is_named_with_the_metric(machine, monkeypatch):
    monkeypatch.setattr(rungs, "FAMILIES", ["llama"])
    other = CheckedMachine(machine.folder, 0, 2, ("optim.lr=1e-2",))
    with pytest.raises(RungError, match=r"(?s)llama: \d+ metrics differ from the CPU's by more than 0.001 of it:.*/1/"):
        rungs.families(other)
    broken = CheckedMachine(machine.folder, 0, 2, ("model.num_layers=0",))
    with pytest.raises(RungError, match=r"(?s)llama, device: exit code 2; log: .*model.num_layers=0: expected"):
        rungs.families(broken)


@pytest.mark.slow
@pytest.mark.multirank
def test_layouts_of_two_ranks_are_compared_with_one_rank(machine, monkeypatch):
    monkeypatch.setattr(rungs, "LAYOUTS", {"tensor": rungs.LAYOUTS["tensor"]})
    assert rungs.layouts(machine) == {"layouts": ["tensor"]}
    monkeypatch.setattr(rungs, "LAYOUTS", {"tensor": ("sft", [], ["parallel.tensor=2", "optim.lr=1e-2"])})
    with pytest.raises(RungError, match=r"tensor: \d+ metrics differ from one rank's"):
        rungs.layouts(machine)


@pytest.mark.slow
def test_a_resume_with_other_bits_is_named(machine, monkeypatch):
    monkeypatch.setattr(rungs, "RESUMED", ("sft",))
    assert rungs.resume(machine) == {"killed after step": rungs.KILLED_AFTER}
    start = Starter.start

    def changed(self, name, stage, *keys, **how):
        if name == "sft-whole":  # as above
            return SimpleNamespace(wait=lambda: machine.folder / "jobs/resume/sft-whole")
        again = sum(job.run.name == name for job in self.started)
        return start(self, name, stage, *keys, *["optim.lr=1e-2"] * again, **how)

    monkeypatch.setattr(Starter, "start", changed)
    other = CheckedMachine(machine.folder / "other", 0, 2)
    other.data.make()
    with pytest.raises(RungError, match=r"^sft, whole and killed: differ at step 2\d of 1 to 30: "):
        rungs.resume(other)


@pytest.mark.slow
@pytest.mark.multirank
def test_links_and_predictions_of_a_cpu_flow_into_the_report(machine):
    rates = rungs.links(machine)["all-reduce, GB/s"]
    assert len(rates) == 2 and all(rate > 0 for rate in rates.values())
    phases = rungs.prediction(machine)["phases"]
    assert {"refit", "generate", "logprobs", "update"} <= phases.keys()
    update = phases["update"]
    assert min(update.values()) > 0


@pytest.mark.slow
def test_an_accuracy_out_of_the_band_is_named(machine, monkeypatch):
    rows = machine.folder / "questions"
    rows.mkdir()
    for name in ("train", "test"):
        lines = [json.dumps({"question": f"{i} + 1?", "answer": f"so #### {i + 1}"}) for i in range(16)]
        (rows / f"{name}.jsonl").write_text("\n".join(lines))
    with machine.jobs("base") as starter:
        weights = starter.start("base", "sft", "run.steps=1").wait()
    small = [
        "run.steps=2",
        "run.eval_every=2",
        "batch.prompts=4",
        "batch.group=2",
        "eval.prompts=4",
        "engine.max_batch=8",
    ]
    small += ["data.max_prompt_tokens=16", "sampling.max_response_tokens=8", "logging=quiet"]
    small += ["data.prompt_template='{question}'", "engine.kv_cache_bytes=67108864"]
    result = rungs.published(CheckedMachine(machine.folder, 0, 1, tuple(small), 1, str(weights), str(rows), (0.0, 1.0)))
    assert len(result["accuracy"]) == 2 and result["band"] == [0.0, 1.0]
    ended = SimpleNamespace(folder=machine.folder / "jobs/published", launch=lambda *args: SimpleNamespace(wait=list))
    monkeypatch.setattr(CheckedMachine, "jobs", lambda self, rung: nullcontext(ended))  # the same job's metrics again
    strict = CheckedMachine(machine.folder, 0, 1, tuple(small), 1, str(weights), str(rows), (1.01, 2.0))
    with pytest.raises(RungError, match=r"^published: accuracy \[0\.\d+\] in .*, expected 1.01 to 2.0"):
        rungs.published(strict)
