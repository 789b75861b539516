"""`aligner convert-config`: published examples of three trainers become configs that a run accepts and a plan fits."""

from __future__ import annotations

import re
import subprocess

import pytest

from aligner.__main__ import main
from aligner.config.resolve import compose
from aligner.config.unread import compose_run
from aligner.config.validate import validate_values
from aligner.errors import ConfigError
from aligner.tools import convert_config as command
from aligner.tools.recipes import plan_of
from aligner.tools.translate.shell import Script, arguments
from aligner.tools.translate.source import read

TRAINER = re.compile(r"^(verl\.trainer\.main_ppo|openrlhf\.cli\.\w+)$")
# The keys of published examples, most on another model: sizes of these are known without their files.
TRL_SFT = """
model_name_or_path: Qwen/Qwen3-0.6B
dataset_name: stanfordnlp/imdb
report_to: none
learning_rate: 0.0001
lr_scheduler_type: cosine
"""
TRL_GRPO = """
model_name_or_path: Qwen/Qwen3-8B
model_revision: main
torch_dtype: bfloat16
attn_implementation: flash_attention_2
dataset_name: openai/gsm8k
bf16: true
use_vllm: true
vllm_device: auto
vllm_gpu_memory_utilization: 0.7
do_eval: true
eval_strategy: steps
eval_steps: 100
gradient_accumulation_steps: 4
steps_per_generation: 8
gradient_checkpointing: true
gradient_checkpointing_kwargs: {use_reentrant: false}
hub_model_id: mine
learning_rate: 2e-05
log_completions: true
logging_steps: 1
lr_scheduler_type: cosine_with_min_lr
lr_scheduler_kwargs: {min_lr_rate: 0.1}
max_prompt_length: 640
max_completion_length: 1024
max_steps: 100
num_generations: 8
beta: 0.04
loss_type: dr_grpo
scale_rewards: false
epsilon_high: 0.28
output_dir: out/grpo
per_device_eval_batch_size: 32
per_device_train_batch_size: 4
push_to_hub: true
report_to: [wandb]
reward_funcs: [accuracy_reward, my.rewards.short]
reward_weights: [1.0, 0.5]
save_strategy: epoch
save_total_limit: 1
seed: 42
warmup_ratio: 0.1
"""
TRL_DPO = """
model_name_or_path: meta-llama/Llama-3.1-8B-Instruct
dataset_mixture:
  datasets:
    - {id: HuggingFaceH4/ultrafeedback_binarized, config: default, split: train_prefs, weight: 1.0}
    - {id: HuggingFaceH4/ultrafeedback_binarized, config: default, split: test_prefs, weight: 1.0}
  test_split_size: 2000
  seed: 0
dataset_num_proc: 12
bf16: true
beta: 0.01
loss_type: [sigmoid, sft]
loss_weights: [1.0, 0.2]
gradient_accumulation_steps: 2
learning_rate: 5.0e-7
lr_scheduler_type: cosine
max_length: 1024
max_prompt_length: 512
num_train_epochs: 1
optim: adamw_torch
per_device_train_batch_size: 8
save_strategy: steps
save_steps: 100
use_peft: true
lora_r: 32
lora_alpha: 16
"""
TRL_REWARD = """
model_name_or_path: Qwen/Qwen3-0.6B
dataset_name: trl-lib/ultrafeedback_binarized
output_dir: out/rm
per_device_train_batch_size: 8
num_train_epochs: 1
gradient_checkpointing: true
learning_rate: 1.0e-5
eval_strategy: steps
eval_steps: 50
max_length: 2048
center_rewards_coefficient: 0.02
"""
OPENRLHF_DAPO = r"""set -x
python3 -m openrlhf.cli.train_ppo_ray \
   --ref_num_nodes 1 --ref_num_gpus_per_node 8 \
   --actor_num_nodes 1 \
   --actor_num_gpus_per_node 8 \
   --vllm_num_engines 4 \
   --vllm_tensor_parallel_size 2 \
   --colocate_all_models \
   --vllm_gpu_memory_utilization 0.6 \
   --init_kl_coef 1e-3 \
   --gamma 1.0 \
   --use_kl_loss \
   --kl_estimator k3 \
   --advantage_estimator group_norm \
   --dynamic_filtering --dynamic_filtering_reward_range 0 1 \
   --eps_clip_low_high 0.2 0.27 \
   --pretrain meta-llama/Llama-3.1-8B-Instruct \
   --remote_rm_url /openrlhf/reward_func.py \
   --save_steps 20 --save_hf_ckpt \
   --micro_train_batch_size 8 --train_batch_size 128 \
   --micro_rollout_batch_size 16 --rollout_batch_size 128 \
   --n_samples_per_prompt 8 --max_epochs 1 \
   --prompt_max_len 1024 --generate_max_len 2048 \
   --zero_stage 3 --bf16 --actor_learning_rate 5e-7 \
   --prompt_data OpenRLHF/prompt-collection-v0.1 --input_key context_messages --apply_chat_template \
   --gradient_checkpointing --packing_samples --enforce_eager \
   --enable_vllm_is_correction --vllm_is_truncated_threshold 0.5 5.0 --use_icepop
# You could also try
#   --kl_estimator k2 \
"""
OPENRLHF_PPO = r"""
SAVE=./final
MODEL_ARGS=(
   --actor.model_name_or_path Qwen/Qwen3-0.6B
   # --critic.model_name_or_path other
   --reward.model_name_or_path OpenRLHF/Llama-3-8b-rm-700k
   --ckpt.output_dir ${SAVE}/rlhf
)
ray job submit --address="http://127.0.0.1:8265" \
   -- python3 -m openrlhf.cli.train_ppo_ray ${MODEL_ARGS[@]} \
   --actor.num_nodes 1 --actor.num_gpus_per_node 4 --vllm.num_engines 2 --vllm.tensor_parallel_size 2 \
   --train.batch_size 128 --rollout.batch_size 1024 --rollout.n_samples_per_prompt 1 \
   --data.max_len 2048 --rollout.max_new_tokens 1024 \
   --actor.adam.lr 5e-7 --critic.adam.lr 9e-6 --algo.kl.init_coef 0.01 \
   --data.prompt_dataset prompts.jsonl --reward.normalize_enable \
   --train.dynamic_batch_enable --train.max_tokens_per_gpu 16384 2>&1 | tee log
"""
OPENRLHF_DPO = """
read -r -d '' training_commands <<EOF
openrlhf.cli.train_dpo \\
   --train_batch_size 256 \\
   --micro_train_batch_size 1 \\
   --pretrain Qwen/Qwen3-0.6B \\
   --max_len 8192 \\
   --learning_rate 5e-7 \\
   --beta 0.2 \\
   --dataset pairs.jsonl \\
   --ipo
EOF
if [[ ${1} != "slurm" ]]; then
    torchrun --standalone --nproc-per-node ${NPROC_PER_NODE:-8} -m $training_commands
fi
"""
VERL_GRPO = """#!/usr/bin/env bash
set -xeuo pipefail
DEVICE=${DEVICE:-$(python3 -c 'import torch_npu' 2>/dev/null && echo npu || echo gpu)}
MODEL_PATH=${MODEL_PATH:-Qwen/Qwen3-8B}
TRAIN_FILE=${TRAIN_FILE:-"/data/gsm8k/train.parquet"}
prompt=$((512 * 2))
case "${DEVICE}" in
    gpu) ;;
    npu)
        export VLLM_USE_V1=1
        rollout_tp=4
        ;;
esac
DATA=(
    algorithm.adv_estimator=grpo
    data.train_files=${TRAIN_FILE}
    data.train_batch_size=512
    data.max_prompt_length=${prompt}
    data.max_response_length=1024
    data.filter_overlong_prompts=True
    data.truncation='error'
)
ACTOR=(
    actor_rollout_ref.model.path=${MODEL_PATH}
    actor_rollout_ref.actor.optim.lr=1e-6
    actor_rollout_ref.actor.optim.lr_warmup_steps=5
    actor_rollout_ref.actor.ppo_mini_batch_size=256
    actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=2
    actor_rollout_ref.actor.use_kl_loss=True
    actor_rollout_ref.actor.kl_loss_coef=0.001
    actor_rollout_ref.actor.kl_loss_type=low_var_kl
    actor_rollout_ref.actor.clip_ratio_high=0.28
    actor_rollout_ref.actor.loss_agg_mode=seq-mean-token-mean
    actor_rollout_ref.actor.fsdp_config.optimizer_offload=True
    actor_rollout_ref.rollout.name=vllm
    actor_rollout_ref.rollout.tensor_model_parallel_size=${rollout_tp}
    actor_rollout_ref.rollout.gpu_memory_utilization=0.6
    actor_rollout_ref.rollout.n=5
)
DATA+=(trainer.logger='["console","wandb"]' trainer.total_epochs=15)
python3 -m verl.trainer.main_ppo "${DATA[@]}" "${ACTOR[@]}" +mine.own=3 "$@"
"""
VERL_PPO = """
algorithm: {adv_estimator: gae, lam: 0.95, use_kl_in_reward: true, kl_ctrl: {kl_coef: 0.002}}
data:
  train_files: [/d/gsm8k/train.parquet, /d/math/train.parquet]
  train_batch_size: 1024
  max_prompt_length: 512
  max_response_length: 1024
actor_rollout_ref:
  model: {path: Qwen/Qwen3-0.6B}
  actor:
    ppo_mini_batch_size: 256
    optim: {lr: 2.0e-6, lr_scheduler_type: cosine, min_lr_ratio: 0.1}
    policy_loss: {loss_mode: gspo}
    megatron: {tensor_model_parallel_size: 2, pipeline_model_parallel_size: 2, context_parallel_size: 1}
  rollout: {name: vllm, n: 1, response_length: '${data.max_response_length}'}
critic: {model: {path: Qwen/Qwen3-0.6B}, optim: {lr: 1.0e-5}}
trainer: {nnodes: 2, n_gpus_per_node: 8, critic_warmup: 3, total_training_steps: 40}
"""
VERL_SFT = """torchrun --standalone --nnodes=1 --nproc_per_node=8 -m verl.trainer.sft_trainer \\
    data.train_files=$HOME/data/gsm8k/train.parquet data.messages_key=turns data.train_batch_size=96 \\
    model.path=Qwen/Qwen3-0.6B optim.lr=1e-4 trainer.total_training_steps=30 trainer.n_gpus_per_node=8
"""
# name of the file -> its text, further options, our values that follow
EXAMPLES = {
    "sft.yaml": (
        TRL_SFT,
        ["--command", "sft", "--gpus", "2"],
        {
            "stage.name": "sft",
            "batch.sequences": 16,  # 8 a device
            "optim.lr": 1e-4,
            "optim.schedule": "cosine",
            "optim.betas": [0.9, 0.999],
            "optim.weight_decay": 0.0,
            "run.epochs": 3.0,
            "data.max_tokens": 1024,
            "data.overlong": "truncate",
            "data.train": "downloads/stanfordnlp/imdb",
            "model.num_layers": 28,
        },
    ),
    "demo.yaml": (
        TRL_GRPO,
        ["--gpus", "8"],
        {
            "stage.name": "grpo",
            "batch.prompts": 32,  # 4 x 8 steps x 8 GPUs / 8
            "batch.group": 8,
            "batch.minibatch_samples": 128,
            "run.steps": 50,  # of 2 updates
            "run.eval_every": 50,
            "optim.min_lr": 2e-6,
            "optim.warmup_steps": 0.1,
            "data.max_prompt_tokens": 640,
            "sampling.max_response_tokens": 1024,
            "algorithm.advantage": "dr_grpo",
            "algorithm.aggregation": "seq_mean_token_sum_norm",
            "algorithm.clip_low": 0.2,
            "algorithm.clip_high": 0.28,
            "algorithm.kl.coef": 0.04,
            "algorithm.kl.placement": "loss",
            "algorithm.kl.importance_weighted": True,
            "engine.name": "vllm",
            "mismatch.cap": 3.0,
            "data.train": "data/gsm8k/train.jsonl",
            "seed": 42,
            "checkpoint.keep_last": 1,
            "parallel.tensor": 2,
        },
    ),
    "handbook.yml": (
        TRL_DPO,
        ["--gpus", "8"],
        {
            "stage.name": "dpo",
            "batch.sequences": 128,
            "algorithm.preference.beta": 0.01,
            "algorithm.preference.loss": ["sigmoid"],
            "algorithm.preference.nll_coef": 0.2,
            "model.lora.rank": 32,
            "model.lora.alpha": 16.0,
            "model.lora.dropout": 0.05,
            "model.lora.targets": ["q_proj", "v_proj"],
            "checkpoint.every": 100,
        },
    ),
    "reward.yaml": (
        TRL_REWARD,
        ["--gpus", "1"],
        {"stage.name": "rm", "algorithm.reward_loss.center_coef": 0.02, "data.max_tokens": 2048, "run.eval_every": 50},
    ),
    "train_dapo.sh": (
        OPENRLHF_DAPO,
        [],
        {
            "stage.name": "grpo",
            "algorithm.advantage": "grpo",
            "algorithm.group_eps": 1e-9,
            "algorithm.kl.coef": 1e-3,
            "algorithm.kl.estimator": "k3",
            "algorithm.kl.placement": "loss",
            "algorithm.clip_high": 0.27,
            "algorithm.filter_groups": True,
            "batch.prompts": 128,
            "batch.group": 8,
            "batch.minibatch_samples": 128,
            "optim.lr": 5e-7,
            "optim.min_lr": 5e-8,
            "optim.schedule": "cosine",
            "optim.warmup_steps": 0.03,
            "reward.clip": 10.0,
            "data.max_prompt_tokens": 1024,
            "sampling.max_response_tokens": 2048,
            "engine.ranks": 0,
            "engine.tensor_parallel": 2,
            "engine.cuda_graphs": False,
            "mismatch.correction": "icepop",
            "mismatch.high": 5.0,
            "cluster.gpus": 8,
        },
    ),
    "ppo.sh": (
        OPENRLHF_PPO,
        [],
        {
            "stage.name": "ppo",
            "run.dir": "./final/rlhf",
            "engine.ranks": 4,
            "cluster.gpus": 8,
            "critic.optim.lr": 9e-6,
            "critic.optim.min_lr": 9e-7,
            "critic.clip": 0.5,
            "algorithm.kl.placement": "reward",
            "algorithm.kl.coef": 0.01,
            "algorithm.lam": 1.0,
            "reward.normalize": True,
            "batch.micro_batch_tokens": 16384,
            "batch.epochs": 1,
        },
    ),
    "train_dpo.sh": (
        OPENRLHF_DPO,
        ["--gpus", "8"],
        {
            "stage.name": "dpo",
            "batch.sequences": 256,
            "batch.micro_batch_samples": 1,
            "algorithm.preference.beta": 0.2,
            "algorithm.preference.loss": ["ipo"],
            "algorithm.preference.length": "sum",
            "data.max_tokens": 8192,
            "optim.lr": 5e-7,
        },
    ),
    "run_grpo.sh": (
        VERL_GRPO,
        [],
        {
            "stage.name": "grpo",
            "batch.prompts": 512,
            "batch.group": 5,
            "batch.minibatch_samples": 1280,
            "optim.warmup_steps": 10.0,  # 5 rollouts of 2 updates
            "optim.betas": [0.9, 0.999],
            "algorithm.dual_clip": 3.0,
            "algorithm.clip_low": 0.2,
            "algorithm.clip_high": 0.28,
            "algorithm.kl.estimator": "k3",
            "algorithm.aggregation": "seq_mean_token_mean",
            "memory.offload": ["optimizer"],
            "engine.tensor_parallel": 4,
            "data.max_prompt_tokens": 1024,
            "run.epochs": 15.0,
            "logging.trackers": ["tensorboard", "wandb"],
            "logging.offline": False,
            "data.columns": {"answer": "reward_model.ground_truth"},
        },
    ),
    "trainer.yaml": (
        VERL_PPO,
        [],
        {
            "stage.name": "ppo",
            "algorithm.lam": 0.95,
            "algorithm.kl.coef": 0.002,
            "algorithm.kl.placement": "reward",
            "algorithm.policy_loss": "gspo",
            "algorithm.aggregation": "seq_mean_token_mean",
            "optim.min_lr": 2e-7,
            "critic.warmup_steps": 3,
            "parallel.tensor": 2,
            "parallel.pipeline": 2,
            "parallel.sequence": True,
            "cluster.gpus": 16,
            "run.steps": 40,
        },
    ),
    "sft.sh": (
        VERL_SFT,
        [],
        {
            "stage.name": "sft",
            "batch.sequences": 96,
            "optim.lr": 1e-4,
            "data.columns": {"messages": "turns"},
            "data.max_tokens": 1024,
            "run.steps": 30,
        },
    ),
}


