"""The board and report.html in a browser: what people see, by mouse, keyboard and phone, in light and dark."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from aligner.run.metrics import append_jsonl
from aligner.run.sample_table import SampleRow
from aligner.tools.report import main as report

EVIL = "</script><script>window.pwned=1</script><img src=x onerror=window.pwned=1>'\"&lt; \u2028 \u202e \u00e9"
STEPS = 60

CONTRAST = (Path(__file__).parent / "contrast.js").read_text().rstrip().rstrip(";")


def record(step: int, scale: float, **more) -> dict:
    row = {"step": step, "wall_time": 1.7e9 + 10 * step, "reward/mean": scale * step, "policy/same": 0.25}
    return row | {"time/update_s": 2.0, "time/step_s": 3.0, "throughput/tokens_per_s": 100.0} | more


def make_run(folder, scale=1.0, name="grpo"):
    folder.mkdir(parents=True)
    rows = [record(step, scale, **{"policy/loss": None if step == 30 else 1 / step}) for step in range(1, STEPS + 1)]
    append_jsonl(folder / "metrics.jsonl", rows)
    (folder / "config.yaml").write_text(f"stage: {{name: {name}}}\nrun: {{steps: 100}}\noptim: {{lr: {scale}}}\n")
    append_jsonl(folder / "starts.jsonl", [{"started": "2026-01-01T10:00:00+00:00", "versions": {"torch": "2.13"}}])
    turns = [{"role": "assistant", "text": "17 x 23?", "tokens": 5}, {"role": "tool", "text": "391"}]
    reports = {"stop": "answer", "failure": "", "reward": 1.0, "turns": turns}
    sample = SampleRow("what is 17 x 23?", "it is 391", 0.5, 0.25, True, {"math": 1.0}, {"answer": "391"}, reports)
    append_jsonl(folder / "samples.jsonl", [{"step": 3, **sample.record()}])
    return folder


@pytest.fixture
def folder(tmp_path):
    """Two good runs, one that a model has written evil into, one that is broken."""
    make_run(tmp_path / "runs" / "a")
    make_run(tmp_path / "runs" / "b", scale=2.0, name="sft")
    evil = make_run(tmp_path / "runs" / "<b>evil")
    append_jsonl(evil / "metrics.jsonl", [record(STEPS + 1, 1.0, **{f"policy/{EVIL}": 1.0}), record(STEPS + 2, 1.0)])
    append_jsonl(evil / "alarms.jsonl", [{"step": 4, "text": f"alarm at step 4: {EVIL}"}])
    append_jsonl(evil / "samples.jsonl", [{"step": 4, **SampleRow(EVIL, f"{EVIL} answer", 1.0, 0.0, True).record()}])
    (evil / "config.yaml").write_text(f"run:\n  name: {json.dumps(EVIL)}\nstage: {{name: {json.dumps(EVIL)}}}\n")
    broken = make_run(tmp_path / "runs" / "broken")
    (broken / "config.yaml").write_text("a: [")
    (broken / "metrics.jsonl").write_text('{"step": 1, "a": 1}\n{"st\n{"step": 3, "a": 2}\n{"step": 4, "a')
    return tmp_path / "runs"


def again(page) -> None:
    """The page's next look at the board, at once."""
    page.evaluate("document.dispatchEvent(new Event('visibilitychange'))")


def chart(page, title: str):
    return page.locator("figure", has=page.get_by_text(title, exact=True))


def test_a_run_in_progress_is_followed(look, serve, folder):
    page = look(serve(folder))
    row = page.locator("[aria-label='table of runs'] tbody tr", has_text="broken")
    assert "metrics.jsonl:2: not valid JSON" in row.inner_text() and "config.yaml" in row.inner_text()
    page.get_by_text("60 / 100").first.wait_for()
    append_jsonl(folder / "a" / "metrics.jsonl", [record(61, 1.0)])
    again(page)
    page.get_by_text("61 / 100").wait_for()
    page.click("nav >> text=curves")
    chart(page, "reward/mean").get_by_text("61").first.wait_for()
    append_jsonl(folder / "a" / "metrics.jsonl", [record(62, 3.0)])
    again(page)
    chart(page, "reward/mean").get_by_text("186").first.wait_for()


