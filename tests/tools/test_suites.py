"""Evaluation suites against `aligner serve`, unchanged: lm-evaluation-harness by completions, Inspect by chat."""

import json
import os
import subprocess
import sys
from importlib.util import find_spec

import datasets
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from aligner.config.resolve import compose
from aligner.environments.endpoint import loopback
from aligner.tools.serve import open_model
from tests.needs import lacking, package
from tests.tools.serving import listening

pytestmark = pytest.mark.slow

CHOICES = """
task: vowels_{kind}
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}, cache_dir: {cache}}}
test_split: test
output_type: {kind}
doc_to_text: "{{{{prompt}}}}"
"""
SCORED = (
    CHOICES
    + """doc_to_choice: [a, bb, ccc]
doc_to_target: "{{{{answer}}}}"
metric_list: [{{metric: acc}}]
"""
)
GENERATED = (
    CHOICES
    + """doc_to_target: a
generation_kwargs: {{until: ["\\n"], max_gen_toks: 4}}
metric_list: [{{metric: exact_match}}]
"""
)
INSPECT = """
from inspect_ai import Task, task
from inspect_ai.dataset import json_dataset
from inspect_ai.scorer import includes
from inspect_ai.solver import generate

@task
def vowels():
    return Task(dataset=json_dataset("rows.jsonl"), solver=generate(), scorer=includes())
"""


@pytest.fixture
def server(tiny_runs, monkeypatch):
    """Return (URL, folder of the model)."""
    served = open_model(compose([f"run.dir={tiny_runs['sft']}", "engine.dtype=float32"]))
    listener = loopback()
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    with listening(served, listener):
        yield f"http://127.0.0.1:{listener.getsockname()[1]}/{served.secret}/v1", tiny_runs["sft"] / "hf"


@torch.no_grad()
def test_lm_evaluation_harness_has_the_logprobs_and_texts_of_transformers(server, tmp_path, monkeypatch):
    lm_eval, tasks = package("lm_eval"), package("lm_eval.tasks")
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    url, model_folder = server
    rows = [{"prompt": f"say {letter * n}:", "answer": "ab".index(letter)} for letter in "ab" for n in (1, 2, 5)]
    data = tmp_path / "rows.jsonl"
    data.write_text("\n".join(map(json.dumps, rows)))
    files = {"data": data, "cache": tmp_path / "cache"}
    (tmp_path / "scored.yaml").write_text(SCORED.format(kind="multiple_choice", **files))
    (tmp_path / "generated.yaml").write_text(GENERATED.format(kind="generate_until", **files))
    # without the index of the package's own tasks, which takes a minute to read
    own = tasks.TaskManager(include_path=str(tmp_path), include_defaults=False)
    results = lm_eval.simple_evaluate(
        "local-completions",
        model_args=f"model=sft,base_url={url}/completions,tokenizer={model_folder},max_length=64",
        tasks=["vowels_multiple_choice", "vowels_generate_until"],
        task_manager=own,
        batch_size=4,
        bootstrap_iters=0,
    )["samples"]

    model = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(model_folder)
    for sample, row in zip(results["vowels_multiple_choice"], rows, strict=True):
        for choice, (actual, greedy) in zip(("a", "bb", "ccc"), sample["filtered_resps"], strict=True):
            prompt = tokenizer.encode(row["prompt"], add_special_tokens=False)
            tokens = tokenizer.encode(f"{row['prompt']} {choice}", add_special_tokens=False)
            logits = model(torch.tensor([tokens])).logits[0, len(prompt) - 1 : -1]
            goal = torch.tensor(tokens[len(prompt) :])[:, None]
            assert float(actual) == pytest.approx(float(logits.log_softmax(-1).gather(1, goal).sum()), abs=1e-4)
            assert str(greedy) == str(bool((logits.argmax(-1) == goal[:, 0]).all()))
    for sample, row in zip(results["vowels_generate_until"], rows, strict=True):
        prompt = tokenizer(row["prompt"], add_special_tokens=False, return_tensors="pt")
        out = model.generate(**prompt, max_new_tokens=4, do_sample=False)[0, prompt.input_ids.shape[1] :]
        assert sample["filtered_resps"] == [tokenizer.decode(out, skip_special_tokens=True).partition("\n")[0]]


def test_inspect_queries_the_chat_api(server, tmp_path):
    if find_spec("inspect_ai") is None:  # its import takes seconds, and this process does not need it
        lacking("inspect_ai is not installed")
    url, _ = server
    (tmp_path / "rows.jsonl").write_text('{"input": "say a:", "target": "a"}\n{"input": "say b:", "target": "b"}\n')
    (tmp_path / "vowels.py").write_text(INSPECT)
    env = os.environ | {"ALIGNER_BASE_URL": url, "ALIGNER_API_KEY": "none"}
    env |= {"INSPECT_DISPLAY": "none", "INSPECT_LOG_FORMAT": "json"}
    command = [sys.executable, "-m", "inspect_ai", "eval", "vowels.py", "--model", "openai-api/aligner/sft"]
    command += ["--max-tokens", "4", "--log-dir", "out"]
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-6000:]
    (path,) = (tmp_path / "out").glob("*.json")
    log = json.loads(path.read_text())
    assert log["status"] == "success", log["error"]["message"]
    assert log["results"]["completed_samples"] == 2
    assert all(sample["output"]["model"] == "sft" for sample in log["samples"])
