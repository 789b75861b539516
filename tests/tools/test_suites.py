"""Evaluation suites against `aligner serve`, unchanged: lm-evaluation-harness by completions, Inspect by chat."""

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from statistics import mean

import datasets
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from aligner.builders import suites
from aligner.config.resolve import compose
from aligner.environments.endpoint import loopback
from aligner.errors import ConfigError, SuiteError
from aligner.rollout.suites import HarnessProcess
from aligner.tools.serve import open_model
from tests import stages
from tests.needs import lacking, package
from tests.run import jobs
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
from inspect_ai.model import GenerateConfig
from inspect_ai.scorer import includes
from inspect_ai.solver import generate

@task
def vowels():
    return Task(dataset=json_dataset("rows.jsonl"), solver=generate(), scorer=includes())
"""


ROWS = [{"prompt": f"say {letter * n}:", "answer": "ab".index(letter)} for letter in "ab" for n in (1, 2, 5)]
TASKS = ["vowels_multiple_choice", "vowels_generate_until"]
METRICS = ["eval/vowels_multiple_choice/acc", "eval/vowels_generate_until/exact_match"]
CHATS, INCLUDED = "inspect/vowels.py@vowels", "eval/inspect/vowels/includes/accuracy"
ABSENT = "task: absent\ndataset_path: aligner/absent\ntest_split: test\noutput_type: generate_until\ndoc_to_text: x\n"


def write_tasks(folder):
    """Tasks of the harness on `ROWS`, one of long answers, and one whose data set is nowhere."""
    data = folder / "rows.jsonl"
    data.write_text("\n".join(map(json.dumps, ROWS)))
    files = {"data": data, "cache": folder / "cache"}
    (folder / "scored.yaml").write_text(SCORED.format(kind="multiple_choice", **files))
    (folder / "generated.yaml").write_text(GENERATED.format(kind="generate_until", **files))
    long = (folder / "generated.yaml").read_text().replace("vowels_generate_until", "long")
    (folder / "long.yaml").write_text(long.replace("max_gen_toks: 4", "max_gen_toks: 63"))
    (folder / "absent.yaml").write_text(ABSENT)
    questions = [{"input": row["prompt"], "target": target} for row, target in zip(ROWS, "aeiou?", strict=True)]
    (folder / "chats.jsonl").write_text("\n".join(map(json.dumps, questions)))
    task = INSPECT.replace("rows.jsonl", "chats.jsonl")
    (folder / "vowels.py").write_text(task)
    (folder / "wordy.py").write_text(task.replace(" Task(", " Task(config=GenerateConfig(max_tokens=63), "))
    return folder


def choices_of(model, tokenizer, prompt):
    """(sum of logprobs, whether it is the greedy one) of each choice, by transformers."""
    scores = []
    for choice in ("a", "bb", "ccc"):
        start = tokenizer.encode(prompt, add_special_tokens=False)
        tokens = tokenizer.encode(f"{prompt} {choice}", add_special_tokens=False)
        logits = model(torch.tensor([tokens])).logits[0, len(start) - 1 : -1]
        goal = torch.tensor(tokens[len(start) :])[:, None]
        right = bool((logits.argmax(-1) == goal[:, 0]).all())
        scores.append((float(logits.log_softmax(-1).gather(1, goal).sum()), right))
    return scores


def line_of(model, tokenizer, prompt):
    """The greedy answer to its first newline, by transformers."""
    start = tokenizer(prompt, add_special_tokens=False, return_tensors="pt")
    out = model.generate(**start, max_new_tokens=4, do_sample=False)[0, start.input_ids.shape[1] :]
    return tokenizer.decode(out, skip_special_tokens=True).partition("\n")[0]


@torch.no_grad()
def included_of(folder):
    """INCLUDED of the first five rows, by transformers."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokenizer, right = AutoTokenizer.from_pretrained(folder), []
    for row, target in zip(ROWS[:5], "aeiou", strict=True):
        chat = [{"role": "user", "content": row["prompt"]}]
        start = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
        out = model.generate(**start, max_new_tokens=4, do_sample=False)[0, start.input_ids.shape[1] :]
        right.append(target in tokenizer.decode(out).lower())
    return mean(right)


