"""Rules between keys of several sections, the model's shape and the number of ranks, by topic and in the order of
checking. Rules within a section are beside its keys (`RULES`), a stage's in its file."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from aligner.config.derived import (
    asks_old_logprobs,
    data_parallel,
    evaluation_functions,
    evaluation_tasks,
    minibatch_samples,
)
from aligner.config.engines import able
from aligner.config.identity import uses
from aligner.config.options import nearest
from aligner.config.rule import rules, value_of
from aligner.config.schema import ROLLOUT_STAGES, Config
from aligner.config.sections.algorithm import GROUP_BASELINES
from aligner.config.sections.mismatch import WEIGHING
from aligner.config.sections.model.config import ModelConfig
from aligner.config.sections.model.rope import longest_row
from aligner.config.stage import Stage
from aligner.config.stages import STAGES
from aligner.errors import UnknownKeyError
from aligner.families import FAMILIES

TABLE = {
    "without effect": rules("""
!data.sources !debug.train_only !data.train => data.train | a file or folder with training data
    | Several are named in data.sources.
checkpoint.best_by_evaluation !holds_out => checkpoint.metric
    | one of the steps' metrics with checkpoint.keep_best, or data.eval and run.eval_every set
!holds_out => run.stop.metric =
    | without run.eval_every > 0 and data.eval: it is looked at after each evaluation
model.dtype=float32 => optim.gradient_dtype, critic.optim.gradient_dtype =float32 | with model.dtype=float32
model.kernels=own
    => optim.megatron.use_precision_aware_optimizer, critic.optim.megatron.use_precision_aware_optimizer off
    | with model.kernels=own: it is TransformerEngine's
!stage.its.debug~shuffle_rewards => debug.shuffle_rewards =false
    | but for stage grpo: rewards are permuted within groups
!stage.its.trains => debug.record =0 | for stage {stage.name}, which trains nothing
!stage.its.rollouts => debug.rollout_only, debug.train_only off
    | for stage {stage.name}, which has no rollouts: {stages.rollouts} have
!stage.its.debug~first_step_checks => debug.first_step_checks =false
    | for stage {stage.name}, which has nothing to compare
debug.rollout_only => run.resume =auto|never | with debug.rollout_only: name the checkpoint in model.init
debug.rollout_only => ema.decay, ptx.coef =0
    | with debug.rollout_only, which trains nothing: it needs a policy that learns
stage.its.scores or !stage.its.trains => ema.decay, ptx.coef =0
    | with stage {stage.name}: it needs a policy that learns
!learns => model.lora.init =
    | where nothing is trained: adapters come with training. Merge it into a folder for model.init
model.lora.rank stage.its.rollouts => model.lora.dropout =0
    | for stage {stage.name}: updates would drop values that the engine's samples used
model.lora.rank => optim.name, critic.optim.name =adam | with model.lora: adapters are trained by AdamW
debug.train_only => eval.tasks = | with debug.train_only: no engine runs that could answer them
debug.train_only evaluates => eval.generate =false | with debug.train_only: no engine runs that could answer data.eval
"""),
    "engines": rules(
        """
=> engine.ranks <ranks.all | : the others train
=> engine.tensor_parallel /ranks.engines
engine.ranks reward.judge_models => engine.tensor_parallel /ranks.train | , where models of reward.judges are
!stage.its.rollouts => engine.ranks =0 | for stage {stage.name}: {stages.rollouts} generate
engine.ranks !engine.can.apart => engine.name
    | {able.apart} with {engine.ranks=}: on ranks of their own others are not implemented here
engine.ranks => engine.quantization =none
    | with {engine.ranks=}: whole tensors are quantised, and those ranks get shards
engine.section=vllm engine.quantization!=none => engine.vllm.args.quantization =
    | with {engine.quantization=}, which rounds the same weights
engine.ranks => debug.record_answers =false | with {engine.ranks=}
!engine.lag => engine.window =0 | without engine.lag: samples that continue with newer weights began with older ones
!engine.ranks => engine.lag =0
    | without engine.ranks: engines on the trainer's ranks wait for it, so nothing overlaps
stage.its.pairs or !learns => engine.lag =0
    | but for stages grpo and ppo, which correct for older weights, and without debug.rollout_only
engine.lag => algorithm.filter_groups =false | with {engine.lag=}: what is generated next would depend on scores
engine.lag => algorithm.advantage !=remax | with {engine.lag=}: greedy answers are generated after the samples
engine.lag reward.own_judges => reward.judge_names
    | with models of their own with {engine.lag=}: the engine generates while samples are scored
