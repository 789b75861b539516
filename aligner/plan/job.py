"""A job in numbers: models, grid, rows and engine, from a config or by hand (as the published runs in benchmarks)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from math import ceil
from pathlib import Path

from aligner.config.adapters import shares_weights
from aligner.config.derived import evaluates, minibatch_samples, old_logprobs_in_update
from aligner.config.engines import empties, entry_of
from aligner.config.quantization import matrix_bytes
from aligner.config.rules import RuleContext
from aligner.config.schema import Config
from aligner.config.sections.engine import EngineConfig
from aligner.config.sections.model.config import ModelConfig, beside, for_run, generating
from aligner.config.sections.vllm import request_shares
from aligner.config.stages import STAGES
from aligner.errors import ConfigError
from aligner.families.draft_folder import eagle_head
from aligner.families.hf_config import config_from_hf
from aligner.plan.linear import package_installed, row_bytes
from aligner.plan.presets import preset_of
from aligner.plan.rows import (
    CHARACTERS,
    CRITERIA,
    CRITERION_TOKENS,
    PlannedRows,
    evaluated_rows,
    step_rows,
    teacher_rows,
)
from aligner.plan.shapes import Grid, kv_bytes, routing_bytes

PREFILL_TOKENS = 8192  # padded prompt tokens of one prefill of the native engine


@dataclass(frozen=True)
class PlannedModel:
    """A model of the job, on the job's grid."""

    name: str  # policy, reference, teacher, teachers.<name>, reward, critic
    shape: ModelConfig
    head: str = "lm"
    trained: bool = False
    outputs: int = 1
    distributed: bool = True  # optimizer state over data-parallel ranks
    gradient: int = 4  # bytes of a parameter's gradient
    moments: int = 8  # bytes of its two moments
    muon: str = ""  # precision of its products, if it has a layer's matrices: of each one moment, in float32
    averaged: bool = False  # `ema` beside it
    shared: bool = False  # its frozen weights are the policy's: those of a reference, or of a critic on its trunk
    grid: Grid | None = None  # a teacher's, if it is not the job's

    @property
    def role(self) -> str:
        return self.name.partition(".")[0]


@dataclass(frozen=True)
class Engine:
    """One replica of the engine for every `tensor` GPUs."""

    tensor: int = 1
    element: int = 2
    max_batch: int = 512
    kv_bytes: float = 1 << 30  # budget
    # a process of its own, as vLLM's: it takes the whole budget when it starts, and rows take pages as they grow
    reserved: bool = False
    refill: bool = True  # a finished row's place is taken by a waiting one; else batches end before the next begins
    padded: bool = True  # every row of a decode step reads the cache up to the longest row's position
    launches: bool = True  # kernels are launched one by one, not as a graph
    placed: bool = True  # a refit writes shards in place, else it hands over whole tensors
    factors: bool = False  # `refit.adapters`: factors alone are sent, and added to frozen weights that are kept
    # an engine in a process of its own has weights before the first refit; those of published runs have none
    early: bool = True
    resident: bool = True  # the weights stay in memory until the next refit, and the cache if it does not sleep
    ranks: int = 0  # beside those that train, that only generate; 0: engines stand on the ranks that train
    lag: int = 0  # > 0: they generate while the others train
    window: int = 0  # decode steps after which samples pause; 0: they do not
    pauses: bool = True  # it can have such windows
    matrix: float = 0.0  # bytes of a number of the layers' matrices, if the engine quantises them; 0: element
    shares: int = 1  # of its GPUs, each with rows, attention and dense layers of its own; experts are on all
    in_flight: bool = False  # not of this project yet: it takes weights while rows run on, and keeps their cache
    page: int = 0  # tokens of a page of the cache, which rows take as they grow; 0: rows are whole
    drafts: int = 0  # tokens drafted for a row, at most `max_batch` tokens of a step
    ahead: bool = False  # by the model's layer for multi-token prediction, if it has one
    drafter: ModelConfig | None = None  # a model that drafts (`engine.draft_model`)
    accepted: float = 0.0  # tokens that a row gets from a step with drafts; 0: drafts are not counted

    def state_bytes(self, m: ModelConfig) -> float:
        """Return the bytes on a GPU that linear attention keeps of a row: in a process of its own with a state for each
        draft, else with what made each token's change."""
        own = row_bytes(m) * (1 + self.drafts) if self.reserved else row_bytes(m, self.drafts)
        return own * self.shares / self.tensor

    @property
    def drafting(self) -> int:
        """The GPUs that share the weights and cache of a model that drafts; in the rank's own process each has all."""
        return self.tensor // self.shares if self.reserved else 1


