"""`aligner doctor engine=trtllm` and `engine=trtllm_engine`: their tables against what is installed."""

import ast
from itertools import chain
from pathlib import Path

import pytest

from aligner.cluster.env import RankEnv
from aligner.config.resolve import compose
from aligner.config.sections.trtllm import TrtllmConfig
from aligner.engines.trtllm import build, built_api, built_worker, torch_api, torch_worker
from aligner.engines.trtllm.features import ARGS, FEATURES, PARAMS
from aligner.engines.trtllm.package import accepted
from aligner.engines.trtllm.sampling import runner_arguments, sampling_arguments
from aligner.errors import ConfigError
from aligner.tools import doctor
from aligner.tools.doctor_trtllm import trtllm_checks
from aligner.types import SamplingParams
from tests.engines.contract import LLAMA, fill, reference
from tests.engines.trtllm.setup import forget_fake, make_built, other_python, use_fake


@pytest.fixture(autouse=True)
def no_fake_left():
    yield
    forget_fake()


def rows(name="trtllm", **options) -> dict[str, tuple[str, list[str]]]:
    options = TrtllmConfig(start_timeout_s=500, **options)
    return {check: (status, detail.splitlines()) for check, status, detail in trtllm_checks(options, name)}


@pytest.mark.slow
def test_present_missing_and_not_run(monkeypatch, tmp_path):
    """Of another interpreter's package."""
    monkeypatch.setenv("PMI_RANK", "1")  # the package would take the doctor's process for a rank
    monkeypatch.setenv("PMI_SIZE", "4")
    read = rows(python=str(other_python(tmp_path)))
    assert read["trtllm"] == ("ok", ["1.4.0rc1, compared with the table's 1.4"])
    assert read["trtllm missing"] == ("ok", ["nothing"])
    assert "tensorrt_llm:SamplingParams(min_p)" in read["trtllm present"][1]
    status, lines = read["trtllm features"]
    assert status == "ok" and all(f"{name}: yes" in lines for name in FEATURES if name != "enable_sleep")
    assert read["trtllm not run"] == ("warn", list(torch_api.NOT_RUN))


def test_what_an_engine_of_several_ranks_lacks_fails(monkeypatch):
    use_fake(monkeypatch, version="1.2.1")
    checks = {
        name: (status, detail) for name, status, detail in trtllm_checks(TrtllmConfig(start_timeout_s=500), ranks=2)
    }
    lacking = "tensorrt_llm.llmapi.llm_args:TorchLlmArgs(orchestrator_type)"
    assert checks["trtllm engine.tensor_parallel"] == ("fail", lacking)


def test_the_table_has_all_that_the_child_uses(monkeypatch):
    use_fake(monkeypatch)
    (row,) = [v for v in torch_api.VERSIONS if v.prefix == "1.4"]
    symbols = [*row.symbols, *(symbol for feature in FEATURES.values() for symbol in feature.symbols)]
    imported = {
        f"{node.module}:{name.name}"
        for module in (torch_worker,)
        for node in ast.walk(ast.parse(Path(module.__file__).read_text()))
        if isinstance(node, ast.ImportFrom) and node.module.startswith("tensorrt_llm")
        for name in node.names
    }
    imported -= {"tensorrt_llm:__version__"}
    assert len(imported) > 5
    assert not {symbol for symbol in imported if not any(known.startswith(symbol) for known in symbols)}
    settings = torch_worker.Settings("", [], 9, "float32", 8, 2, 99, True, True, True, True, 0, True, 2, draft_tokens=3)
    arguments = set(torch_worker.engine_arguments(settings, FEATURES)) - {"executor_cls"}
    of_features = [FEATURES[name].arguments[ARGS] for name in ("sleep_config", "ranks", "drafts")]
    assert arguments == {*row.arguments[ARGS], *chain(*of_features)}
    others = {*FEATURES["enable_sleep"].arguments[ARGS], "pipeline_parallel_size", "context_parallel_size"}
    assert TrtllmConfig.SET.keys() == arguments | others
    sampling = SamplingParams(4, temperature=0.7, min_p=0.1, stop_token_ids=(3,))
    known = set(row.arguments[PARAMS])
    assert known == {*sampling_arguments(sampling, row, (), 0), "seed", "return_context_logits"}
    assert sampling_arguments(sampling, row, (), 0, True).keys() == sampling_arguments(sampling, row, (), 0).keys()
    plain = SamplingParams(4, temperature=0.7)
    fields = {*FEATURES["processed_logprobs"].arguments[PARAMS], *FEATURES["plain_logprobs"].arguments[PARAMS]}
    assert set(sampling_arguments(plain, row, FEATURES, 0)) - set(sampling_arguments(plain, row, (), 0)) == fields


