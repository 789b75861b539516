"""Composition: every override style works, every wrong one is refused with key, value and expectation."""

import math
import shlex
import subprocess
import sys
from dataclasses import asdict, is_dataclass
from pathlib import Path

import pytest
import yaml

from aligner.config.options import GROUPS, all_keys, key_type, leaves
from aligner.config.resolve import compose, compose_over, quoted, sweep
from aligner.config.schema import Config
from aligner.config.stages import STAGES
from aligner.errors import ConfigError, UnknownKeyError
from aligner.files import conf_dir

CONF = conf_dir()


@pytest.fixture
def user_conf(tmp_path):
    """A folder of config groups beside the project's; returns a function that adds a file."""

    def add(path: str, text: str) -> str:
        file = tmp_path / f"{path}.yaml"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
        return str(tmp_path)

    return add


def options(group):
    return sorted(path.stem for path in (CONF / group).glob("*.yaml"))


@pytest.mark.parametrize("group", [g for g in GROUPS if g != "experiment"])
def test_every_file_of_every_group_composes_and_takes_effect(group):
    assert options(group)
    for name in options(group):
        cfg = asdict(compose([f"{group}={name}"]))
        own = yaml.safe_load((CONF / group / f"{name}.yaml").read_text()) or {}
        expected = own if group == "stage" else {group: own}
        assert_contains(cfg, expected, f"{group}/{name}")


def assert_contains(whole, piece, where):
    for key, value in piece.items():
        if isinstance(value, dict):
            assert_contains(whole[key], value, f"{where}.{key}")
        elif isinstance(value, list) and any(isinstance(item, dict) for item in value):
            assert len(whole[key]) == len(value), f"{where}.{key}"
            assert_contains(dict(enumerate(whole[key])), dict(enumerate(value)), f"{where}.{key}")
        elif value == "auto":  # the schema may have told already what that is
            assert key in whole, f"{where}.{key}"
        elif not str(value).startswith("${"):  # an interpolation takes the value of another key
            assert whole[key] == value, f"{where}.{key}"


def lines_of(file):
    """Dotted key -> value of a file of conf/."""

    def walk(section, prefix):
        for name, value in section.items():
            if isinstance(value, dict) and f"{prefix}{name}" not in leaves():
                yield from walk(value, f"{prefix}{name}.")
            else:
                yield f"{prefix}{name}", value

    text = file.read_text()
    content = yaml.safe_load(text) or {}
    content.pop("defaults", None)
    return dict(walk(content, "" if "@package _global_" in text or file.parent == CONF else f"{file.parent.name}."))


def test_files_hold_only_what_differs_from_the_defaults():
    """But for what takes back another file's value: groups come before experiments, and these in the order asked."""
    files = {file: lines_of(file) for file in CONF.rglob("*.yaml")}

    def plain(key, value):
        return value == leaves()[key].default and isinstance(value, bool) == isinstance(leaves()[key].default, bool)

    def takes_back(file, key):
        beside = ("experiment", file.parent.name) if file.parent.name != "experiment" else ()
        others = (values for other, values in files.items() if other != file and other.parent.name not in beside)
        return any(key in values and not plain(key, values[key]) for values in others)

    needless = [
        f"{file.relative_to(CONF)}: {key}={value}"
        for file, values in files.items()
        for key, value in values.items()
        if plain(key, value) and not takes_back(file, key)
    ]
    assert not needless


@pytest.mark.parametrize("stage", STAGES)
def test_the_stage_brings_its_algorithm(stage):
    cfg = compose([f"stage={stage}"])
    assert cfg.stage.name == stage and cfg.run.dir == f"runs/{stage}"
    own = yaml.safe_load((CONF / "stage" / f"{stage}.yaml").read_text())
    assert_contains(asdict(cfg.algorithm), own.get("algorithm", {}), stage)


def test_an_algorithm_is_no_choice_of_a_file():
    with pytest.raises(ConfigError, match=r"algorithm='grpo': expected algorithm\.<key>=<value>.*stage=NAME"):
        compose(["stage=ppo", "algorithm=grpo"])


