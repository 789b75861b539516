"""Values of keys that the schema takes or refuses, through composition as a user gives them."""

import pytest

from aligner.config.identity import reads, uses
from aligner.config.resolve import compose
from aligner.config.schema import StageConfig
from aligner.config.stages import STAGES
from aligner.errors import ConfigError

EXAMPLE = "examples/own_stage.py"


@pytest.mark.parametrize("steps", ["0", "0.03", "1", "50"])
def test_warm_up_is_a_number_of_steps_or_a_fraction(steps):
    assert compose(["stage=sft", f"optim.warmup_steps={steps}"]).optim.warmup_steps == float(steps)


@pytest.mark.parametrize("steps", ["1.5", "-1", "-0.1", ".nan", "few"])
def test_other_warm_ups_are_refused(steps):
    with pytest.raises(ConfigError, match=r"optim\.warmup_steps"):
        compose(["stage=sft", f"optim.warmup_steps={steps}"])


@pytest.mark.parametrize(
    "setting", ["lam_alpha=-1", "positive.coef=-0.1", "sft_loss=DFT", "advantage=max_rl", "positive.above=much"]
)
def test_settings_of_algorithms_are_refused_by_their_key(setting):
    with pytest.raises(ConfigError, match=rf"algorithm\.{setting.partition('=')[0]}"):
        compose([f"algorithm.{setting}"])


def test_a_stage_is_one_of_the_projects_or_the_path_of_a_file():
    assert StageConfig(name="grpo").its is STAGES["grpo"]
    assert StageConfig(name=EXAMPLE).its.rollouts and EXAMPLE not in STAGES
    assert StageConfig(name="absent.py").name == "absent.py"  # a run's folder may outlive the file
    with pytest.raises(ConfigError, match=r"stage\.name='grop': expected one of .*grpo.*, or path\.py"):
        StageConfig(name="grop")
    with pytest.raises(KeyError):
        _ = STAGES["grop"]


def test_only_a_stage_in_a_file_reads_stage_args():
    assert reads(EXAMPLE, "stage.args") and uses(EXAMPLE, "stage.args.scale")
    assert not any(uses(name, "stage.args") for name in STAGES)