def test_what_is_missing_fails(monkeypatch):
    use_fake(monkeypatch)
    import tensorrt_llm
    from tensorrt_llm._torch.pyexecutor.model_loader import ModelLoader

    monkeypatch.delattr(ModelLoader, "reload")
    monkeypatch.delattr(tensorrt_llm, "LLM")
    comparison = torch_api.compare()
    reload = "tensorrt_llm._torch.pyexecutor.model_loader:ModelLoader.reload"
    names = ("model", "weights", "allow_partial_loading")
    assert set(comparison.missing) == {
        "tensorrt_llm:LLM",
        "tensorrt_llm:LLM.generate_async",
        "tensorrt_llm:LLM.generate_async(inputs)",
        "tensorrt_llm:LLM.generate_async(sampling_params)",
        "tensorrt_llm:LLM.shutdown",
    } | {
        reload,
        *(f"{reload}({name})" for name in names),
    }


def test_the_table_of_built_engines_has_all_that_the_child_uses(monkeypatch):
    use_fake(monkeypatch, version="1.2.1")
    row = built_api.version_row("1.2.1")
    sources = [Path(module.__file__).read_text() for module in (built_worker, build)]
    nodes = [node for text in sources for node in ast.walk(ast.parse(text)) if isinstance(node, ast.ImportFrom)]
    nodes = [node for node in nodes if node.module.startswith("tensorrt_llm")]
    imported = {f"{node.module}:{name.name}" for node in nodes for name in node.names}
    known = (*row.symbols, *row.arguments)
    assert len(imported) == 8 and not {s for s in imported if not any(k.startswith(s) for k in known)}
    arguments = runner_arguments(SamplingParams(4, temperature=0.7, min_p=0.1, stop_token_ids=(3,)), [1, 2])
    assert set(arguments) == set(row.arguments["tensorrt_llm.runtime:SamplingConfig"])


def test_the_calls_give_what_the_table_lists(monkeypatch, tmp_path):
    """By what the fake was given."""
    use_fake(monkeypatch, version="1.2.1")
    import tensorrt_llm.builder
    import tensorrt_llm.runtime

    inputs = {}

    def spy(name, wrapped):
        def call(*arguments, **kwargs):
            inputs.setdefault(name, set()).update(kwargs)
            return wrapped(*arguments, **kwargs)

        return call

    runner, config = tensorrt_llm.runtime.ModelRunner, tensorrt_llm.builder.BuildConfig
    monkeypatch.setattr(runner, "generate", spy("tensorrt_llm.runtime:ModelRunner.generate", runner.generate))
    wrapped = spy("tensorrt_llm.runtime:ModelRunner.from_engine", runner.from_engine)
    monkeypatch.setattr(runner, "from_engine", wrapped)
    monkeypatch.setattr(tensorrt_llm.builder, "BuildConfig", spy("tensorrt_llm.builder:BuildConfig", config))
    engine = fill(make_built(LLAMA), reference(LLAMA))
    engine.generate([[1]], [[0]], SamplingParams(2))
    row = built_api.version_row("1.2.1")
    assert inputs == {name: set(row.arguments[name]) for name in inputs} and len(inputs) == 3


