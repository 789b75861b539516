"""The rules between keys: each is broken by a row of overrides, and says which key, which value and what instead."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import is_dataclass
from typing import get_args, get_origin

import pytest

from aligner.config.options import hints
from aligner.config.rule import Rule, rules
from aligner.config.rules import FACTS, TABLE, WORDS
from aligner.config.schema import Config
from aligner.config.stages import STAGES
from aligner.config.validate import validate, validate_layout
from aligner.errors import ConfigError

# a stage @ ranks ; overrides => the key that is refused
ROWS = """
sft ; data.train='' => data.train
grpo ; engine.tensor_parallel=2 => engine.tensor_parallel
grpo@3 ; engine.ranks=1 ; engine.tensor_parallel=2 => engine.tensor_parallel
grpo@2 ; engine.tensor_parallel=2 ; model={num_heads: 6, num_kv_heads: 3, head_dim: 16} => model.num_kv_heads
grpo@3 ; engine.tensor_parallel=3 ; model={num_heads: 6, num_kv_heads: 2, head_dim: 16} => model.num_kv_heads
grpo@2 ; engine.ranks=2 => engine.ranks
grpo@2 ; engine.ranks=1 ; parallel.tensor=2 => world size less engine.ranks
grpo@3 ; engine.ranks=1 ; batch.prompts=15 => batch.prompts
online_dpo@2 ; batch.prompts=9 => batch.prompts
grpo@2 ; batch.prompts=9 => batch.prompts
grpo@2 ; engine.ranks=1 ; engine.name=trtllm_engine ; engine.trtllm.prefix_reuse=false ; engine.cuda_graphs=false
    => engine.name
grpo@2 ; engine.ranks=1 ; engine.quantization=int8 => engine.quantization
grpo@2 ; engine.ranks=1 ; debug.record_answers=true => debug.record_answers
sft@2 ; engine.ranks=1 => engine.ranks
grpo@2 ; engine.lag=1 => engine.lag
sft ; mismatch.expect=zero => mismatch.expect
grpo ; mismatch.expect=zero ; model.kernels=own => model.kernels
grpo ; mismatch.expect=zero ; engine.name=vllm => engine.name
grpo@2 ; mismatch.expect=zero ; engine.ranks=1 ; engine.lag=1 => engine.lag
grpo@2 ; mismatch.expect=zero ; engine.ranks=1 => engine.ranks
grpo ; mismatch.expect=zero ; engine.quantization=int8 => engine.quantization
grpo ; mismatch.expect=zero ; engine.dtype=bfloat16 => engine.dtype
grpo ; mismatch.expect=zero ; debug.record_answers=true => debug.record_answers
grpo ; mismatch.expect=zero ; model.lora.rank=4 => model.lora.rank
grpo ; mismatch.expect=zero ; debug.train_only=. => debug.train_only
grpo ; mismatch.expect=zero ; model.family=gemma2 => model.family
grpo ; mismatch.expect=zero ; model={family: qwen3, qk_norm: true, moe: {num_experts: 4}} => model.family
grpo@2 ; mismatch.expect=zero ; parallel.tensor=2 => parallel.tensor
grpo@2 ; mismatch.expect=zero ; parallel.context=2 => parallel.context
grpo@2 ; mismatch.expect=zero ; parallel.expert=2 ; model={family: mixtral, moe: {num_experts: 4}} => parallel.expert
grpo@2 ; mismatch.expect=zero ; engine.tensor_parallel=2 => engine.tensor_parallel
sft@2 ; engine.lag=1 => engine.lag
grpo@3 ; engine.ranks=2 ; engine.tensor_parallel=2 ; engine.lag=1 ; engine.window=8 ; environment.tools=[a:b]
    => engine.tensor_parallel
grpo@2 ; engine.ranks=1 ; engine.window=8 => engine.window
grpo@2 ; engine.ranks=1 ; engine.lag=1 ; engine.window=8 ; engine.name=vllm => engine.name
online_dpo@2 ; engine.ranks=1 ; engine.lag=1 => engine.lag
grpo@2 ; engine.ranks=1 ; engine.lag=1 ; debug.rollout_only=true => engine.lag
grpo@2 ; engine.ranks=1 ; engine.lag=1 ; mismatch.correction=none => mismatch.correction
grpo@2 ; engine.ranks=1 ; engine.lag=1 ; mismatch.correction=veto => mismatch.correction
grpo@2 ; engine.ranks=1 ; engine.lag=2 ; algorithm.policy_loss=reinforce ; mismatch.correction=none
    => mismatch.correction