def test_an_experiment_selects_groups_and_the_command_line_beats_it(user_conf):
    text = "# @package _global_\ndefaults:\n  - override /stage: ppo\n  - override /model: qwen3_1.7b\n"
    folder = user_conf("experiment/mine", text + "run: {name: mine, steps: 7}\nbatch: {prompts: 96}\n")
    cfg = compose(["experiment=mine"], config_dir=folder)
    assert (cfg.stage.name, cfg.algorithm.advantage, cfg.model.num_layers) == ("ppo", "gae", 28)
    assert (cfg.run.steps, cfg.batch.prompts, cfg.run.dir) == (7, 96, "runs/mine")
    cfg = compose(["experiment=mine", "stage=grpo", "run.steps=9"], config_dir=folder)
    assert (cfg.stage.name, cfg.algorithm.advantage, cfg.run.steps, cfg.batch.prompts) == ("grpo", "grpo", 9, 96)


def test_a_config_knows_nothing_of_those_composed_before(user_conf):
    """Files of the project are read once, a user's each time; values of one config are in no other."""
    changed = compose(["stage=grpo", "sampling.top_p=0.5", "data.columns.prompt=question"])
    assert changed.sampling.top_p == 0.5 and changed.data.columns["prompt"] == "question"
    plain = compose(["stage=grpo"])
    assert plain.sampling.top_p == 1.0 and "prompt" not in plain.data.columns
    for steps in (7, 8):
        folder = user_conf("experiment/mine", f"# @package _global_\nrun: {{steps: {steps}}}\n")
        assert compose(["experiment=mine"], config_dir=folder).run.steps == steps


@pytest.mark.parametrize("over", [compose, lambda overrides: compose_over(compose(overrides[:1]), overrides[1:])])
def test_a_section_as_a_mapping_is_its_keys_one_by_one(over):
    cfg = over([
        "stage=distill",
        "algorithm.distill={top_k: 4, teachers: {math: a, code: 'b=c'}}",
        "data={columns: {prompt: q}, template_arguments: {deep: {er: 1}}}",
        "reward={model: x, model_attributes: {help: 0.5}, judges: [{question: '{response}'}]}",
        "algorithm.distill.teachers.more=d",
    ])  # fmt: skip
    assert cfg.algorithm.distill.teachers == {"math": "a", "code": "b=c", "more": "d"}
    assert cfg.algorithm.distill.top_k == 4 and cfg.algorithm.distill.kind == "forward_kl"
    assert cfg.data.columns == {"prompt": "q"} and cfg.data.template_arguments == {"deep": {"er": 1}}
    assert cfg.reward.model_attributes == {"help": 0.5} and cfg.reward.judges[0].question == "{response}"
    with pytest.raises(UnknownKeyError, match=r"algorithm.distill.teechers.*algorithm.distill.teachers"):
        over(["stage=distill", "algorithm.distill={teechers: {a: b}}"])


def test_values_of_every_kind():
    cfg = compose(
        [
            "optim.lr=1e-3",
            "model.tie_embeddings=false",
            "optim.betas=[0.8,0.9]",
            "reward.functions=[{path:a.py:f,weight:2},{path:math,args:{field:gold,deep:{n:1}}}]",
            "data.columns.prompt=question",
            "+data.columns.completion=answer",
            "critic.optim={lr:3e-5}",
            "++seed=5",
            "data.train='a b,c=d'",
        ]
    )
    assert (cfg.optim.lr, cfg.model.tie_embeddings, cfg.optim.betas) == (1e-3, False, [0.8, 0.9])
    assert [(f.path, f.weight) for f in cfg.reward.functions] == [("a.py:f", 2.0), ("math", 1.0)]
    assert cfg.reward.functions[1].args == {"field": "gold", "deep": {"n": 1}}
    assert cfg.data.columns == {"prompt": "question", "completion": "answer"}
    assert (cfg.critic.optim.lr, cfg.seed, cfg.data.train) == (3e-5, 5, "a b,c=d")