@torch.no_grad()
def scores_of(folder):
    """METRICS of the first five rows, by transformers."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    scored = [[score for score, _ in choices_of(model, tokenizer, row["prompt"])] for row in ROWS[:5]]
    right = [scores.index(max(scores)) == row["answer"] for scores, row in zip(scored, ROWS, strict=False)]
    return [mean(right), mean(line_of(model, tokenizer, row["prompt"]) == "a" for row in ROWS[:5])]


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
    write_tasks(tmp_path)
    # without the index of the package's own tasks, which takes a minute to read
    own = tasks.TaskManager(include_path=str(tmp_path), include_defaults=False)
    results = lm_eval.simple_evaluate(
        "local-completions",
        model_args=f"model=sft,base_url={url}/completions,tokenizer={model_folder},max_length=64",
        tasks=TASKS,
        task_manager=own,
        batch_size=4,
        bootstrap_iters=0,
    )["samples"]

    model = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(model_folder)
    for sample, row in zip(results["vowels_multiple_choice"], ROWS, strict=True):
        wanted = choices_of(model, tokenizer, row["prompt"])
        for (actual, greedy), (logprob, right) in zip(sample["filtered_resps"], wanted, strict=True):
            assert float(actual) == pytest.approx(logprob, abs=1e-4) and str(greedy) == str(right)
    for sample, row in zip(results["vowels_generate_until"], ROWS, strict=True):
        assert sample["filtered_resps"] == [line_of(model, tokenizer, row["prompt"])]


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


@pytest.fixture(scope="module")
def harness(tmp_path_factory):
    """restart(settings, log) -> one process of the harness for all tests, as its imports take seconds."""
    package("lm_eval")
    processes = []

    def restart(settings, log):
        if processes:
            processes[0].send(settings)
        else:
            processes.append(HarnessProcess(settings, log))
        return processes[0]

    return restart


def test_a_stage_is_evaluated_by_tasks_and_trains_as_without(harness, tiny_data, tmp_path, monkeypatch):
    """Before, between and after its steps, each of its own weights; and no bit of the training differs."""
    monkeypatch.setattr(suites, "HarnessProcess", harness)
    tasks = ",".join([*TASKS, CHATS][: 2 + (find_spec("inspect_ai") is not None)])
    settings = [f"eval.tasks_folder={write_tasks(tmp_path)}", f"eval.tasks=[{tasks}]", "run.eval_every=1"]
    settings += ["run.steps=2", "optim.lr=0.05", "eval.prompts=5"]
    plain = stages.stage("grpo", tiny_data, tmp_path / "plain", *settings[3:])
    run = stages.stage("grpo", tiny_data, tmp_path / "run", *settings)
    steps = [[{k: v for k, v in r.items() if k[:5] != "eval/"} for r in stages.timeless(f)[-2:]] for f in (plain, run)]
    assert steps[0] == steps[1] and len(steps[0][1]) > 20 and stages.same_weights(plain, run)
    assert [[name in record for name in METRICS] for record in stages.records(run)] == [[True, True]] * 3
    assert [stages.records(run)[-1][name] for name in METRICS] == scores_of(run / "hf")
    if CHATS in tasks:
        assert [INCLUDED in record for record in stages.records(run)] == [True] * 3
        assert stages.records(run)[-1][INCLUDED] == included_of(run / "hf")


def test_a_suite_that_fails_ends_the_run_which_measures_again_only_what_it_lacks(
    harness, tiny_data, tmp_path, monkeypatch
):
    """The step is saved first; a start of the finished run measures nothing."""
    monkeypatch.setattr(suites, "HarnessProcess", harness)
    begin, addresses = HarnessProcess.begin, []

    def counted(self, url, over):
        addresses.append(url)
        begin(self, "http://127.0.0.1:9/nobody" if len(addresses) == 2 else url, over)

    monkeypatch.setattr(HarnessProcess, "begin", counted)
    settings = [f"eval.tasks_folder={write_tasks(tmp_path)}", f"eval.tasks=[{TASKS[1]}]", "run.eval_every=1"]
    settings += ["run.steps=2", "checkpoint.every=9"]
    with pytest.raises(SuiteError, match=r"^eval.tasks: a suite failed: .*log\.txt\)$"):
        stages.stage("grpo", tiny_data, tmp_path / "run", *settings)
    assert stages.checkpoints(tmp_path / "run") == [1] and len(addresses) == 2
    for _ in range(2):
        run = stages.stage("grpo", tiny_data, tmp_path / "run", *settings)
        assert [METRICS[1] in record for record in stages.records(run)] == [True] * 3 and len(addresses) == 4


@pytest.mark.multirank
def test_engines_on_ranks_of_their_own_answer_tasks(ranks, tiny_data, tmp_path):
    package("lm_eval")
    settings = [f"eval.tasks_folder={write_tasks(tmp_path)}", f"eval.tasks=[{','.join(TASKS)}]", "engine.ranks=1"]
    settings += ["run.steps=1", "optim.lr=0.05", "eval.prompts=5"]
    arguments = stages.overrides("grpo", tiny_data, tmp_path / "run", *settings)
    assert ranks.run(jobs.run_stage, world=2, arguments=arguments) == [0, 0]
    assert [stages.records(tmp_path / "run")[-1][name] for name in METRICS] == scores_of(tmp_path / "run/hf")


@pytest.mark.parametrize(
    ("task", "words"),
    [
        (
            "absent",
            r"eval.tasks='absent': expected a task whose data set is in \S+: a run downloads nothing. On a "
            r"login node, with the same HF_HOME: python -m aligner.rollout.harness_process absent$",
        ),
        ("long", r"eval.tasks='long': expected tasks with answers of at most 62 tokens.* generates up to 63"),
        ("inspect/wordy.py", r"eval.tasks='inspect/vowels': expected tasks with answers of at most 62 tokens"),
        (CHATS.replace("vowels.py", "none.py"), r"eval.tasks='inspect/none.py@vowels': expected inspect/ and what"),
        (f"{CHATS}s", r"eval.tasks='inspect/vowels.py@vowelss': expected tasks that Inspect loads. \w+: .*vowelss"),
    ],
)
def test_a_task_that_cannot_run_is_refused_before_training(task, words, harness, tiny_data, tmp_path, monkeypatch):
    if "/" in task and find_spec("inspect_ai") is None:
        lacking("inspect_ai is not installed")
    monkeypatch.setattr(suites, "HarnessProcess", harness)
    folder = write_tasks(tmp_path)
    with pytest.raises(ConfigError, match=words):
        settings = [f"eval.tasks_folder={folder}", f"eval.tasks=[{task}]"]
        stages.stage("grpo", tiny_data, tmp_path / "run", *settings)
    assert not (tmp_path / "run/metrics.jsonl").exists()