grpo ; algorithm.old_logprobs=engine ; algorithm.policy_loss=gpg => algorithm.old_logprobs
grpo ; algorithm.old_logprobs=engine ; algorithm.policy_loss=kl_cov => algorithm.old_logprobs
grpo ; algorithm.old_logprobs=proxy ; mismatch.correction=veto => algorithm.old_logprobs
grpo ; algorithm.old_logprobs=proxy ; mismatch.stop_above=2 => algorithm.old_logprobs
grpo ; algorithm.old_logprobs=proxy ; debug.first_step_checks=true => algorithm.old_logprobs
grpo ; algorithm.old_logprobs=engine ; mismatch.correction=tis_token => mismatch.correction
ppo ; algorithm.old_logprobs=proxy ; critic.init=. => algorithm.old_logprobs
ppo ; algorithm.old_logprobs=engine ; critic.init=. => algorithm.old_logprobs
grpo@2 ; engine.ranks=1 ; engine.lag=1 ; algorithm.filter_groups=true => algorithm.filter_groups
grpo ; curriculum.bounds=[0,1] => curriculum.column
grpo ; curriculum.steps=2 => curriculum.column
grpo ; curriculum.column=n => curriculum.column
grpo ; curriculum={column: n, bounds: [0, 1], first: high} => curriculum.first
grpo ; curriculum.attempts=2 => curriculum.attempts
grpo ; curriculum.learnability=true => curriculum.learnability
grpo ; reward={functions: [], model: .} ; curriculum.skip_epochs=1 => reward.functions
grpo@2 ; engine.ranks=1 ; engine.lag=1 ; algorithm.advantage=remax => algorithm.advantage
grpo@2 ; engine.ranks=1 ; engine.lag=1 ; checkpoint.rollouts=false => checkpoint.rollouts
grpo@2 ; engine.ranks=1 ; engine.lag=1 ; reward.judges=[{question: '{response}'}] => reward.judges
rm ; ema.decay=0.9 => ema.decay
sample ; ema.decay=0.9 => ema.decay
ppo ; reward.judges=[{kind: pairwise, question: '{first}{second}'}] ; batch.group=1 => batch.group
grpo ; reward.judges=[{question: '{response}'}] ; engine.name=trtllm => engine.name
sample ; reward.judges=[{question: '{response}'}] ; engine.name=trtllm => engine.name
rm ; ptx={coef: 0.1, data: {train: '${data.train}'}} => ptx.coef
sft@2 ; ptx={coef: 0.1, sequences: 3, data: {train: '${data.train}'}} => ptx.sequences
sft ; ptx={coef: 0.1, data: {train: '${data.train}', max_tokens: 9999}} => ptx.data.max_tokens
grpo ; ema.decay=0.9 ; debug.rollout_only=true => ema.decay
sft ; optim.name=muon => optim.distributed
ppo ; critic.init=. ; critic.optim.name=muon => critic.optim.distributed
sft ; optim.muon_momentum=0.9 => optim.muon_momentum
sft ; optim.muon_scale=1 => optim.muon_scale
sft ; optim.muon_precision=float32 => optim.muon_precision
sft ; optim={name: muon, distributed: false} ; model.lora.rank=4 => optim.name
ppo ; critic.init=. ; critic.optim={name: muon, distributed: false} ; model.lora.rank=4 => critic.optim.name
sample ; data.train='' ; data.sources=[{path: README.md}] => data.sources
sample ; reward.normalize=true => reward.normalize
sample ; debug.rollout_only=true => debug.rollout_only
sample ; debug.record=1 => debug.record
online_dpo ; $pairs.reference=stored => $pairs.reference
online_dpo ; $pairs.row_weights=true => $pairs.row_weights
online_dpo ; batch.group=1 => batch.group
online_dpo ; batch.epochs=2 => batch.epochs
online_dpo ; batch.minibatch_samples=64 => batch.minibatch_samples
online_dpo ; batch.prompts=12 ; batch.micro_batch_samples=8 => batch.micro_batch_samples
sft ; batch.sequences=12 ; batch.micro_batch_samples=8 => batch.micro_batch_samples
grpo ; batch.minibatch_samples=64 ; batch.micro_batch_samples=24 => batch.micro_batch_samples
online_dpo ; reward.normalize=true => reward.normalize
online_dpo ; reward.functions=[] => reward.functions
grpo ; environment.tools=['a.py:b'] ; reward.functions=[] => reward.functions
grpo ; reward.functions=[] => reward.functions
online_dpo ; debug.rollout_only=true => debug.rollout_only
sample ; checkpoint.every=0 => checkpoint.every
sample ; reward.functions=[] ; stage.sample.reward_above=0 => stage.sample.reward_above
sample ; reward.functions=[] ; stage.sample.best=2 => stage.sample.best
sample@3 ; parallel.tensor=2 => world size
sft@3 ; parallel=tp2 => world size
sft@2 ; parallel.tensor=2 ; parallel.pipeline=2 => world size
ppo ; parallel.tensor=2 => world size
sample ; environment.path=a.py:B => environment.path
grpo ; environment.path=a.py:B ; reward.model=. => reward.model
grpo ; environment.path=a.py:B ; reward.judges=[{question: '{response}'}] => reward.judges
grpo ; environment.tools=['a.py:b'] ; algorithm.advantage=remax => algorithm.advantage
grpo ; environment.tools=['a.py:b'] ; environment.max_tokens=63 => environment.max_tokens
grpo ; algorithm.observation_coef=0.05 => algorithm.observation_coef
grpo ; environment.tools=['a.py:b'] ; environment.max_tokens=3999 => environment.max_tokens
sft@3 ; parallel.tensor=3 => model.num_heads
sft@2 ; parallel.tensor=2 ; model.num_kv_heads=1 => model.num_kv_heads
sft@3 ; parallel.tensor=3 ; model.num_heads=6 ; model.num_kv_heads=6 ; model.hidden_size=192 ; model.ffn_hidden_size=512
    => model.ffn_hidden_size
