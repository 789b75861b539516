"""One complete type per phase of the pipeline: Prompt -> Generations -> Sample -> RolloutBatch -> TrainBatch ->
LossOutput.

Every per-token tensor is [B, T], and index t belongs to tokens[:, t]; index 0 has no logprob. Rows are right-padded:
prompt, response, padding. With causal attention no attention mask is needed then.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from enum import StrEnum
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Prompt:
    """A dataset row that is ready to generate from."""

    id: int  # stable row number in its dataset; part of every request seed
    tokens: tuple[int, ...]
    text: str  # the model's input, special tokens included
    fields: Mapping[str, Any] = field(default_factory=dict)  # the row's other columns: answer, entry, ...
    messages: tuple[dict[str, Any], ...] | None = None  # the conversation it was rendered from; None: a plain text


@dataclass(frozen=True)
class SamplingParams:
    """Rules by which the engine samples tokens. temperature 0 is greedy; top_k 0, top_p 1, min_p 0 are off."""

    max_response_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    stop_token_ids: tuple[int, ...] = ()
    stop: tuple[str, ...] = ()
    vocabulary: int = 0  # ids from here on, of embeddings without a token, are never sampled; 0: all
    special: str = "keep"  # special tokens in the texts of answers: keep, strip

    @property
    def truncates(self) -> bool:
        """Whether tokens are sampled from a part of the tempered distribution only."""
        return self.temperature > 0 and (self.top_p < 1 or self.top_k > 0 or self.min_p > 0)


STOP, LENGTH = 0, 1  # Generations.finish_reason codes: a stop token or string was met / the token limit was met


class TensorBatch:
    """Batch whose tensor fields have the same rows."""

    def tensors(self) -> dict[str, Tensor]:
        """Return all tensors by name, those of payloads too."""
        tensors: dict[str, Tensor] = {}
        self.mapped(tensors.setdefault)
        return tensors

    def mapped(self, change: Callable[[str, Tensor], Tensor]):
        """Return the same batch, its payloads too, with `change(name, tensor)` for each tensor."""
        changed: dict[str, Any] = {}
        for name in (f.name for f in fields(self)):  # type: ignore[arg-type]
            value = getattr(self, name)
            if hasattr(value, "shape"):
                changed[name] = change(name, value)
            elif name == "payloads":
                changed[name] = [payload.mapped(change) for payload in value]
        return replace(self, **changed)

    def select(self, rows: Tensor):
        """Return the same batch with only these rows (int64 [n])."""
        return self.mapped(lambda _, t: t.index_select(0, rows.to(t.device)))

    def trim(self):
        """Cut trailing columns that are padding in every row."""
        width = int(self.lengths.max()) if len(self.lengths) else 1  # type: ignore[attr-defined]
        old = self.tokens.shape[1]  # type: ignore[attr-defined]
        if width == old:
            return self

        def cut(name: str, t: Tensor) -> Tensor:
            per_token = t.dim() >= 2 and t.shape[1] == old and name != "labels"  # attribute scores are not
            return t[:, :width].contiguous() if per_token else t

        return self.mapped(cut)


@dataclass
class Generations(TensorBatch):
    """Output of an engine, column by column: N = prompts x samples rows, prompt-major.

    The stop token is part of the response (and has a logprob). A stop string ends the response with the token that
    completes it. The tokens after the prompt of a trajectory are a response of several turns.
    """

    tokens: Tensor  # int64 [N, R], right-padded with 0
    lengths: Tensor  # int64 [N], response tokens
    logprobs: Tensor  # float32 [N, R], of the distribution that was sampled from; 0 on padding
    finish_reason: Tensor  # int64 [N], STOP or LENGTH
    weight_version: int
    full_logprobs: Tensor | None = None  # float32 [N, R], of the tempered full distribution, if top-p/top-k/min-p cut
    routing: Tensor | None = None  # uint8 or int16 [N, P + R, layers, top_k]: ops/packing/routing.py; of prompts too
    made: Tensor | None = None  # bool [N, R] tokens that the policy generated; None: all
    forks: Tensor | None = None  # int64 [N, R] number of the trajectory's segment with the token; None: the prompt's
    versions: Tensor | None = None  # int64 [N, R] of the weights of each token; None: weight_version


class Stop(StrEnum):
    """Why a trajectory ended."""

    ANSWER = "answer"  # the model called no tool
    DONE = "done"  # the environment is done
    LENGTH = "length"  # a response was cut by the token limit
    TURNS = "turns"  # environment.max_turns; likewise of tokens and seconds
    TOKENS = "tokens"
    SECONDS = "seconds"
    TEMPLATE = "template"  # the chat template refuses to continue from the response
    PROMPT = "prompt"  # the opening of environment or agent is longer than data.max_prompt_tokens
    FAILED = "failed"  # a tool or the environment failed repeatedly


@dataclass(frozen=True)
class Trajectory:
    """A sample of several turns."""

    messages: tuple[dict[str, Any], ...]  # after the prompt: the model's, and the results of its calls
    stop: Stop
    turns: int  # responses of the model
    reward: float | None = None  # the environment's, of all turns
    failure: str = ""  # of tools or environment: cause and text. It makes the sample invalid
    seconds: float = 0.0  # spent in tools and environment
    retried: int = 0  # calls to them that were repeated
    wrong: int = 0  # calls whose result was an error
    rows: int = 1  # segments; each but the first was rendered anew
    turn_rewards: tuple[float, ...] = ()  # after each turn that called tools
    late: int = 0  # requests of an agent that came before its previous one was answered
    restarted: int = 0  # times that it began again
    turn_seconds: tuple[float, ...] = ()  # of the calls of each turn that has some


@dataclass
class Sample:
    """One response with its prompt, as a Reward sees it. Of a trajectory, the response is the last turn."""

    prompt: Prompt
    index: int  # 0 .. group-1
    response: str  # decoded, special tokens and stop token removed
    tokens: tuple[int, ...]  # response tokens; of a trajectory, all after the prompt
    finished: bool  # ended by a stop token or string, not by the limit; a trajectory: not by a budget
    weight_version: int = 0
    trajectory: Trajectory | None = None  # None: of one turn
    seed: int | None = None  # of its request, unique in the run; None: it is of no rollout


@dataclass
class RolloutBatch(TensorBatch):
    """The samples of one rollout that live on this data-parallel rank, group-major, CPU tensors."""

    tokens: Tensor  # int64 [B, T] prompt + response, right-padded
    lengths: Tensor  # int64 [B] prompt + response tokens
    response_mask: Tensor  # float32 [B, T] 1 where the policy generated the token
    rollout_logprobs: Tensor  # float32 [B, T] by the engine, of the full tempered distribution
    rewards: Tensor  # float32 [B] total scalar outcome
    valid: Tensor  # bool [B] False: out of baselines, losses and denominators
    group: Tensor  # int64 [B] global prompt slot in the rollout, 0 .. prompts-1
    finished: Tensor  # bool [B]
    weight_version: int
    samples: list[Sample] = field(default_factory=list)
    old_logprobs: Tensor | None = None  # float32 [B, T] by the policy before the update
    ref_logprobs: Tensor | None = None  # float32 [B, T] by the frozen reference
    values: Tensor | None = None  # float32 [B, T] by the critic before the update
    token_rewards: Tensor | None = None  # float32 [B, T]
    advantages: Tensor | None = None  # float32 [B, T]
    returns: Tensor | None = None  # float32 [B, T]
    loss_mask: Tensor | None = None  # float32 [B, T] response_mask less invalid and loss-masked samples
    sampled_logprobs: Tensor | None = None  # float32 [B, T] by the engine, as sampled from, if top-p/top-k/min-p cut
    token_weights: Tensor | None = None  # float32 [B, T] factors of the policy loss (`mismatch.correction`)
    positive: Tensor | None = None  # float32 [B] 1: its likelihood is in the policy loss (`algorithm.positive`)
    observed: Tensor | None = None  # float32 [B, T] 1: likewise, what tools or environment wrote (`observation_coef`)
    rejected: Tensor | None = None  # bool [B] made invalid by `mismatch.correction`
    greedy_rewards: Tensor | None = None  # float32 [B] shaped reward of the prompt's greedy response (remax)
    routing: Tensor | None = None  # [B, T, layers, top_k] the engine's experts (`mismatch.replay_routing`)
    forks: Tensor | None = None  # int64 [B, T] numbers of a trajectory's segments, each rendered anew; None: one
    versions: Tensor | None = None  # int64 [B, T] of the weights that made each token; None: weight_version


@dataclass
class PolicyTargets(TensorBatch):
    """Tensors that a policy loss compares the policy with: each float32 [B, T] unless said otherwise."""

    advantages: Tensor
    old_logprobs: Tensor | None = None  # None: the update computes them
    ref_logprobs: Tensor | None = None
    token_weights: Tensor | None = None  # factors of the policy loss, not of its denominators
    rollout_logprobs: Tensor | None = None  # by the engine (dppo)
    response_mask: Tensor | None = None  # set where old_logprobs are None: the update computes and compares them
    chosen: Tensor | None = None  # 1 on tokens chosen by covariance (clip_cov, kl_cov)
    positive: Tensor | None = None  # [B], 1: its likelihood is in the loss (`algorithm.positive`)
    observed: Tensor | None = None  # 1: likewise, tokens of others than the policy (`algorithm.observation_coef`)
    row_keys: Tensor | None = None  # int64 [B] >= 0, a hash of rollout, epoch and sample, for random choices
    versions: Tensor | None = None  # int64 [B, T] of the engine's weights (`algorithm.old_logprobs=proxy`)


@dataclass
class ValueTargets(TensorBatch):
    """Tensors that a value loss compares the critic with, float32 [B, T]."""

    returns: Tensor
    values: Tensor  # before the update


@dataclass
class LabelTargets(TensorBatch):
    """Labels of whole rows: of answers, or of both answers of a pair."""

    labels: Tensor  # float32 [B] or [B, K]: margins, attribute scores, or both with rewards of pairs
    ref_logprobs: Tensor | None = None  # float32 [B, T] by the frozen reference


@dataclass
class StepTargets(TensorBatch):
    """Labels of the steps of answers."""

    step_labels: Tensor  # float32 [B, T], read where the loss mask is 1


@dataclass
class TeacherTargets(TensorBatch):
    """Hidden states [B, T, H] from which a teacher predicts tokens; or its k top logprobs [B, T, k] and their ids
    (int64)."""

    teacher: Tensor
    teacher_ids: Tensor | None = None


@dataclass
class TeacherNumbers(TensorBatch):
    """Number of each row's teacher, where there are several teachers."""

    told_by: Tensor  # int64 [B]


