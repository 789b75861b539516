"""Sites are data: every file loads, and mistakes in one are named."""

import re
import shlex
import subprocess

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aligner.cluster.render import expandable
from aligner.cluster.site import Container, Site, find_site, load_site, names
from aligner.errors import ConfigError, SiteCodeError, UnknownKeyError


@pytest.mark.parametrize("name", names())
def test_every_site_loads_and_says_what_it_is(name):
    site = load_site(name)
    assert site.description and site.ranks >= 1


def test_the_issue_names_four_kinds_of_site():
    assert {"localslurm", "generic", "dgx_infiniband", "slingshot"} <= set(names())
    assert load_site("dgx_infiniband").container.runtime == "pyxis" and load_site("dgx_infiniband").gpus_per_node == 8
    assert load_site("slingshot").container.runtime == "apptainer" and load_site("slingshot").mpi == "pmi2"


@pytest.mark.parametrize(
    ("text", "error", "message"),
    [
        ("partitions: x", UnknownKeyError, "Did you mean `partition`?"),
        ("bind: {cpus: cores}", UnknownKeyError, "Did you mean `bind.cpu`?"),
        ("gpus_per_node: many", ConfigError, "expected an integer"),
        ("gpus_per_node: -1", ConfigError, "a number >= 0"),
        ("engines: {gpus_per_node: -1}", ConfigError, "engines.gpus_per_node=-1: expected a number >= 0"),
        ("engines: {gpu: h900}", ConfigError, "engines.gpu='h900'"),
        ("engines: {partitions: x}", UnknownKeyError, "Did you mean `engines.partition`?"),
        ("mpi: pmix_v9", ConfigError, "one of none, pmix, pmi2, mpirun"),
        ("container: {runtime: pyxis}", ConfigError, "container.image"),
        ("container: {runtime: pyxis, image: x}\nmpi: mpirun", ConfigError, "mpirun would run outside"),
        ("node_local: /tmp/x\npython: python", ConfigError, "node_local='/tmp/x': expected empty with `python`"),
        ("env: {'A B': x}", ConfigError, "the name of an environment variable"),
        ("env: {OMP_NUM_THREADS: 4}", ConfigError, "env.OMP_NUM_THREADS=4: expected a string"),
        ("a: [", ConfigError, "a YAML file"),
    ],
)
def test_mistakes_are_named_with_the_file(tmp_path, text, error, message):
    path = tmp_path / "mine.yaml"
    path.write_text(text)
    with pytest.raises(error, match=re.escape(message)) as caught:
        load_site(str(path))
    assert "mine.yaml" in str(caught.value)


OWN = """
from dataclasses import replace
from aligner import api
from aligner.cluster.site import load_site

MINE = replace(load_site("dgx_infiniband"), partition="big", env={"NCCL_DEBUG": "WARN"})
WRONG = api.Site(gpus_per_node=2.5)
"""


def test_a_site_of_a_users_python_is_checked_as_files_are(tmp_path, monkeypatch):
    (tmp_path / "own_site.py").write_text(OWN)
    monkeypatch.syspath_prepend(tmp_path)  # as an installed package's module
    for path in (f"{tmp_path}/own_site.py", "own_site"):
        name, site = find_site(f"{path}:MINE")
        assert name == f"{path}:MINE" and site.gpu == "h100" and site.env == {"NCCL_DEBUG": "WARN"}
        assert isinstance(site.container, Container) and site.container.runtime == "pyxis"
        with pytest.raises(ConfigError, match=r"gpus_per_node=2.5: expected an integer.*own_site.*:WRONG"):
            load_site(f"{path}:WRONG")
        with pytest.raises(SiteCodeError, match=r"--site=.*expected a Site `NONE` in .*, which has MINE, WRONG"):
            load_site(f"{path}:NONE")
    (tmp_path / "odd_site.py").write_text(OWN + "api.Site(mpi='pmix_v9')")
    with pytest.raises(SiteCodeError, match=r"raised ConfigError: mpi='pmix_v9': expected one of none, pmix"):
        load_site(f"{tmp_path}/odd_site.py:MINE")


def test_a_site_that_is_not_there_names_those_that_are():
    with pytest.raises(ConfigError, match="generic, localslurm"):
        load_site("nowhere")


def test_a_job_finds_its_site_by_the_clusters_name():
    assert find_site(None, {})[0] == "generic"
    assert find_site(None, {"SLURM_CLUSTER_NAME": "localslurm"})[0] == "localslurm"
    assert find_site(None, {"SLURM_CLUSTER_NAME": "another"})[0] == "generic"
    assert find_site(None, {"SLURM_CLUSTER_NAME": "localslurm", "ALIGNER_SITE": "slingshot"})[0] == "slingshot"
    assert find_site("generic", {"ALIGNER_SITE": "slingshot"})[0] == "generic"


def test_ranks_per_node_follow_the_gpus():
    assert Site().ranks == 1 and Site(gpus_per_node=8).ranks == 8 and Site(gpus_per_node=8, ranks_per_node=4).ranks == 4
    with pytest.raises(ConfigError):
        Container(runtime="apptainer")


# no NUL in an environment; surrogates are no text
words = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=12)


@given(st.lists(st.tuples(words.map(lambda t: t.replace("$", "")), st.sampled_from(["", "$AB", "${AB}"])), max_size=3))
@settings(max_examples=15, deadline=None)
def test_only_variables_are_expanded(parts):
    """The shell reads back what was written, with $AB for its value; whatever else is in the text is literal."""
    text = "".join(t + ("${AB}" if v else "") for t, v in parts)
    wanted = "".join(t + ("v w" if v else "") for t, v in parts)
    script = f"AB='v w'; printf '%s\\0' {expandable(text)}"
    out = subprocess.run(["bash", "-uc", script], capture_output=True, check=True).stdout
    assert out.decode() == wanted + "\0"


def test_expandable_leaves_plain_words_plain():
    assert expandable("mlx5_0:1") == "mlx5_0:1" and expandable("") == "''"
    assert shlex.split(expandable("$5 `x` $(y)")) == ["$5 `x` $(y)"]