sft@5 ; parallel.pipeline=5 => parallel.pipeline
sft@4 ; parallel={pipeline: 4, virtual_stages: 2} => parallel.pipeline
sft ; parallel.virtual_stages=2 => parallel.virtual_stages
sft@2 ; model=glm5 ; model.indexer.loss=1 ; parallel={pipeline: 2, virtual_stages: 2} => model.indexer.loss
sft@2 ; parallel={pipeline: 2, stage_layers: [1, 2]} => parallel.stage_layers
sft@2 ; parallel={pipeline: 2, stage_layers: [4]} => parallel.stage_layers
sft@2 ; parallel={pipeline: 2, stage_layers: [4, 0]} => parallel.stage_layers
sft@2 ; batch.sequences=9 => batch.sequences
rm@2 ; batch.sequences=9 => batch.sequences
grpo ; batch.minibatch_samples=100 => batch.minibatch_samples
grpo@2 ; batch.prompts=4 ; batch.group=9 ; batch.minibatch_samples=9 => batch.minibatch_samples
grpo ; batch.group=1 => batch.group
grpo ; batch.group=1 ; algorithm.advantage=rloo => batch.group
grpo ; batch.group=1 ; algorithm.advantage=dr_grpo => batch.group
grpo ; batch.group=1 ; algorithm.advantage=opo => batch.group
grpo ; batch.group=1 ; algorithm.advantage=gdpo => batch.group
grpo ; algorithm.advantage=gae => algorithm.advantage
grpo ; algorithm.lam_alpha=0.05 => algorithm.advantage
ppo ; algorithm.advantage=grpo => algorithm.advantage
ppo ; reward.model='' ; reward.functions=[{path:math}] => critic.init
ppo ; critic.trunk=policy => critic.trunk
ppo ; critic.trunk=policy ; model.lora.rank=2 ; critic.init=. => critic.init
grpo ; sampling.temperature=0 => sampling.temperature
grpo ; data.max_prompt_tokens=4000 ; sampling.max_response_tokens=97 => sampling.max_response_tokens
sft ; data.max_tokens=5000 => data.max_tokens
sft ; checkpoint.keep_best=1 => checkpoint.metric
dpo ; $pairs.loss=[robust] ; $pairs.label_smoothing=0.5 => $pairs.label_smoothing
dpo ; $pairs.loss=[ipo] ; $pairs.label_smoothing=0.1 => $pairs.label_smoothing
dpo ; $pairs.loss=[ipo] ; $pairs.gamma=1 => $pairs.gamma
dpo ; $pairs.loss=[sigmoid,bco_pair] ; $pairs.gamma=1 => $pairs.gamma
dpo ; $pairs.loss=[apo_zero] ; $pairs.f_divergence=js => $pairs.f_divergence
dpo ; $pairs.loss=[aot_unpaired] ; $pairs.f_divergence=js => $pairs.f_divergence
dpo ; $pairs.loss=[nca_pair] ; $pairs.margin=true => $pairs.margin
dpo ; $pairs.loss=[aot] ; $pairs.margin=true => $pairs.margin
dpo ; $pairs.loss=[orpo] ; $pairs.reference=none ; $pairs.nll_coef=1 ; $pairs.ld_alpha=0.5 => $pairs.ld_alpha
dpo ; $pairs.loss=[orpo] ; $pairs.reference=none => $pairs.nll_coef
dpo ; $pairs.loss=[orpo] ; $pairs.nll_coef=1 => $pairs.reference
dpo ; $pairs.loss=[alphapo] ; $pairs.reference=none ; $pairs.length=sum => $pairs.length
dpo ; $pairs.loss=[nca_pair] ; $pairs.reference=none => $pairs.reference
dpo ; $pairs.loss=[sppo_hard] ; $pairs.reference=none => $pairs.reference
dpo ; $pairs.loss=[apo_down] ; $pairs.reference=none => $pairs.reference
dpo ; $pairs.loss=[aot] ; $pairs.reference=none => $pairs.reference
dpo ; $pairs.loss=[sigmoid,aot] ; $pairs.wpo=true => $pairs.wpo
dpo ; $pairs.loss=[aot_unpaired] ; $pairs.row_weights=true => $pairs.row_weights
dpo ; $pairs.sync_every=2 ; $pairs.reference=stored => $pairs.sync_every
dpo ; $pairs.reference=none ; $pairs.f_divergence=js => $pairs.f_divergence
distill ; $kd.top_k=4 ; $kd.outside=zero ; $kd.kind=jsd => $kd.outside
distill ; $kd.outside=renormalise => $kd.outside
distill ; $kd.on_policy=0.5 ; $kd.store=x ; $kd.top_k=4 => $kd.store
distill ; $kd.on_policy=1 ; $kd.sft_coef=0.1 => $kd.sft_coef
distill ; $kd.on_policy=0.5 ; $kd.teacher_prompt=x => $kd.on_policy
distill ; $kd.teacher=self => $kd.teacher_prompt
distill ; $kd={teacher: self, teacher_prompt: x, on_policy: 1, tensor: 2} => $kd.tensor
distill ; $kd={teacher: self, teacher_prompt: x, on_policy: 1, pipeline: 2} => $kd.pipeline
distill ; $kd={teacher: self, teacher_prompt: x, on_policy: 1} ; batch.group=2 => batch.group
distill ; $kd={teacher: self, teacher_prompt: '{right_answer}', on_policy: 1} => batch.group
distill ; $kd={teacher: self, teacher_prompt: '{right_answer}', on_policy: 1} ; batch.group=2 => reward.functions
distill@2 ; $kd={teacher: self, teacher_prompt: '{right_answer}', on_policy: 1} ; batch.group=3 ; batch.sequences=8
    ; reward.functions=[{path: math}] => batch.sequences
distill ; $kd.teacher=x ; $kd.teachers={a: y} => $kd.teacher
distill ; $kd.teachers={a: y} ; $kd.top_k=4 ; $kd.store=x => $kd.teacher
distill ; $kd.store=x => $kd.top_k
grpo ; algorithm.policy_loss=dppo ; mismatch.correction=icepop+veto => mismatch.correction
grpo ; batch.group=4 ; algorithm.policy_loss=dppo ; mismatch.correction=tis_token => mismatch.correction
grpo ; debug={replay: conf, rollout_only: true} => debug.replay
grpo ; debug={rollout_only: true, train_only: pyproject.toml} => debug.rollout_only
grpo ; debug={record: 1, train_only: pyproject.toml} => debug.record
grpo ; debug={rollout_only: true, first_step_checks: true} => debug.first_step_checks
grpo ; engine.name=recorded => debug.train_only
grpo ; debug.rollout_only=true ; run.resume=conf => run.resume
grpo ; batch.group=1 ; algorithm.advantage=remax ; algorithm.filter_groups=true => batch.group
grpo ; batch.group=4 ; algorithm.advantage=gdpo ; reward.clip=1 => reward.clip
grpo ; batch.group=4 ; algorithm.advantage=gdpo ; reward.normalize=true => reward.normalize
grpo ; refit.adapters=factors => refit.adapters
grpo ; model.lora.rank=2 ; debug.rollout_only=true ; refit.adapters=factors => refit.adapters
grpo ; model.lora.rank=2 ; engine.name=trtllm ; refit.adapters=factors => refit.adapters
grpo ; engine={name: vllm, quantization: fp8, vllm: {args: {quantization: fp8}}} => engine.vllm.args.quantization
grpo ; model.lora.rank=2 ; engine.quantization=int8 ; refit.adapters=factors => refit.adapters
grpo ; model.lora.rank=2 ; debug.record_answers=true ; refit.adapters=factors => refit.adapters
grpo ; model.lora.rank=2 ; engine.sleep_weights=true ; refit.adapters=factors => refit.adapters
sft ; model=tiny_moe ; model.moe.top_k=9 => model.moe.top_k
sft ; model=tiny_moe ; model.moe.num_experts=0 => model.moe.num_experts
sft ; model=tiny_moe ; model.family=qwen3 => model.family
sft ; model=tiny_moe ; model.family=mixtral ; model.qk_norm=false ; model.moe.norm_topk_prob=false
    => model.moe.norm_topk_prob