@pytest.mark.slow
def test_a_board_without_runs_waits_for_them(look, serve, tmp_path):
    (tmp_path / "none").mkdir()
    page = look(serve(tmp_path / "none"))
    page.get_by_text("No runs in").wait_for()
    make_run(tmp_path / "none" / "first")
    again(page)
    page.locator("tbody").get_by_text("first").first.wait_for()


@pytest.mark.slow
def test_runs_are_filtered_sorted_and_chosen_by_keyboard(look, serve, folder):
    page = look(serve(folder))
    page.get_by_text("config that differs").wait_for()
    names = lambda: [text.strip() for text in page.locator("[aria-label='table of runs'] tbody th").all_inner_texts()]  # noqa: E731
    assert names() == ["<b>evil", "a", "b", "broken"]
    assert page.locator("tr", has_text="optim.lr").locator("td").all_inner_texts() == ["", "1.0", "2.0", ""]
    order = []
    for _ in range(9):  # by the tab key, in the order of the page, and to be seen
        page.keyboard.press("Tab")
        order.append(page.evaluate("document.activeElement.innerText || document.activeElement.ariaLabel"))
        assert page.evaluate("getComputedStyle(document.activeElement).outlineStyle") != "none"
    expected = ["runs", "curves", "samples", "compose", "chat", "filter runs", "choose all", "choose none"]
    assert [text.lower() for text in order[:8]] == expected
    page.get_by_role("button", name="reward/mean").focus()
    page.keyboard.press("Enter")
    page.keyboard.press("Enter")  # the focus stays where it was
    assert names()[0] == "b" and page.locator("[aria-sort=descending]").count() == 1
    page.get_by_label("filter runs").fill("sft end")
    assert names() == ["b"]
    page.get_by_label("filter runs").fill("")
    page.get_by_role("checkbox", name="broken").focus()
    page.keyboard.press("Space")
    page.get_by_text("4 runs, 3 chosen").wait_for()
    page.get_by_role("link", name="curves").focus()
    page.keyboard.press("Enter")
    page.locator("#page-curves canvas").first.wait_for()
    assert page.locator("#page-curves [role=group] button").all_inner_texts() == ["<b>evil", "a", "b"]


@pytest.mark.slow
def test_axes_smoothing_zoom_and_overlays(look, serve, folder):
    page = look(serve(folder) + "#curves")
    figure = chart(page, "reward/mean")
    figure.locator("canvas").wait_for()
    assert figure.locator("figcaption .swatch").count() == 3  # of a, b and the evil one
    plot = figure.locator(".plot")
    plot.focus()
    for _ in range(3):
        page.keyboard.press("ArrowRight")
    at = plot.locator("xpath=..").locator("figcaption .dim").inner_text()
    step = int(at.split()[1].rstrip(":"))
    assert at.split()[2:5] == [str(step), str(step), str(2 * step)]  # what stands there is the data
    page.keyboard.press("+")
    whole = figure.get_by_role("button", name="whole")
    whole.wait_for()
    page.keyboard.press("Escape")
    whole.wait_for(state="hidden")
    page.keyboard.press("Enter")
    assert figure.locator("[aria-pressed=true]").count() == 1
    page.get_by_role("button", name="b", exact=True).click()
    assert figure.locator("figcaption .swatch").count() == 2
    for clock in ("hours", "tokens", "date"):
        page.get_by_label("x axis").select_option(clock)
    page.get_by_label("x axis").select_option("tokens")
    plot.focus()
    page.keyboard.press("ArrowRight")
    assert figure.locator("figcaption .dim").inner_text().startswith("tokens ")
    page.get_by_label("log y").check()
    page.get_by_label("log x").check()
    page.get_by_label("smoothing").fill("0.9")
    page.get_by_label("filter metrics").fill("policy loss")
    chart(page, "policy/loss").locator("canvas").wait_for()
    page.get_by_label("filter metrics").fill("same")
    page.get_by_text("constant metrics: 1").wait_for()
    assert page.locator(".breakdown").count() == 2
    assert (
        "update" in page.locator(".breakdown").first.inner_text()
        and "66.7 %" in page.locator(".breakdown").first.inner_text()
    )


