"""Bad input: a clear error (value, expectation, config key) before any training, and nothing is lost."""

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest

import aligner.__main__ as command_line
from aligner.errors import (
    CheckpointError,
    ConfigError,
    DataError,
    EnvironmentCodeError,
    LayoutError,
    RewardError,
    RewardPathError,
    UnknownKeyError,
    WriteError,
)
from tests import stages

REWARDS = "tests/assets/tiny_rewards.py"


def reward(path: str) -> str:
    return f"reward.functions=[{{path: '{path}'}}]"


# name: (stage, overrides, error, exit code, what the message holds); {x} are places that `prepare` makes
CASES = {
    "missing file": (
        "sft",
        ["data.train={d}/none.jsonl"],
        ConfigError,
        2,
        ["data.train=", "none.jsonl", "a path that exists"],
    ),
    "missing eval file": ("sft", ["data.eval={d}/none.jsonl"], ConfigError, 2, ["data.eval=", "none.jsonl"]),
    "malformed JSON": (
        "sft",
        ["data.train={x}/torn.jsonl"],
        DataError,
        2,
        ["data.train", "torn.jsonl:3", "not valid JSON", '{"prompt": "c"'],
    ),
    "not UTF-8": ("sft", ["data.train={x}/latin.jsonl"], DataError, 2, ["data.train", "latin.jsonl", "UTF-8"]),
    "pairs for sft": (
        "sft",
        ["data.train={d}/pairs.jsonl"],
        DataError,
        2,
        ["pairs.jsonl, row 1", "{messages} or {prompt, completion}", "data.columns"],
    ),
    "answers for rm": (
        "rm",
        ["data.train={d}/train.jsonl"],
        DataError,
        2,
        ["train.jsonl, row 1", "{chosen, rejected}", "found prompt, completion"],
    ),
    "empty answer": (
        "dpo",
        ["data.train={x}/empty_answer.jsonl"],
        DataError,
        2,
        ["empty_answer.jsonl, row 2", "some text in `rejected`"],
    ),
    "pairs of two prompts": (
        "dpo",
        ["data.train={x}/two_prompts.jsonl"],
        DataError,
        2,
        ["two_prompts.jsonl, row 1", "the same prompt"],
    ),
    "labels that are no booleans": (
        "kto",
        ["data.train={x}/numbers.jsonl"],
        DataError,
        2,
        ["numbers.jsonl, row 2", "label=0", "true or false"],
    ),
    "one label only": (
        "kto",
        ["data.train={x}/liked.jsonl"],
        DataError,
        2,
        ["data.train", "label true and answers with label false", "all are true"],
    ),
    "one label only in what is read of the held-out rows": (
        "kto",
        ["data.train={d}/labels.jsonl", "data.eval={d}/labels.jsonl", "eval.prompts=1"],
        DataError,
        2,
        ["eval.prompts=1", "data.eval", "all are true"],
    ),
    "empty answer with a label": (
        "kto",
        ["data.train={x}/empty_answer.jsonl"],
        DataError,
        2,
        ["empty_answer.jsonl, row 2", "some text in `rejected`"],
    ),
    "answers without labels": (
        "kto",
        ["data.train={d}/train.jsonl"],
        DataError,
        2,
        ["train.jsonl, row 1", "{prompt, completion, label} or {chosen, rejected}", "found prompt, completion"],
    ),
    "one sample and no other to compare with": (
        "kto",
        ["batch.sequences=1", "batch.micro_batch_samples=1"],
        ConfigError,
        2,
        ["batch.sequences=1", "at least 2", "algorithm.kto.kl=minibatch"],
    ),
    "kto without a reference": (
        "kto",
        ["algorithm.kto.reference=none"],
        ConfigError,
        2,
        ["algorithm.kto.reference='none'", "model, stored"],
    ),
    "no rewards": (
        "dpo",
        ["algorithm.preference.loss=[rpo_sq]"],
        DataError,
        2,
        ["pairs.jsonl, row 1", "`chosen_reward`", "algorithm.preference.loss"],
    ),
    "no row weights": (
        "dpo",
        ["algorithm.preference.row_weights=true"],
        DataError,
        2,
        ["pairs.jsonl, row 1", "`weight`", "algorithm.preference.row_weights"],
    ),
    "no teacher": ("distill", [], ConfigError, 2, ["algorithm.distill.teacher=''", "the model to learn from"]),
    "a teacher that is not there": (
        "distill",
        ["algorithm.distill.teacher={x}/nobody"],
        ConfigError,
        2,
        ["algorithm.distill.teacher=", "nobody", "a path that exists"],
    ),
    "a teacher with another tokenizer": (
        "distill",
        ["algorithm.distill.teacher={sft}", "model.tokenizer={x}/swapped"],
        ConfigError,
        2,
        ["algorithm.distill.teacher=", "the student's tokenizer", "259 of them the same", "teacher_prompt={prompt}"],
    ),
    **{
        f"{key} with a teacher of another tokenizer": (
            "distill",
            [
                "algorithm.distill={teacher: {sft}, on_policy: 1, teacher_prompt: '{prompt}', kind: reverse_kl}",
                f"algorithm.distill.{key}={value}",
                "model.tokenizer={x}/swapped",
            ],
            ConfigError,
            2,
            [f"algorithm.distill.{key}=", f"{wanted} with algorithm.distill.teacher=", "259 of them the same"],
        )
        for key, value, wanted in (("top_k", "3", "0"), ("kind", "jsd", "reverse_kl"), ("temperature", "2", "1.0"))
    },
    "a teacher of a name that is not there": (
        "distill",
        ["algorithm.distill.teachers={a: {sft}, b: {x}/nobody}"],
        ConfigError,
        2,
        ["algorithm.distill.teachers.b=", "nobody", "a path that exists"],
    ),
    "one of several teachers with another tokenizer": (
        "distill",
        ["algorithm.distill.teachers={a: {sft}}", "data.train={x}/named.jsonl", "model.tokenizer={x}/swapped"],
        ConfigError,
        2,
        ["algorithm.distill.teachers.a=", "the student's tokenizer", "259 of them the same"],
    ),
    "documents of several teachers": (
        "distill",
        ["algorithm.distill.teachers={a: {sft}}", "data.format=text"],
        ConfigError,
        2,
        ["data.format='text'", "rows with answers"],
    ),
    "a row without a teacher": (
        "distill",
        ["algorithm.distill.teachers={a: {sft}, b: {sft}}", "data.train={x}/unnamed.jsonl"],
        DataError,
        2,
        ["unnamed.jsonl, row 2", "teacher=None", "a, b"],
    ),
    "a row of an unknown teacher": (
        "distill",
        [
            "algorithm.distill.teachers={a: {sft}}",
            "algorithm.distill={teacher_column: who, on_policy: 1}",
            "data.train={x}/unnamed.jsonl",
        ],
        DataError,
        2,
        ["unnamed.jsonl, row 2", "who='c'", "the name of a teacher: a ", "algorithm.distill.teacher_column"],
    ),
    "a tool without type hints": (
        "grpo",
        ["environment.tools=['tests/assets/environments.py:bare']", "environment.max_tokens=32"],
        EnvironmentCodeError,
        2,
        ["the tool `bare`", "a type hint"],
    ),
    "an environment without reset": (
        "grpo",
        ["environment.path=tests/assets/environments.py:NoReset", "environment.max_tokens=32"],
        EnvironmentCodeError,
        2,
        ["environment.path=", "a method reset(self, seed, **row)"],
    ),
    "a template without tools": (
        "grpo",
        ["environment.tools=['tests/assets/environments.py:add']", "environment.max_tokens=32"],
        ConfigError,
        2,
        ["model.tokenizer=", "shows the tools", "data.chat_template"],
    ),
    "a teacher of scores": (
        "distill",
        ["algorithm.distill.teacher={rm}", "model.tokenizer={d}/tokenizer"],
        ConfigError,
        2,
        ["algorithm.distill.teacher=", "a language model", "a head of scores"],
    ),
    "more tokens than there are": (
        "distill",
        ["algorithm.distill={teacher: {sft}, top_k: 999}"],
        ConfigError,
        2,
        ["algorithm.distill.top_k=999", "tokens of the vocabulary"],
    ),
    "no prompts for grpo": (
        "grpo",
        ["data.train={x}/other.jsonl"],
        DataError,
        2,
        ["other.jsonl, row 1", "{prompt}", "found question"],
    ),
    "no answers of their own": (
        "sample",
        ["data.train={d}/pairs.jsonl", "stage.sample.pairs=answers"],
        DataError,
        2,
        ["pairs.jsonl, row 1", "`completion`", "stage.sample.pairs=answers"],
    ),
    "a column that is taken": (
        "sample",
        ["stage.sample.column=reward"],
        ConfigError,
        2,
        ["stage.sample.column='reward'", "a name other than prompt, row"],
    ),
    "no margins": (
        "rm",
        ["algorithm.reward_loss.margin=true", "data.train={x}/plain_pairs.jsonl"],
        DataError,
        2,
        ["margin", "algorithm.reward_loss.margin", "row 1"],
    ),
    "empty dataset": (
        "grpo",
        ["data.train={x}/empty.jsonl"],
        DataError,
        2,
        ["data.train=", "empty.jsonl", "at least one row"],
    ),
    "prompts too long": (
        "grpo",
        ["data.max_prompt_tokens=3"],
        DataError,
        2,
        ["data.max_prompt_tokens=3", "all 32 rows were dropped", "shortest has 6 tokens"],
    ),
    "rows too long": ("sft", ["data.max_tokens=4"], DataError, 2, ["data.max_tokens=4", "all 32 rows were dropped"]),
    "no rows to learn beside": ("sft", ["ptx.coef=0.1"], ConfigError, 2, ["ptx.data.train=''", "ptx.coef > 0"]),
    "prompts to learn beside": (
        "grpo",
        ["ptx={coef: 0.1, data: {train: '{x}/other.jsonl', max_tokens: 32}}"],
        DataError,
        2,
        ["other.jsonl, row 1", "{prompt, completion}"],
    ),
    "no room for answers": (
        "grpo",
        ["sampling.max_response_tokens=60"],
        ConfigError,
        2,
        ["sampling.max_response_tokens=60", "model.max_position=64", "data.max_prompt_tokens=16"],
    ),
    "no tokenizer": (
        "sft",
        ["model.tokenizer={x}/none"],
        DataError,
        2,
        ["model.tokenizer=", "none", "Hugging Face tokenizer"],
    ),
    "no EOS": (
        "sft",
        ["model.tokenizer={x}/no_eos"],
        DataError,
        2,
        ["model.tokenizer=", "expected an EOS token", "eos_token"],
    ),
    "no chat template": (
        "sft",
        ["model.tokenizer={x}/no_chat", "data.train={x}/chat.jsonl"],
        DataError,
        2,
        ["chat template", "model.tokenizer"],
    ),
    "vocabulary mismatch": (
        "sft",
        ["model.init={sft}", "model.tokenizer={x}/larger"],
        ConfigError,
        2,
        ["model.vocab_size=261", "at least 264", "model.init and model.tokenizer"],
    ),
    "vocabulary too small": ("sft", ["model.vocab_size=100"], ConfigError, 2, ["model.vocab_size=100", "at least 261"]),
    "init is no model": (
        "sft",
        ["model.init={d}"],
        ConfigError,
        2,
        ["model.init=", "config.json", "a run folder or a checkpoint"],
    ),
    "reward model of another tokenizer": (
        "ppo",
        ["model.init={sft}", "reward.model={rm}", "model.tokenizer={x}/swapped"],
        ConfigError,
        2,
        ["reward.model=", "the policy's tokenizer"],
    ),
    "world size": ("sft", ["parallel=tp2"], LayoutError, 2, ["world size=1", "a multiple of", "=2", "--ranks"]),
    "world size with pipeline": (
        "sft",
        ["parallel.tensor=2", "parallel.pipeline=2", "--ranks=6"],
        LayoutError,
        2,
        ["world size=6", "2*2*1=4"],
    ),
    "heads": (
        "sft",
        ["parallel.tensor=4", "--ranks=4"],
        LayoutError,
        2,
        ["model.num_kv_heads=2", "a multiple of parallel.tensor=4"],
    ),
    "layers": (
        "sft",
        ["parallel.pipeline=4", "--ranks=4"],
        LayoutError,
        2,
        ["parallel.pipeline=4", "at most 2", "model.num_layers=2"],
    ),
    "heads of the model": (
        "sft",
        ["model.num_kv_heads=3"],
        ConfigError,
        2,
        ["model.num_kv_heads=3", "a divisor of model.num_heads=4"],
    ),
    "hidden size": (
        "sft",
        ["model.hidden_size=30"],
        ConfigError,
        2,
        ["model.hidden_size=30", "a multiple of model.num_heads=4"],
    ),
    "global batch over ranks": (
        "sft",
        ["batch.sequences=15", "--ranks=2"],
        LayoutError,
        2,
        ["batch.sequences=15", "a multiple of the 2 data-parallel ranks"],
    ),
    "micro-batches": (
        "sft",
        ["batch.sequences=12"],
        ConfigError,
        2,
        ["batch.micro_batch_samples=8", "a divisor of", "=12"],
    ),
    "minibatches": (
        "grpo",
        ["batch.minibatch_samples=7"],
        ConfigError,
        2,
        ["batch.minibatch_samples=7", "a divisor of batch.prompts*group=8*4=32"],
    ),
    "group of one": ("grpo", ["batch.group=1"], ConfigError, 2, ["batch.group=1", "at least 2", "grpo"]),
    "unknown key": (
        "sft",
        ["optim.learning_rate=1"],
        UnknownKeyError,
        2,
        ["`optim.learning_rate`", "Did you mean `optim."],
    ),
    "misspelt key": (
        "grpo",
        ["samplin.temperature=1"],
        UnknownKeyError,
        2,
        ["`samplin.temperature`", "Did you mean `sampling.temperature`"],
    ),
    "kernel without a GPU": (
        "sft",
        ["model.varlen_attention=true"],
        ConfigError,
        2,
        ["model.varlen_attention=True", "CUDA"],
    ),
    "field of Megatron's that a key decides": (
        "sft",
        ["optim.megatron.use_distributed_optimizer=true"],
        ConfigError,
        2,
        ["optim.megatron.use_distributed_optimizer=True", "it is decided by optim.distributed. Remove it."],
    ),
    "FP8 without TransformerEngine": (
        "sft",
        ["model={megatron: {fp8: hybrid, fp8_recipe: tensorwise}, dtype: bfloat16, head_dim: 16}"],
        ConfigError,
        2,
        ["model.megatron.fp8='hybrid'", "a device with FP8, and TransformerEngine", "it is not installed"],
    ),
    "TransformerEngine's Adam without it": (
        "sft",
        ["optim.megatron.use_precision_aware_optimizer=true", "data.train={x}/torn.jsonl"],  # which is read later
        ConfigError,
        2,
        ["optim.megatron.use_precision_aware_optimizer=True", "TransformerEngine is not used here"],
    ),
    "wrong type": ("sft", ["run.steps=many"], ConfigError, 2, ["run.steps='many'", "integer"]),
    "out of range": ("sft", ["optim.lr=-1"], ConfigError, 2, ["optim.lr=-1", "a number > 0"]),
    "not a choice": (
        "grpo",
        ["algorithm.policy_loss=pppo"],
        ConfigError,
        2,
        ["algorithm.policy_loss='pppo'", "one of"],
    ),
    "no reward": ("grpo", ["reward.functions=[]"], ConfigError, 2, ["reward.functions=[]", "at least one function"]),
    "reward module missing": (
        "grpo",
        [reward("no_such_module:f")],
        RewardPathError,
        2,
        ["reward.functions[0].path='no_such_module:f'", "ModuleNotFoundError"],
    ),
    "reward file missing": (
        "grpo",
        [reward("{x}/none.py:f")],
        RewardPathError,
        2,
        ["reward.functions[0].path=", "none.py", "FileNotFoundError"],
    ),
    "reward function missing": (
        "grpo",
        [reward(f"{REWARDS}:vowel")],
        RewardPathError,
        2,
        ["reward.functions[0].path=", "a function `vowel`", "vowels"],
    ),
    "reward file broken": (
        "grpo",
        [reward("{x}/broken.py:f")],
        RewardPathError,
        2,
        ["reward.functions[0].path=", "broken.py", "SyntaxError"],
    ),
    "reward raises": (
        "grpo",
        [reward(f"{REWARDS}:raises")],
        RewardError,
        1,
        ["reward `raises`", "reward.functions[0].path", "KeyError", "prompt 0, sample 0"],
    ),
    "reward of wrong length": (
        "grpo",
        [reward(f"{REWARDS}:one_too_many")],
        RewardError,
        1,
        ["reward `one_too_many` returned 3 scores", "expected 2"],
    ),
    "reward is NaN": (
        "grpo",
        [reward(f"{REWARDS}:not_a_number")],
        RewardError,
        1,
        ["reward `not_a_number` returned nan", "a finite number or None", "response '0'"],
    ),
    "resume from another model": (
        "sft",
        ["run.resume={rm}/checkpoints/step-00000020"],
        CheckpointError,
        2,
        ["belongs to another run", "stage is 'rm' there, 'sft' here", "run.resume"],
    ),
    "resume from nothing": ("sft", ["run.resume={d}/none"], ConfigError, 2, ["run.resume=", "a path that exists"]),
    "resume from no checkpoint": (
        "sft",
        ["run.resume={d}"],
        CheckpointError,
        2,
        ["expected a checkpoint", "run.resume"],
    ),
}