sft ; model=deepseek_v3 ; model.moe.groups=7 => model.moe.num_experts
sft ; model=deepseek_v3 ; model.moe.top_groups=9 => model.moe.top_groups
sft ; model=deepseek_v3 ; model.moe.top_k=129 => model.moe.top_k
sft ; model=deepseek_v3 ; model.moe.shared_ffn_hidden_size=3000 => model.moe.shared_ffn_hidden_size
sft ; model=deepseek_v3 ; model.moe.dense_layers=[1] => model.moe.dense_layers
sft ; model=deepseek_v3 ; model.latent.kv_rank=0 => model.latent.kv_rank
sft ; model=deepseek_v3 ; model.latent.rotary_dim=7 => model.latent.rotary_dim
sft ; model=deepseek_v3 ; model.num_kv_heads=64 => model.num_kv_heads
sft ; model=deepseek_v3 ; model.head_dim=128 => model.head_dim
sft ; model=tiny_moe ; parallel.expert=2 => parallel.expert
sft@2 ; model=tiny_moe ; parallel.expert=4 ; parallel.tensor=2 => parallel.expert
sft@4 ; model=tiny_moe ; parallel.expert=4 ; model.moe.num_experts=6 => model.moe.num_experts
sft@2 ; model=tiny_moe ; parallel.expert=2 ; batch.micro_batch_tokens=99 ; batch.packing=false => batch.packing
sft@2 ; model=tiny_moe ; model=tiny ; parallel.expert=2 => parallel.expert
sft ; model=tiny_moe ; model.moe.ffn_hidden_size=68 ; model.family=qwen3_moe => model.moe.ffn_hidden_size
sft ; model=tiny_moe ; model.family=qwen3_moe ; model.moe.ffn_hidden_size=0
    ; model.ffn_hidden_size=68
    => model.ffn_hidden_size
sft@2 ; model=tiny_moe ; model.moe.ffn_hidden_size=72 ; model.family=qwen3_moe ; model.hidden_size=36
    ; model.head_dim=16 => model.hidden_size
sft ; run.stop.metric=eval/loss => run.stop.metric
sft ; debug.shuffle_rewards=true => debug.shuffle_rewards
rm ; debug.rollout_only=true => debug.rollout_only
sft ; debug.train_only=conf => debug.train_only
sft ; debug.first_step_checks=true => debug.first_step_checks
grpo ; debug.rollout_only=true ; ptx={coef: 0.1, data: {train: .}} => ptx.coef
sample ; model.lora={rank: 2, init: .} => model.lora.init
grpo ; model.lora={rank: 2, dropout: 0.1} => model.lora.dropout
grpo ; debug.train_only=conf ; data.eval=. => eval.generate
grpo ; debug.train_only=conf ; eval.tasks=[gsm8k] => eval.tasks
sft ; mismatch.replay_routing=true => mismatch.replay_routing
grpo ; mismatch.replay_routing=true => mismatch.replay_routing
grpo ; model=tiny_moe ; engine.name=trtllm ; mismatch.replay_routing=true => mismatch.replay_routing
grpo ; model=tiny_moe ; engine=vllm ; mismatch.replay_routing=true ; engine.vllm.prefix_reuse=false
    => engine.vllm.prefix_reuse
grpo@3 ; engine={ranks: 2, tensor_parallel: 2} ; reward.judges=[{model: ., question: '{response}'}]
    => engine.tensor_parallel
sft@2 ; model=qwen3_next_80b_a3b ; model.linear={key_heads: 3, value_heads: 6} ; parallel.tensor=2
    => model.linear.key_heads
sft@2 ; model=qwen3_next_80b_a3b ; model.moe.shared_ffn_hidden_size=21 ; parallel.tensor=2
    => model.moe.shared_ffn_hidden_size
sft@3 ; parallel={context: 3, context_mode: alltoall} => model.num_heads
sft@2 ; parallel={context: 2, context_mode: alltoall} ; model.num_kv_heads=1 => model.num_kv_heads
sft@2 ; model=qwen3_next_80b_a3b ; model.linear={key_heads: 3, value_heads: 6}
    ; parallel={context: 2, context_mode: alltoall} => model.linear.key_heads
grpo ; engine=trtllm_engine ; run.deterministic=true => run.deterministic
grpo ; model=tiny_moe ; engine.cuda_graphs=true => engine.cuda_graphs
grpo@3 ; engine.tensor_parallel=3 => model.num_heads
grpo@2 ; model=qwen3_next_80b_a3b ; model.linear={key_heads: 3, value_heads: 6} ; engine.tensor_parallel=2
    => model.linear.key_heads
grpo@2 ; model.ffn_hidden_size=383 ; engine.tensor_parallel=2 => model.ffn_hidden_size
grpo@2 ; model=qwen3_next_80b_a3b ; model.moe.shared_ffn_hidden_size=21 ; engine.tensor_parallel=2
    => model.moe.shared_ffn_hidden_size
