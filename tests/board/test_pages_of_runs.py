"""Samples, compose and chat in a real browser."""

from __future__ import annotations

import json
import math
import re
import threading
import time
from dataclasses import replace
from types import SimpleNamespace

import pytest

from aligner import __main__ as command_line
from aligner.board import chat
from aligner.data.tokenizer import byte_tokenizer
from aligner.tools.report import main as report
from tests import stages, tiny
from tests.board.recordings import HOSTILE, TEXT, record, run_folder

pytest.importorskip("playwright")
from playwright.sync_api import expect

PHONE = {"width": 390, "height": 800}
WAIT_MS = 300_000  # the machine may be busy


def go(page, tab: str, ready: str, **folder: str) -> None:
    where = "&".join(f"{name}={value}" for name, value in folder.items())
    page.set_default_timeout(WAIT_MS)
    expect.set_options(timeout=WAIT_MS)
    page.evaluate("where => { location.hash = where }", f"{tab}?{where}" if where else tab)
    page.wait_for_selector(ready)


def choice(page, name: str):
    return page.get_by_role("combobox", name=name, exact=True)


def fits_a_phone(page) -> bool:
    """Charts are drawn again, in the new width, a moment later."""
    page.set_viewport_size(PHONE)
    until = time.monotonic() + WAIT_MS / 1000
    while page.evaluate("document.documentElement.scrollWidth") > PHONE["width"] and time.monotonic() < until:
        page.wait_for_timeout(50)
    return page.evaluate("document.documentElement.scrollWidth") <= PHONE["width"]


@pytest.mark.slow
def test_groups_and_their_tokens(look, serve, tmp_path):
    tokenizer = byte_tokenizer(str(run_folder(tmp_path / "new", rows=2) / "hf"))
    columns = record(tmp_path / "new", 7, tokenizer.encode(TEXT))
    page = look(serve(tmp_path))
    go(page, "samples", ".token")
    assert page.locator(".group").count() == 2 and HOSTILE in page.locator(".prompt").first.inner_text()
    spans = page.locator(".tokens").first.locator(".token")
    assert spans.all_text_contents() == ["<", "x", ">", " "] and "given" in spans.nth(2).get_attribute("class")
    shares = [float(re.search(r"var\(--(more|less)\) (\d+)%", style)[2]) for style in _styles(spans, [0, 1, 3])]
    advantages = abs(columns["trained/advantages"][:4, 3:]) * columns["response_mask"][:4, 3:]
    wanted = [45 * advantages[0, i] / advantages.max() for i in (0, 1, 3)]
    assert shares == pytest.approx(wanted, abs=0.6)
    spans.nth(1).hover()
    numbers = page.locator("p.numbers").first
    assert f"advantage {columns['trained/advantages'][0, 4]:.2g}"[:13] in numbers.inner_text()
    page.locator(".tokens").first.focus()
    page.keyboard.press("ArrowRight")
    assert numbers.inner_text().startswith('">" (') and "not of the policy" in numbers.inner_text()
    page.get_by_label("colour").select_option("kl")
    page.get_by_role("button", name="more").click()
    expect(page.locator(".group")).to_have_count(1)
    assert page.get_by_label("colour").input_value() == "kl"
    assert fits_a_phone(page) and page.title() == "aligner board"
    (tmp_path / "new" / "metrics.jsonl").write_text('{"step": 7, "reward/mean": 1.0}\n')
    report([str(tmp_path / "new")])
    page = look(f"file://{tmp_path / 'new' / 'report.html'}")
    page.locator(".token").first.wait_for()
    assert page.locator("#page-samples .token").all_text_contents()[:4] == ["<", "x", ">", " "]
    assert page.locator("#page-samples button").count() == 0 and fits_a_phone(page)


def _styles(spans, numbers) -> list[str]:
    return [spans.nth(i).get_attribute("style") for i in numbers]


@pytest.mark.slow
def test_rows_are_searched(look, serve, tmp_path):
    run_folder(tmp_path / "old", rows=30)
    turns = [{"role": "assistant", "text": "call"}, {"role": "tool", "text": HOSTILE}]
    row = {"step": 30, "prompt": "turns", "response": "r", "reward": 9, "advantage": 0, "finished": True, "scores": {}}
    with (tmp_path / "old" / "samples.jsonl").open("a") as file:
        file.write(json.dumps(row | {"columns": {}, "trajectory": {"stop": "done", "turns": turns}}) + "\n")
    page = look(serve(tmp_path))
    go(page, "samples", ".sample")
    assert page.locator(".sample").count() == 12 and "debug.record=K" in page.locator("#page-samples").inner_text()
    first = page.locator(".sample").first
    assert [text.strip() for text in first.locator("small").all_inner_texts()][1] == "assistant not in the loss"
    assert first.locator("pre").all_inner_texts() == ["turns", "call", HOSTILE]
    page.get_by_label("prompt has").fill("Question 2")
    page.get_by_label("reward from").fill("4")
    expect(page.locator(".sample")).to_have_count(2)
    page.get_by_label("step").select_option("29")
    expect(page.locator(".sample")).to_have_count(1)
    assert fits_a_phone(page)