@pytest.fixture(scope="module")
def places(tiny_data, tiny_runs, tmp_path_factory):
    """The broken files that the cases name."""
    from aligner.data.tokenizer import train_tokenizer

    x = tmp_path_factory.mktemp("bad")
    (x / "torn.jsonl").write_text('{"prompt": "a", "completion": "b"}\n\n{"prompt": "c"\n')
    (x / "latin.jsonl").write_bytes(b'{"prompt": "\xe9t\xe9", "completion": "b"}\n')
    (x / "other.jsonl").write_text('{"question": "a"}\n')
    rows = [{"prompt": "a", "chosen": "b", "rejected": answer} for answer in ("c", "")]
    stages.write_jsonl(x / "empty_answer.jsonl", rows)
    for name, labels in (("numbers", [True, 0]), ("liked", [True, True])):
        answers = [{"prompt": "a:", "completion": "b", "label": label} for label in labels]
        stages.write_jsonl(x / f"{name}.jsonl", answers)
    chats = [[{"role": "user", "content": q}, {"role": "assistant", "content": "x"}] for q in "ab"]
    stages.write_jsonl(x / "two_prompts.jsonl", [{"chosen": chats[0], "rejected": chats[1]}])
    (x / "plain_pairs.jsonl").write_text('{"prompt": "a", "chosen": "b", "rejected": "c"}\n')
    (x / "chat.jsonl").write_text(
        '{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}\n'
    )
    (x / "empty.jsonl").write_text("\n")
    named = [{"prompt": "a:", "completion": "b", "teacher": "a", "who": "a"}]
    stages.write_jsonl(x / "named.jsonl", named * 16)
    stages.write_jsonl(x / "unnamed.jsonl", [*named, {"prompt": "a:", "completion": "b", "who": "c"}])
    (x / "broken.py").write_text("def f(:\n")
    train_tokenizer(["say say say"] * 9, str(x / "larger"), 265)
    for name in ("no_eos", "no_chat", "swapped"):
        shutil.copytree(tiny_data / "tokenizer", x / name)
    edit(x / "no_eos" / "tokenizer_config.json", lambda c: c.update(eos_token=None))
    edit(x / "no_chat" / "tokenizer_config.json", lambda c: c.pop("chat_template", None))
    (x / "no_chat" / "chat_template.jinja").unlink(missing_ok=True)

    def swap(content):
        vocabulary = content["model"]["vocab"]
        vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]

    edit(x / "swapped" / "tokenizer.json", swap)
    return {"d": tiny_data, "x": x, "sft": tiny_runs["sft"], "rm": tiny_runs["rm"]}