grpo@2 ; model=tiny_moe ; model.moe={num_experts: 1, top_k: 1} ; engine.tensor_parallel=2 => model.moe.num_experts
grpo@2 ; model=tiny_moe ; model.moe.ffn_hidden_size=33 ; engine={name: vllm, tensor_parallel: 2}
    => model.moe.ffn_hidden_size
grpo@2 ; model=tiny_moe ; model.moe.ffn_hidden_size=33 ; engine={name: trtllm, tensor_parallel: 2}
    => model.moe.ffn_hidden_size
grpo ; data.eval=. ; eval.max_response_tokens=4096 => eval.max_response_tokens
sample ; environment.agent=a:b => environment.agent
sample ; environment.tools=[a:b] => environment.tools
distill ; $kd.teacher='' => $kd.teacher
distill ; $kd.on_policy=1 ; sampling.temperature=0 => sampling.temperature
distill ; $kd={teacher: '', teachers: {a: .}} ; data.format=text => data.format
dpo ; $pairs.reference=adapter => $pairs.reference
dpo ; model.lora={rank: 2, quantize_base: nf4} ; $pairs.reference=model => $pairs.reference
dpo ; model.lora={rank: 2, init: .} ; $pairs.reference=stored => $pairs.reference
dpo ; model.lora.rank=4 ; $pairs.sync_every=2 => $pairs.sync_every
online_dpo ; memory.offload=[weights] ; $pairs.sync_every=2 => memory.offload
kto ; model.lora={rank: 2, quantize_base: nf4} ; algorithm.kto.reference=stored => algorithm.kto.reference
kto ; model.lora={rank: 2, init: .} ; algorithm.kto.reference=stored => algorithm.kto.reference
kto ; batch.sequences=1 => batch.sequences
sample ; debug.train_only=conf => debug.train_only
grpo ; engine.answers=conf => engine.answers
grpo ; engine={name: recorded, answers: conf} ; debug.record_answers=true => debug.record_answers
sft ; model=qwen3_next_80b_a3b ; model.moe.shared_ffn_hidden_size=0 => model.moe.shared_ffn_hidden_size
sft ; model=deepseek_v3 ; model.moe={groups: 256, top_groups: 8} => model.moe.num_experts
sft ; model=deepseek_v3 ; model.moe.ffn_hidden_size=0 => model.moe.ffn_hidden_size
sft ; model=deepseek_v3 ; model.moe.shared_ffn_hidden_size=0 => model.moe.shared_ffn_hidden_size
sft ; model=deepseek_v3 ; model.latent.plain_dim=0 => model.latent.plain_dim
sft ; model=deepseek_v3 ; model.latent.rotary_dim=0 => model.latent.rotary_dim
sft ; model=deepseek_v3 ; model.latent.value_dim=0 => model.latent.value_dim
sft ; model=qwen3_next_80b_a3b ; model.linear.key_heads=0 => model.linear.key_heads
sft ; model.num_kv_heads=3 => model.num_kv_heads
sft ; model.hidden_size=130 => model.hidden_size
sft ; model=nemotron3_nano_30b_a3b ; model.tie_embeddings=true => model.tie_embeddings
sft ; model.family=ministral3 => model.rope_scaling.type
sft ; model.rope_scaling={type: yarn, llama_4_scaling_beta: 0.1} => model.rope_scaling.llama_4_scaling_beta
sft ; model=glm5 ; model.indexer.heads=0 => model.indexer.heads
sft ; model=glm5 ; model.latent.query_rank=0 => model.latent.query_rank
sft ; model=glm5 ; model.indexer.head_dim=32 => model.indexer.head_dim
sft ; model=glm5 ; model.indexer.head_dim=0 => model.indexer.head_dim
sft ; model=glm5 ; model.indexer.top_k=0 => model.indexer.top_k
sft ; model.indexer.loss=1 => model.indexer.loss
sft ; model=glm5 ; model.indexer.loss=1 ; model.lora.rank=2 => model.indexer.loss
sft ; model.mtp.layers=1 => model.mtp.layers
sft ; model=glm5 ; model.mtp.layers=1 => model.mtp.layers
sft ; model=deepseek_v3 ; model.mtp.layers=1 ; model.lora.rank=2 => model.mtp.layers
dpo ; model=deepseek_v3 ; model.mtp.layers=1 => model.mtp.layers
sample ; model=deepseek_v3 ; model.mtp.layers=1 => model.mtp.layers
sample ; model=deepseek_v3 ; model.mtp.layers=1 ; engine=vllm => model.mtp.layers
sft@2 ; model=deepseek_v3 ; model.mtp.layers=1 ; parallel.pipeline=2 ; model.mtp.detach=false => model.mtp.detach
sft@2 ; model=glm5 ; model.indexer.shared_layers=[3, 39] ; parallel={pipeline: 2, stage_layers: [39, 39]}
    => parallel.stage_layers