@dataclass
class TeacherRows(TensorBatch):
    """The same answers as rows for the teacher, behind a prompt of its own."""

    teacher_tokens: Tensor  # int64 [B, T of its own]
    teacher_lengths: Tensor  # int64 [B]
    teacher_mask: Tensor  # float32, 1 on the answers' tokens
    teacher_spans: Tensor | None = None  # int64 [B, T of its own], with another tokenizer: as `TextSpans.spans`
    spans: Tensor | None = None  # int64 [B, T], of the student's tokens
    sampled: Tensor | None = None  # float32 [B, T], likewise: logprobs with which they were sampled


@dataclass
class TextSpans(TensorBatch):
    """Spans of text that a teacher with another tokenizer ends where the student does. TeacherTargets are then the
    teacher's logprobs of whole spans, [B, T, 1], at their last tokens."""

    spans: Tensor  # int64 [B, T] number of the token's span in its row, from 1 on; 0: of none
    baseline: Tensor  # float32 [B, T], at last tokens the mean log-ratio of all rows' spans with this number


@dataclass
class SourceNumbers(TensorBatch):
    """Number of each row's source, of a mixture (`data.sources`)."""

    source: Tensor  # int64 [B]


@dataclass
class PtxRows(TensorBatch):
    """Mark of rows of `ptx.data`, which have a loss of their own."""