def edit(path: Path, change) -> None:
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


@pytest.fixture(scope="module")
def earlier(tiny_data, tiny_runs, tmp_path_factory):
    """For each stage a run folder with one step done, made once."""
    root, made = tmp_path_factory.mktemp("earlier"), {}

    def get(stage: str) -> Path:
        if stage not in made:
            overrides = [f"reward.model={tiny_runs['rm']}", f"model.init={tiny_runs['sft']}"] if stage == "ppo" else []
            overrides += [f"algorithm.distill.teacher={tiny_runs['sft']}"] if stage == "distill" else []
            made[stage] = stages.stage(stage, tiny_data, root / stage, "run.steps=1", "run.export=false", *overrides)
        return made[stage]

    return get


@pytest.fixture
def refuse(monkeypatch, capsys):
    """Call the command line, which must refuse: (error, exit code, its line on stderr)."""
    messages = []
    say = command_line._say
    monkeypatch.setattr(command_line, "_say", lambda error, *rest: (messages.append(error), say(error, *rest)))
    monkeypatch.chdir(stages.ROOT)

    def call(arguments: list[str]):
        import torch

        ranks = [a for a in arguments if a.startswith("--ranks=")]
        arguments = [a for a in arguments if a not in ranks]
        capsys.readouterr()
        messages.clear()
        try:
            code = command_line.main([*(["launch", *ranks[0].split("=")] if ranks else ["run"]), *arguments])
        finally:
            torch.use_deterministic_algorithms(False)
        lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
        assert len(messages) == len(lines) == 1, (messages, lines)
        return messages[0], code, lines[0]

    return call