sft ; model=deepseek_v4_flash ; model.entries.tokens=0 => model.entries.tokens
sft ; model=deepseek_v4_flash ; model.entries.heavy_tokens=0 => model.entries.heavy_tokens
sft ; model=deepseek_v4_flash ; model.hyper.streams=0 => model.hyper.streams
sft ; model=deepseek_v4_flash ; model.hyper.iterations=0 => model.hyper.iterations
sft ; model=deepseek_v4_flash ; model.indexer.heads=0 => model.indexer.heads
sft ; model=deepseek_v4_flash ; model.latent.query_rank=0 => model.latent.query_rank
sft ; model=deepseek_v4_flash ; model.latent.output_groups=0 => model.latent.output_groups
sft ; model=deepseek_v4_flash ; model.latent.output_rank=0 => model.latent.output_rank
sft ; model=deepseek_v4_flash ; model.latent.output_groups=48 => model.num_heads
sft ; model=deepseek_v4_flash ; model.attention.window=0 => model.attention.window
sft ; model=deepseek_v4_flash ; model.attention.local_rope_base=0 => model.attention.local_rope_base
sft ; model=deepseek_v4_flash ; model.attention.rotary_fraction=0.124 => model.attention.rotary_fraction
sft ; model=deepseek_v4_flash ; model.attention.rotary_fraction=0.5 => model.attention.rotary_fraction
sft ; model=deepseek_v4_flash ; model.entries.heavy_layers=[0] => model.entries.heavy_layers
sft ; model=deepseek_v4_flash ; model.num_kv_heads=2 => model.num_kv_heads
sft ; model=deepseek_v4_flash ; model.moe.gate_limit=0 => model.moe.gate_limit
sft ; model=deepseek_v4_flash ; model.moe.hash_layers=44 => model.moe.hash_layers
sft ; model=deepseek_v4_flash ; model.indexer.loss=1 => model.indexer.loss
sft@16 ; model=deepseek_v4_flash ; parallel.tensor=16 => model.latent.output_groups
sft@2 ; model=deepseek_v4_flash ; parallel={context: 2, context_mode: alltoall} => parallel.context_mode
grpo@16 ; model=deepseek_v4_flash ; engine.tensor_parallel=16 => model.latent.output_groups
sft ; model=gemma4_31b ; model.rope_scaling.type=llama3 => model.rope_scaling.type
sft ; model.rope_scaling.type=proportional => model.family
sft ; model=gemma4_31b ; model.attention.global_head_dim=0 => model.attention.global_head_dim
sft ; model=gemma4_31b ; model.attention.global_head_dim=7 => model.attention.global_head_dim
sft ; model=gemma4_31b ; model.attention.local_rope_base=0 => model.attention.local_rope_base
sft ; model=gemma4_31b ; model.attention.global_kv_heads=5 => model.attention.global_kv_heads
sft ; model=gemma4_26b_a4b ; model.moe.shared_ffn_hidden_size=704 => model.moe.shared_ffn_hidden_size
sft ; model=gemma4_31b ; model.attention.key_is_value=false => model.attention.global_kv_heads
sft@2 ; model=gemma4_31b ; model.attention.global_kv_heads=1 ; parallel.tensor=2 => model.attention.global_kv_heads
sft@2 ; model=gemma4_31b ; model.attention.global_kv_heads=1 ; parallel={context: 2, context_mode: alltoall}
    => model.attention.global_kv_heads
grpo@8 ; model=gemma4_31b ; model={num_heads: 24, num_kv_heads: 8, attention: {global_kv_heads: 12}}
    ; engine.tensor_parallel=8 => model.attention.global_kv_heads
grpo@8 ; model=gemma4_31b ; model={num_heads: 24, num_kv_heads: 8, attention: {global_kv_heads: 3}}
    ; engine.tensor_parallel=8 => model.attention.global_kv_heads
sft@5 ; model=gemma4_e2b ; parallel.pipeline=5 => parallel.pipeline
sft ; model=gemma4_e2b ; model.recompute=full => model.recompute
sft ; model=gemma4_e2b ; model.attention.kv_shared_layers=31 => model.attention.kv_shared_layers
sft ; model=gemma4_26b_a4b ; model.double_mlp=true => model.double_mlp
sft ; model.layer_input_size=8 => model.layer_input_size
sft ; model=nemotron3_nano_30b_a3b ; model.linear.rule=delta => model.linear.rule
sft ; model=qwen3_next_80b_a3b ; model.linear.rule=mamba2 => model.linear.rule
sft ; model=qwen3_next_80b_a3b ; model.linear.value_heads=0 => model.linear.value_heads
sft ; model=qwen3_next_80b_a3b ; model.linear.key_head_dim=0 => model.linear.key_head_dim
sft ; model=qwen3_next_80b_a3b ; model.linear.value_head_dim=0 => model.linear.value_head_dim
sft ; model=qwen3_next_80b_a3b ; model.linear.conv=0 => model.linear.conv
sft ; model=qwen3_next_80b_a3b ; model.linear.value_heads=17 => model.linear.value_heads
sft ; model.lora.quantize_base=nf4 => model.lora.quantize_base
sft ; model.lora.init=x => model.lora.init
sft ; parallel.sequence=true => parallel.sequence
sft ; optim={lr: 1e-5, min_lr: 1e-4} => optim.min_lr
sft ; optim.megatron.exp_avg_dtype=bfloat16 => optim.megatron.use_precision_aware_optimizer
sft ; optim.megatron.exp_avg_sq_dtype=bfloat16 => optim.megatron.use_precision_aware_optimizer
sft ; optim.megatron={use_precision_aware_optimizer: true, exp_avg_dtype: bfloat16} => optim.megatron.exp_avg_sq_dtype
sft ; optim.megatron={use_precision_aware_optimizer: true, exp_avg_sq_dtype: bfloat16} => optim.megatron.exp_avg_dtype
sft ; optim.megatron.use_precision_aware_optimizer=true ; optim.distributed=false => optim.distributed
sft ; optim.megatron.pad_buckets_for_high_nccl_busbw=true ; optim.distributed=false => optim.distributed
sft ; optim.megatron.use_precision_aware_optimizer=true ; model.kernels=own
    => optim.megatron.use_precision_aware_optimizer
ppo ; critic.optim.megatron.use_precision_aware_optimizer=true ; model.kernels=own
    => critic.optim.megatron.use_precision_aware_optimizer
