"""A config of each stage that is fine."""

import pytest

from aligner.config.resolve import compose


@pytest.fixture(scope="module")
def make(tmp_path_factory):
    folder = tmp_path_factory.mktemp("valid")
    data = folder / "train.jsonl"
    data.write_text("{}\n")
    (folder / "rm").mkdir()
    stages = {
        "distill": [f"algorithm.distill.teacher='{folder}/rm'"],
        "grpo": ["reward.functions=[{path:math}]"],
        "sample": ["reward.functions=[{path:math}]"],
        "online_dpo": ["reward.functions=[{path:math}]"],
        "ppo": [f"reward.model='{folder}/rm'"],
    }

    def compose_valid(stage, *overrides):
        return compose([f"stage={stage}", f"data.train='{data}'", *stages.get(stage, []), *overrides])

    return compose_valid
