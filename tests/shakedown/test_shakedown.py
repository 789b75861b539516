"""The rungs on a CPU, and faults that they have to name."""

import json
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

    def composed(self, name, stage, *overrides, ranks=1, on_cpu=False):
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
    assert "--only='famlies': expected rungs of machine, families" in capsys.readouterr().err
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
        again = sum(job.run.name == name for job in self.started)
        return start(self, name, stage, *keys, *["optim.lr=1e-2"] * again, **how)

    monkeypatch.setattr(Starter, "start", changed)
    other = CheckedMachine(machine.folder / "other", 0, 2)
    other.data.make()
    with pytest.raises(RungError, match=r"^sft, whole and killed: differ at step 2\d of 1 to 30: "):
        rungs.resume(other)
