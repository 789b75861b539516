"""An engine in a user's file: it passes the contract of the project's, trains with GRPO, and is refused before a run
if it cannot."""

import re

import pytest
import torch

from aligner.__main__ import main
from aligner.builders.outside_engine import engine_class
from aligner.config.engines import entry_of
from aligner.config.freeze import load_frozen, outside_code
from aligner.config.resolve import compose
from aligner.config.validate import validate
from aligner.errors import ConfigError, EngineCodeError, UnknownKeyError
from aligner.plan.job import job_of
from examples.own_engine import ENGINE, OwnEngine, OwnEngineConfig
from tests import stages
from tests.engines.contract import EngineContract

EXAMPLE = "examples/own_engine.py:ENGINE"


class TestOwnEngine(EngineContract):
    models = ("llama",)
    # what it refuses: stop strings, cuts; what a cache or a batch bounds, which it has not
    test_stop_strings = test_stop_strings_need_a_decoder = test_cut_distributions_report_both_logprobs = None
    test_each_cut_by_itself = test_a_row_that_can_never_fit_is_refused = test_sleep_changes_nothing_but_memory = None
    test_results_do_not_depend_on_the_batch = None

    @staticmethod
    def make_engine(cfg, decode=None, **engine_config):
        engine = OwnEngine(cfg, None, args=OwnEngineConfig(), device="cpu", dtype=torch.float32)
        engine.can = ENGINE.can
        return engine


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return stages.make_data(tmp_path_factory.mktemp("data"))


def test_grpo_trains_with_it(data, tmp_path, capsys):
    """The rollouts are the native engine's only in distribution: what compares them is the trainer, at each step."""
    line = [f"engine.name={EXAMPLE}", "engine.args.attention=sdpa", "refit.verify=checksum", "run.steps=2"]
    line = stages.overrides("grpo", data, tmp_path / "run", *line, "batch.prompts=4", "batch.group=2")
    line.remove("batch.micro_batch_samples=16")
    assert main(["plan", "--gpus", "1", *line]) == 0, capsys.readouterr()
    run = stages.run(line)
    assert [abs(record["mismatch/gen_kl"]) < 1e-6 for record in stages.records(run)] == [True, True]
    frozen = load_frozen(run)
    assert frozen.engine.args == {"attention": "sdpa"}
    assert list(outside_code(frozen)) == ["engine.name", "the engine's class"]
    assert load_frozen(run, foreign=True).engine.name == "native"  # nothing that a foreign folder names is imported


def test_a_plan_has_what_the_entry_says(monkeypatch):
    sizes = ["stage=grpo", "model=tiny", "model.vocab_size=300", f"engine.name={EXAMPLE}", "batch.prompts=8"]
    here = job_of(compose(sizes), 1).engine
    assert (here.padded, here.launches, here.reserved, here.placed) == (True, True, False, False)
    monkeypatch.setitem(entry_of(EXAMPLE).planned, "padded", False)
    assert not job_of(compose(sizes), 1).engine.padded


SOURCE = """
from aligner import api

class Own({base}):
    {body}

ENGINE = api.EngineEntry(api.Capabilities({can}), made_by="{path}:{made}")
"""
METHODS = "generate = logprobs = begin_update = update_weights = finish_update = checksums = lambda self: None"


@pytest.mark.parametrize(
    "parts, message",
    [
        ({"name": "ENGIN"}, "expected a EngineEntry `ENGIN` in {path}, which has ENGINE"),
        ({"name": "Own"}, "expected a EngineEntry `Own` in {path}, which has ENGINE"),
        ({"can": "apart=True"}, "expected capabilities among any_prompt, scores, request_seeds"),
        ({"made": "Other"}, "expected a Class `Other` in {path}, which has Own"),
        ({"base": "object"}, "expected a class with api.RolloutEngine as base"),
        (
            {"body": "pass"},
            "expected methods generate, logprobs, begin_update, update_weights, finish_update",
        ),
        ({"can": "scores=True"}, "expected methods top_logprobs of"),
    ],
)
def test_an_engine_that_cannot_be_used_is_refused_before_the_run(tmp_path, parts, message):
    path = tmp_path / "own.py"
    whole = {"base": "api.RolloutEngine", "body": METHODS, "can": "", "made": "Own", "path": path, "name": "ENGINE"}
    path.write_text(SOURCE.format(**(whole | parts)))
    with pytest.raises(EngineCodeError, match=re.escape(message.format(path=path))):
        engine_class(compose(["stage=grpo", f"engine.name={path}:{(whole | parts)['name']}"]))


@pytest.mark.parametrize(
    "settings, error, message",
    [
        (["engine.args.attention=flash"], ConfigError, "engine.args.attention='flash': expected one of eager, sdpa"),
        (["engine.args.atention=sdpa"], UnknownKeyError, "Did you mean `engine.args.attention`?"),
        (["engine=native", "engine.args.attention=sdpa"], ConfigError, "no entries: engine.name=native has no section"),
        (["sampling.stop=[x]"], ConfigError, "sampling.stop=['x']: expected [] with engine.name="),
        (["engine.ranks=1"], ConfigError, "engine.name='examples/own_engine.py:ENGINE': expected native or"),
        (["engine.page_tokens=16"], ConfigError, "engine.page_tokens=16: expected 0 with engine.name="),
        (["engine.name=nativ"], ConfigError, "or module:EngineEntry, path.py:EngineEntry"),
    ],
)
def test_its_keys_and_rules_are_checked(data, settings, error, message):
    line = ["stage=grpo", "model=tiny", f"data.train={data / 'train.jsonl'}", f"model.tokenizer={data / 'tokenizer'}"]
    line += ["batch.prompts=4", "batch.group=2", "reward.functions=[{path: math}]", f"engine.name={EXAMPLE}"]
    line = [word for word in line if not (settings[0].startswith("engine=") and word.startswith("engine.name"))]
    with pytest.raises(error) as caught:
        validate(compose([*line, *settings]), 2)
    assert message in str(caught.value)