@dataclass
class TrainBatch(TensorBatch):
    """Rows for one forward pass of a model, and a payload for each loss that they are for."""

    tokens: Tensor  # int64 [B, T]
    lengths: Tensor  # int64 [B]
    loss_mask: Tensor  # float32 [B, T]
    payloads: list[TensorBatch] = field(default_factory=list)  # one of a kind
    wanted: Tensor | None = None  # bool [B, T] tokens whose output is read; None: all
    routing: Tensor | None = None  # [B, T, layers, top_k] the experts to use; None: the choice of the model's routers
    documents: Tensor | None = None  # int64 [B, T] numbers of a row's documents, which see only themselves; None: one
    forks: Tensor | None = None  # likewise of a trajectory's segments; losses see all of it as one row
    packing: Any = None  # ops.packing.Packing: positions of its tokens in the model's stream, once a model has it
    whole: Any = None  # ops.packing.documents.SourceRows: the rows whose forks became rows, for a model

    def find[P: TensorBatch](self, kind: type[P]) -> P | None:
        """Return the payload of this kind, if there is one."""
        return next((payload for payload in self.payloads if isinstance(payload, kind)), None)

    def of[P: TensorBatch](self, kind: type[P]) -> P:
        """Return the payload of this kind, which must exist."""
        payload = self.find(kind)
        assert payload is not None, f"rows without {kind.__name__}"
        return payload

    def without(self, *kinds: type[TensorBatch]) -> TrainBatch:
        """Return the rows without the payloads of these kinds."""
        return replace(self, payloads=[payload for payload in self.payloads if not isinstance(payload, kinds)])

    def with_payloads(self, *payloads: TensorBatch) -> TrainBatch:
        """Return the rows with these payloads in place of others of their kinds."""
        kept = self.without(*map(type, payloads))
        return replace(kept, payloads=[*kept.payloads, *payloads])


@dataclass
class LossOutput:
    """A loss already divided by its minibatch denominator, so that micro-batches and data-parallel ranks add up.

    `means`: name -> (numerator, denominator), summed over micro-batches and ranks, then divided. `maxima`: name ->
    value, reduced by max.
    """

    loss: Tensor
    means: dict[str, tuple[Tensor, Tensor]] = field(default_factory=dict)
    maxima: dict[str, Tensor] = field(default_factory=dict)

    def detached(self) -> LossOutput:
        """Return only the numbers. Kept with its graph until the step ends, the loss of a micro-batch would keep what
        a pipeline stage received for it, and its gradient."""
        means = {name: (above.detach(), below.detach()) for name, (above, below) in self.means.items()}
        return LossOutput(self.loss.detach(), means, {name: value.detach() for name, value in self.maxima.items()})


ScalarMetrics = dict[str, float]
Sums = dict[str, tuple[float, float]]  # name -> (numerator, denominator): add over ranks, then divide
Progress = Callable[[int, int], None]  # (done, total)
TokenLists = Sequence[Sequence[int]]  # of each prompt its tokens
SeedLists = Sequence[Sequence[int]]  # of each prompt a seed for each of its samples
