"""Multi-token prediction: a layer behind the last that predicts the token after the next (DeepSeek-V3,
arXiv:2412.19437, section 2.2, with depth 1).

From the last hidden state h_i, behind the model's final norm, and the embedding e of the next token: x_i = layer(W
[norm(e_{i+1}); norm(h_i)]). The model's own output matrix gives from norm(x_i) the logits of token i + 2. Hugging Face
has the layer as the one behind the last.

Megatron's own (`MultiTokenPredictionBlock`) fits no stream. It finds the next tokens in `cu_seqlens`, a row and a
message at a time, makes all logits at once, and asks global process groups. Here every rank has whole rows of tokens.

The layer is on the last pipeline stage. A tied output matrix is the embedding there too. Of other models the first
stage sends its embedding for each step. Megatron keeps a copy, with a gradient and moments.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from megatron.core.models.common.embeddings.language_model_embedding import LanguageModelEmbedding
from megatron.core.transformer.spec_utils import ModuleSpec, build_module
from torch import Tensor

from aligner.config.sections.model.config import ModelConfig
from aligner.errors import AlignerError
from aligner.megatron.attention import Stream
from aligner.megatron.groups import Layout
from aligner.megatron.sharing import LayerConfig, SharedLinear, checkpoint_entries
from aligner.megatron.variants import scale_embeddings
from aligner.models.params import embedding_factor
from aligner.ops.kernels.add_loss import add_loss
from aligner.ops.kernels.logprobs import logit_numbers, token_logprobs
from aligner.ops.packing.ahead import predicted_ahead, two_ahead
from aligner.ops.packing.pack import Packing
from aligner.ops.rl.accuracy import greedy_hits
from aligner.types import ScalarMetrics, TrainBatch

if TYPE_CHECKING:
    from aligner.megatron.train import ShardedModel

OWN_NORM = "mtp"  # Megatron's name of a group of parameters whose gradients are clipped apart


class PredictingLayer(torch.nn.Module):
    """hidden, embedded [N, 1, H] (a 1/TP share of N with sequence parallelism) -> [N, 1, H], of which the output
    matrix makes logits. The norms and the matrix in front of the layer are whole on every tensor rank."""

    def __init__(self, config: LayerConfig, cfg: ModelConfig, layout: Layout, layer: ModuleSpec):
        super().__init__()
        self.group = layout.pgs.tp
        for name in ("enorm", "hnorm", "final_layernorm"):
            setattr(self, name, config.norm(config, config.hidden_size, config.layernorm_epsilon))
        self.eh_proj = SharedLinear(config, 2 * config.hidden_size, config.hidden_size)
        number = cfg.num_layers + 1 - config.pipeline_model_parallel_layout.get_layer_offset()  # which Megatron adds
        self.layer = build_module(layer, config=config, layer_number=number, pg_collection=layout.pgs)
        if cfg.mtp.detach:
            for parameter in self.parameters():
                parameter.grad_norm_group = OWN_NORM

    def forward(self, hidden: Tensor, embedded: Tensor, stream: Stream) -> Tensor:
        if stream.times is not None:  # the engine's choice of experts is of the model's own layers
            stream = replace(stream, times=replace(stream.times, replay=None))
        x = self.eh_proj(torch.cat([self.enorm(embedded), self.hnorm(hidden)], -1))
        return self.final_layernorm(self.layer(x, attention_mask=None, packed_seq_params=stream)[0])

    def sharded_state_dict(self, prefix: str = "", sharded_offsets: tuple = (), metadata: dict | None = None):
        entries: dict[str, Any] = self.layer.sharded_state_dict(f"{prefix}layer.", sharded_offsets, metadata)
        for name in ("enorm", "hnorm", "eh_proj", "final_layernorm"):
            own = getattr(self, name)
            entries |= checkpoint_entries(own, f"{prefix}{name}.", sharded_offsets, metadata, self.group)
        return entries


class AheadLoss:
    """The loss of that layer, the mean over the tokens of the minibatch's loss mask; nothing happens in a model without
    one."""

    def __init__(self, model: ShardedModel, logits_bytes: int):
        self.model, self.logits_bytes, self.tokens = model, logits_bytes, 1.0
        self.learns = bool(model.cfg.mtp.layers) and model.head.kind == "lm"
        self.embedding: LanguageModelEmbedding | None = None  # of the step
        self.totals = torch.zeros(2, dtype=torch.float64, device=model.device)  # of the step: losses, right guesses

    def pairs(self, packing: Packing, batch: TrainBatch) -> Packing | None:
        """Return the pairs of a micro-batch, on the CPU; None on a stage without the layer, or without gradient."""
        if self.model.module.ahead is None or not torch.is_grad_enabled():
            return None
        return two_ahead(packing, predicted_ahead(batch))

    def begin(self, micro_batches: Sequence[TrainBatch]) -> None:
        """Start a step. Collective over the data-parallel ranks, and over the first and last stage."""
        if not self.learns:
            return
        # on the CPU: the host reads them at once
        tokens = torch.tensor(float(sum(int(predicted_ahead(b.trim()).sum()) for b in micro_batches)))
        dist.all_reduce(tokens, group=self.model.layout.pgs.dp)
        self.tokens = max(1.0, float(tokens))
        self.totals.zero_()
        self.embedding = self._looked_up()

    def _looked_up(self) -> LanguageModelEmbedding | None:
        """Return the embedding, on the last stage. Collective over the first and last stage if they do not share it."""
        model, module, layout = self.model, self.model.module, self.model.layout
        ends, tied = layout.pgs.embd, module.share_embeddings_and_output_weights
        if layout.is_first_stage:
            if layout.pipeline > 1 and not tied:
                dist.broadcast(module.embedding.word_embeddings.weight.detach(), group=ends, group_src=0)
            return module.embedding
        if not layout.is_last_stage:
            return None
        sizes = {"vocab_size": module.vocab_size, "max_sequence_length": module.max_sequence_length}
        where = {"position_embedding_type": "none", "tp_group": layout.pgs.tp}
        own = LanguageModelEmbedding(module.config, **sizes, **where).requires_grad_(False)
        if tied:
            own.word_embeddings.weight = module.output_layer.weight
        else:
            dist.broadcast(own.word_embeddings.weight, group=ends, group_src=0)
        scale_embeddings(own, embedding_factor(model.cfg, model.dtype))
        return own

    def attached(self, hidden: Tensor, batch: TrainBatch, stream: Stream) -> Tensor:
        """Return the model's last hidden states unchanged; backward through them minimises this loss as well."""
        model, cfg, ahead = self.model, self.model.cfg, stream.ahead
        if ahead is None:
            return hidden
        following = batch.tokens.view(-1)[(ahead.source + 1).clamp_max(batch.tokens.numel() - 1)]
        assert self.embedding is not None
        embedded, known, weight = self.embedding(following[None], None), hidden, model.head_weight
        if cfg.mtp.detach:
            embedded, known, weight = embedded.detach(), hidden.detach(), weight.detach()
        where = {"vocab_size": cfg.vocab_size, "group": model.layout.pgs.tp if model.layout.tensor > 1 else None}

        def read(logits: Tensor, targets: Tensor) -> Tensor:
            return torch.stack([token_logprobs(logits, targets, **where)[0], greedy_hits(logits, targets, **where)], 1)

        x = model.module.ahead(known, embedded, stream)[:, 0]
        budget = {"budget_bytes": self.logits_bytes, "numbers": logit_numbers(x), "weight": weight}
        logprobs, hits = model.over_logits(x, replace(batch, packing=ahead), read, **budget).unbind(-1)
        self.totals += torch.stack([-logprobs.detach().double().sum(), hits.double().sum()])
        return add_loss(hidden, -logprobs.sum() * (cfg.mtp.loss / self.tokens))

    def metrics(self) -> ScalarMetrics:
        """Return mtp/loss, and mtp/acceptance, the share of tokens that were the most likely ones, equal on every rank.
        Collective over the data-parallel ranks and the stages. Raises AlignerError if the loss is not finite."""
        if not self.learns:
            return {}
        dist.all_reduce(self.totals, group=self.model.layout.pgs.dp)
        self.model.broadcast_from_last_stage(self.totals)
        self.embedding = None
        loss, hits = (self.totals / self.tokens).tolist()
        if not math.isfinite(loss):  # of a detached layer, whose gradients are not in grad_norm
            expected = "a finite number. Resume from a checkpoint before it with a lower optim.lr"
            raise AlignerError(f"mtp/loss {loss} at optimizer step {self.model.step_count}: expected {expected}")
        return {"mtp/loss": loss, "mtp/acceptance": hits}