engine.lag => checkpoint.rollouts =true | with {engine.lag=}: a checkpoint names rollouts that are stored
engine.lag !algorithm.ratio_to_engine !mismatch.methods~$WEIGHING => mismatch.correction
    | auto or one with a weight with {engine.lag=} ($WEIGHING): samples are of older weights
engine.window !engine.can.windows => engine.name | {able.windows} with {engine.window=}: it counts decode steps
engine.window environment.on => engine.tensor_parallel =1
    | with {engine.window=} and {environment.key}: turns are taken between decode steps, not in rounds
""",
        WEIGHING=WEIGHING,
    ),
    "factors": rules("""
!model.lora.rank => refit.adapters =merged | with model.lora.rank=0, which has no factors
!learns => refit.adapters =merged
    | with a stage that trains nothing, or debug.rollout_only: adapters come with training
!engine.can.merges_adapters => refit.adapters =merged
    | with {engine.name=}: only engine {able.merges_adapters} merges
engine.quantization!=none => refit.adapters =merged
    | with {engine.quantization=}, which is of merged weights, given whole
engine.sleep_weights=true => refit.adapters =merged | with engine.sleep_weights=true: engines keep frozen weights
debug.record_answers => refit.adapters =merged | with debug.record_answers, whose engine is given whole weights
"""),
    "routing": rules("""
!stage.its.rollouts => mismatch.replay_routing =false | for stage {stage.name}: {stages.rollouts} have an engine
!engine.can.routing !debug.train_only => mismatch.replay_routing =false
    | with {engine.name=}, which does not report the experts of its tokens: {able.routing} does
mismatch.replay_routing engine.section=vllm => engine.vllm.prefix_reuse =true
    | with {mismatch.replay_routing=}: vLLM keeps the experts of tokens beside their blocks
engine.draft_tokens engine.section=vllm => mismatch.replay_routing =false | with {engine.draft_tokens=} of vLLM
engine.draft_tokens engine.section=vllm => sampling.min_p =0 | with {engine.draft_tokens=} of vLLM, which drops it
"""),
    "zero": rules("""
mismatch.expect=zero !stage.its.rollouts => mismatch.expect =any
    | for stage {stage.name}: {stages.rollouts} have an engine
mismatch.expect=zero => model.kernels =auto|invariant | with {mismatch.expect=}
mismatch.expect=zero => debug.train_only off | with {mismatch.expect=}: stored samples are of other weights
mismatch.expect=zero => engine.name =native | with {mismatch.expect=}: other engines have kernels of their own
mismatch.expect=zero => engine.lag, engine.ranks =0 | with {mismatch.expect=}: samples are of the trainer's own weights
mismatch.expect=zero => engine.quantization =none | with {mismatch.expect=}
mismatch.expect=zero => debug.record_answers =false | with {mismatch.expect=}
mismatch.expect=zero => engine.dtype =auto | with {mismatch.expect=}: the trainer's
mismatch.expect=zero => model.lora.rank =0
    | with {mismatch.expect=}: the engine multiplies merged weights, the trainer adapters on their own
"""),
    "ranks": rules("""
!engine.ranks => world size %ranks.grid | | Change --ranks or the layout.
engine.ranks => world size less engine.ranks %ranks.grid | | Change --ranks or the layout.
=> parallel.expert /ranks.experts | , which share the experts
"""),
    "layout": rules(
        """
model.kernels=invariant => model.family =llama|mistral|mixtral|qwen2|qwen3|qwen3_moe
    | with model.kernels=invariant: others have parts whose sums depend on the rows beside a token
model.kernels=invariant => parallel.tensor, parallel.context, parallel.expert, engine.tensor_parallel =1
    | with model.kernels=invariant: sums over ranks have other orders
=> model.num_heads, model.attention.global_kv_heads, model.linear.key_heads %parallel.tensor
!model.traits.entries => model.num_kv_heads %parallel.tensor
model.traits.entries => model.latent.output_groups %parallel.tensor
model.traits.entries parallel.context>1 => parallel.context_mode =allgather
    | for model.family={model.family}, whose heads share one key
