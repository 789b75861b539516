"""Other trainers' names for our keys."""

from __future__ import annotations

import pytest

from aligner.config.foreign_names import NAMES, known_elsewhere
from aligner.config.identity import uses
from aligner.config.options import GROUPS, all_keys, key_type, nearest
from aligner.config.resolve import compose
from aligner.config.stages import STAGES
from aligner.errors import UnknownKeyError

ANSWERS = [
    (name, stage, setting)
    for name, answer in NAMES.items()
    for stage, setting in ({"": answer} if isinstance(answer, str) else answer).items()
    if setting
]


def test_every_answer_is_a_key_that_exists_or_a_setting_of_one():
    for name, _, setting in ANSWERS:
        key, equals, _ = setting.partition("=")
        assert key_type(key) is not None or key in GROUPS, name
        if equals and key not in ("model.lora.quantize_base", "memory.offload", "engine"):
            compose([setting, *(["algorithm.kl.coef=0.1"] if "placement" in setting else [])])


def test_answers_for_a_stage_are_keys_that_it_reads():
    for name, stage, setting in ANSWERS:
        key = setting.partition("=")[0]
        assert not stage or uses(stage, key), (name, stage, key)


def test_no_name_of_ours_is_taken_for_another_one():
    """But for keys that another stage reads, where what they are called means something else."""
    ours = set(all_keys()) - {"batch.epochs", "batch.prompts", "batch.sequences", "data.max_tokens"}
    assert not ours & set(NAMES) and len(NAMES) > 200


@pytest.mark.parametrize(
    ("stage", "name", "key"),
    [
        ("sft", "learning_rate", "optim.lr"),
        ("sft", "+trainer.learning_rate", "optim.lr"),
        ("ppo", "critic.optim.learning_rate", "critic.optim.lr"),
        ("ppo", "critc.optim.lr", "critic.optim.lr"),
        ("dpo", "beta", "algorithm.preference.beta"),
        ("dpo", "algorithm.beta", "algorithm.preference.beta"),
        ("kto", "algorithm.beta", "algorithm.kto.beta"),
        ("grpo", "algorithm.beta", "algorithm.kl.coef"),
        ("distill", "beta", "algorithm.distill.beta"),
        ("dpo", "loss_type", "algorithm.preference.loss"),
        ("grpo", "num_generations", "batch.group"),
        ("grpo", "actor_rollout_ref.rollout.n", "batch.group"),
        ("grpo", "actor_rollout_ref.actor.optim.lr", "optim.lr"),
        ("grpo", "actor_rollout_ref.rollout.tensor_model_parallel_size", "engine.tensor_parallel"),
        ("grpo", "data.train_batch_size", "batch.prompts"),
        ("sft", "data.train_batch_size", "batch.sequences"),
        ("grpo", "data.max_response_length", "sampling.max_response_tokens"),
        ("grpo", "data.train_files", "data.train"),
        ("sft", "max_length", "data.max_tokens"),
        ("grpo", "max_len", "sampling.max_response_tokens"),
        ("grpo", "policy.megatron_cfg.optimizer.lr", "optim.lr"),
        ("grpo", "grpo.num_prompts_per_step", "batch.prompts"),
        ("sft", "per_device_train_batch_size", "batch.micro_batch_samples"),
        ("sft", "warmup_ratio", "optim.warmup_steps"),
        ("sft", "bf16", "model.dtype=bfloat16"),
        ("sft", "lora_r", "model.lora.rank"),
        ("sft", "load_in_4bit", "model.lora.quantize_base=nf4"),
        ("kto", "preference.desirable_weight", "algorithm.kto.desirable_weight"),
        ("grpo", "Kl_Coef", "algorithm.kl.coef"),
        ("sft", "gradient-checkpointing", "model.recompute"),
        ("sft", "num_train_epochs", "run.epochs"),
        ("grpo", "trainer.total_epochs", "run.epochs"),
        ("grpo", "ppo_epochs", "batch.epochs"),
        ("sft", "epochs", "run.epochs"),
        ("sft", "optim.learning_rat", "optim.lr"),
        ("grpo", "num_generation", "batch.group"),
        ("dpo", "max_prompt_length", "data.max_tokens"),
        ("grpo", "data.max_prompt_lenght", "data.max_prompt_tokens"),
    ],
)
def test_a_name_of_another_trainer_leads_to_ours(stage, name, key):
    assert nearest(name.lstrip("+"), stage=stage) == key
    if "-" not in name:  # which no override's key has
        with pytest.raises(UnknownKeyError, match=f"Did you mean `{key}`"):
            compose([f"stage={stage}", f"{name}=1"])


@pytest.mark.parametrize(
    ("stage", "name", "key"),
    [("sft", "num_generations", "batch.group"), ("dpo", "max_completion_length", "sampling.max_response_tokens")],
)
def test_a_suggestion_that_the_stage_does_not_read_says_so(stage, name, key):
    with pytest.raises(UnknownKeyError, match=rf"Did you mean `{key}`\? Stage {stage} does not read it"):
        compose([f"stage={stage}", f"{name}=1"])
    with pytest.raises(UnknownKeyError, match=rf"Did you mean `{key}`\?$"):
        compose(["stage=grpo", f"{name}=1"])


@pytest.mark.parametrize(
    ("stage", "name", "key"),
    [
        ("grpo", "data.max_token", "data.max_prompt_tokens"),
        ("dpo", "data.max_promt_tokens", "data.max_tokens"),
        ("sft", "data.max_promt_tokens", "data.max_prompt_tokens"),
        ("grpo", "batch.sequence", "batch.prompts"),
    ],
)
def test_a_misspelt_key_of_other_stages_leads_to_what_this_stage_reads(stage, name, key):
    with pytest.raises(UnknownKeyError, match=rf"Did you mean `{key}`\?$"):
        compose([f"stage={stage}", f"{name}=1"])


def test_a_stage_that_a_recipe_chooses_counts():
    with pytest.raises(UnknownKeyError, match=r"`algorithm\.preference\.beta`"):
        compose(["experiment=simpo", "algorithm.beta=2"])


def test_a_name_that_nobody_has_is_not_known():
    assert known_elsewhere("nobody.says.this") == known_elsewhere("") == known_elsewhere("beta", "sft") == ""
    assert all(known_elsewhere(name, stage) is not None for name in NAMES for stage in STAGES)