@pytest.mark.parametrize(
    ("override", "key", "suggestion"),
    [
        ("optim.lrr=1", "optim.lrr", "optim.lr"),
        ("lr=1", "lr", "optim.lr"),
        ("modell=tiny", "modell", "model"),
        ("batch.group_size=4", "batch.group_size", "batch.group"),
        ("group=4", "group", "batch.group"),
        ("+optim.momentums=1", "optim.momentums", None),
        ("+new.key=1", "new.key", None),
        ("++new.key=1", "new.key", None),
        ("~optim.lrr", "optim.lrr", "optim.lr"),
        ("logging/project=x", "logging/project", "logging.project"),
        ("hydra.run.dir=x", "hydra.run.dir", "run.dir"),
        ("reward.functions=[{pth:a}]", "reward.functions[].pth", "reward.functions[].path"),
        ("reward.functions=[{path:a,wight:1}]", "reward.functions[].wight", "reward.functions[].weight"),
        ("critic.optim={lrr:1}", "critic.optim.lrr", "critic.optim.lr"),
    ],
)
def test_unknown_keys_are_refused_with_the_nearest_name(override, key, suggestion):
    with pytest.raises(UnknownKeyError) as caught:
        compose([override])
    assert caught.value.key == key and f"`{key}`" in str(caught.value)
    if suggestion:
        assert f"`{suggestion}`" in str(caught.value)


@pytest.mark.parametrize(
    ("path", "text", "key"),
    [
        ("experiment/bad", "# @package _global_\noptim: {lrr: 1}\n", "optim.lrr"),
        ("experiment/bad", "# @package _global_\nfoo: 1\n", "foo"),
        ("model/bad", "layers: 3\n", "model.layers"),
        (
            "experiment/bad",
            "# @package _global_\nreward: {functions: [{path: x, wight: 3}]}\n",
            "reward.functions[].wight",
        ),
    ],
)
def test_unknown_keys_in_files_name_the_file(user_conf, path, text, key):
    with pytest.raises(UnknownKeyError) as caught:
        compose([path.replace("/", "=")], config_dir=user_conf(path, text))
    assert caught.value.key == key and f"{path}.yaml" in str(caught.value)


@pytest.mark.parametrize(
    ("override", "key", "value", "expected"),
    [
        ("optim.lr=abc", "optim.lr", "abc", "a number"),
        ("run.steps=1.5", "run.steps", 1.5, "an integer"),
        ("model.tie_embeddings=maybe", "model.tie_embeddings", "maybe", "true or false"),
        ("data.eval=null", "data.eval", None, "a string"),
        ("model.num_layers=[1]", "model.num_layers", [1], "an integer"),
        ("reward.functions=3", "reward.functions", 3, "a list"),
        ("debug=yes", "debug", "yes", "a section with the keys skip_refit"),
        ("optim.betas=[a,b]", "optim.betas[0]", "a", "a number"),
        ("reward.functions=[{path:a,weight:abc}]", "reward.functions[].weight", "abc", "a number"),
        ("optim.lr=-1", "optim.lr", -1.0, "> 0"),
        ("critic.optim.lr=-1", "critic.optim.lr", -1.0, "> 0"),
        ("stage.name=dqo", "stage.name", "dqo", "grpo"),
        ("~optim.lr", "optim.lr", "~", "cannot be deleted"),
        ("run.name=${nope}", "run.name", "${nope}", "nope"),
        ("optim.lr=1,2", "optim.lr", "1,2", "--multirun"),
        ("seed=range(0,3)", "seed", "range(0,3)", "--multirun"),
        ("model=foo", "model", "foo", "tiny"),
        ("stage=dqo", "stage", "dqo", ", ".join(sorted(STAGES))),
        ("optim.lr", "override", "optim.lr", "key=value"),
        ("=3", "override", "=3", "key=value"),
        ("optim=1", "optim", 1, "the name of one of its options"),
        ("optim=null", "optim", None, "the name of one of its options"),
        ("optim.lr=inf", "optim.lr", math.inf, "a finite number"),
        ("reward.functions=[{path:a,weight:-inf}]", "reward.functions[0].weight", -math.inf, "a finite number"),
        ("run.dir=", "run.dir", "", "a folder"),
        ('sampling.stop=[a,""]', "sampling.stop", ["a", ""], "at least one character"),
    ],
)
def test_wrong_values_name_key_value_and_expectation(override, key, value, expected):
    with pytest.raises(ConfigError) as caught:
        compose([override])
    assert (caught.value.key, caught.value.value) == (key, value)
    assert expected in str(caught.value) and "\n" not in str(caught.value)


