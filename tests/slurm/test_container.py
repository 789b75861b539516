"""The image: versions of its recipe, wheels for each machine, and a build of the variant without CUDA."""

import importlib.util
import re
from pathlib import Path
from zipfile import ZipFile

import pytest

from tests.needs import lacking

ROOT = Path(__file__).parents[2]
DOCKERFILE = (ROOT / "slurm/container/Dockerfile").read_text()


@pytest.fixture
def wheels():
    spec = importlib.util.spec_from_file_location("container_wheels", ROOT / "slurm/container/wheels.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def pinned(name):
    lines = (ROOT / name).read_text().splitlines()
    return dict(line.split("==") for line in lines if "==" in line and not line.startswith("#"))


def test_the_recipe_has_the_versions_of_the_pins():
    core, kernels, te = (pinned(f"constraints{name}.txt") for name in ("", "-kernels", "-te"))
    toolkit = re.search(r"^ARG BASE=nvidia/cuda:([\d.]+)-cudnn-devel", DOCKERFILE, re.MULTILINE)[1]
    assert core["cuda-toolkit"] == f"{toolkit}.0" and f"-t aligner:torch{core['torch']} ." in DOCKERFILE
    assert {kernels[f"transformer-engine{suffix}"] for suffix in ("", "-cu13", "-torch")} == {te["transformer-engine"]}
    assert te["einops"] == kernels["einops"] and core.keys().isdisjoint(kernels)
    assert re.search(r"^ARG APEX=[0-9a-f]{40}$", DOCKERFILE, re.MULTILINE)


def test_the_recipe_copies_what_is_there_and_names_no_machine():
    copied = [word for line in re.findall(r"^COPY (.+) \S+$", DOCKERFILE, re.MULTILINE) for word in line.split()]
    assert len(copied) >= 5 and all((ROOT / name).is_file() for name in copied)
    assert {"setup.py", "aligner/version.py"} <= {*copied}  # the one reads the other
    steps = DOCKERFILE.partition("\nFROM")[2]
    assert not re.search(r"x86|amd64|sbsa|https?://(?!github)", steps)
    assert "[[" not in steps and "SHELL" not in steps  # buildah's own format has only sh


def index(folder, *files):
    """A folder of wheels, as pip looks for them."""
    for file in files:
        name, version = file.split("-")[:2]
        with ZipFile(folder / file, "w") as wheel:
            info = f"{name}-{version}.dist-info"
            wheel.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
            wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\n")
            wheel.writestr(f"{info}/RECORD", "")


@pytest.mark.slow
def test_pins_without_a_wheel_are_named(wheels, tmp_path, capsys):
    arm, x86 = "manylinux_2_28_aarch64", "manylinux2014_x86_64"
    both = [f"both-1.0-cp312-cp312-{name}.whl" for name in (arm, x86)]
    index(tmp_path, "pure-1.0-py3-none-any.whl", f"stable-1.0-cp310-abi3-{arm}.whl", *both)
    index(
        tmp_path,
        f"half-1.0-cp312-cp312-{x86}.whl",
        f"half-1.1-cp312-cp312-{arm}.whl",
        f"other-1.0-cp311-cp311-{arm}.whl",
    )
    pins = tmp_path / "constraints.txt"
    pins.write_text("# some\npure==1.0\nhalf==1.0\nstable==1.0\nother==1.0  # for another Python\nboth==1.0\n")
    local = ["--", "--no-index", f"--find-links={tmp_path}"]
    assert wheels.main([str(pins), *local]) == 1
    assert capsys.readouterr().out.splitlines() == [
        "constraints.txt: 3 of 5 pins have a wheel for aarch64",
        "  other==1.0: from source, for x86_64 too",
        "  half==1.0: only for x86_64",
    ]
    pins.write_text("pure==1.0\n")
    assert wheels.main([str(pins), *local]) == 0
    with pytest.raises(RuntimeError, match="Retrying"):
        wheels.main([str(pins), "--", "-i", "http://127.0.0.1:9", "--retries=1"])


@pytest.mark.slow
@pytest.mark.network
def test_the_pinned_torch_has_a_wheel_for_aarch64_with_its_libraries(wheels):
    names = ("torch", "triton", "nvidia-nccl-cu13")
    try:
        assert wheels.without_wheel([f"{name}=={pinned('constraints.txt')[name]}" for name in names], "aarch64") == []
    except RuntimeError as error:
        lacking(f"no package index: {error}")
