"""report.html: the board's pages in one file, with all that they ask inside. What they show is seen in tests/board."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from html.parser import HTMLParser

import pytest

from aligner import __main__ as command_line
from aligner.board.page import modules
from aligner.errors import ConfigError
from aligner.run.metrics import append_jsonl
from aligner.run.sample_table import SampleRow
from aligner.tools.multirun import final_metric, show_jobs
from aligner.tools.report import main
from tests import stages

EVIL = "</script><script>alert('x')</script><!-- <img src=x onerror=\"alert(1)\">&amp; \u2028"


class Page(HTMLParser):
    """Collects tags, and what stands in the inlined JSON."""

    def __init__(self, text: str):
        super().__init__()
        self.text, self.tags, self.data = text, [], []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data):
        if self.tags and self.tags[-1] == ("script", {"type": "application/json", "id": "inlined"}):
            self.data.append(data)

    @property
    def inlined(self) -> dict:
        return json.loads("".join(self.data))

    @property
    def answers(self) -> dict:
        return self.inlined["answers"]


def make_run(folder, steps: int = 5, scale: float = 1.0):
    folder.mkdir(parents=True)
    for step in range(steps):
        record = {"step": step, "wall_time": 1.0, "reward/mean": scale * step, "time/update_s": 2.0, EVIL: float(step)}
        append_jsonl(folder / "metrics.jsonl", [record])
    row = SampleRow(EVIL, f"{EVIL} answer", 1.0, 0.25, True)
    append_jsonl(folder / "samples.jsonl", [{"step": 3, **row.record()}])
    append_jsonl(folder / "alarms.jsonl", [{"step": 4, "text": f"alarm at step 4: {EVIL}"}])
    (folder / "config.yaml").write_text(f"run:\n  name: {json.dumps(EVIL)}\n")
    (folder / "summary.json").write_text(json.dumps({"sft": {"accuracy": 0.375}, EVIL: EVIL}))
    return folder


def page(folder) -> Page:
    return Page((folder / "report.html").read_text())


def test_a_page_holds_all_it_needs_and_text_is_data(tmp_path, capsys):
    folder = make_run(tmp_path / "run<b>1")
    assert main([str(folder)]) == 0
    assert capsys.readouterr().out.strip() == str(folder / "report.html")
    actual = page(folder)
    policies = [attrs["content"] for tag, attrs in actual.tags if attrs.get("http-equiv") == "Content-Security-Policy"]
    (nonce,) = {*re.findall(r"'nonce-([^']+)'", policies[0])}
    assert policies[0].startswith("default-src 'none'") and "unsafe" not in policies[0]
    assert not {tag for tag, _ in actual.tags} & {"img", "iframe", "a", "b", "object", "base", "form"}
    for tag, attrs in actual.tags:
        assert not {name for name in attrs if name.startswith("on") or name in ("src", "srcset")}
        assert tag != "script" or attrs.get("type") == "application/json" or attrs["nonce"] == nonce
    assert [attrs["href"] for tag, attrs in actual.tags if tag == "link"] == ["data:,"]
    assert any(attrs.get("name") == "viewport" for _, attrs in actual.tags)
    imports = json.loads(re.search(r'<script type="importmap"[^>]*>(.*?)</script>', actual.text)[1])["imports"]
    assert {*imports} == {f"board/{name}" for name in modules()}
    assert all(position.startswith("data:text/javascript;base64,") for position in imports.values())
    main([str(folder)])
    assert nonce not in (folder / "report.html").read_text()  # so that no text could have known it
    answers = actual.answers
    assert answers["details"]["details"]["run<b>1"]["alarms"] == [{"step": 4, "text": f"alarm at step 4: {EVIL}"}]
    assert answers["details"]["summary"] == {"sft.accuracy": 0.375, EVIL: EVIL}
    assert answers["curves"]["curves"]["run<b>1"][EVIL]["y"] == [0, 1, 2, 3, 4]
    assert answers["samples"]["views"][0]["rows"][0]["response"] == f"{EVIL} answer"


def test_several_runs_go_into_their_common_folder(tmp_path):
    runs = [make_run(tmp_path / "sft"), make_run(tmp_path / "grpo", scale=2.0)]
    (tmp_path / "summary.json").write_text('{"policy": 0.5}')
    assert main([str(run) for run in runs]) == 0
    answers = page(tmp_path).answers
    assert [row["name"] for row in answers["runs"]["runs"]] == ["sft", "grpo"]  # as they were given
    assert answers["details"]["summary"] == {"policy": 0.5}
    assert page(tmp_path).inlined["tabs"] == ["runs", "curves", "samples"]


def test_an_empty_run_and_a_folder_that_is_none(tmp_path):
    (tmp_path / "metrics.jsonl").write_text("")
    assert main([str(tmp_path)]) == 0
    assert page(tmp_path).answers["curves"]["curves"] == {tmp_path.name: {}}
    with pytest.raises(ConfigError, match=r"nothing-here.*metrics.jsonl"):  # exit code 2
        main([str(tmp_path / "nothing-here")])
    assert main([]) == 2


def test_a_long_run_makes_a_small_page(tmp_path):
    folder = tmp_path / "one"
    folder.mkdir()
    names = [f"policy/m{i}" for i in range(10)]
    rows = ({"step": step, **{name: i + step % 7 for i, name in enumerate(names)}} for step in range(9000))
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    main([str(folder)])
    curves = page(folder).answers["curves"]["curves"]["one"]
    assert all(300 < len(curve["x"]) <= 410 and curve["x"][-1] == 8999 for curve in curves.values())
    assert (folder / "report.html").stat().st_size < 400_000


def test_a_sweep_is_compared_with_its_failed_child(tmp_path, capsys):
    sweep = tmp_path / "sweep"
    for i, hour in ((0, "08"), (1, "09"), (10, "11")):
        make_run(sweep / f"{i}_optim.lr={i}")
        append_jsonl(sweep / f"{i}_optim.lr={i}" / "starts.jsonl", [{"started": f"2026-01-01T{hour}:00:00+00:00"}])
    (sweep / "2_broken").mkdir()
    (sweep / "2_broken" / "config.yaml").write_text("seed: 1\n")
    append_jsonl(
        sweep / "2_broken" / "starts.jsonl", [{"started": "2026-01-01T10:00:00+00:00"}, {"ended": "", "result": "oh"}]
    )
    (sweep / "logs").mkdir()
    assert main([str(sweep)]) == 0
    assert capsys.readouterr().out.strip() == str(sweep / "report.html")
    rows = page(sweep).answers["runs"]["runs"]
    assert [row["name"] for row in rows] == ["0_optim.lr=0", "1_optim.lr=1", "2_broken", "10_optim.lr=10"]
    assert rows[2]["result"] == "oh"
    assert main([str(path) for path in sorted(sweep.iterdir())]) == 0  # as a shell's sweep/* gives them
    assert final_metric(sweep / "1_optim.lr=1") == ("reward/mean", 4.0)
    assert final_metric(sweep / "2_broken") is None


@pytest.mark.slow
def test_it_needs_neither_torch_nor_a_server(tmp_path):
    code = "import sys\nfrom aligner.tools.report import main\nmain(sys.argv[1:])\n"
    code += "print([m for m in ('torch', 'starlette', 'uvicorn') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code, str(make_run(tmp_path / "a"))], capture_output=True, text=True)
    assert done.stdout.splitlines()[1] == "[]", done.stderr


def test_a_run_leaves_its_page_and_does_not_fail_by_it(tiny_data, tmp_path, capsys):
    overrides = ("run.steps=1", "run.export=false", "checkpoint.final=false")
    assert command_line.main(["run", *stages.overrides("sft", tiny_data, tmp_path / "run", *overrides)]) == 0
    answers = page(tmp_path / "run").answers
    (row,) = answers["runs"]["runs"]
    assert (row["result"], row["state"], row["stage"]) == ("done", "DONE", "sft")
    assert next(metric for metric in answers["metrics"]["metrics"] if metric["name"] == "sft/loss")["last"]["run"] > 0
    assert answers["phases"]["phases"]["run"]["seconds"]["time/update_s"] > 0
    (tmp_path / "other" / "report.html" / "in the way").mkdir(parents=True)
    assert command_line.main(["run", *stages.overrides("sft", tiny_data, tmp_path / "other", *overrides)]) == 0
    assert "warning: no report.html: AlignerError" in capsys.readouterr().err
    assert (tmp_path / "other" / "DONE").exists()


def test_the_table_of_a_sweep_has_the_number_that_matters(tmp_path, capsys):
    make_run(tmp_path / "0_a", scale=2.0)
    rows = [("a=1", 0, 3.0, str(tmp_path / "0_a")), ("a=2", 2, 1.0, str(tmp_path / "1_b"))]
    show_jobs(rows, 2)
    table = " ".join(capsys.readouterr().out.split())
    assert "reward/mean 8" in table and "failed (2)" in table