def value(cfg, key):
    for word in key.split("."):
        cfg = getattr(cfg, word)
    return cfg


def translated(tmp_path, name, text, *options):
    (tmp_path / name).write_text(text)
    return main(["convert-config", str(tmp_path / name), "--out", str(tmp_path), *options])


@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_becomes_a_config_that_a_run_accepts_and_a_plan_fits(name, tmp_path, capsys):
    text, options, expected = EXAMPLES[name]
    assert translated(tmp_path, name, text, *options) == 0
    output = capsys.readouterr().out
    (path,) = (tmp_path / "experiment").glob("*.yaml")
    cfg = compose_run([f"experiment={path.stem}"], config_dir=str(tmp_path))
    assert {key: value(cfg, key) for key in expected} == expected
    names = [source.name for source in cfg.data.sources]
    assert len(set(names)) == len(names)
    assert path.read_text() == output[: output.index("#\n# Translated")]
    validate_values(cfg, cfg.cluster.gpus)
    assert plan_of(cfg).memory.fits
    source = read(str(tmp_path / name))
    report = output.partition("# Translated")[2]
    lines = [line for line in report.splitlines() if line.startswith("#   ")]
    for key in source.values:  # each name is in the report
        assert any(re.search(rf"(^|[ ,]){re.escape(key)}[=:\[]", line.removeprefix("#")) for line in lines), key
    assert f"launch --ranks {cfg.cluster.gpus} -c {tmp_path} experiment={path.stem}" in output