def contents(folder: Path) -> dict[str, bytes]:
    """Of all files but the config of a refused start: in a used folder that one waits beside the run's own."""
    first = not (folder / "checkpoints").exists()
    refused = ("config.yaml",) if first else ("config.pending.yaml",)
    files = (p for p in folder.rglob("*") if p.is_file() and p.name not in refused)
    return {str(p.relative_to(folder)): p.read_bytes() for p in files if "logs" not in p.parts}


@pytest.mark.few(20)
@pytest.mark.parametrize("name", CASES)
def test_bad_input(name, places, earlier, refuse, tiny_data, tmp_path):
    stage, change, kind, code, parts = CASES[name]
    for key, location in places.items():
        change = [text.replace("{" + key + "}", str(location)) for text in change]
    folders = [tmp_path / "fresh"]
    if name != "resume from another model":  # a run with checkpoints of its own goes on with those
        folders.append(shutil.copytree(earlier(stage), tmp_path / "used"))
    for run in folders:
        before = contents(run)
        overrides = [f"reward.model={places['rm']}", f"model.init={places['sft']}"] if stage == "ppo" else []
        error, actual, line = refuse(stages.overrides(stage, tiny_data, run, "run.steps=3", *overrides, *change))
        assert type(error).__name__ in (kind.__name__, "AnotherRunError") and isinstance(error, kind)
        assert actual == code == error.exit_code
        missing = [piece for piece in parts if piece not in line]
        assert not missing, f"{missing} not in: {line}"
        assert contents(run) == before  # no checkpoint, no metric, no sample; and what was there is there