model.dense => model.ffn_hidden_size %parallel.tensor
=> model.moe.shared_ffn_hidden_size %parallel.tensor
parallel.context>1 parallel.context_mode=alltoall
    => model.num_heads, model.num_kv_heads, model.attention.global_kv_heads, model.linear.key_heads %ranks.heads
    | | parallel.context_mode=allgather takes any number of heads.
=> parallel.pipeline <=ranks.begins
    | : each stage needs a layer of {model.num_layers=}, with {parallel.virtual_stages=} stages on a rank
ranks.other_layers => parallel.stage_layers
    | {parallel.pipeline=} x {parallel.virtual_stages=} numbers with the sum {model.num_layers=}, one for each stage
parallel.virtual_stages>1 => model.indexer.loss =0
    | with {parallel.virtual_stages=}: it would count the tokens of short micro-batches that are added for all to have
    a turn
model.mtp.layers parallel.pipeline>1 !model.tie_embeddings => model.mtp.detach =true
    | with {parallel.pipeline=}: the layer, on the last stage, sends the embedding on the first one no gradient
    | Or use parallel.tensor, parallel.context or parallel.expert.
stage.name=dpo|kto|online_dpo|rm => model.mtp.layers =0
    | for stage {stage.name}: sft, distill, grpo and ppo train such a layer
stage.name=sample !engine.reads_ahead => model.mtp.layers =0
    | for stage sample, which trains nothing | Its engine drafts with one: set engine.draft_tokens.
model.passes_beside => parallel.pipeline =1
    | with model.attention.kv_shared_layers={model.attention.kv_shared_layers} and
    model.layer_input_size={model.layer_input_size}: stages pass hidden states alone
    | Use parallel.tensor or parallel.context.
model.passes_beside => model.recompute =none
    | with model.attention.kv_shared_layers={model.attention.kv_shared_layers} and
    model.layer_input_size={model.layer_input_size}: what layers pass beside hidden states would get no gradient
model.megatron.fp8 => model.hidden_size, model.head_dim, model.attention.global_head_dim %ranks.fp8
model.megatron.fp8 => model.ffn_hidden_size %ranks.fp8_tensor
model.megatron.fp8 !model.head_dim => model.hidden_size %ranks.fp8_heads | , or head_dim
model.megatron.tp_comm_overlap => parallel.sequence =true | with model.megatron.tp_comm_overlap
model.megatron.tp_comm_overlap => run.deterministic =false
    | with model.megatron.tp_comm_overlap, which Megatron-Core excludes
model.megatron.tp_comm_overlap !batch.micro_batch_tokens => batch.micro_batch_samples =auto
    | with model.megatron.tp_comm_overlap: its buffers hold batch.micro_batch_tokens
ranks.choices => parallel.stage_layers
    | stages that begin with an indexer of their own: layers {ranks.choices} use the choice of the layer before
!model.moe.num_experts !scorer => mismatch.replay_routing =false | for a model without experts (model.moe)
!model.indexer.heads => model.indexer.loss =0 | for a model without indexers (model.indexer)
!model.traits.trains_ahead => model.mtp.layers =0
    | for model.family={model.family}: $AHEAD train such a layer
!model.moe.num_experts !scorer => parallel.expert =1 | for a model without experts (model.moe)
model.moe.num_experts => model.moe.num_experts %parallel.expert
model.moe.num_experts parallel.expert>1 batch.micro_batch_tokens => batch.packing =true
    | with parallel.expert > 1 and batch.micro_batch_tokens: every rank takes part in every layer of every
    micro-batch, so all need equally many
""",
        AHEAD=[name for name, family in FAMILIES.items() if family.trains_ahead],
    ),
    "engine's model": rules("""
generates !engine.can.repeats => run.deterministic =false
    | with {engine.name=}{engine.why.repeats} | engine.name=native repeats bit-for-bit.
engine.can.computes_here engine.cuda_graphs=true model.moe.num_experts => engine.cuda_graphs =false
    | with experts: how many rows one gets is not known ahead
model.traits.linear !engine.can.computes_here !model.mtp.layers => engine.draft_tokens =0
    | with {model.family=}, {engine.name=} and {model.mtp.layers=}: states fail where rows have unlike numbers of drafts
    | engine.name=native looks drafts up.
model.traits.linear !engine.can.computes_here => engine.draft_model =
    | with {model.family=} and {engine.name=}, where such drafts of states have not been tried
    | engine.name=native drafts.