@pytest.mark.slow
def test_a_form_says_what_the_command_line_says(look, serve, tmp_path, capsys):
    page = look(serve(tmp_path))
    go(page, "compose", ".key, details[data-section]")
    page.get_by_label("find a key").fill("optim.lr")
    lr = page.get_by_role("textbox", name="optim.lr", exact=True)
    lr.fill("fast")
    page.wait_for_selector("[aria-invalid=true]")
    command = page.locator(".command").inner_text().split()
    assert command[-1] == "optim.lr=fast" and command_line.main(command[3:]) == 2
    assert page.locator("#page-compose p[role=status]").inner_text() == capsys.readouterr().err.strip()
    assert page.get_by_role("button", name="start here").is_disabled()
    lr.fill("3e-5")
    choice(page, "model").select_option("qwen3_0.6b")
    expect(page.locator(".plan")).to_contain_text("grpo on 8 x h100")
    assert "lr: 3.0e-05" in page.get_by_label("YAML").text_content()
    page.get_by_label("GPUs").fill("16")
    expect(page.locator(".plan")).to_contain_text("grpo on 16 x h100")
    for key, value in (("data.train", str(tmp_path)), ("reward.functions", "[{path: math}]")):
        expect(page.locator("#page-compose p[role=status]")).to_contain_text(f"error: {key}=")
        page.get_by_role("button", name="show the key").click()
        page.keyboard.type(value)
    expect(page.locator("#page-compose p[role=status]")).to_contain_text("no errors")
    choice(page, "run it").select_option("submit")
    page.get_by_role("button", name="dry run").click()
    page.wait_for_selector("text=submit this")
    assert "#SBATCH" in page.get_by_label("dry run").inner_text()
    assert fits_a_phone(page)


@pytest.mark.slow
def test_a_run_is_started_and_stopped(look, serve, tmp_path):
    data, run = stages.make_data(tmp_path / "data"), tmp_path / "runs" / "sft"
    run.parent.mkdir()
    page = look(serve(tmp_path / "runs"))
    go(page, "compose", ".key, details[data-section]")
    choice(page, "stage").select_option("sft")
    inputs = [
        *stages.BASE,
        *stages.STAGES["sft"],
        f"run.dir={run}",
        "run.steps=100000",
        f"data.train={data}/train.jsonl",
    ]
    inputs += [f"model.tokenizer={data}/tokenizer", "run.export=false"]
    for text in inputs:
        key, _, value = text.lstrip("?").partition("=")
        if key == "logging":
            choice(page, key).select_option(value)
            continue
        page.get_by_label("find a key").fill(key)
        if value in ("true", "false", "float32"):
            choice(page, key).select_option(value)
        else:
            page.get_by_role("textbox", name=key, exact=True).fill(value)
    expect(page.locator("#page-compose p[role=status]")).to_contain_text("no errors")
    page.get_by_role("button", name="start here").click()
    page.wait_for_selector(".job button:not([disabled])")
    until = time.monotonic() + WAIT_MS / 1000
    while not (run / "metrics.jsonl").is_file():
        assert time.monotonic() < until
        time.sleep(0.1)
    page.get_by_role("button", name="stop").click()
    page.wait_for_selector("text=ended with exit code 0")
    assert (run / "STOPPED").is_file() and "step" in (run / "logs" / "board.log").read_text()


@pytest.fixture
def random_model(tmp_path):
    """A folder of Hugging Face with a model that says anything."""
    model, raw = tiny.transformers_model(replace(tiny.MODELS["qwen3"], vocab_size=261))
    folder = tmp_path / "models" / "random"
    tiny.write_folder(model, raw, folder)
    byte_tokenizer(str(folder))
    yield folder
    for name in list(chat.TALKS.by_name):
        chat.TALKS.close(name)