@dataclass(frozen=True)
class PlannedJudge:
    """A judge of `reward.judges`: its model and rows as those of a job that only generates, and the engine that
    answers."""

    shape: ModelConfig
    rows: PlannedRows  # questions and replies
    engine: Engine
    model: str = ""  # folder of its own weights; empty: the run's engine is asked


@dataclass(frozen=True)
class PlanJob:
    stage: str
    models: tuple[PlannedModel, ...]  # the policy (or the model of rm) first
    grid: Grid
    rows: PlannedRows
    engine: Engine | None
    gpus_per_node: int = 8
    element: int = 2  # bytes of a parameter and an activation
    minibatches: int = 1
    epochs: int = 1
    micro_rows: int = 8
    micro_tokens: int = 0  # > 0: instead of micro_rows
    unit: int = 1  # rows of what `batch.micro_batch_samples` counts
    packing: bool = True
    share: bool = False  # the prompts of rows that follow each other in a micro-batch: see `shared.py`
    balanced: bool = True  # rows are dealt to data-parallel ranks by their cost, else by their number
    recompute: int = 0  # layers of each stage
    logprob_tokens: int = 16384
    logits_bytes: float = 1 << 30
    bucket_bytes: float = 256 << 20
    offload: tuple[str, ...] = ()  # memory.offload
    old_in_update: bool = False  # `config.derived.old_logprobs_in_update`
    compares: bool = False  # a student whole distributions: it keeps its teachers' output matrices (`roles/teacher.py`)
    log_squares: bool = False  # each update sums the squares of a token's probabilities (`roles/policy.py`)
    sleeps: bool = True  # the KV cache is given back while others work
    routing: int = 0  # bytes of a token, if the engine's routing is replayed
    turns: int = 0  # tokens by which prompts of trajectories may grow; 0: samples are answers of one turn
    ptx_rows: int = 0  # `ptx.data` in each of the policy's optimizer steps, over all ranks
    ptx_longest: int = 0  # their limit in tokens
    judges: tuple[PlannedJudge, ...] = ()
    teacher_rows: PlannedRows | None = None  # the step's, behind prompts that only teachers read
    evaluated: PlannedRows | None = None  # answers of an evaluation, if any are generated
    pretrain_steps: int = 0  # of the critic, once
    # of a stage without rollouts: `config.stage.Stage.passes`
    passes: Mapping[str, float] = field(default_factory=dict)
    package: bool = False  # flash-linear-attention computes linear attention
    # not of this project yet: what published runs have, as `Grid.folded`
    overlap: tuple[str, ...] = ()  # axes whose messages run beside products
    pairs: bool = False  # a token goes once for each of its experts, not once to each node and rank that has some
    kept: float = 1.0  # share of activations that FP8 or recomputing some of them leaves

    @property
    def recompute_text(self) -> str:
        """What is recomputed, for behind a layout."""
        return f", recompute {self.policy.shape.recompute}".removesuffix(" full") if self.recompute else ""

    @property
    def policy(self) -> PlannedModel:
        return self.models[0]

    @property
    def gpus(self) -> int:
        return self.grid.gpus + (self.engine.ranks if self.engine else 0)

    @property
    def replicas(self) -> float:
        """Number of the engine's replicas."""
        assert self.engine is not None
        return (self.engine.ranks or self.grid.gpus) / self.engine.tensor

    @property
    def rollout(self) -> bool:
        return STAGES[self.stage].rollouts

    @property
    def served(self) -> PlannedModel:
        """What engines have of the policy."""
        return replace(self.policy, shape=generating(self.policy.shape, self.engine is not None and self.engine.ahead))

    @property
    def asked(self) -> tuple[PlannedModel, ...]:
        """Models with forward passes of their own, without gradient, before the update."""
        if not STAGES[self.stage].trains:
            return ()
        if not self.rollout or STAGES[self.stage].pairs:
            return tuple(model for model in self.models if self.passes.get(model.role))
        others = tuple(model for model in self.models[1:] if model.name != "reward")
        plain = replace(self.policy, shape=generating(self.policy.shape))  # as passes without gradient compute it
        return others if self.old_in_update else (plain, *others)

    @property
    def taught(self) -> PlanJob:
        """The job with the rows that its teachers read."""
        return replace(self, rows=self.teacher_rows) if self.teacher_rows else self

    @property
    def learned(self) -> float:
        """Rows of an optimizer step."""
        return 2 * self.rows.prompts if STAGES[self.stage].pairs else self.rows.count / self.minibatches

    def micro_batches(self, worst: bool = False) -> tuple[int, float]:
        """Return (micro-batches of a rank and an optimizer step, tokens in the stream of one): on average, or of the
        longest rows."""
        return self._cut(self.learned, self.rows.mean, self.rows.longest, worst)

    def ptx_micro_batches(self, worst: bool = False) -> tuple[int, float]:
        """Return the same for `ptx.data`, whose rows have on average half of their longest length."""
        return self._cut(self.ptx_rows, self.ptx_longest / 2, self.ptx_longest, worst) if self.ptx_rows else (0, 0.0)

    def _cut(self, count: float, mean: float, longest: int, worst: bool) -> tuple[int, float]:
        rows = count / self.grid.data
        length = longest if worst or not self.packing else mean
        if self.micro_tokens:
            tokens = max(float(self.micro_tokens), longest) if worst else float(self.micro_tokens)
            count = ceil(rows * length / tokens)
            return count, min(tokens, rows * length) if worst else rows * length / count
        return ceil(rows / min(self.micro_rows, rows)), min(self.micro_rows, rows) * length

    def asked_by(self, judge: PlannedJudge) -> PlanJob:
        """Return a job whose rows are the questions of a judge."""
        models = (PlannedModel("policy", judge.shape),)
        return replace(self, models=models, rows=judge.rows, engine=judge.engine, routing=0, evaluated=None)

    def slots(self) -> tuple[int, float]:
        """Return (rows decoded together by one engine, bytes of its cache per GPU), as `plan_generation` cuts the
        budget."""
        engine, shape = self.engine, self.served.shape
        assert engine is not None
        token = kv_bytes(shape, engine.element, engine.tensor // engine.shares) + self.routing
        token += kv_bytes(engine.drafter, engine.element, engine.drafting) if engine.drafter else 0
        at_once = engine.lag if engine.in_flight else 1 + engine.lag * bool(engine.window)
        rows = self.rows.count / self.replicas * at_once
        half = self.rows.prompt_mean + self.rows.response_mean / 2  # what a row has so far, on average
        if engine.reserved:
            held = token * half + engine.state_bytes(shape)
            own = min(ceil(rows / engine.shares), engine.max_batch, engine.kv_bytes // held)
            return int(max(1, own)) * engine.shares, engine.kv_bytes
        prompts = rows if self.turns else self.rows.prompts / self.replicas  # trajectories go on with others
        positions = self.rows.longest - 1
        page = engine.page if engine.page < positions else 0
        budget, longest = engine.kv_bytes // token - page, self.rows.prompt_longest + self.turns
        longest = positions if engine.window and self.turns else longest  # what pauses is read again
        again = positions if page else longest  # what paused for lack of pages is read again
        positions += engine.drafts + bool(engine.drafts and engine.window)
        positions = ceil(positions / page) * page if page else positions
        state_positions = ceil(engine.state_bytes(shape) / token)  # in positions
        each = longest + state_positions
        most = PREFILL_TOKENS * each // longest
        chunk = max(each, min(most, budget // 4, budget - positions - state_positions, each * ceil(prompts)))
        chunk = page + max(chunk, again + state_positions)
        begun = min(positions, page + state_positions) if page else positions
        budget -= chunk - page + positions + state_positions  # of the first row
        room = int(max(1, min(ceil(rows), budget // (begun + state_positions) + 1)))
        slots = min(engine.max_batch, room)
        between_steps = engine.tensor == 1 and bool(engine.lag or not engine.ranks)  # turns are taken, not in rounds
        keeps = self.turns and between_steps and not state_positions  # rows between their turns
        whole = max(1, min(room if keeps else slots, (budget + positions - (slots - 1) * state_positions) // positions))
        running = slots
        slots = int(max(1, min(slots, whole * positions // (half + page / 2)))) if page else slots
        return slots, (whole * positions + running * state_positions + chunk) * token


def grid_of(cfg: Config, gpus: int) -> Grid:
    p = cfg.parallel
    over_heads, data, sizes = p.context_mode == "alltoall", gpus // p.model_size, tuple(p.stage_layers)
    return Grid(p.tensor, p.pipeline, p.context, p.expert, data, p.sequence, over_heads, sizes, p.virtual_stages)


def job_of(
    cfg: Config,
    gpus: int,
    *,
    gpus_per_node: int = 8,
    prompt_tokens: float = 0,
    response_tokens: float = 0,
    lengths: tuple[tuple[int, int], ...] = (),
    engine_tensor: int = 0,
    criteria: float = CRITERIA,
) -> PlanJob:
    """Return the job of a config on so many GPUs, in bfloat16 unless the config says float32. Mean lengths that are not
    given are half of the longest. `lengths` of responses bring their own mean. `criteria`: mean number in a rubric."""
    shape, stage, b = shape_at(cfg.model, cfg.model.init), STAGES[cfg.stage.name], cfg.batch
    distill = cfg.algorithm.distill
    rollout, pairs = stage.rollouts, stage.rows(cfg)
    element = 4 if cfg.model.dtype == "float32" else 2
    apart = cfg.parallel.context > 1 or cfg.mismatch.replay_routing or shape.mtp.layers  # rows share no prompts
    rows = step_rows(cfg, prompt_tokens, response_tokens, lengths)
    serves = not cfg.debug.train_only and (rollout or stage.generates(cfg) or evaluates(cfg))
    engine = _engine(cfg, shape, engine_tensor, element, gpus) if serves else None
    return PlanJob(
        stage=cfg.stage.name,
        models=_planned_models(cfg, shape, gpus - cfg.engine.ranks),
        grid=grid_of(cfg, gpus - cfg.engine.ranks),
        rows=rows,
        engine=engine,
        gpus_per_node=gpus_per_node,
        element=element,
        package=element == 2 and package_installed(),
        minibatches=rows.count // minibatch_samples(cfg) if rollout else 1,
        epochs=b.epochs if rollout else 1,
        micro_rows=b.micro_batch_rows * pairs,
        micro_tokens=b.micro_batch_tokens,
        unit=pairs,
        packing=b.packing,
        balanced=b.balance,
        share=b.share_prompts and b.packing and not apart,
        recompute=shape.recomputed,
        logprob_tokens=b.logprob_budget,
        logits_bytes=b.logits_bytes,
        bucket_bytes=cfg.refit.bucket_bytes,
        offload=tuple(cfg.memory.offload),
        old_in_update=old_logprobs_in_update(cfg),
        compares=("teacher" in stage.other_models(cfg) or distill.own_teacher) and not distill.top_k,
        log_squares=cfg.algorithm.preference.wpo,
        sleeps=cfg.memory.sleep != "never" and cfg.engine.sleeps,
        routing=routing_bytes(shape) if cfg.mismatch.replay_routing else 0,
        turns=cfg.environment.max_tokens - cfg.sampling.max_response_tokens if cfg.environment.on else 0,
        ptx_rows=cfg.ptx.sequences if cfg.ptx.coef else 0,
        ptx_longest=cfg.ptx.data.max_tokens,
        teacher_rows=teacher_rows(cfg, rows) if distill.teacher_prompt else None,
        judges=_judges(cfg, shape, rows, engine, criteria) if rollout and engine is not None else (),
        evaluated=evaluated_rows(cfg, rows, gpus) if engine is not None and evaluates(cfg) else None,
        pretrain_steps=cfg.critic.pretrain_steps if "critic" in stage.other_models(cfg) else 0,
        passes=stage.passes(cfg),
    )


def _engine(cfg: Config, shape: ModelConfig, tensor: int, element: int, gpus: int) -> Engine:
    """Return the rollout engine. `tensor` ranks for each replica replace the config's number if not 0. `element`: bytes
    of a trainer's weight. Raises ConfigError."""
    e = cfg.engine
    tensor = tensor or e.tensor_parallel
    size = 4 if e.dtype == "float32" else 2 if e.dtype == "bfloat16" else element
    RuleContext(cfg).check("factors")
    if (e.ranks or gpus) % tensor:
        raise ConfigError("engine.tensor_parallel", tensor, f"a divisor of the {e.ranks or gpus} GPUs that generate")
    planned = Engine(
        tensor,
        size,
        e.max_batch,
        float(e.cache_bytes),
        reserved=e.can.own_process,
        **_decoding(e, shape),
        placed=bool(e.ranks) or (e.can.in_place and e.quantization == "none"),
        factors=cfg.refit.adapters == "factors",
        resident=not _released(cfg),
        matrix=matrix_bytes(cfg),
        shares=request_shares(e.vllm.args, tensor) if e.child is e.vllm else 1,
        ranks=e.ranks,
        lag=e.lag,
        window=e.window,
        page=e.page_tokens,
        drafts=e.draft_tokens,
        ahead=e.reads_ahead,
        drafter=_drafter(shape, e.draft_model) if e.draft_tokens and e.draft_model else None,
        pauses=e.can.windows and (not cfg.environment.on or tensor == 1),
    )
    return replace(planned, **entry_of(e.name).planned)


def _drafter(shape: ModelConfig, folder: str) -> ModelConfig:
    """Return the shape of the model that drafts. Of an EAGLE-3 head that of a llama with as many weights (more, with
    latent attention): columns of its MLP stand for the matrix that joins three hidden states, and for what projections
    read beside the embedding."""
    head = eagle_head(folder) if _config_of(folder) is not None else None
    if head is None:
        return shape_beside(shape, folder)
    width = head.head_numbers // 2
    joined = 3 * head.hidden_size + head.num_layers * (head.num_heads + 2 * head.num_kv_heads) * width
    return ModelConfig(
        num_layers=head.num_layers,
        hidden_size=head.hidden_size,
        ffn_hidden_size=head.ffn_hidden_size + round(joined / 3 / head.num_layers),
        num_heads=head.num_heads,
        num_kv_heads=head.num_kv_heads,
        head_dim=width,
        vocab_size=head.drafted_tokens,
        max_position=shape.max_position,
        tie_embeddings=True,  # the embedding is the model's
    )


def _released(cfg: Config) -> bool:
    """Return whether the engine is without weights from its last sample to the next refit. An engine in a process of
    its own that a reward model puts to sleep first keeps them (`run/phases.py`)."""
    scored = cfg.reward.model or any(judge.model for judge in cfg.reward.judges)
    kept = cfg.engine.can.own_process and scored and not any(judge.own for judge in cfg.reward.judges)
    return cfg.memory.sleep != "never" and empties(cfg) and not kept


def _planned_models(cfg: Config, shape: ModelConfig, gpus: int) -> tuple[PlannedModel, ...]:
    stage = STAGES[cfg.stage.name]
    trains = stage.trains and not cfg.debug.rollout_only
    other_models = stage.other_models(cfg) if trains else ()
    mixed = cfg.model.dtype != "float32"
    ours, theirs = (
        {"gradient": 2 if o.gradient_dtype == "bfloat16" else 4, "moments": o.moment_bytes}
        | {"muon": o.muon_precision if o.name == "muon" else ""}
        for o in (cfg.optim, cfg.critic.optim)
    )
    if stage.scores:
        outputs = max(1, len(cfg.algorithm.reward_loss.attributes))
        return (PlannedModel("policy", shape, "score", True, outputs, cfg.optim.is_sharded(mixed), **ours),)
    averaged = cfg.ema.decay > 0
    some_float32 = shape.lora.dora if shape.lora.rank else shape.traits.trains_float32
    distributed = cfg.optim.is_sharded(mixed and some_float32)
    models = [PlannedModel("policy", shape, trained=trains, distributed=distributed, averaged=averaged, **ours)]
    scorer = shape_beside(shape, cfg.reward.model)
    if "reference" in other_models:
        models.append(PlannedModel("reference", generating(shape), shared=shares_weights(cfg)))
    if "teacher" in other_models:
        teachers = cfg.algorithm.distill.models()
        layout = cfg.algorithm.distill.layout(cfg.parallel)
        grid = None if layout == cfg.parallel else grid_of(replace(cfg, parallel=layout), gpus)
        models += [PlannedModel(name, shape_beside(shape, path), grid=grid) for name, path in teachers.items()]
    if stage.rollouts and cfg.reward.model and not cfg.debug.train_only:
        models.append(PlannedModel("reward", scorer, "score"))
    if "critic" in other_models:
        shared = cfg.critic.trunk == "policy"
        critic = shape if shared else shape_at(scorer, cfg.critic.init)
        distributed = cfg.critic.optim.is_sharded(mixed)
        models.append(PlannedModel("critic", critic, "score", True, 1, distributed, shared=shared, **theirs))
    return tuple(models)


def _decoding(engine: EngineConfig, shape: ModelConfig) -> dict[str, bool]:
    """Return how decode steps of an engine of this model run on a GPU, as fields of `Engine`."""
    here, captures = engine.can.computes_here, engine.captures_of(shape.moe.num_experts)
    return {"padded": here and not (captures and not shape.latent.kv_rank), "launches": here and not captures}


def _judges(
    cfg: Config, shape: ModelConfig, rows: PlannedRows, engine: Engine, criteria: float
) -> tuple[PlannedJudge, ...]:
    """Plan the judges. Comparisons are asked in both orders. A ring of n with k opponents each asks about at most every
    pair of the n once. A rubric asks about each of its `criteria`."""
    planned = []
    native = replace(cfg.engine, name="native")
    for judge in cfg.reward.judges:
        if judge.endpoint.base_url:
            continue
        group, pairwise, text = cfg.batch.group, judge.kind == "pairwise", ceil(len(judge.text) / CHARACTERS)
        pairs = min(group * (judge.opponents or group), group * (group - 1) // 2)
        count, answers = (2 * cfg.batch.prompts * pairs, 2) if pairwise else (rows.count, 1)
        if judge.kind == "rubric":
            count, text = round(count * criteria), text + CRITERION_TOKENS
        asked = PlannedRows(
            count,
            count,
            rows.prompt_mean + answers * rows.response_mean + text,
            rows.prompt_longest + answers * rows.response_longest + text,
            judge.max_tokens / 2,
            judge.max_tokens,
        )
        judges = shape_at(beside(shape), judge.model)
        own = replace(engine, ranks=0, factors=False, drafter=None, **_decoding(native, judges))
        by = own if judge.model else engine
        planned.append(PlannedJudge(judges, asked, by, judge.model))
    return tuple(planned)


def known_shape(cfg: Config, reader: str) -> ModelConfig:
    """Return `shape_at` of the config's model.init. Raises ConfigError where the size of the vocabulary is unknown."""
    shape, init = shape_at(cfg.model, cfg.model.init), cfg.model.init
    if shape.vocab_size:
        return shape
    if init not in ("", "random") and not Path(init).expanduser().exists():
        hint = "Or add the preset of its shape: model=llama3_8b."
        expected = f"a folder on this machine, from whose config.json {reader} reads sizes"
        raise ConfigError("model.init", init, expected, hint)
    expected = f"the size of the vocabulary, or model.tokenizer=FOLDER on this machine, whose size {reader} reads"
    raise ConfigError("model.vocab_size", 0, expected, "Or choose a model: model=llama3_8b.")


def shape_beside(run: ModelConfig, folder: str) -> ModelConfig:
    """Return the shape of another model of a run: of its folder, else of the published model whose name that has, else
    the policy's."""
    like, preset = beside(run), preset_of(folder)
    return shape_at(for_run(preset, like) if preset else like, folder)


def shape_at(like: ModelConfig, init: str) -> ModelConfig:
    """Return the shape in the folder `init`, completed by the keys of the run of `like`; `like` where the folder has
    none (yet). The folder's `hf` (of a finished run) comes first, and `source` (of an import) last."""
    source = _config_of(init)
    return like if source is None else for_run(config_from_hf(source), like)


def _config_of(init: str) -> Path | None:
    """Return where the config.json of a folder is; None where it has none (yet)."""
    folder = Path(init).expanduser()
    candidates = (folder / subfolder for subfolder in ("hf", "", "source"))
    return next((path for path in candidates if init and (path / "config.json").is_file()), None)
