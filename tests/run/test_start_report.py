"""What a run says before its first step and after its last one."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
import torch

from aligner.builders import start_report
from aligner.config.resolve import compose
from aligner.errors import DataError
from aligner.megatron import model as megatron_model
from tests import stages

pytestmark = pytest.mark.slow
SHORT = ["run.steps=2", "run.export=false", "checkpoint.final=false", "logging.progress=true"]


def run(capsys, name, data, folder, *overrides: str):
    """The lines of a run, and how its steps were shown."""
    stages.stage(name, data, folder, *SHORT, *overrides)
    output = capsys.readouterr()
    return output.out.splitlines(), output.err.splitlines()


def line(lines: list[str], begin: str) -> str:
    (found,) = (text for text in lines if text.startswith(begin))
    return found


def test_where_what_how_long_and_to_where(tiny_data, tmp_path, capsys):
    out, err = run(capsys, "sft", tiny_data, tmp_path, "batch.sequences=8", "logging.trackers=[tensorboard]")
    record = json.loads((tmp_path / "starts.jsonl").read_text().splitlines()[0])
    assert line(out, "cpu, float32: ") == f"cpu, float32: policy {record['parameters']:,} parameters, all trained"
    assert line(out, "2 steps") == "2 steps of 8 rows: 0.5 epochs (4 steps an epoch of 32)"
    files = f"writes to {tmp_path}: metrics.jsonl, tensorboard/, report.html at the end"
    assert line(out, "writes to ") == files
    assert not [text for text in out if "WARNING" in text]
    assert "loss=" in err[-1] and "lr=0.003" in err[-1]


def test_modules_of_transformer_engine_and_the_reasons_for_others(tiny_data, tmp_path, capsys, monkeypatch):
    kinds = {"attention": "heads of 12 numbers", "linear layers": "", "norms": ""}
    monkeypatch.setattr("aligner.builders.start_report.te_kinds", lambda cfg: kinds)
    out, _ = run(capsys, "sft", tiny_data, tmp_path, "batch.sequences=8")
    assert [text for text in out if "TransformerEngine" in text] == [
        "TransformerEngine's attention: not used, heads of 12 numbers",
        "TransformerEngine's linear layers: used",
        "TransformerEngine's norms: used",
    ]


@pytest.mark.parametrize(
    "line, warned",
    [("stage=grpo", True), ("stage=grpo batch.share_prompts=false", False), ("stage=dpo", True), ("stage=sft", False)],
)
def test_user_buffers_that_shared_prompts_leave_empty(line, warned):
    cfg = compose([*line.split(), "model.megatron.tp_comm_overlap=true"])
    job = SimpleNamespace(cfg=cfg, initial=SimpleNamespace(folder=None))
    assert any("share prompts" in text for text in start_report._warnings(job, "float32")) == warned


def test_epochs_are_reported_as_steps(tiny_data, tmp_path, capsys):
    out, _ = run(capsys, "sft", tiny_data, tmp_path, "run.steps=0", "run.epochs=0.5", "batch.sequences=16")
    assert line(out, "1 step ") == "1 step of 16 rows: 0.5 epochs (2 steps an epoch of 32)"


def test_adapters_a_critic_and_what_is_not_trained(tiny_data, tiny_runs, tmp_path, capsys):
    ppo = [f"model.init={tiny_runs['sft']}", f"reward.model={tiny_runs['rm']}", "critic.warmup_steps=0"]
    out, _ = run(capsys, "ppo", tiny_data, tmp_path / "a", *ppo, "model.lora.rank=2")
    message = line(out, "cpu, float32: ")
    assert (
        "policy " in message
        and "only adapters trained; critic " in message
        and message.endswith("only adapters trained")
    )
    assert line(out, "2 steps").endswith("prompts: 1 epoch (2 steps an epoch of 32)")
    out, _ = run(capsys, "sample", tiny_data, tmp_path / "b", f"model.init={tiny_runs['sft']}")
    assert line(out, "cpu, float32: ").endswith("parameters, none of them trained")


@pytest.mark.parametrize(("steps", "message"), [(2, True), (3, False)])
def test_a_policy_that_never_learns_is_reported(steps, message, tiny_data, tiny_runs, tmp_path, capsys):
    overrides = [f"model.init={tiny_runs['sft']}", f"reward.model={tiny_runs['rm']}", "critic.warmup_steps=2"]
    out, _ = run(capsys, "ppo", tiny_data, tmp_path, *overrides, f"run.steps={steps}")
    results = [text for text in out if "critic.warmup_steps=2" in text]
    assert bool(results) == message and all("run.steps=2" in text for text in results)
    same = stages.records(tmp_path)
    assert any("policy/loss" in record for record in same) != message


@pytest.mark.parametrize(
    ("name", "key", "overrides"),
    [
        ("sft", "sequences", []),
        ("dpo", "sequences", []),
        ("grpo", "prompts", []),
        ("distill", "sequences", ["algorithm.distill.on_policy=1"]),
    ],
)
def test_steps_of_several_epochs_are_reported(name, key, overrides, tiny_data, tiny_runs, tmp_path, capsys):
    overrides = [
        *overrides,
        f"batch.{key}=80",
        "batch.micro_batch_samples=80",
        f"model.init={tiny_runs['sft']}",
        "run.steps=1",
    ]
    overrides += [f"algorithm.distill.teacher={tiny_runs['sft']}"] if name == "distill" else []
    out, _ = run(capsys, name, tiny_data, tmp_path, *overrides)
    assert line(out, "WARNING: batch.") == f"WARNING: batch.{key}=80: a step takes each of the 32 rows about 2.5 times"


def test_another_dtype_than_the_folders_is_reported(tiny_data, tiny_runs, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(megatron_model, "cpu_has_bf16", lambda: True)
    init = f"model.init={tiny_runs['sft']}"
    out, _ = run(capsys, "sft", tiny_data, tmp_path / "a", init, "model.dtype=auto", "run.export=true")
    message = line(out, "WARNING: model.dtype=auto is bfloat16")
    assert "holds float32: the export will be bfloat16. model.dtype=float32 keeps it" in message
    assert {t.dtype for t in stages.weights(tmp_path / "a").values()} == {torch.bfloat16}
    out, _ = run(capsys, "sft", tiny_data, tmp_path / "b", f"model.init={tmp_path / 'a'}", "model.dtype=auto")
    assert not [text for text in out if "model.dtype" in text]
    out, _ = run(capsys, "sft", tiny_data, tmp_path / "c", init, "model.dtype=bfloat16")  # as it was asked for
    assert not [text for text in out if "WARNING" in text]


def test_the_last_evaluation_is_reported(tiny_data, tmp_path, capsys):
    overrides = [f"data.eval={tiny_data / 'eval.jsonl'}"]
    _, err = run(capsys, "sft", tiny_data, tmp_path / "a", *overrides)
    value = stages.records(tmp_path / "a")[-1]["eval/loss"]
    assert err[-1].startswith(f"evaluation at step 2: eval/loss {value:.4g}")
    _, err = run(capsys, "sft", tiny_data, tmp_path / "b", *overrides, "run.eval_every=2")
    assert len([text for text in err if text.startswith("evaluation at step")]) == 1
    _, err = run(capsys, "sft", tiny_data, tmp_path / "c")
    assert not [text for text in err if "evaluation" in text]


@pytest.mark.parametrize("name", ["dpo", "rm"])
def test_pairs_that_are_all_equal_are_refused(name, tiny_data, tmp_path, capsys):
    rows = [{"prompt": f"say {c}:", "chosen": c, "rejected": c} for c in "abcdefgh"]
    data = stages.write_jsonl(tmp_path / "equal.jsonl", rows)
    with pytest.raises(DataError, match=r"data\.train: .* all 8 pairs have equal answers"):
        run(capsys, name, tiny_data, tmp_path / "a", f"data.train={data}")
    data = stages.write_jsonl(tmp_path / "some.jsonl", [*rows, rows[0] | {"chosen": "?"}])
    out, _ = run(capsys, name, tiny_data, tmp_path / "b", f"data.train={data}")
    assert "8 pairs have equal answers: they have no gradient" in line(out, "data.train: ")