def test_one_overlong_row_is_no_error_but_counted(tiny_data, tmp_path, capsys):
    rows = [json.loads(line) for line in (tiny_data / "train.jsonl").read_text().splitlines()]
    train = stages.write_jsonl(tmp_path / "train.jsonl", [*rows, {"prompt": "say " + "a" * 99, "completion": "a"}])
    overrides = ["run.steps=1", "run.export=false", "checkpoint.final=false", f"data.train={train}"]
    stages.stage("sft", tiny_data, tmp_path / "run", *overrides)
    assert "data.train: 33 rows, 32 kept, 1 dropped and 0 truncated by data.max_tokens=32" in capsys.readouterr().out


def test_a_file_stands_where_the_run_folder_should_be(tiny_data, refuse, tmp_path):
    for where in (tmp_path / "file", tmp_path / "file" / "run"):
        (tmp_path / "file").write_text("mine")
        error, code, line = refuse(stages.overrides("sft", tiny_data, where))
        assert isinstance(error, ConfigError) and code == 2
        assert f"run.dir='{where}': expected a folder that can be written" in line
    assert (tmp_path / "file").read_text() == "mine"


@pytest.fixture
def disk(tmp_path):
    """mount(size) -> a file system of its own (root only)."""
    folder, mounted = tmp_path / "disk", []

    def mount(options: str) -> Path:
        folder.mkdir(exist_ok=True)
        done = os.geteuid() == 0 and subprocess.run(
            ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(folder)], capture_output=True
        )
        if not done or done.returncode:
            pytest.skip("cannot mount a tmpfs here")
        mounted.append(folder)
        return folder

    yield mount
    for position in mounted:
        subprocess.run(["umount", str(position)], check=True)


