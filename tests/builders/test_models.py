"""What other models of a job take of its policy."""

from types import SimpleNamespace

import pytest

from aligner.builders import models, teachers
from aligner.config.resolve import compose

MAKERS = {
    "reward.model": (models, models.make_reward_model, ["stage=grpo", "reward.model=x"]),
    "algorithm.distill.teacher": (
        *(teachers, teachers.find_teachers),
        ["stage=distill", "algorithm.distill.teacher=x", "data.train=x"],
    ),
}


@pytest.mark.parametrize("key", MAKERS)
def test_fields_of_megatron_are_the_policys(key, monkeypatch):
    """Those that fit its shape may not fit another."""
    module, make, overrides = MAKERS[key]
    cfg = compose([*overrides, "model=qwen3_30b_a3b", "model.megatron.recompute_modules=[moe]"])

    def resolve(like, path, *unused, **options):
        raise StopIteration(like.megatron)

    monkeypatch.setattr(module, "resolve", resolve)
    with pytest.raises(StopIteration) as seen:
        make(SimpleNamespace(cfg=cfg))
    assert seen.value.value == {}
