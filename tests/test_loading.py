"""What is imported for good is left alone by the garbage collector, and nothing else is."""

import gc
import importlib.metadata
import importlib.util
import types
import weakref
from pathlib import Path

import pytest

from aligner.errors import ConfigError
from aligner.loading import TORCH, check_torch, for_good, new_enough

ROOT = Path(__file__).parents[1]


class Knot:
    def __init__(self):
        self.me = self


def test_only_what_is_made_within_stays(tmp_path, monkeypatch):
    (tmp_path / "never_imported.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    with for_good():
        import never_imported  # noqa: F401

        inside = weakref.ref(Knot())
        assert not gc.isenabled()
    outside = weakref.ref(Knot())
    gc.collect()
    assert gc.isenabled() and inside() is not None and outside() is None
    inside().me = None
    assert inside() is None


def test_where_everything_is_imported_nothing_stays():
    """A process that comes by once more has made garbage since."""
    before = weakref.ref(Knot())
    with for_good():
        inside = weakref.ref(Knot())
    gc.collect()
    assert before() is None and inside() is None


def test_a_failed_import_leaves_the_collector_on():
    with pytest.raises(ImportError), for_good():
        import no_such_module  # noqa: F401
    assert gc.isenabled()


VERSIONS = {"2.11.0": True, "2.13.0+cu130": True, "2.12.0a0+5aff3928d8.nv26.05": True, "3.0": True}
VERSIONS |= {"2.9.0a0+50eac811a6.nv25.09": False, "2.10.1": False, "2.1.11": False, "1.13": False}


@pytest.fixture
def container_check():
    """slurm/container/check.py, which knows nothing of this package: an image is checked before it has it."""
    spec = importlib.util.spec_from_file_location("container_check", ROOT / "slurm" / "container" / "check.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(("version", "enough"), VERSIONS.items())
def test_a_torch_that_is_too_old_is_refused_before_it_is_imported(version, enough, container_check, monkeypatch):
    assert new_enough(version) == enough
    monkeypatch.setattr(importlib.metadata, "version", lambda name: version)
    if enough:
        check_torch()
    else:
        with pytest.raises(ConfigError, match=r"torch=.*: expected 2\.11 or later"):
            check_torch()
    functional = types.SimpleNamespace(grouped_mm=None)
    cuda = types.SimpleNamespace(cuda="13.0")
    torch = types.SimpleNamespace(__version__=version, nn=types.SimpleNamespace(functional=functional), version=cuda)
    monkeypatch.setattr(container_check.importlib, "import_module", {"torch": torch}.get)
    assert [text.partition(":")[0] for text in container_check.problems()] == [f"torch {version}"] * (not enough)
    cuda.cuda = None
    assert len(list(container_check.problems())) == 1 + (not enough)
    assert len(list(container_check.problems(cpu=True))) == (not enough)


def test_a_torch_that_is_not_there_says_so_itself(monkeypatch):
    def missing(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", missing)
    check_torch()


def test_an_image_is_told_everything_that_it_lacks(container_check, monkeypatch):
    there = {"torch": importlib.import_module("torch")}

    def broken(name):
        raise OSError("libcudart.so.13: not there")

    monkeypatch.setattr(container_check.importlib, "import_module", broken)
    reported = list(container_check.problems())
    assert len(reported) == 1 + len(container_check.NEEDED) and all("OSError: libcudart" in text for text in reported)
    monkeypatch.setattr(container_check.importlib, "import_module", lambda name: there.get(name) or broken(name))
    monkeypatch.setattr(container_check.platform, "machine", lambda: "riscv64")
    reported = list(container_check.problems())
    assert [text.partition(" does")[0] for text in reported[1 : 1 + len(container_check.KERNELS)]] == [
        *container_check.KERNELS
    ]
    assert reported[0] == "machine riscv64: expected one of x86_64, aarch64"


def test_the_least_torch_is_the_same_everywhere(container_check):
    bound = ".".join(map(str, TORCH))
    assert f'"torch>={bound}"' in (ROOT / "setup.py").read_text() and container_check.TORCH == TORCH