sft ; model={megatron: {recompute_modules: [mlp]}, recompute: full} => model.recompute
sft ; model=nemotron3_nano_30b_a3b ; model.megatron.recompute_modules=[moe] => model.megatron.recompute_modules
sft ; model=deepseek_v4_flash ; model.megatron.recompute_modules=[moe] => model.megatron.recompute_modules
sft ; model=qwen3_30b_a3b ; model.megatron.recompute_modules=[mlp] => model.megatron.recompute_modules
sft ; model.megatron.recompute_modules=[moe] => model.moe.num_experts
sft ; model.megatron.fp8=hybrid => model.megatron.fp8_recipe
sft ; model.megatron={fp8: hybrid, fp8_recipe: delayed} => model.megatron.fp8_recipe
sft ; model.megatron.fp8_recipe=mxfp8 => model.megatron.fp8
sft ; model={megatron: {fp8: hybrid, fp8_recipe: tensorwise}, family: qwen3_moe, moe: {num_experts: 4}}
    => model.moe.num_experts
sft ; model=qwen3.5_4b ; model.megatron={fp8: hybrid, fp8_recipe: tensorwise} => model.linear.key_heads
sft ; model=gemma4_31b ; model.megatron={fp8: hybrid, fp8_recipe: tensorwise} ; model.attention.global_head_dim=24
    => model.attention.global_head_dim
sft ; model={megatron: {fp8: hybrid, fp8_recipe: tensorwise}, hidden_size: 72, head_dim: 16} => model.hidden_size
sft ; model={megatron: {fp8: hybrid, fp8_recipe: tensorwise}, head_dim: 24} => model.head_dim
sft ; model={megatron: {fp8: hybrid, fp8_recipe: mxfp8}, head_dim: 16} => model.head_dim
sft ; model={megatron: {fp8: hybrid, fp8_recipe: mxfp8}, hidden_size: 64} => model.hidden_size
sft@2 ; model={megatron: {fp8: hybrid, fp8_recipe: tensorwise}, ffn_hidden_size: 48} ; parallel.tensor=2
    => model.ffn_hidden_size
sft ; model={megatron: {fp8: hybrid, fp8_recipe: tensorwise}, kernels: own} => model.megatron.fp8
sft ; model={megatron: {fp8: hybrid, fp8_recipe: tensorwise}, dtype: float32} => model.megatron.fp8
sft@2 ; model.megatron.tp_comm_overlap=true ; parallel.tensor=2 => parallel.sequence
sft@2 ; model.megatron.tp_comm_overlap=true ; parallel={tensor: 2, sequence: true} ; run.deterministic=true
    => run.deterministic
sft@2 ; model.megatron.tp_comm_overlap=true ; parallel={tensor: 2, sequence: true} ; batch.micro_batch_samples=2
    => batch.micro_batch_samples
sft ; model.megatron.tp_comm_overlap_ag=true => model.megatron.tp_comm_overlap
sft ; model.megatron.tp_comm_overlap_rs=true => model.megatron.tp_comm_overlap
sft ; model.megatron.tp_comm_bootstrap_backend=gloo => model.megatron.tp_comm_overlap
sft ; model={megatron: {tp_comm_overlap: true}, family: qwen3_moe, moe: {num_experts: 4}} => model.moe.num_experts
sft ; model=qwen3.5_4b ; model.megatron.tp_comm_overlap=true => model.linear.key_heads
sft ; model={megatron: {tp_comm_overlap: true}, hidden_size: 48} => model.hidden_size
sft ; model={megatron: {tp_comm_overlap: true, fp8: hybrid, fp8_recipe: blockwise}} => model.megatron.fp8_recipe
sft@2 ; model={megatron: {tp_comm_overlap: true}, kernels: own} ; parallel={tensor: 2, sequence: true}
    => model.megatron.tp_comm_overlap
sft ; model.dtype=float32 ; optim.gradient_dtype=bfloat16 => optim.gradient_dtype
ppo ; model.dtype=float32 ; critic.optim.gradient_dtype=bfloat16 => critic.optim.gradient_dtype
grpo ; algorithm.policy_loss=gspo => algorithm.aggregation
grpo ; algorithm={policy_loss: gmpo, aggregation: seq_mean_token_mean, advantage: reinforce_pp} => algorithm.policy_loss
grpo ; algorithm={advantage: remax, kl: {coef: 1, placement: reward}} => algorithm.kl.placement
grpo ; algorithm={advantage: pass_at_k, whiten: true} => algorithm.whiten
grpo ; algorithm={advantage: gdpo, overlong: {penalty: 1}} => algorithm.overlong.penalty
grpo ; algorithm={advantage: gdpo, overlong: {soft_fraction: 0.5}} => algorithm.overlong.soft_fraction
grpo ; algorithm.cov.high=1 => algorithm.cov.high
grpo ; algorithm.kl={coef: 0.1, placement: none} => algorithm.kl.placement
rm ; algorithm.reward_loss.kind=regression => algorithm.reward_loss.attributes
distill ; $kd={teacher: '', teachers: {a: y}, top_k: 4, store: x} => $kd.store
grpo ; engine={name: trtllm_engine, tensor_parallel: 2} => engine.tensor_parallel
grpo ; engine={name: trtllm_engine, cuda_graphs: true} => engine.cuda_graphs
grpo ; engine={cuda_graphs: true, tensor_parallel: 2} => engine.cuda_graphs
grpo ; engine.sleep=false => engine.sleep
grpo ; engine={name: trtllm_engine, sleep_weights: true} => engine.sleep_weights
grpo ; engine={name: trtllm_engine, trtllm: {prefix_reuse: true}} => engine.trtllm.prefix_reuse
grpo ; engine={name: vllm, sleep: false, sleep_weights: true} => engine.sleep_weights
grpo ; engine={name: vllm, page_tokens: 16} => engine.page_tokens
grpo ; engine={name: trtllm_engine, draft_tokens: 4, trtllm: {prefix_reuse: false}} => engine.draft_tokens
grpo ; engine={name: trtllm, draft_tokens: 4, draft_model: conf} => engine.draft_model
grpo ; model=glm4.5_air ; model.mtp.layers=1 ; engine={name: trtllm, draft_tokens: 4} => engine.draft_tokens
grpo ; engine={name: vllm, draft_tokens: 4} ; sampling.min_p=0.1 => sampling.min_p
grpo ; model=tiny_moe ; engine={name: vllm, draft_tokens: 4} ; mismatch.replay_routing=true
    => mismatch.replay_routing
