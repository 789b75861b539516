"""The report: self-contained, everything escaped, curves that are the data."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser

import pytest

from aligner import __main__ as command_line
from aligner.errors import AlignerError, ConfigError
from aligner.run.metrics import append_jsonl, read_jsonl
from aligner.run.sample_table import SampleRow
from aligner.tools import report_runs, svg
from aligner.tools.multirun import show_jobs
from aligner.tools.report import main
from aligner.tools.report_runs import final_metric
from tests import stages

EVIL = "<script>alert('x')</script><img src=x onerror=\"alert(1)\">&amp;"
VOID = {"meta", "line", "polyline", "polygon", "circle"}


class Page(HTMLParser):
    """Collects tags and text, and checks that every tag is closed."""

    def __init__(self, text: str):
        super().__init__()
        self.tags: list[tuple[str, dict]] = []
        self.texts: list[str] = []
        self.open: list[str] = []
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        if tag not in VOID:
            assert self.open.pop() == tag

    def handle_data(self, data):
        self.texts.append(data)

    @property
    def text(self) -> str:
        return "".join(self.texts)


def make_run(folder, steps: int = 5, scale: float = 1.0):
    folder.mkdir(parents=True)
    with (folder / "metrics.jsonl").open("w") as file:
        for step in range(steps):
            record = {
                "step": step,
                "wall_time": 1.0,
                "reward/mean": scale * step,
                "policy/loss": None if step == 2 else 0.5,
            }
            record |= {"time/generate_s": 1.0, "time/update_s": 2.0, "time/eval/generate_s": 9.0, EVIL: 1.0}
            file.write(json.dumps(record) + "\n")
    row = SampleRow(EVIL, f"{EVIL} answer", 1.0, 0.25, True)
    append_jsonl(folder / "samples.jsonl", [{"step": 3, **row.record()}])
    append_jsonl(folder / "alarms.jsonl", [{"step": 4, "text": f"alarm at step 4: {EVIL}"}])
    (folder / "config.yaml").write_text(f"run:\n  name: '{EVIL}'\n")
    (folder / "summary.json").write_text(json.dumps({"sft": {"accuracy": 0.375}, EVIL: EVIL}))
    return folder


def test_model_text_is_escaped_and_nothing_is_loaded(tmp_path, capsys):
    folder = make_run(tmp_path / "run<b>1")
    assert main([str(folder)]) == 0
    assert capsys.readouterr().out.strip() == str(folder / "report.html")
    text = (folder / "report.html").read_text()
    page = Page(text)
    names = {tag for tag, _ in page.tags}
    assert not names & {"script", "img", "link", "iframe", "a", "b1", "object"}
    attributes = {name for _, attrs in page.tags for name in attrs}
    assert not {name for name in attributes if name.startswith("on") or name in ("src", "href", "srcset", "xlink:href")}
    assert "http:" not in text
    assert "https:" not in text
    assert "url(" not in text
    assert page.text.count(f"{EVIL} answer") == 1  # shown as written
    assert f"alarm at step 4: {EVIL}" in page.text
    assert "sft.accuracy" in page.text
    assert "0.375" in page.text


def test_viewport_and_policy(tmp_path):
    main([str(make_run(tmp_path / "one"))])
    metas = [attrs for tag, attrs in Page((tmp_path / "one" / "report.html").read_text()).tags if tag == "meta"]
    assert any(m.get("name") == "viewport" for m in metas)
    assert any(m.get("http-equiv") == "Content-Security-Policy" and "'none'" in m["content"] for m in metas)


def test_several_runs_are_overlaid_in_their_common_folder(tmp_path):
    runs = [make_run(tmp_path / "sft"), make_run(tmp_path / "grpo", scale=2.0)]
    assert main([str(run) for run in runs]) == 0
    text = (tmp_path / "report.html").read_text()
    figure = next(f for f in re.findall(r"<figure>.*?</figure>", text) if "<b>reward/mean</b>" in f)
    assert figure.count("<polyline") == 2
    assert svg.color(0) in figure
    assert svg.color(1) in figure
    assert "sft" in Page(text).text


def test_an_empty_run_and_a_folder_that_is_none(tmp_path):
    (tmp_path / "metrics.jsonl").write_text("")
    assert main([str(tmp_path)]) == 0
    Page((tmp_path / "report.html").read_text())
    with pytest.raises(ConfigError, match=r"nothing-here.*metrics.jsonl"):  # exit code 2
        main([str(tmp_path / "nothing-here")])
    assert main([]) == 2


def points(picture: str) -> list[list[tuple[float, float]]]:
    found = re.findall(r'<polyline points="([^"]+)"', picture)
    return [[tuple(map(float, pair.split(","))) for pair in line.split()] for line in found]


def test_a_curve_is_an_affine_picture_of_its_data():
    data = [(0.0, 1.0), (1.0, 3.0), (2.0, 2.0), (4.0, -1.0)]
    (line,) = points(svg.lines("t", [(0, data)]))
    x0, y0 = line[0]
    sx = (line[3][0] - x0) / 4
    sy = (line[3][1] - y0) / -2
    assert sx > 0 > sy  # y grows upwards
    for (x, y), (px, py) in zip(data, line, strict=True):
        assert px == pytest.approx(x0 + sx * x, abs=0.2)
        assert py == pytest.approx(y0 + sy * (y - 1.0), abs=0.2)


def test_gaps_long_curves_and_constants():
    gap = svg.lines("t", [(0, [(0, 1.0), (1, 2.0), (2, None), (3, 1.0), (4, 2.0), (5, None), (6, 1.5)])])
    assert [len(line) for line in points(gap)] == [2, 2]
    assert gap.count("<circle") == 1
    (long,) = points(svg.lines("t", [(0, [(i, float(i)) for i in range(10_001)])]))
    assert len(long) <= svg.MAX_POINTS
    assert long[-1] == (svg.WIDTH - svg.RIGHT, svg.TOP)  # the last value is shown
    assert svg.lines("t", [(0, [(3, 5.0)])])
    assert svg.lines("t", [(0, [(3, None)])]) == ""


def section_of(text: str, title: str) -> str:
    return text[text.index(f"<h2>{title}</h2>") :].partition("<h2>")[2].partition("<h2>")[0]


def test_phases_are_stacked_without_the_nested_ones_and_add_up_to_the_step(tmp_path):
    main([str(make_run(tmp_path / "one"))])
    section = section_of((tmp_path / "one" / "report.html").read_text(), "seconds of a step, by phase")
    assert section.count("<polygon") == 2
    assert "generate 5 s" in section
    assert "update 10 s" in section
    folder = make_run(tmp_path / "two")
    records = read_jsonl(folder / "metrics.jsonl")
    whole = [record | {"time/step_s": 3.5, "time/save_s": 4.0} for record in records]  # a save comes after the step
    (folder / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in whole))
    main([str(folder)])
    section = section_of((folder / "report.html").read_text(), "seconds of a step, by phase")
    assert "step 17.5 s" not in section
    assert section.count("<polygon") == 4
    assert "other 2.5 s" in section  # 5 x (3.5 - 1 - 2)
    assert "save 20 s" in section


def test_trajectories_are_shown_turn_by_turn(tmp_path):
    """With what is trained on, rewards of turns, and how they ended; damaged ones as far as they go."""
    folder = make_run(tmp_path / "one")
    call = {"role": "assistant", "text": f"{EVIL} call", "tokens": 17}
    result = {"role": "tool", "text": "391", "reward": 0.125}
    turns = [call, result, {"role": EVIL, "text": "it is 391", "tokens": 9}]
    told = {"stop": "answer", "failure": "", "reward": 1.0, "turns": turns}
    row = SampleRow("what is 17 x 23?", "it is 391", 0.5, 0.25, True, {"environment": 1.0}, {}, told)
    broken = [{"turns": [3, {}, {"tokens": "x", "reward": EVIL}], "stop": EVIL}, {"turns": 3}, {"stop": 1}, 7, []]
    rows = [{"step": 3, **row.record()}, *({"step": 3, "trajectory": one} for one in broken)]
    append_jsonl(folder / "samples.jsonl", rows)
    main([str(folder)])
    text = (folder / "report.html").read_text()
    section = section_of(text, "trajectories").partition("</h2>")[2].partition("<details><summary>config")[0]
    page = Page(section)
    assert section.count("<details>") == 4 and not {tag for tag, _ in page.tags} & {"script", "img"}
    assert "reward 0.5, environment 1, advantage 0.25; answer" in page.text
    own = [re.sub("<[^>]*>", "|", turn) for turn in re.findall(r'<div class="turn own">.*?</div>', section)]
    assert "17 tokens in the loss" in own[0] and "9 tokens in the loss" in own[1] and f"{EVIL} call" in page.text
    assert "tool not in the loss, turn reward 0.125" in page.text
    assert "<h2>trajectories" not in main_page(make_run(tmp_path / "two"))


def main_page(folder) -> str:
    main([str(folder)])
    return (folder / "report.html").read_text()


def write(path, *records) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(record) + "\n" for record in records))


def test_torn_and_foreign_files_make_a_page(tmp_path):
    folder = make_run(tmp_path / "one")
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": 5, "reward/mean": Infinity, "rm/loss": [1, 2], "kl/x": "a", "c/y": NaN, "c/z": true}\n')
        file.write(f'{{"step": 5, "reward/mean": {"9" * 400}}}\n{{"step": {"9" * 400}, "rm/loss": 1}}\n')  # no float's
        file.write('{"wall_time": 3.0}\n{"step": 6, "reward/me')
    with (folder / "samples.jsonl").open("a") as file:
        file.write('{"step": 5}\n{"step": 5, "scores": [1], "columns": 3, "reward": "x"}\n')
        file.write(f'{{"step": 5, "reward": {"9" * 400}, "scores": {{"a": {"9" * 400}}}}}\n')
    with (folder / "alarms.jsonl").open("a") as file:
        file.write("{}\n")
    (folder / "config.yaml").write_text("a: [")
    write(folder / "starts.jsonl", {"started": "yesterday", "versions": 3}, {"started": None})
    assert main([str(folder)]) == 0
    Page((folder / "report.html").read_text())
    (folder / "metrics.jsonl").write_text('{"step": 1}\n{"st\n{"step": 2}\n')
    with pytest.raises(AlignerError, match=r"metrics.jsonl:2: not valid JSON"):
        main([str(folder)])
    (folder / "metrics.jsonl").write_text('{"step": 1}\n{"st\n')  # the half line, and a newline that an editor adds
    assert main([str(folder)]) == 0


def test_runs_of_one_name_are_told_apart_and_their_configs_compared(tmp_path):
    for parent, lr in (("a", "0.5"), ("b", "0.25")):
        make_run(tmp_path / parent / "grpo")
        (tmp_path / parent / "grpo" / "config.yaml").write_text(f"seed: 7\noptim: {{lr: {lr}, eps: 3}}\n")
    main([str(tmp_path / "a" / "grpo"), str(tmp_path / "b" / "grpo")])
    text = (tmp_path / "a" / "grpo" / "report.html").read_text()
    assert "<h1>a/grpo | b/grpo</h1>" in text
    differ = section_of(text, "config that differs")
    assert "<th>optim.lr</th><td>0.5</td><td>0.25</td>" in differ
    assert "eps" not in differ and "seed" not in differ


def test_the_top_says_where_a_run_comes_from(tmp_path):
    folder = make_run(tmp_path / "one")
    (folder / "config.yaml").write_text("seed: 12345\nmodel: {family: qwen3}\nstage: {name: grpo}\n")
    start = {"started": "2026-01-01T10:00:00+00:00", "commit": "0123456789abcdef", "dirty": True, "host": "node7"}
    start |= {"parameters": 596_049_920, "versions": {"torch": "2.13"}, "hardware": {"cpu": "C", "gpu": "H200"}}
    ends = {"ended": "2026-01-01T10:00:40+00:00", "result": "StopRequested: USR1"}
    again = {**start, "started": "2026-01-01T11:00:00+00:00", "dirty": False, "command": "aligner run a=1"}
    write(folder / "starts.jsonl", start, ends, again, {"ended": "2026-01-01T12:01:00+00:00", "result": "done"})
    main([str(folder)])
    text = (folder / "report.html").read_text()
    top = text[: text.index("<h2>")]
    for value in (
        "12345",
        "qwen3 596M",
        "1 h 1 min",
        "0123456789ab<",
        "torch 2.13",
        "H200",
        "aligner run a=1",
        "node7",
    ):
        assert value in top, value
    write(folder / "starts.jsonl", start)
    main([str(folder)])
    assert "no end recorded" in (folder / "report.html").read_text()


def test_what_never_changes_is_folded_and_bytes_are_for_people(tmp_path):
    folder = tmp_path / "one"
    record = {"memory/a_bytes": 3786018816, "memory/b_bytes": 2**30, "policy/same": 0.25}
    write(folder / "metrics.jsonl", *({"step": i, **record, "memory/b_bytes": i * 2**30} for i in range(3)))
    main([str(folder)])
    text = (folder / "report.html").read_text()
    assert "1 that never change" in section_of(text, "memory")
    assert "<th>memory/a_bytes</th><td>3.53 GiB</td>" in text and "<th>policy/same</th><td>0.25</td>" in text
    assert "<b>memory/b_bytes</b> (GiB) 2 GiB" in text
    assert text.count("<figure>") == 1
    assert [svg.number(v) for v in (9999.0, 12345.0, 3786018816.0, -2e6, 0.00012345)] == [
        "9999",
        "12.35k",
        "3.786G",
        "-2M",
        "0.0001234",
    ]


def test_each_value_of_a_long_run_is_looked_at_once(tmp_path, monkeypatch):
    steps, number, looked = 1000, report_runs.number, []
    monkeypatch.setattr(report_runs, "number", lambda value: looked.append(value) or number(value))
    names = [f"time/p{i}_s" for i in range(5)] + [f"policy/m{i}" for i in range(5)]
    records = ({"step": step} | {name: i + step % 7 for i, name in enumerate(names)} for step in range(steps))
    write(tmp_path / "one" / "metrics.jsonl", *records)
    main([str(tmp_path / "one")])
    assert steps * len(names) <= len(looked) < 1.3 * steps * len(names)  # steps among them, twice
    assert (tmp_path / "one" / "report.html").read_text().count("<figure>") == len(names) + 1


def test_a_sweep_is_compared_with_its_failed_child(tmp_path, capsys):
    sweep = tmp_path / "sweep"
    for i in (0, 1, 10):
        make_run(sweep / f"{i}_optim.lr={i}")
    (sweep / "2_broken").mkdir()
    (sweep / "2_broken" / "config.yaml").write_text("seed: 1\n")
    write(sweep / "2_broken" / "starts.jsonl", {"started": "2026-01-01T10:00:00+00:00"}, {"ended": "", "result": "oh"})
    (sweep / "logs").mkdir()
    assert main([str(sweep)]) == 0
    assert capsys.readouterr().out.strip() == str(sweep / "report.html")
    text = (sweep / "report.html").read_text()
    assert "<h1>0_optim.lr=0 | 1_optim.lr=1 | 2_broken | 10_optim.lr=10</h1>" in text
    assert "<td>oh</td>" in text
    assert main([str(path) for path in sorted(sweep.iterdir())]) == 0  # as a shell's sweep/* gives them
    assert final_metric(sweep / "1_optim.lr=1") == ("reward/mean", 4.0)
    assert final_metric(sweep / "2_broken") is None


def test_a_run_leaves_its_page_and_does_not_fail_by_it(tiny_data, tmp_path, capsys):
    more = ("run.steps=1", "run.export=false", "checkpoint.final=false")
    assert command_line.main(["run", *stages.overrides("sft", tiny_data, tmp_path / "run", *more)]) == 0
    text = (tmp_path / "run" / "report.html").read_text()
    assert "<td>done</td>" in text and "<b>sft/loss</b>" not in text  # of one step: it never changes
    assert "<th>sft/loss</th>" in text
    (tmp_path / "other" / "report.html" / "in the way").mkdir(parents=True)
    assert command_line.main(["run", *stages.overrides("sft", tiny_data, tmp_path / "other", *more)]) == 0
    assert "warning: no report.html: AlignerError" in capsys.readouterr().err
    assert (tmp_path / "other" / "DONE").exists()


def test_the_table_of_a_sweep_has_the_number_that_matters(tmp_path, capsys):
    make_run(tmp_path / "0_a", scale=2.0)
    rows = [("a=1", 0, 3.0, str(tmp_path / "0_a")), ("a=2", 2, 1.0, str(tmp_path / "1_b"))]
    show_jobs(rows, 2)
    table = " ".join(capsys.readouterr().out.split())
    assert "reward/mean 8" in table and "failed (2)" in table