def test_the_report_names_what_has_no_equivalent_and_what_is_assumed(tmp_path, capsys):
    translated(tmp_path, "run.sh", VERL_GRPO)
    output = capsys.readouterr().out
    lacking = output.partition("# Without equivalent:")[2].partition("#\n")[0]
    assert "mine.own=3" in lacking and "$rollout_tp=4: of the script's first branch" in lacking
    assert "data.truncation=error: data.overlong=drop" in output.partition("# Nothing to set:")[2]


def test_a_default_is_stated_only_where_it_differs_from_ours(tmp_path, capsys):
    translated(tmp_path, "tuned.yaml", TRL_SFT, "--command", "sft", "--gpus", "1")
    stated = capsys.readouterr().out.partition("defaults that differ from ours:")[2].partition("#\n")[0]
    assert "adam_beta2=0.999 (default) -> optim.betas=[0.9, 0.999]" in stated and "weight_decay=0 (default)" in stated
    assert "optim.eps" not in stated and "optim.clip_grad" not in stated  # equal in both


@pytest.mark.parametrize(
    ("name", "text", "options", "message"),
    [
        ("a.yaml", "policy: {model_name: x}\ngrpo: {}\n", [], "expected a config of TRL .* policy, grpo are none"),
        ("a.yaml", "one: 1\n", [], "expected a config of TRL"),
        ("a.txt", "one two three", [], "expected a config of TRL"),
        ("a.yaml", "a: [", [], r"a\.yaml, line 2: |expected valid YAML"),
        ("a.sh", "verl.trainer.main_eval", [], "data.train_files|expected"),
        (
            "a.yaml",
            TRL_GRPO + "num_generation: 4\n",
            ["--gpus", "8"],
            "num_generation=4.*Did you mean `num_generations`",
        ),
        ("a.yaml", TRL_GRPO.replace("beta: 0.04", "beta: high"), ["--gpus", "8"], "beta='high': expected a number"),
        ("a.yaml", TRL_GRPO.replace("num_generations: 8", "num_generations: 7"), ["--gpus", "8"], "num_generations=7"),
        ("a.yaml", TRL_GRPO, [], "--gpus=0: expected the number of GPUs"),
        ("a.yaml", TRL_SFT, ["--gpus", "8"], "--command='': expected one of grpo, rloo, sft"),
        ("a.sh", VERL_GRPO.replace("_size=512", "_sice=512"), [], "data.train_batch_sice.*`data.train_batch_size`"),
        ("a.sh", VERL_GRPO.replace("=512", "=513"), [], "ppo_mini_batch_size=256: expected a divisor"),
        ("a.sh", VERL_GRPO.replace("$((512 * 2))", "$(nproc)"), [], r"\$\{prompt\}.*without commands"),
        ("a.sh", OPENRLHF_DPO.replace("--beta 0.2", "--betta 0.2"), [], "betta.*Did you mean"),
        ("a.sh", OPENRLHF_DPO.replace("train_dpo", "serve_rm"), [], "expected one of train_ppo_ray"),
    ],
)
def test_bad_input_is_refused_by_name(name, text, options, message, tmp_path, capsys):
    assert translated(tmp_path, name, text, *options) == 2
    assert re.search(message, capsys.readouterr().err, re.DOTALL)
    assert not (tmp_path / "experiment").exists()


