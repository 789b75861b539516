"""The report: self-contained, everything escaped, curves that are the data."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser

import pytest

from aligner.errors import AlignerError
from aligner.run.alarms import write_alarms
from aligner.run.sample_table import SampleRow, write_samples
from aligner.tools import svg
from aligner.tools.report import main

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
    write_samples(folder, 3, [SampleRow(EVIL, f"{EVIL} answer", 1.0, 0.25, True)])
    write_alarms(folder, 4, [f"alarm at step 4: {EVIL}"])
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
    with pytest.raises(AlignerError, match=r"nothing-here.*metrics.jsonl"):
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


def test_phases_are_stacked_without_the_nested_ones(tmp_path):
    main([str(make_run(tmp_path / "one"))])
    text = (tmp_path / "one" / "report.html").read_text()
    section = text[text.index("seconds of a step, by phase") :]
    assert section.count("<polygon") == 2
    assert "generate 5 s" in section
    assert "update 10 s" in section
