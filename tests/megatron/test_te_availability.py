"""Whether a process has TransformerEngine: by `model.kernels`, by the machine, and by whether the package loads."""

import importlib
import importlib.util
import sys
from dataclasses import replace

import pytest
import torch

from aligner.config.sections.model.attention import AttentionConfig
from aligner.errors import ConfigError
from aligner.megatron import model
from aligner.megatron import transformer_engine as te
from tests.tiny import LLAMA

BROKEN = {
    "ImportError": "raise ImportError('/usr/lib/libtransformer_engine.so: undefined symbol: _ZN3c10')",
    "OSError": "import ctypes\nctypes.CDLL('libaligner_has_no_such_library.so')",
    "ModuleNotFoundError": "import aligner_has_no_such_module",
    "AssertionError": "assert False",
    "SyntaxError": "def",
    "RuntimeError": "raise RuntimeError('built for torch 2.9\\nand 40 lines more')",
}


@pytest.fixture
def install(monkeypatch, tmp_path):
    """Puts a package of this name and `pytorch` in it where it is found, on a machine with a GPU."""
    modules, was = dict(sys.modules), replace(te.TE)
    for name in [name for name in modules if name.startswith(te.NAME)]:
        del sys.modules[name]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.syspath_prepend(tmp_path)

    def installed(text: str) -> None:
        (tmp_path / te.NAME / "pytorch").mkdir(parents=True)
        (tmp_path / te.NAME / "__init__.py").touch()
        (tmp_path / te.NAME / "pytorch" / "__init__.py").write_text(text)
        importlib.invalidate_caches()

    yield installed
    sys.modules.clear()
    sys.modules.update(modules)
    te._note(was)


def hidden() -> bool:
    with pytest.raises(ImportError):
        importlib.import_module(f"{te.NAME}.pytorch")
    return importlib.util.find_spec(te.NAME) is None


@pytest.mark.parametrize("kind", BROKEN)
def test_one_that_does_not_load_is_reported_and_hidden(install, kind):
    install(BROKEN[kind])
    te.settle("auto")
    assert te.TE.broken and te.TE.lacks.startswith(f"it does not import: {kind}") and hidden()
    assert "\n" not in te.TE.lacks
    assert not model.te_kinds(LLAMA)
    with pytest.raises(ConfigError, match=rf"(?s)model\.kernels='te': expected auto or own.*{kind}"):
        model.check_kernels(replace(LLAMA, kernels="te"), torch.bfloat16, torch.device("cpu"))


def test_one_that_loads_is_used_unless_the_config_says_own(install, monkeypatch):
    install("")
    te.settle("te")
    monkeypatch.setattr(te, "unfused", lambda cfg: "")
    assert not te.TE.lacks and importlib.import_module(f"{te.NAME}.pytorch")
    assert not any(model.te_kinds(LLAMA).values()) and all(model.te_kinds(replace(LLAMA, kernels="own")).values())
    model.check_kernels(replace(LLAMA, kernels="te"), torch.bfloat16, torch.device("cpu"))
    te.settle("own")
    assert te.TE.lacks == "model.kernels=own" and not te.TE.broken and hidden()


def test_own_does_not_even_try_it(install):
    install("raise SystemExit('tried')")
    te.settle("own")
    assert te.TE.lacks == "model.kernels=own" and not te.TE.broken


def test_without_a_gpu_and_without_the_package(install, monkeypatch):
    te.settle("auto")
    assert te.TE.lacks == "it is not installed" and not te.TE.broken
    sys.modules.pop(te.NAME)
    install("raise SystemExit('tried')")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    te.settle("auto")
    assert te.TE.lacks == "there is no GPU" and not te.TE.broken


def test_megatron_that_does_not_load_with_it_loads_without(install):
    install("")
    tries = []

    def megatron():
        tries.append(te.NAME in sys.modules and sys.modules[te.NAME] is not None)
        if tries[-1]:
            raise AttributeError("module 'transformer_engine' has no attribute 'pytorch'")

    te.load(megatron)
    assert tries == [True, False] and te.TE.broken and "AttributeError" in te.TE.lacks

    def never():
        raise ImportError("of its own")

    sys.modules.pop(te.NAME)
    with pytest.raises(ImportError, match="of its own"):
        te.load(never)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"dtype": "float32"}, "model.dtype=float32"),
        ({"varlen_attention": True}, "varlen_attention"),
        ({"attention": AttentionConfig(softcap=30.0), "family": "gemma2"}, "model.attention.softcap=30"),
        ({"head_dim": 12}, "these have 12"),
    ],
)
def test_te_for_a_model_that_it_cannot_be_is_refused_by_the_config(changes, says):
    from aligner.config.sections.model.kernels import check_te

    check_te(replace(LLAMA, **changes))
    with pytest.raises(ConfigError, match=rf"model\.kernels='te'.*{says}"):
        check_te(replace(LLAMA, **changes, kernels="te"))