def test_a_result_that_this_project_refuses_is_shown_but_not_written(tmp_path, capsys):
    text = VERL_PPO.replace("tensor_model_parallel_size: 2", "tensor_model_parallel_size: 3")
    assert translated(tmp_path, "a.yaml", text) == 2
    streams = capsys.readouterr()
    assert "tensor: 3" in streams.out and "parallel.tensor" in streams.err and not (tmp_path / "experiment").exists()


def test_an_edited_translation_is_not_overwritten(tmp_path, capsys):
    options = ("--command", "sft", "--gpus", "1", "--name", "own")
    assert translated(tmp_path, "a.yaml", TRL_SFT, *options) == 0 == translated(tmp_path, "a.yaml", TRL_SFT, *options)
    path = tmp_path / "experiment/own.yaml"
    path.write_text(path.read_text() + "seed: 3\n")
    assert translated(tmp_path, "a.yaml", TRL_SFT, *options) == 2
    assert "seed: 3" in path.read_text()
    assert translated(tmp_path, "a.yaml", TRL_SFT, "--command", "sft", "--gpus", "1", "--name", "dapo") == 2
    assert "conf/experiment" in capsys.readouterr().err


@pytest.mark.parametrize(
    "script", [OPENRLHF_DAPO, OPENRLHF_PPO, OPENRLHF_DPO, VERL_GRPO.replace("set -x", "rollout_tp=4 #")]
)
def test_the_reader_of_scripts_gets_the_arguments_that_bash_passes(script, tmp_path, monkeypatch):
    monkeypatch.delenv("MODEL_PATH", raising=False)
    shim = "shown() { while [[ $# -gt 0 && $1 != *.cli.* && $1 != *.main_ppo ]]; do shift; done\n"
    shim += 'printf "%s\\n" "$@" >"$OUT"; }\n'
    shim += "".join(f'{program}() {{ shown "$@"; }}\n' for program in ("ray", "torchrun"))
    shim += 'python3() { if [[ $1 == -m ]]; then shown "$@"; else return 1; fi; }\n'
    (tmp_path / "a.sh").write_text(shim + script)
    environment = {"PATH": "/usr/bin:/bin", "OUT": str(tmp_path / "out"), "HOME": "/root"}
    subprocess.run(["bash", tmp_path / "a.sh"], env=environment, capture_output=True, check=False)
    words = next(Script(script).commands(TRAINER))
    assert (tmp_path / "out").read_text().split("\n")[1:-1] == arguments(words, TRAINER)