grpo ; engine={max_batch: 4, draft_tokens: 4} => engine.draft_tokens
grpo ; engine.draft_model=conf => engine.draft_tokens
grpo ; model=qwen3_next_80b_a3b ; engine={name: vllm, draft_tokens: 4} => engine.draft_tokens
grpo ; model=qwen3.5_9b ; model.mtp.layers=1 ; engine={name: vllm, draft_tokens: 4, draft_model: conf}
    => engine.draft_model
grpo ; model=deepseek_v4_flash ; engine.draft_tokens=4 => engine.draft_tokens
grpo ; engine={name: trtllm_engine, trtllm: {args: {backend: x}}} => engine.trtllm.args
grpo ; reward.model_attributes={a: 1} => reward.model_attributes
grpo ; reward.judges=[{kind: pairwise, question: '{first}{second}', parse: yesno}] => reward.judges[].parse
grpo ; reward.judges=[{question: '{response}', endpoint: {base_url: u}}] => reward.judges[].endpoint.model
grpo ; reward.judges=[{question: '{response}', model: ., endpoint: {base_url: u, model: m}}] => reward.judges[].model
grpo ; reward.judges=[{question: '{response}', votes: 2}] => reward.judges[].votes
grpo ; reward.judges=[{question: '{response}', question_file: x}] => reward.judges[].question_file
grpo ; environment={agent: 'a:b', path: 'a:b'} => environment.agent
grpo ; environment={agent: 'a b', tools: ['a:b']} => environment.agent
grpo ; environment={agent: 'a b', path: 'a:b', reward: 'a:b'} => environment.reward
grpo ; environment={tools: ['a:b'], reward: 'a:b'} => environment.reward
sft ; data.sources=[{path: README.md}] => data.train
sft ; ptx.coef=0.1 => ptx.data.train
sft ; ptx.data.eval=x => ptx.data.eval
sft ; ptx.data.chat_template=chatml => ptx.data.chat_template
sft ; ptx.data.template_arguments={a: 1} => ptx.data.template_arguments
sft ; eval.samples=2 => eval.temperature
sft ; eval.tasks_folder=. => eval.tasks_folder
sft ; eval.tasks_chat=true => eval.tasks_chat
"""
SHORT = {"$pairs": "algorithm.preference", "$kd": "algorithm.distill"}


def sections(kind: type) -> Iterator[type]:
    yield kind
    for inner in hints(kind).values():
        inner = get_args(inner)[0] if get_origin(inner) is list else inner
        if is_dataclass(inner):
            yield from sections(inner)


TABLES = [*TABLE.values(), *(stage.rules for stage in STAGES.values()), *(kind.RULES for kind in sections(Config))]
EVERY = list(dict.fromkeys(rule for table in TABLES for rule in table))


def refused(row: str, make) -> ConfigError:
    """What the overrides of a row end with, and by which rule, in `by`."""
    for short, long in SHORT.items():
        row = row.replace(short, long)
    settings, _, key = row.rpartition("=>")
    start, *overrides = (text.strip() for text in settings.split(" ; "))
    stage, _, ranks = start.partition("@")
    with pytest.raises(ConfigError) as caught:
        cfg = make(stage, *overrides)
        validate(cfg, int(ranks or 1))
        validate_layout(cfg, int(ranks or 1))
    assert caught.value.key == key.strip(), row
    return caught.value


@pytest.fixture(scope="module")
def broken(make):
    """Rule -> errors of the rows that break it."""
    results, check = {}, Rule.check

    def recorded(self: Rule, *how) -> None:
        try:
            check(self, *how)
        except ConfigError as error:
            results.setdefault(self, []).append(error)
            raise

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Rule, "check", recorded)
        for row in re.split(r"\n(?=\S)", ROWS.strip()):
            refused(" ".join(row.split()), make)
    return results


@pytest.mark.parametrize("rule", EVERY, ids=lambda rule: f"{rule.key}{rule.must} {rule.when[0][:40]}")
def test_a_broken_rule_names_key_value_and_what_instead(rule, broken):
    for error in broken[rule]:
        assert error.exit_code == 2 and str(error).startswith(f"{error.key}={error.value!r}: expected ")
        assert error.expected.strip() and not re.search(r"\{[\w.]+=?\}|\$[A-Z]|  ", error.expected), error
        assert str(error).endswith(rule.hint)
        if re.match("=[^=]", f"{rule.must} "):
            assert error.expected.startswith(rule.must[1:].split("|")[0] or "empty")


def test_names_of_the_table_are_keys_or_known():
    named = {name for words in WORDS.values() for name in re.findall(r"\{([\w.]+)", words)}
    assert set(WORDS) <= set(FACTS) and {name for name in named if name.startswith("ranks.")} <= set(FACTS)


def test_a_table_is_read_as_it_is_written():
    actual = rules("""
a.b !c=x|y or d => e, f >=2 | : a reason
    that goes on | a hint
=> g | what instead
""")
    assert [(rule.when, rule.key, rule.must) for rule in actual] == [
        (("a.b !c=x|y", "d"), "e", ">=2"),
        (("a.b !c=x|y", "d"), "f", ">=2"),
        (("",), "g", ""),
    ]
    assert actual[0].reason == ": a reason that goes on" and actual[0].hint == "a hint"
    values = {"a.b": 1, "c": "z", "d": 0, "e": 1}
    with pytest.raises(ConfigError, match=r"^e=1: expected at least 2: a reason that goes on\. a hint$"):
        actual[0].check(values.__getitem__, {}, str)
    actual[0].check((values | {"c": "y"}).__getitem__, {}, str)
    actual[0].check((values | {"e": 2}).__getitem__, {}, str)
    with pytest.raises(AssertionError, match="no rule"):
        rules("a => b ?? c")