def test_a_trajectory_in_a_terminal_reads_as_its_session(look, serve, tmp_path):
    typed, code = "ls -x --color=always <i>; false", "print('<b>2')\n1 / 0"
    out = "\x1b[0m\x1b[01;34m<i>d\x1b[0m\n(exit status 1)"
    turns = [{"role": "assistant", "text": f"look\nbash({json.dumps({'command': typed})})", "tokens": 9}]
    turns += [{"role": "tool", "text": out, "reward": None, "seconds": 0.125}]
    turns += [{"role": "assistant", "text": f"python({json.dumps({'code': code})})", "tokens": 7}]
    reports = {"stop": "turns", "failure": "", "reward": 1.0, "turns": [*turns, {"role": "tool", "text": "2"}]}
    run = make_run(tmp_path / "runs" / "agent")
    row = SampleRow("find <i>", "", 0.5, 0.25, False, {}, {}, reports)
    (run / "samples.jsonl").write_text(json.dumps({"step": 3, **row.record()}) + "\n")
    page = look(serve(tmp_path / "runs") + "#samples")
    call = page.locator(".turn.own", has_text="look").locator("pre.typed")
    assert call.inner_text() == f"$ {typed}" and "monospace" in call.evaluate("e => getComputedStyle(e).fontFamily")
    output = page.locator(".turn", has_text="0.125 s")
    assert output.locator("pre").all_inner_texts() == ["<i>d", "(exit status 1)"]
    assert page.locator("pre.typed").nth(1).inner_text() == f">>> {code}" and page.locator(".turn i").count() == 0
    assert page.evaluate(CONTRAST) == []


@pytest.mark.slow
def test_what_models_write_is_text(look, serve, folder):
    report([str(folder)])
    for address in (serve(folder), (folder / "report.html").as_uri()):
        page = look(address)
        page.get_by_text(f"alarm at step 4: {EVIL}").wait_for()
        if address.startswith("http"):
            page.click("nav >> text=samples")
            page.get_by_role("combobox", name="run", exact=True).select_option("<b>evil")
        page.get_by_text(f"{EVIL} answer").first.wait_for()
        if address.startswith("http"):
            page.click("nav >> text=curves")
        page.locator("summary", has_text="policy").first.wait_for()
        assert page.evaluate("window.pwned") is None and page.locator("main img, main script").count() == 0


@pytest.mark.few(1)
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_every_page_on_a_phone_and_in_contrast(look, serve, folder, scheme):
    report([str(folder)])
    page = look(serve(folder), width=390, scheme=scheme)
    for tab in ("runs", "curves", "samples", "compose", "chat"):
        page.goto(page.url.partition("#")[0] + f"#{tab}")
        page.locator(f"#page-{tab} > *").first.wait_for()
        page.wait_for_load_state("networkidle")
        assert page.evaluate("document.documentElement.scrollWidth") <= 390, tab
        assert page.evaluate(CONTRAST) == [], tab
    page = look((folder / "report.html").as_uri(), width=390, scheme=scheme)
    assert page.locator("canvas").count() >= 6
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    assert page.evaluate(CONTRAST) == []


@pytest.mark.slow
def test_a_report_prints_in_light_whatever_the_screen(look, folder):
    report([str(folder)])
    page = look((folder / "report.html").as_uri(), scheme="dark")
    assert page.locator("section").count() == 3
    dark = page.evaluate("getComputedStyle(document.body).backgroundColor")
    page.evaluate("dispatchEvent(new Event('beforeprint'))")
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)" != dark
    pdf = page.pdf()
    assert pdf.startswith(b"%PDF") and len(pdf) > 20_000
    page.evaluate("dispatchEvent(new Event('afterprint'))")
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == dark
    assert page.get_by_role("button", name="choose all").count() == 0  # what needs a server