def test_other_names_of_one_key_say_the_same():
    """Old and new names of OpenRLHF lead to the same settings."""
    from aligner.tools.translate.openrlhf import current

    old, _ = current("train_ppo_ray", {"pretrain": "m", "init_kl_coef": 0.1, "l2": 0.2, "bf16": True})
    assert old == {
        "actor.model_name_or_path": "m",
        "algo.kl.init_coef": 0.1,
        "critic.adam.weight_decay": 0.2,
        "actor.adam.weight_decay": 0.2,
        "ds.param_dtype": "bf16",
    }


def test_no_vocabulary_explains_a_name_that_it_translates():
    """A name is translated or explained: a pattern of the explained would hide nothing that is translated."""
    from aligner.tools.translate import openrlhf, trl, verl

    for vocabulary in [trl.vocabulary(c) for c in trl.STAGES] + [openrlhf.vocabulary(c) for c in openrlhf.STAGES]:
        assert not [n for n in vocabulary.defaults if n in {**vocabulary.needless, **vocabulary.missing}]
    assert verl.vocabulary(True).remark("engine.fsdp_size") and not verl.vocabulary(False).remark("data.nothing")


def test_the_settings_of_a_translation_are_checked():
    sheet = command.TRANSLATIONS["trl"](
        command.Source("trl", "kto", {"model_name_or_path": "a/b", "dataset_name": "c/d"}), "", 1
    )
    document = command.experiment(sheet, "x.yaml")
    assert command.checked(sheet, document).stage.name == "kto"
    with pytest.raises(ConfigError, match="unknown config key"):
        command.checked(sheet, document + "nothing: {at: all}\n")
    assert compose(["stage=kto"]).algorithm.kto.beta == sheet["beta"]