engine.name=trtllm model.mtp.layers => engine.draft_tokens =0
    | with {engine.name=} and {model.mtp.layers=}: TensorRT-LLM gives no logprobs where a layer of the model drafts
    | engine.name=vllm drafts with it.
model.traits.entries => engine.draft_tokens =0
    | with {model.family=}, whose states cannot go back to the last token that was kept
"""),
    "shares": rules("""
=> model.num_heads, model.linear.key_heads %engine.tensor_parallel
model.traits.entries => model.latent.output_groups %engine.tensor_parallel
model.num_kv_heads>engine.tensor_parallel => model.num_kv_heads %engine.tensor_parallel
model.num_kv_heads<engine.tensor_parallel => model.num_kv_heads /engine.tensor_parallel
model.attention.global_kv_heads>engine.tensor_parallel => model.attention.global_kv_heads %engine.tensor_parallel
model.attention.global_kv_heads model.attention.global_kv_heads<engine.tensor_parallel
    => model.attention.global_kv_heads /engine.tensor_parallel
model.dense => model.ffn_hidden_size %engine.tensor_parallel
=> model.moe.shared_ffn_hidden_size %engine.tensor_parallel
model.moe.num_experts => model.moe.num_experts >=engine.tensor_parallel
!engine.can.computes_here engine.name!=vllm model.moe.num_experts => model.expert_ffn %engine.tensor_parallel
engine.name=vllm !engine.vllm.args.enable_expert_parallel model.moe.num_experts
    => model.expert_ffn %engine.tensor_parallel
    | | engine.vllm.args.enable_expert_parallel=true gives each rank whole experts.
"""),
    "lengths": rules("""
@data.max_tokens => data.max_tokens <=model.longest
ptx.coef => ptx.data.max_tokens <=model.longest
responds environment.on => environment.max_tokens <=model.room
responds !environment.on => sampling.max_response_tokens <=model.room
evaluates => eval.max_response_tokens <=model.room
"""),
    "on a GPU": rules("""
model.moe.num_experts half => model.hidden_size %ranks.rows | for experts in bfloat16 on a GPU
model.moe.num_experts half => model.expert_ffn %ranks.rows | for experts in bfloat16 on a GPU
"""),
    "algorithm": rules(
        """
=> sampling.temperature >0 | for stage {stage.name}
algorithm.advantage=$BASELINES => batch.group >=2 | : {algorithm.advantage} compares the samples of a prompt
algorithm.filter_groups => batch.group >=2 | with algorithm.filter_groups, which compares the samples of a prompt
algorithm.advantage=gdpo => reward.clip, reward.normalize off
    | with algorithm.advantage=gdpo, which uses only the reward's components
algorithm.policy_loss=dppo mismatch.methods~$WEIGHING => mismatch.correction
    | no weights with algorithm.policy_loss=dppo, whose ratio is to the engine already
algorithm.old_logprobs=engine mismatch.methods~$WEIGHING => mismatch.correction
    | no weights with algorithm.old_logprobs=engine, whose ratio is to the engine already
stage.name!=grpo => algorithm.old_logprobs =auto|recompute | for stage {stage.name}: grpo has others
asks_old_logprobs => algorithm.old_logprobs =auto|recompute
    | with this {asks_old_logprobs}, which needs the policy's logprobs before the update
""",
        WEIGHING=WEIGHING,
        BASELINES=GROUP_BASELINES,
    ),
    "rewards": rules("""
stage.its.trains !debug.train_only !reward.any !environment.path !environment.agent => reward.functions
    | at least one function, or reward.model, for stage {stage.name} | Example: reward.functions=[{path: math}]
curriculum.skip_epochs !reward.functions !environment.path !environment.agent => reward.functions
    | at least one function with curriculum.skip_epochs: models' scores are no passes
reward.own_judges !engine.can.any_prompt !debug.train_only => engine.name
    | {able.any_prompt} with reward.judges without model and endpoint: others are built for the data's prompts
reward.pairwise => batch.group >=2 | with a pairwise judge, which compares the samples of a prompt
"""),
    "trajectories": rules("""
!@environment => environment.agent, environment.path, environment.tools =
    | for stage {stage.name}: {stages.environment} have trajectories
!environment.on => algorithm.observation_coef =0
    | without environment.path, .tools or .agent: responses of one turn read nothing that others wrote
environment.on => environment.max_tokens >=sampling.max_response_tokens | : a first answer has to fit
environment.on => reward.model = | with {environment.key}: it supports only answers of one turn
environment.on => reward.local_judges = | with {environment.key}: it supports only answers of one turn
environment.on => algorithm.advantage !=remax
    | with {environment.key}: its greedy answers would need environments of their own