@pytest.mark.slow
def test_models_answer_token_by_token_side_by_side(look, serve, random_model):
    page = look(serve(random_model.parent))
    go(page, "chat", ".talk")
    for label in ("model", "second model"):
        choice(page, label).select_option(str(random_model))
        page.locator(".talks > div").nth(int(label != "model")).locator("text=ready").wait_for()
    (talk,) = chat.TALKS.by_name.values()
    page.evaluate(
        """() => { window.lengths = new Set(); const talk = document.querySelector(".talk");
        new MutationObserver(() => window.lengths.add(talk.textContent.length)).observe(talk,
        {subtree: true, childList: true, characterData: true}); }"""
    )
    page.get_by_label("max_tokens").fill("40")
    page.get_by_label("temperature").fill("1")
    page.get_by_label("seed").fill("3")
    page.get_by_label("message").fill(HOSTILE)
    page.keyboard.press("Enter")
    expect(page.locator(".talk .tokens")).to_have_count(2)
    first, second = page.locator(".talk .tokens").all()
    spans = first.locator(".token")
    answer, beside = (one.locator(".token").all_text_contents() for one in (first, second))
    # of one seed; what is sampled together with another answer is rounded otherwise
    assert 1 <= len(answer) <= 40 and sum(a == b for a, b in zip(answer, beside, strict=False)) > len(answer) / 2
    assert page.evaluate("window.lengths.size") > 3  # it came bit by bit
    spans.first.hover()
    numbers = page.locator(".talk p.numbers").first.inner_text()
    logprob, probability = (float(re.search(rf"{name} (\S+)", numbers)[1]) for name in ("logprob", "probability"))
    assert math.exp(logprob) == pytest.approx(probability, rel=1e-2) and logprob < 0
    assert page.locator(".talk .turn pre").first.inner_text() == HOSTILE
    page.get_by_label("max_tokens").fill("100000")
    page.get_by_label("message").fill("again")
    page.get_by_role("button", name="send").click()
    page.locator(".talk .problem").first.wait_for()
    assert "expected at most 256 in all" in page.locator(".talk .problem").first.inner_text()
    assert fits_a_phone(page)
    for label in ("model", "second model"):
        choice(page, label).select_option("")
    for status in page.locator("#page-chat .talks [role=status]").all():
        expect(status).to_be_empty()
    assert talk.process.wait(300) == -9


@pytest.mark.slow
def test_what_is_sent_while_a_model_loads_is_answered_then(look, serve, tmp_path, monkeypatch):
    """And what was said because none was chosen goes."""
    loaded = threading.Event()

    class Slow:
        def living(self):
            return []

        def open(self, name, model):
            assert loaded.wait(300)
            return SimpleNamespace(plain=False)

        def say(self, name, body):
            yield {"text": f"heard {body['messages'][-1]['content']}"}

    monkeypatch.setattr(chat, "TALKS", Slow())
    (run_folder(tmp_path / "a") / "hf").mkdir()
    (tmp_path / "a" / "hf" / "config.json").write_text('{"architectures": ["LlamaForCausalLM"]}')
    page = look(serve(tmp_path))
    go(page, "chat", ".talks")
    page.get_by_label("message").fill("hello")
    page.get_by_role("button", name="send").click()
    expect(page.get_by_role("alert")).to_contain_text("choose a model first")
    choice(page, "model").select_option("a")
    expect(page.get_by_role("alert")).to_be_hidden()
    page.get_by_role("button", name="send").click()
    expect(page.get_by_role("button", name="send")).to_be_disabled()
    expect(page.get_by_role("alert")).to_be_hidden()
    loaded.set()
    expect(page.locator(".turn.own pre")).to_have_text("heard hello")


@pytest.mark.slow
def test_names_break_between_words_and_logs_are_text(look, serve, tmp_path):
    name = "quickstart_grpo-of_a-long_name.with_many-parts"
    folder = run_folder(tmp_path / name)
    (folder / "metrics.jsonl").write_text('{"step": 1, "reward/mean": 1.0, "eval/accuracy": 0.5}\n')
    (folder / "logs").mkdir()
    (folder / "logs" / "board.log").write_text(f"{HOSTILE}\nerror: the end\n")
    page = look(serve(tmp_path), width=PHONE["width"])
    label = page.locator("label.choice span").first
    assert label.text_content() == name and fits_a_phone(page)
    lines = page.evaluate(LINES)
    assert "".join(lines) == name and all(line[-1] in "_-." for line in lines[:-1])
    log = page.locator("pre.log")
    assert log.text_content() == f"{HOSTILE}\nerror: the end\n" and page.title() == "aligner board"
    go(page, "curves", "figure")
    assert "eval/accuracy" in page.locator("figure").first.inner_text()


# the text of each line of the first name, as the browser breaks it
LINES = """() => {
  const element = document.querySelector("label.choice span");
  const found = []; let top = null;
  const walk = document.createTreeWalker(element, NodeFilter.SHOW_TEXT);
  for (let node = walk.nextNode(); node; node = walk.nextNode())
    for (let i = 0; i < node.length; i++) {
      const range = document.createRange();
      range.setStart(node, i); range.setEnd(node, i + 1);
      const y = range.getBoundingClientRect().top;
      if (top === null || Math.abs(y - top) > 3) found.push("");
      top = y;
      found[found.length - 1] += node.data[i];
    }
  return found;
}"""
