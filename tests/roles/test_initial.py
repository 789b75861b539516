"""Where models start from, by the folder that a key names."""

import json
import shutil
from dataclasses import replace
from functools import partial
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from aligner.__main__ import main
from aligner.config.sections.model.config import for_run
from aligner.config.sections.parallel import ParallelConfig
from aligner.errors import ConfigError
from aligner.families.hf_config import config_from_hf
from aligner.families.table import family_table
from aligner.megatron.model import Head
from aligner.megatron.weights import local_parameters, own_shard
from aligner.models import safetensors_io
from aligner.models.safetensors_io import open_hf
from aligner.models.slices import HfSource
from aligner.roles.model_init import InitialModel, shape_of
from tests import stages
from tests.megatron.models import build
from tests.ranks import on_ranks
from tests.tiny import LLAMA, MOE, MORE, transformers_model, write_folder

QUIET = ["run.steps=1", "run.export=false", "checkpoint.final=false", "reward.functions=[]"]


@pytest.mark.slow
def test_a_reward_model_is_the_same_from_its_run_its_checkpoint_and_its_export(tiny_data, tiny_runs, tmp_path, capsys):
    run = tiny_runs["rm"]
    checkpoint = run / "checkpoints" / "step-00000020"
    shutil.copytree(run, tmp_path / "no_export", ignore=shutil.ignore_patterns("hf"))
    assert main(["export", str(checkpoint), str(tmp_path / "out")]) == 0
    content = [
        json.loads((folder / "aligner.json").read_text()) for folder in (run / "hf", checkpoint, tmp_path / "out")
    ]
    assert content[0] == content[1] == content[2] and content[0]["bias"] != 0 and content[0]["std"] != 1
    assert "aligner.json" in json.loads((checkpoint / "manifest.json").read_text())["files"]
    rewards = []
    for i, index in enumerate((run, checkpoint, tmp_path / "out", tmp_path / "no_export")):
        overrides = [f"model.init={tiny_runs['sft']}", f"reward.model={index}"]
        (record,) = stages.records(stages.stage("grpo", tiny_data, tmp_path / str(i), *overrides, *QUIET))
        rewards.append(record["reward/model/mean"])
    assert len(set(rewards)) == 1 and rewards[0] != 0
    assert "not centred" not in capsys.readouterr().out


@pytest.mark.parametrize("folder", ["", "checkpoints/step-00000040"])
def test_a_language_model_is_no_reward_model(tiny_data, tiny_runs, tmp_path, folder):
    path = tiny_runs["sft"] / folder
    with pytest.raises(ConfigError, match=rf"^reward\.model='{path}': expected a reward model: a run of stage rm"):
        stages.stage("grpo", tiny_data, tmp_path / "run", f"reward.model={path}", *QUIET)


@pytest.fixture
def hf_folder(request, tmp_path):
    return write_folder(*transformers_model(request.param), tmp_path / "hf")


@pytest.mark.multirank
@pytest.mark.parametrize(
    ("hf_folder", "layout", "world", "readers"),
    [
        (LLAMA, {}, 2, {0}),
        (LLAMA, {"context": 2}, 4, {0}),
        (LLAMA, {"tensor": 2}, 4, {0, 1}),
        (LLAMA, {"pipeline": 2}, 4, {0, 2}),
        (MOE, {"expert": 2}, 4, {0, 1}),  # rank 1 the experts that rank 0 has not
    ],
    indirect=["hf_folder"],
)
@on_ranks()
def test_one_of_the_data_parallel_copies_reads_the_weights(hf_folder, layout, world, readers):
    """And all have what they would have read by themselves."""
    opened: list[Path] = []
    real = safetensors_io._open
    with mock.patch.object(safetensors_io, "_open", lambda path, *names: opened.append(path) or real(path, *names)):
        initial = InitialModel(config_from_hf(hf_folder), None, folder=Path(hf_folder))
        model = build(initial.config, ParallelConfig(**layout), dtype=torch.bfloat16, source=initial.source(Head()))
    assert bool(opened) == (dist.get_rank() in readers)
    own = HfSource(partial(open_hf, hf_folder), initial.config)
    table = {spec.canonical: spec for spec in family_table(initial.config)}
    for name, tensor in local_parameters(model.module).items():
        assert torch.equal(tensor, own_shard(table[name], own, model.layout).to(torch.bfloat16)), name


def test_a_model_without_indexers_beside_one_that_trains_them_has_no_loss_of_theirs():
    """A critic of a policy with `model.indexer.loss`, whose checkpoints are those of any other run."""
    run = replace(MORE["glm_moe_dsa"], indexer=replace(MORE["glm_moe_dsa"].indexer, loss=0.5))
    critic = for_run(LLAMA, run)
    assert critic.indexer.loss == 0 and shape_of(critic) == shape_of(LLAMA)
    assert for_run(MORE["deepseek_v32"], run).indexer.loss == 0.5
    assert shape_of(run) == shape_of(MORE["glm_moe_dsa"])