"""),
    "ptx": rules("ptx.coef => ptx.sequences %ranks.data"),
    # of a stage that does not train, ranks may have shares of any size
    "batch": rules("""
stage.its.trains stage.its.rollouts => batch.prompts %ranks.data
stage.its.trains !stage.its.pairs batch.minibatch_samples stage.its.rollouts
    => batch.minibatch_samples /batch.samples | , or 0 for all of them
stage.its.trains !stage.its.pairs batch.minibatch_samples stage.its.rollouts => batch.minibatch_samples %ranks.data
stage.its.trains !stage.its.rollouts => batch.sequences %ranks.data
algorithm.distill.of_group => batch.sequences %ranks.groups
stage.its.trains !batch.sizes_itself !batch.micro_batch_tokens batch.micro_batch_rows<batch.share
    => batch.micro_batch_samples /batch.share
"""),
}


# the key that a property is about
_SHOWN = dict.fromkeys(("reward.local_judges", "reward.judge_names"), "reward.judges")
_SHOWN["data.source_paths"] = "data.sources"


@dataclass(frozen=True)
class RuleContext:
    """Values that the rules of the table look up. `model`: a shape from a folder, in place of the config's, reported
    under `key`. `scorer`: it is that of a reward model, critic or teacher, which may be dense beside a policy with
    experts."""

    cfg: Config
    ranks: int = 0
    model: ModelConfig | None = None
    key: str = "model"
    scorer: bool = False

    def check(self, *topics: str) -> None:
        """Check topics; `stage`: the rules of the stage. Raises ConfigError, or LayoutError, for the first broken
        one."""
        for topic in topics:
            for rule in self.stage.rules if topic == "stage" else TABLE[topic]:
                if topic == "stage":  # a user's file may have a slip in a rule that does not apply now
                    for name in rule.names:
                        self.look(name)
                rule.check(self.look, WORDS, self._full)

    def _full(self, name: str) -> str:
        """Return the key that a name in a rule comes from."""
        experts = "moe.ffn_hidden_size" if self.shape.moe.ffn_hidden_size else "ffn_hidden_size"
        name = f"model.{experts}" if name == "model.expert_ffn" else _SHOWN.get(name, name)
        return f"{self.key}.{name.removeprefix('model.')}" if name.startswith("model.") else name

    def look(self, name: str) -> Any:
        """Return the value of a name in a rule. Raises UnknownKeyError."""
        if name in FACTS:
            return FACTS[name](self)
        if name.startswith("@"):  # whether the stage reads a key
            return uses(self.cfg.stage.name, name[1:])
        if name.startswith("able."):  # engines that can
            return able(name.removeprefix("able."))
        try:
            within, key = (self.shape, name.removeprefix("model.")) if name.startswith("model.") else (self.cfg, name)
            return value_of(within, key)
        except AttributeError:
            raise UnknownKeyError(name, nearest(name)) from None

    @property
    def shape(self) -> ModelConfig:
        return self.model or self.cfg.model

    @property
    def stages(self) -> tuple[range, ...]:
        return self.shape.stages(self.cfg.parallel)

    @property
    def stage(self) -> Stage:
        return STAGES[self.cfg.stage.name]

    @property
    def generates(self) -> bool:
        return self.stage.rollouts or self.stage.generates(self.cfg)

    @property
    def step(self) -> tuple[str, int]:
        """The key of the rows of an optimizer step, and their number."""
        batch = self.cfg.batch
        if self.stage.pairs or not self.stage.rollouts:
            name = "prompts" if self.stage.pairs else "sequences"
            return f"batch.{name}", getattr(batch, name)
        return "batch.minibatch_samples", minibatch_samples(self.cfg)


def _longest(s: RuleContext) -> int:
    return longest_row(s.shape.rope_scaling, s.shape.max_position)


def _other_layers(s: RuleContext) -> bool:
    """Return whether the numbers of layers of the stages are not those of the policy."""
    sizes = s.cfg.parallel.stage_layers
    return bool(sizes) and not s.scorer and sizes != [len(each) for each in s.stages]


FACTS: dict[str, Callable[[RuleContext], Any]] = {  # values derived from several keys
    "scorer": lambda s: s.scorer,
    "generates": lambda s: s.generates,
    "evaluates": lambda s: evaluation_functions(s.cfg),
    "responds": lambda s: s.generates or (evaluation_functions(s.cfg) and not s.cfg.eval.max_response_tokens),
    "holds_out": lambda s: (s.cfg.data.eval or evaluation_tasks(s.cfg)) and s.cfg.run.eval_every,
    "learns": lambda s: s.stage.trains and not s.cfg.debug.rollout_only,
    "half": lambda s: s.cfg.model.dtype != "float32",
    "asks_old_logprobs": lambda s: asks_old_logprobs(s.cfg),
    "stages.rollouts": lambda s: ROLLOUT_STAGES,
    "stages.environment": lambda s: sorted(name for name in STAGES if uses(name, "environment")),
    "world size": lambda s: s.ranks,
    "world size less engine.ranks": lambda s: s.ranks - s.cfg.engine.ranks,
    "ranks.all": lambda s: s.ranks,
    "ranks.engines": lambda s: s.cfg.engine.ranks or s.ranks,
    "ranks.train": lambda s: s.ranks - s.cfg.engine.ranks,
    "ranks.grid": lambda s: s.cfg.parallel.model_size,
    "ranks.heads": lambda s: s.cfg.parallel.tensor * s.cfg.parallel.context,
    "ranks.experts": lambda s: (s.ranks - s.cfg.engine.ranks) // s.cfg.parallel.pipeline,
    "ranks.other_layers": _other_layers,
    "ranks.choices": lambda s: [each[0] for each in s.stages if each[0] in s.shape.indexer.shared_layers],
    "ranks.begins": lambda s: (
        (s.shape.num_layers - len(s.shape.indexer.shared_layers)) // s.cfg.parallel.virtual_stages
    ),
    "ranks.data": lambda s: data_parallel(s.cfg, s.ranks),
    "ranks.groups": lambda s: data_parallel(s.cfg, s.ranks) * s.cfg.batch.group,
    "ranks.rows": lambda s: 8,  # CUDA's product of all experts, in bfloat16, needs rows of multiples of 16 bytes
    "ranks.fp8": lambda s: s.shape.fp8_step,
    "ranks.fp8_tensor": lambda s: s.shape.fp8_step * s.cfg.parallel.tensor,
    "ranks.fp8_heads": lambda s: s.shape.fp8_step * s.shape.num_heads,
    "batch.samples": lambda s: s.cfg.batch.prompts * s.cfg.batch.group,
    "batch.step": lambda s: s.step[0],
    "batch.rows": lambda s: s.step[1],
    "batch.share": lambda s: s.step[1] // data_parallel(s.cfg, s.ranks),
    "model.longest": _longest,
    "model.limit": lambda s: "" if _longest(s) == s.shape.max_position else "rope_scaling.original_",
    "model.room": lambda s: _longest(s) - s.cfg.data.max_prompt_tokens,
}
WORDS = {  # the names in messages of numbers that are no keys
    "ranks.all": "the {ranks.all} ranks of the job",
    "ranks.engines": "the {ranks.engines} ranks that generate",
    "ranks.train": "the {ranks.train} ranks that train",
    "ranks.grid": "parallel.tensor*pipeline*context="
    "{parallel.tensor}*{parallel.pipeline}*{parallel.context}={ranks.grid}",
    "ranks.heads": "parallel.tensor*context={parallel.tensor}*{parallel.context}",
    "ranks.experts": "the {ranks.experts} ranks of a pipeline stage",
    "ranks.data": "the {ranks.data} data-parallel ranks",
    "ranks.groups": "the {ranks.data} data-parallel ranks x {batch.group=}",
    "ranks.begins": "{ranks.begins}",
    "ranks.rows": "8",
    "ranks.fp8": "{ranks.fp8} with {model.megatron.fp8=}",
    "ranks.fp8_tensor": "{ranks.fp8} x {parallel.tensor=} with {model.megatron.fp8=}",
    "ranks.fp8_heads": "{ranks.fp8} x {model.num_heads=} with {model.megatron.fp8=}",
    "batch.samples": "batch.prompts*group={batch.prompts}*{batch.group}={batch.samples}",
    "batch.share": "{batch.step}/dp={batch.rows}/{ranks.data}={batch.share}",
    "model.longest": "model.{model.limit}max_position={model.longest}",
    "model.room": "model.{model.limit}max_position={model.longest} less {data.max_prompt_tokens=}",
}