@pytest.mark.slow
def test_built_engines_present_missing_and_not_run(monkeypatch, tmp_path):
    monkeypatch.setenv("FAKE_TRTLLM_VERSION", "1.2.1")
    read = rows(name="trtllm_engine", python=str(other_python(tmp_path)))
    assert read["trtllm"] == ("ok", ["1.2.1, compared with the table's 1.2"])
    assert read["trtllm missing"] == ("ok", ["nothing"])
    present = read["trtllm present"][1]
    assert {"tensorrt:Refitter.refit_cuda_engine", "tensorrt_llm.plugin:PluginConfig(use_fused_mlp)"} <= set(present)
    assert read["trtllm not run"] == ("warn", list(built_api.NOT_RUN))


def test_built_engines_are_refused_where_the_builder_is_gone(monkeypatch, tmp_path):
    monkeypatch.setenv("FAKE_TRTLLM_VERSION", "1.4.0rc1")
    read = rows(name="trtllm_engine", python=str(other_python(tmp_path)))
    assert read["trtllm"][0] == "fail" and "engine=trtllm runs on it" in read["trtllm"][1][0]


def test_a_part_of_the_builder_that_is_missing_fails(monkeypatch):
    use_fake(monkeypatch, version="1.2.1")
    import tensorrt
    import tensorrt_llm.plugin

    monkeypatch.delattr(tensorrt.Refitter, "get_missing_weights")
    monkeypatch.delitem(tensorrt_llm.plugin.PluginConfig.model_fields, "use_fused_mlp")
    comparison = torch_api.compare(built_api.VERSIONS, built_api.NOT_RUN)
    missing = {"tensorrt:Refitter.get_missing_weights", "tensorrt_llm.plugin:PluginConfig(use_fused_mlp)"}
    assert set(comparison.missing) == missing


def test_properties_of_older_configs_count():
    class PluginConfig:
        def __init__(self, dtype="float16"):
            self._use_fused_mlp = True

        @property
        def use_fused_mlp(self):
            return self._use_fused_mlp

    assert accepted(PluginConfig) == {"dtype", "use_fused_mlp"}


EXPECTED = {"1.3": {"sleep_config", "weights_tag", "processed_logprobs", "balancer", "ranks", "drafts"}}
EXPECTED["1.4"] = EXPECTED["1.3"] | {"plain_logprobs", "update_hooks", "finalize"}


@pytest.mark.parametrize("version", ["1.1.0", "1.2.1", "1.3.0rc24", "1.4.0rc1", "1.13.0"])
def test_the_fake_has_what_the_table_asks_of_each_version(monkeypatch, version):
    use_fake(monkeypatch, version=version)
    comparison = torch_api.compare()
    assert not comparison.missing and len(comparison.present) > 25
    if "rc" in version:
        assert {name for name, there in comparison.features.items() if there} == EXPECTED[version[:3]]
    assert comparison.row == ("" if version == "1.13.0" else version[:3])
    assert bool(comparison.refused) == (version == "1.1.0")
    if comparison.refused or not comparison.row:
        with pytest.raises(ConfigError, match=r"expected TensorRT-LLM 1\.2, 1\.3, 1\.4"):
            torch_api.version_row(version)


@pytest.mark.slow
def test_doctor_names_the_extra_of_a_missing_package(monkeypatch, tmp_path):
    cfg = compose(["engine=trtllm", f"run.dir='{tmp_path}'"])
    monkeypatch.setattr(doctor, "_torch", lambda env: iter(()))
    checks = {check.name: check for check in doctor.checks(cfg, RankEnv())}
    assert checks["trtllm"].status == doctor.FAIL and "aligner[trtllm]" in checks["trtllm"].detail
    assert "comparing the installed package" in checks["trtllm not run"].detail


def test_a_package_that_cannot_be_imported(monkeypatch, tmp_path):
    (tmp_path / "tensorrt_llm").mkdir()
    (tmp_path / "tensorrt_llm" / "__init__.py").write_text("raise OSError('libcuda.so.1: cannot open')")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{Path(__file__).parents[2]}")
    assert rows()["trtllm"] == ("fail", ["cannot be imported: OSError: libcuda.so.1: cannot open"])
