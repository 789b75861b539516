"""The translation of TRL's configs against TRL itself: its names, its defaults, and what it makes of a file."""

from __future__ import annotations

import dataclasses

import pytest
import yaml

from aligner.config.resolve import compose
from aligner.tools import convert_config as command
from aligner.tools.translate import trl
from aligner.tools.translate.source import Source
from tests.needs import package

TRL = package("trl")
SCRIPTS = package("trl.scripts.grpo")
KINDS = {"grpo": "GRPOConfig", "rloo": "RLOOConfig", "sft": "SFTConfig", "dpo": "DPOConfig", "reward": "RewardConfig"}
KINDS |= {"kto": "KTOConfig"}
# of earlier versions, of the alignment handbook, or of some commands only
OTHERS = {"warmup_ratio", "max_prompt_length", "max_seq_length", "rpo_alpha", "reference_free", "dataset_mixture"}
OTHERS |= {"router_aux_loss_coef", "disable_dropout"}
FILE = {
    "model_name_or_path": "Qwen/Qwen3-8B",
    "dataset_name": "openai/gsm8k",
    "per_device_train_batch_size": 4,
    "gradient_accumulation_steps": 2,
    "steps_per_generation": 6,
    "num_generations": 4,
    "num_iterations": 2,
    "learning_rate": "3e-6",
    "warmup_steps": 0.1,
    "lr_scheduler_type": "cosine",
    "adam_beta2": 0.98,
    "scale_rewards": False,
    "epsilon": 0.1,
    "epsilon_high": 0.3,
    "beta": 0.05,
    "top_p": 0.9,
    "temperature": 0.8,
}


def fields(kind):
    """Name -> default of all that a file for this command may have."""
    arguments = SCRIPTS.GRPOScriptArguments if kind in ("grpo", "rloo") else TRL.ScriptArguments
    classes = [getattr(TRL, KINDS[kind]), TRL.ModelConfig, arguments, TRL.DatasetMixtureConfig]
    return {
        f.name: f.default if f.default_factory is dataclasses.MISSING else f.default_factory()
        for one in classes
        for f in dataclasses.fields(one)
    }


@pytest.mark.parametrize("kind", KINDS)
def test_every_name_of_trl_is_known_and_its_default_is_ours(kind):
    theirs, vocabulary = fields(kind), trl.vocabulary(kind)
    names = {trl.RENAMED.get(name, name) for name in theirs}
    assert not [name for name in names if name not in vocabulary.defaults and not vocabulary.remark(name)]
    assert set(vocabulary.defaults) - set(theirs) <= OTHERS
    stated = {name: default for name, default in vocabulary.defaults.items() if not isinstance(default, type)}
    assert stated and {name: theirs[name] for name in stated} == stated


def test_a_file_means_what_trl_reads_in_it(tmp_path):
    (tmp_path / "a.yaml").write_text(yaml.safe_dump(FILE))
    parser = TRL.TrlParser((SCRIPTS.GRPOScriptArguments, TRL.GRPOConfig, TRL.ModelConfig))
    _, theirs, _ = parser.parse_args_and_config(args=["--use_cpu", "true", "--config", str(tmp_path / "a.yaml")])
    sheet = command.TRANSLATIONS["trl"](Source("trl", "grpo", FILE), "", theirs.world_size)
    cfg = command.checked(sheet, command.experiment(sheet, "a.yaml"))
    assert cfg.batch.prompts * cfg.batch.group == theirs.generation_batch_size
    updates = theirs.steps_per_generation // theirs.gradient_accumulation_steps
    assert cfg.batch.minibatch_samples * updates == theirs.generation_batch_size and updates == 3
    assert (cfg.batch.epochs, cfg.run.epochs) == (theirs.num_iterations, theirs.num_train_epochs)
    assert (cfg.optim.lr, cfg.optim.warmup_steps) == (theirs.learning_rate, theirs.warmup_steps)
    assert cfg.optim.betas == [theirs.adam_beta1, theirs.adam_beta2] and cfg.optim.eps == theirs.adam_epsilon
    assert (cfg.optim.weight_decay, cfg.optim.clip_grad) == (theirs.weight_decay, theirs.max_grad_norm)
    assert (cfg.algorithm.clip_low, cfg.algorithm.clip_high) == (theirs.epsilon, theirs.epsilon_high)
    assert (
        cfg.algorithm.kl.coef == theirs.beta and cfg.algorithm.kl.importance_weighted == theirs.use_bias_correction_kl
    )
    assert (cfg.sampling.temperature, cfg.sampling.top_p) == (theirs.temperature, theirs.top_p)
    assert cfg.sampling.max_response_tokens == theirs.max_completion_length
    assert theirs.scale_rewards == "none" and cfg.algorithm.advantage == "dr_grpo"
    assert (
        theirs.loss_type == "dapo" and cfg.algorithm.aggregation == compose(["experiment=dapo"]).algorithm.aggregation
    )