def test_unknown_experiment_is_refused_with_the_options(user_conf):
    folder = user_conf("experiment/mine", "# @package _global_\n")
    with pytest.raises(ConfigError, match=r"experiment='quickstart_gpro': .*\. Did you mean `quickstart_grpo`\?$"):
        compose(["experiment=quickstart_gpro"])
    with pytest.raises(ConfigError, match=r"experiment='other': expected one of .*mine"):
        compose(["experiment=other"], config_dir=folder)


@pytest.mark.parametrize("path", ["Qwen/Qwen2.5-0.5B", "/models/qwen", "./m", "runs/sft", "m"])
def test_a_folder_in_place_of_a_preset_is_sent_to_model_init(path, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "m").mkdir()
    with pytest.raises(ConfigError, match=rf"model.init={path}\.$") as caught:
        compose([f"model={path}"])
    assert (caught.value.key, caught.value.value) == ("model", path)
    with pytest.raises(ConfigError) as other:
        compose(["model=llama3-8b"])
    assert "model.init" not in str(other.value)


def test_broken_yaml_names_file_and_line(user_conf):
    folder = user_conf("experiment/bad", "# @package _global_\noptim: [\n")
    with pytest.raises(ConfigError, match=r"experiment/bad.yaml, line 3"):
        compose(["experiment=bad"], config_dir=folder)
    with pytest.raises(ConfigError, match=r"optim.lr='abc'.*experiment/typed.yaml"):
        compose(["experiment=typed"], config_dir=user_conf("experiment/typed", "# @package _global_\noptim: {lr: abc}"))


def test_config_dir_must_exist(tmp_path):
    with pytest.raises(ConfigError, match="--config-dir"):
        compose([], config_dir=str(tmp_path / "nothing"))


def test_sweeps_are_the_product_of_their_values():
    jobs = sweep(["optim.lr=1e-4,2e-4", "seed=range(0,3)", "stage=grpo", "reward.functions=[{path:a.py:f,weight:2}]"])
    configs = [compose(job) for job in jobs]
    assert [(c.optim.lr, c.seed) for c in configs] == [(lr, s) for lr in (1e-4, 2e-4) for s in range(3)]
    assert all(c.stage.name == "grpo" and c.reward.functions[0].path == "a.py:f" for c in configs)
    assert [compose(j).model.num_layers for j in sweep(["model=choice(tiny,llama3_70b)"])] == [4, 80]
    assert sweep(["seed=1"]) == [["seed=1"]]
    with pytest.raises(UnknownKeyError):
        sweep(["sed=1,2"])
    with pytest.raises(ConfigError, match="listed"):
        sweep(["optim.lr=interval(0,1)"])


def test_a_key_without_a_value_is_no_override():
    with pytest.raises(ConfigError, match=r"^override='batch\.group': expected key=value, as Hydra reads it$"):
        compose(["batch.group"])


@pytest.mark.parametrize("text", ["a b", 'say "x"', "back\\slash", "tail\\", "it's", "a,b=[c]{d}", "${x}", "\\${x}"])
def test_quoted_text_survives_hydra(text):
    assert compose([f"run.dir={quoted(text)}"]).run.dir == text