def remount(folder: Path, options: str) -> None:
    subprocess.run(["mount", "-o", f"remount,{options}", str(folder)], check=True)


def test_a_read_only_run_folder(tiny_data, refuse, disk):
    folder = disk("size=1m")
    remount(folder, "ro")
    error, code, line = refuse(stages.overrides("sft", tiny_data, folder / "run"))
    assert isinstance(error, ConfigError) and code == 2 and "Read-only file system" in line
    assert f"run.dir='{folder / 'run'}': expected a folder that can be written" in line


def test_a_full_run_folder(tiny_data, refuse, disk):
    folder = disk("size=64k")
    with pytest.raises(OSError):
        (folder / "filler").write_bytes(bytes(1 << 20))
    error, code, line = refuse(stages.overrides("sft", tiny_data, folder / "run"))
    assert isinstance(error, ConfigError) and code == 2
    assert f"run.dir='{folder / 'run'}'" in line and "No space left on device" in line


@pytest.mark.slow
@pytest.mark.parametrize("stage", ["sft", "ppo"])
def test_a_folder_that_fills_up_loses_no_checkpoint(stage, tiny_data, places, refuse, disk, tmp_path):
    """The disk is full at some checkpoint: an error, the ones before it whole; with room, the run goes on."""
    overrides = ["run.steps=4", "checkpoint.every=1", "checkpoint.keep_last=9"]
    overrides += [f"reward.model={places['rm']}", f"model.init={places['sft']}"] if stage == "ppo" else []
    reference = stages.stage(stage, tiny_data, tmp_path / "reference", *overrides)
    one = sum(p.stat().st_size for p in (reference / "checkpoints" / "step-00000001").rglob("*"))
    folder = disk(f"size={int(one * 2.6) // 4096 * 4 + 100}k")
    run = folder / "run"
    error, code, line = refuse(stages.overrides(stage, tiny_data, run, *overrides))
    assert isinstance(error, CheckpointError) and code == 2
    assert (
        "step-0000000" in line
        and "no space left" in line
        and "run.dir" in line
        and "Earlier checkpoints are untouched" in line
    )
    kept = stages.checkpoints(run)
    assert kept and kept[-1] < 4 and not list((run / "checkpoints").glob("*.tmp"))
    remount(folder, "size=64m")
    stages.stage(stage, tiny_data, run, *overrides)
    assert stages.same_weights(run, reference)
    assert stages.differences(run, reference) == []


def test_no_room_for_the_exported_model(tiny_data, refuse, disk, tmp_path):
    folder = disk("size=100k")
    overrides = ["run.steps=1", "checkpoint.final=false", "run.resume=never"]
    error, code, line = refuse(stages.overrides("sft", tiny_data, folder / "run", *overrides))
    assert isinstance(error, WriteError) and error.transient and code == 1
    assert "hf" in line and "run.dir" in line and not (folder / "run" / "DONE").exists()
    remount(folder, "size=8m")
    stages.stage("sft", tiny_data, folder / "run", *overrides)
    assert (folder / "run" / "hf" / "config.json").exists()