def test_nan_is_no_weight_and_a_limit_may_be_infinite():
    with pytest.raises(ConfigError, match=r"reward.functions\[0\].weight=nan: expected a finite number"):
        compose(["reward.functions=[{path:a,weight:nan}]"])
    assert compose(["run.stop.above=inf"]).run.stop.above == math.inf


@pytest.mark.parametrize(
    "value", ["runs/\u00fcn\u00ef", "/data/step=100/x.jsonl", "it's", "/x(1).jsonl", "a,b=(c", "x]", 'say "x"']
)
def test_what_hydra_cannot_read_is_told_how_to_quote(value):
    """The advice, typed into a shell, gives the value."""
    with pytest.raises(ConfigError) as caught:
        compose([f"run.dir={value}"])
    advice = str(caught.value).rpartition(": ")[2]
    assert "\n" not in str(caught.value)
    assert compose(shlex.split(advice)).run.dir == value


def test_values_go_over_a_frozen_config():
    base = compose(["stage=grpo", "run.name='\\${x}'", "optim.lr=2e-4", "critic.optim.lr=3e-4"])
    over = compose_over(base, ["sampling.temperature=0.5", "data.columns.prompt=q", "reward.functions=[{path:math}]"])
    assert base.run.name == over.run.name == "${x}"
    assert (over.stage.name, over.optim.lr, over.critic.optim.lr) == ("grpo", 2e-4, 3e-4)
    assert over.sampling.temperature == 0.5 and over.data.columns == {"prompt": "q"}
    assert over.reward.functions[0].path == "math"
    for wrong in ("model=tiny", "optim.lrr=1", "optim.lr=abc", "optim.lr=-1", "seed=1,2"):
        with pytest.raises(ConfigError):
            compose_over(base, [wrong])


def test_all_keys_are_keys_and_every_group_but_experiment_is_a_section():
    assert {"seed", "optim.lr", "critic.optim.lr", "reward.functions[].weight"} <= set(all_keys())
    assert all(key_type(key) is not None for key in all_keys())
    assert all(is_dataclass(key_type(group)) for group in GROUPS if group != "experiment")
    assert isinstance(compose([]), Config)


def test_the_published_shapes_have_the_published_sizes():
    def parameters(name):
        m = compose([f"model={name}"]).model
        attention = m.hidden_size * m.kv_channels * (2 * m.num_heads + 2 * m.num_kv_heads)
        extra = m.kv_channels * ((m.num_heads + 2 * m.num_kv_heads) * m.qkv_bias + 2 * m.qk_norm)
        mlp = 3 * m.hidden_size * m.ffn_hidden_size
        if m.moe.num_experts:
            mlp = m.moe.num_experts * (3 * m.hidden_size * m.moe.ffn_hidden_size + m.hidden_size)
        layer = attention + extra + mlp + 2 * m.hidden_size
        return m.num_layers * layer + m.hidden_size + m.vocab_size * m.hidden_size * (1 if m.tie_embeddings else 2)

    published = {  # from the safetensors indices of the published checkpoints
        "qwen3_0.6b": 596_049_920,
        "qwen3_1.7b": 1_720_574_976,
        "qwen2.5_7b": 7_615_616_512,
        "llama3_8b": 8_030_261_248,
        "llama3_70b": 70_553_706_496,
        "qwen3_30b_a3b": 30_532_122_624,
    }
    assert {name: parameters(name) for name in published} == published


def test_the_config_room_imports_no_torch():
    modules = sorted(p.stem for p in (Path(__file__).parents[2] / "aligner/config").glob("*.py"))
    code = "import sys\n" + "".join(f"import aligner.config.{m}\n" for m in modules if m != "__init__")
    code += "import aligner.types, aligner.__main__, aligner.cluster.env, aligner.cluster.launch\n"
    code += "from aligner.config.resolve import compose\ncompose([])\n"
    code += "print([m for m in ('torch', 'megatron', 'transformers', 'numpy') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
