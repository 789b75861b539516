"""The decoder that only infers: blocks with fused weights, composed by the family's table; no autograd."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from aligner.config.sections.model.config import ModelConfig, with_ahead
from aligner.engines.native.ahead import AheadLayer
from aligner.engines.native.attention import PrefillPositions
from aligner.engines.native.block_inputs import BlockContext, DecodeStep, PrefillInputs, Product, nearby
from aligner.engines.native.cache import SlotCache
from aligner.engines.native.entries import EntryHeads
from aligner.engines.native.heads import PlainHeads
from aligner.engines.native.latent import LatentHeads
from aligner.engines.native.layer_inputs import LayerInputTable
from aligner.engines.native.linear import LinearLayers
from aligner.engines.native.mlp import DenseMlp, ExpertMlp
from aligner.engines.native.packs import PackedMatrices
from aligner.engines.native.peers import EngineRanks
from aligner.engines.native.routes import Routes
from aligner.engines.native.scratch import Scratch, cleared
from aligner.engines.native.states import RowStates
from aligner.engines.native.streams import ResidualStreams
from aligner.families.rows import in_layer
from aligner.families.table import ahead_name, family_table
from aligner.models.params import embedding_factor, expected_hf_shapes
from aligner.models.rope import attention_factor, inverse_frequencies, query_factors
from aligner.models.shards import HfTensor, hf_tensors
from aligner.ops.kernels.hyper import written
from aligner.ops.kernels.invariant import by_rows
from aligner.ops.kernels.products import add_linear, linear, use_fast_products
from aligner.ops.kernels.scored_attention import scaled_logits
from aligner.ops.reduce import sum_halves

EMBEDDING = "embedding.word_embeddings.weight"
# before attention, before the MLP, behind either, behind what a layer's input adds: a family has some of them
NORMS = BEFORE, BEFORE_MLP, BEHIND, BEHIND_MLP, BEHIND_INPUT = (
    "input_layernorm",
    "pre_mlp_layernorm",
    "self_attention.post_layernorm",
    "mlp.post_layernorm",
    "layer_input.post_layernorm",
)
# kinds of layers with heads of their own, in the order of the caches
ORDER = [(), ("local", "keys"), ("global", "keys"), ("local", "reads"), ("global", "reads")]
Mixer = PlainHeads | LatentHeads | EntryHeads | LinearLayers
# (mixer, layer, normalised hidden states [M, H]) -> the input of its `out`
Mix = Callable[[Mixer, int, Tensor], Tensor]


class NativeModel:
    def __init__(self, cfg: ModelConfig, device: torch.device, dtype: torch.dtype, peers: EngineRanks | None = None):
        self.cfg, self.device, self.dtype, self.peers = cfg, device, dtype, peers or EngineRanks(None)
        use_fast_products(device, dtype)
        # the layer for multi-token prediction is one more layer of the blocks, through which `_forward` does not go
        blocks_of = with_ahead(cfg) if cfg.mtp.layers else cfg
        self.kit = kit = BlockContext(blocks_of, device, dtype, self.peers)
        self.shapes = expected_hf_shapes(cfg)
        self.tensors = {tensor.name: tensor for tensor in hf_tensors(cfg)}
        # a rank has 1 / share of heads, FFN rows and vocabulary
        share, rank = self.peers.size, self.peers.rank
        self.intervals = {name: tensor.interval(share, rank) for name, tensor in self.tensors.items()}
        hf = {spec.canonical: spec.hf[0] for spec in family_table(blocks_of)}
        self.first_token, high = self.interval(self.tensors[hf[EMBEDDING]])
        tokens = high - self.first_token
        self.embedding = kit.empty(tokens, cfg.hidden_size)
        self.head = self.embedding if cfg.tie_embeddings else kit.empty(tokens, cfg.hidden_size)
        # the norms that any layer has, in the order of rows
        names, layers = [in_layer(f"{name}.weight") for name in NORMS], range(blocks_of.num_layers)
        has = [any(name.format(layer=layer) in hf for layer in layers) for name in names]
        self.norm_rows = [name for name, here in zip(NORMS, has, strict=True) if here]
        self.norms = kit.empty(blocks_of.num_layers, len(self.norm_rows), cfg.hidden_size)
        self.final_norm = kit.empty(cfg.hidden_size)
        self.scalars = kit.empty(cfg.num_layers, 1) if cfg.traits.layer_scalar else None
        self.layer_inputs = LayerInputTable(kit, tokens) if cfg.layer_input_size else None
        self.ahead = AheadLayer(kit, cfg) if cfg.mtp.layers else None
        self._compose()
        self._views = self._hf_views()
        assert self._views.keys() == self.shapes.keys(), self._views.keys() ^ self.shapes.keys()
        plain = {name: layers for block in self.blocks for name, layers in block.matrices().items()}
        also_plain = ("head",) if cfg.tie_embeddings else ()
        kit.packs = PackedMatrices(plain | {"head": [self.head]}, self._views, also_plain, not cfg.invariant)
        self.watch: Callable[[Tensor], None] | None = None  # gets the embeddings, and what each layer gives
        self._forgotten = False
        self.forget()
        self._ropes: tuple[Tensor, ...] = ()
        self._embedding_factor = embedding_factor(cfg, dtype)

    def _compose(self) -> None:
        """Make the blocks of the family, and map each layer to those that it goes through."""
        cfg, kit = self.kit.cfg, self.kit
        heads = self._heads()
        self.cached = [each.cached for each in heads.values() if each.cached[0]]
        attention = cfg.layers_of("attention")
        self.mixers: dict[int, Mixer] = {layer: heads[cfg.heads_of(layer)] for layer in attention}
        self.mlps: dict[int, DenseMlp] = {}
        self.experts: dict[int, ExpertMlp] = {}
        self.streams = ResidualStreams(kit) if cfg.hyper.streams else None
        beside = [block for block in (self.layer_inputs, self.streams, self.ahead) if block is not None]
        self.blocks: list[Any] = [*heads.values(), *beside]
        self.linear = LinearLayers(kit) if cfg.layers_of("linear") else None
        if self.linear is not None:
            self.mixers |= dict.fromkeys(cfg.layers_of("linear"), self.linear)
            self.blocks.append(self.linear)
        widths = defaultdict[int, list[int]](list)
        for layer in cfg.layers_of("dense"):
            widths[cfg.of_kinds(cfg.layer_kinds(layer)).ffn_hidden_size].append(layer)
        for layers in widths.values():
            self.mlps |= dict.fromkeys(layers, DenseMlp(kit, layers, " wide" * bool(self.mlps)))
            self.blocks.append(self.mlps[layers[0]])
        if layers := cfg.layers_of("sparse"):
            self.experts = dict.fromkeys(layers, ExpertMlp(kit))
            self.blocks.append(self.experts[layers[0]])

    def memories(self, fed: int = 1) -> RowStates | None:
        """Return the memories of rows if there are any, for steps that feed at most so many tokens of each."""
        shapes = {kind: shape for b in self.blocks if isinstance(b, EntryHeads) for kind, shape in b.states().items()}
        shapes |= self.linear.states(fed) if self.linear is not None else {}
        return RowStates(shapes, self.device) if shapes else None

    def _heads(self) -> dict[tuple[str, ...], Any]:
        """Return the heads by kinds of layers."""
        cfg, heads = self.kit.cfg, dict[tuple[str, ...], Any]()
        if cfg.latent.kv_rank or cfg.traits.entries:
            return {(): EntryHeads(self.kit) if cfg.traits.entries else LatentHeads(self.kit)}
        for kinds in sorted({cfg.heads_of(layer) for layer in cfg.layers_of("attention")}, key=ORDER.index):
            heads[kinds] = PlainHeads(self.kit, kinds, heads.get((*kinds[:1], "keys")))
        return heads

    @property
    def packs(self) -> PackedMatrices:
        return self.kit.packs

    @property
    def scratch(self) -> Scratch:
        return self.kit.scratch

    @scratch.setter
    def scratch(self, scratch: Scratch) -> None:
        self.kit.scratch = scratch

    @property
    def views(self) -> dict[str, Tensor]:
        """The views to read and to write weights through, until rows are computed again."""
        self.packs.unpack()
        return self._views

    @property
    def weight_bytes(self) -> int:
        return self.packs.held_bytes + sum(buffer.untyped_storage().nbytes() for buffer in self.kit.weights)

    def _hf_views(self) -> dict[str, Tensor]:
        """Return Hugging Face name -> view into the fused buffers whose elements are in Hugging Face's order."""
        hf = {spec.canonical: spec.hf[0] for spec in family_table(self.kit.cfg)}
        views = {hf[EMBEDDING]: self.embedding, hf["decoder.final_layernorm.weight"]: self.final_norm}
        if not self.cfg.tie_embeddings:
            views["lm_head.weight"] = self.head
        for layer, rows in enumerate(self.norms):
            for name, row in zip(self.norm_rows, rows, strict=True):
                if stored := hf.get(f"decoder.layers.{layer}.{name}.weight"):  # layers may differ
                    views[stored] = row
            if self.scalars is not None:
                views[hf[f"decoder.layers.{layer}.layer_scalar"]] = self.scalars[layer]
        for block in self.blocks:
            views |= block.views()
        return {ahead_name(self.cfg, name): view for name, view in views.items()}

    def load(self, name: str, tensor: Tensor) -> None:
        """Load this rank's share of a whole tensor."""
        view, spec = self.views[name], self.tensors[name]
        low, high = self.interval(spec)
        tensor = tensor.narrow(spec.axis, low, high - low)
        view.copy_(tensor.detach().reshape(view.shape), non_blocking=True)

    def interval(self, tensor: HfTensor) -> tuple[int, int]:
        """Return the entries of `tensor.axis` that this rank holds."""
        return self.intervals[tensor.name]

    def shard_view(self, name: str, start: int, stop: int) -> Tensor:
        """Return a view of entries [start, stop), which this rank holds; elements in Hugging Face's order. Its matrix
        must be open (`PackedMatrices.open`)."""
        view, (low, high) = self._views[name], self.intervals[name]
        if self.tensors[name].axis:
            return view[..., start - low : stop - low]
        each = (high - low) // view.shape[0]  # more than one where heads are split into halves
        return view[(start - low) // each : (stop - low) // each]

    def checksums(self) -> dict[str, int]:
        """Return the checksums of the whole tensors. The first rank that holds a share hashes it."""
        halves = torch.zeros(len(self.tensors), 2, dtype=torch.int64)
        for row, (name, tensor) in zip(halves, self.tensors.items(), strict=True):
            low, high = self.interval(tensor)
            rank = self.peers.rank
            if low < high and (rank == 0 or tensor.interval(self.peers.size, rank - 1) != (low, high)):
                value = tensor.checksum(self.views[name], low, high)
                row += torch.tensor([value & 0xFFFFFFFF, value >> 32])
        return dict(zip(self.tensors, sum_halves(halves, self.peers.group), strict=True))

    def forget(self) -> None:
        """Release the weights until `restore`. Views of them stay valid."""
        self.packs.forget()
        for buffer in self.kit.weights if not self._forgotten else ():
            storage = buffer.untyped_storage()
            if storage.resizable():  # not if numpy has seen it
                storage.resize_(0)
        self._forgotten = True

    def restore(self) -> None:
        """Give forgotten weights, or those of a new model, memory: zeros."""
        for buffer in self.kit.weights if self._forgotten else ():
            if buffer.untyped_storage().nbytes() < buffer.nbytes:
                buffer.untyped_storage().resize_(buffer.nbytes)
            cleared(buffer)
        self._forgotten = False

    def release(self) -> None:
        """Release all memory; the model cannot be used afterwards."""
        self.scratch.clear()
        self._views.clear()
        self.kit.weights.clear()
        self.packs.clear()
        self.embedding = self.head = self.norms = self.final_norm
        self.mixers, self.mlps, self.experts, self.blocks = {}, {}, {}, []

    # ---- forward

    def rotations(self, positions: Tensor, longest: int) -> tuple[Tensor, ...]:
        """Return complex64 [M, 1, rotary_dim / 2] each for positions int64 [M] below `longest`: of all layers, of
        global and of local ones, or of keys and of queries."""
        self.extend_rotations(longest)
        return tuple(rope[positions, None] for rope in self._ropes)

    @property
    def rotations_at(self) -> tuple[int, ...]:
        """The addresses of the tables of rotations."""
        return tuple(rope.data_ptr() for rope in self._ropes)

    def extend_rotations(self, longest: int) -> None:
        """Extend the tables of rotations to positions below `longest`."""
        held = len(self._ropes[0]) if self._ropes else 0
        if held < longest:
            longest = max(longest, 2 * held)
            kinds = (False, True) if self.cfg.attention.local_rope_base else (False,)
            ropes = [self._rotations(longest, local) for local in kinds]
            factors = query_factors(self.cfg, torch.arange(longest)[:, None])
            ropes += [] if factors is None else [rope * factors for rope in ropes]
            self._ropes = tuple(rope.to(self.device) for rope in ropes)

    def _rotations(self, longest: int, local: bool) -> Tensor:
        angles = torch.arange(longest).float()[:, None] * inverse_frequencies(self.cfg, local)
        if self.cfg.invariant:
            parts = (by_rows(f, angles) * attention_factor(self.cfg, local) for f in (torch.cos, torch.sin))
            return torch.complex(*parts)
        return torch.polar(torch.tensor(attention_factor(self.cfg, local)).expand_as(angles), angles)

    def prefill(
        self,
        tokens: Tensor,
        staged: tuple[Tensor, ...] | None = None,
        routes: Tensor | None = None,
        memories: RowStates | None = None,
        lengths: Tensor | None = None,
        held: Tensor | None = None,
    ) -> Tensor:
        """Return tokens int64 [P, T] right-padded -> normalised hidden states [P, T, hidden].

        Keys and values are written to `staged`, of each kind of heads, if given, each token's experts to
        routes [P, T, layer, top_k]. The memories of linear layers behind the `lengths` int64 [P] of the rows are
        written to the staged `memories`. With `held` int64 [P] (not for linear layers) the tokens follow so many
        that are staged already.
        """
        rows, length = tokens.shape
        prompts = self._prompts(rows, length, staged, memories, lengths, held)
        flat = routes
        if routes is not None:  # those of `held` tokens are staged
            flat = routes.flatten(0, 1) if held is None else routes.new_empty(rows * length, *routes.shape[2:])

        def mix(mixer: Mixer, layer: int, y: Tensor) -> Tensor:
            return mixer.prefill(layer, y, prompts)

        hidden = self._forward(tokens.reshape(-1), mix, flat)
        if self.ahead is not None and staged is not None:  # what follows the last token is read when it is sampled
            self._predict(hidden, F.pad(tokens[:, 1:], (0, 1)).flatten(), mix)
        hidden = hidden.view(rows, length, -1)
        if routes is not None and held is not None:
            routes[prompts.behind.rows, prompts.behind.positions] = flat
        return hidden

    def _prompts(
        self,
        rows: int,
        length: int,
        staged: tuple[Tensor, ...] | None,
        memories: RowStates | None,
        lengths: Tensor | None,
        held: Tensor | None,
    ) -> PrefillInputs:
        """See `prefill`."""
        positions, reach = torch.arange(length, device=self.device).repeat(rows), length
        behind = None
        if held is not None:
            reach = staged[0].shape[-2]
            positions += held.repeat_interleave(length)
            seen = torch.arange(reach, device=self.device) <= positions[:, None]
            which = torch.arange(rows, device=self.device).repeat_interleave(length)
            behind = PrefillPositions(which, positions, seen.view(rows, 1, length, reach))
        causal = None if behind is None else behind.seen
        near = nearby(positions[:length] if causal is None else positions, reach, self.cfg.attention.window)
        near = near if causal is None or near is None else near.view_as(causal)
        rope = self.rotations(positions, reach)
        real = None if lengths is None else positions[:length] < lengths[:, None]
        return PrefillInputs(rows, length, rope, causal, near, staged, behind, real, memories, {}, {})

    def decode(
        self,
        tokens: Tensor,
        positions: Tensor,
        cache: SlotCache,
        longest: int,
        routes: Routes | None = None,
        heard: list[Tensor] | None = None,
        fused: bool = False,
    ) -> Tensor:
        """Return float32 logits [M, V] of the M tokens int64 [n, w], or [n], that follow in slots [0, n), at positions
        of this shape, all < longest; hidden states [M, hidden], which they are of, are added to `heard`. `fused`:
        attention by one kernel, which is for a GPU; its launch alone costs the host more than torch's few. With w > 1
        `advance` has to follow."""
        hidden = self.decoded(tokens, positions, cache, longest, routes, fused)
        if heard is not None:
            heard.append(hidden)
        return self.logits(hidden)

    def decoded(
        self,
        tokens: Tensor,
        positions: Tensor,
        cache: SlotCache,
        longest: int,
        routes: Routes | None = None,
        fused: bool = False,
    ) -> Tensor:
        """Return the hidden states of `decode`."""
        step = self._step(positions, cache, longest, fused)

        def mix(mixer: Mixer, layer: int, y: Tensor) -> Tensor:
            return mixer.decode(layer, y, step)

        routing = None if routes is None else routes.empty(tokens.numel())
        hidden = self._forward(tokens.flatten(), mix, routing)
        if routes is not None:
            cache.kinds[-1].write(0, step.places[-1], routing.flatten(1)[:, None])
        return hidden

    def advance(self, kept: Tensor, most: int, cache: SlotCache) -> None:
        """Let the memories of slots [0, n) go on by the first `kept`, int64 [n], at most `most`, of the tokens that the
        last step fed."""
        if self.linear is not None:
            self.linear.advance(kept, most, cache.memories)

    def _step(self, positions: Tensor, cache: SlotCache, longest: int, fused: bool = False) -> DecodeStep:
        places, window = tuple(each.places(positions) for each in cache.kinds), self.cfg.attention.window
        flat = positions.flatten()
        rope = self.rotations(flat, longest)
        return DecodeStep(len(positions), longest, window, flat, fused, cache, places, self.scratch, rope)

    def predict(self, hidden: Tensor, following: Tensor, positions: Tensor, cache: SlotCache, longest: int) -> Tensor:
        """Return what the layer for multi-token prediction makes, [M, hidden], of hidden states [M, hidden] at
        positions int64 [n, w], or [n], of slots [0, n), all < longest, and of the tokens that follow each, int64 [M].
        Its `logits` are of the tokens behind these."""
        step = self._step(positions, cache, longest)
        return self._predict(hidden, following, lambda mixer, layer, y: mixer.decode(layer, y, step))

    def _predict(self, hidden: Tensor, following: Tensor, mix: Mix) -> Tensor:
        x = self.ahead.joined(self._embedded(following), hidden)
        return self.kit.norm(self._through(self.cfg.num_layers, x, mix), self.ahead.norms[2])

    def logits(self, hidden: Tensor) -> Tensor:
        """Return float32 logits [..., V] on every rank."""
        logits = scaled_logits(self.kit.linear(hidden, self.packs["head", 0]), self.cfg.scales)
        return self.peers.join(logits, self.cfg.vocab_size).float()

    def _embed(self, table: Tensor, tokens: Tensor) -> Tensor:
        """Return rows of a table of the vocabulary of which this rank has its share."""
        if self.peers.size == 1:
            return table[tokens]
        local = tokens - self.first_token
        own = (local >= 0) & (local < len(table))
        rows = table[local.where(own, 0)] if len(table) else table.new_zeros(1, 1)
        return self.peers.add(rows.expand(len(tokens), table.shape[1]) * own[:, None])

    def _forward(self, tokens: Tensor, mix: Mix, routes: Tensor | None = None) -> Tensor:
        """Return tokens int64 [M] -> [M, hidden] after the final norm; write their experts to routes [M, layer,
        top_k] if given. Large intermediates are in scratch buffers."""
        x = self._embedded(tokens)
        if self.streams is not None:
            return self.kit.norm(self._through_streams(x, tokens, mix, routes), self.final_norm)
        if self.watch is not None:
            self.watch(x)
        inputs = self.layer_inputs(tokens, x, self._embed) if self.layer_inputs is not None else None
        for layer in range(self.cfg.num_layers):
            x = self._through(layer, x, mix, routes)
            if inputs is not None:
                x += self._normed(self.layer_inputs.addend(layer, x, inputs), layer, BEHIND_INPUT)
            if self.scalars is not None:
                x *= self.scalars[layer]
            if self.watch is not None:
                self.watch(x)
        return self.kit.norm(x, self.final_norm)

    def _embedded(self, tokens: Tensor) -> Tensor:
        x = self._embed(self.embedding, tokens)
        if self._embedding_factor != 1:
            x *= self._embedding_factor
        return x

    def _through(self, layer: int, x: Tensor, mix: Mix, routes: Tensor | None = None) -> Tensor:
        """Return x [M, hidden] behind a layer, perhaps in its place."""
        if mixer := self.mixers.get(layer):
            y = self._normed(x, layer, BEFORE)
            x = self._add(x, mix(mixer, layer, y), mixer.out_of(layer), layer, BEHIND)
        if layer in self.experts:
            y = self._normed(x, layer, BEFORE_MLP)
            x += self._normed(self.experts[layer](layer, y, routes), layer, BEHIND_MLP)
        elif mlp := self.mlps.get(layer):
            y = self._normed(x, layer, BEFORE_MLP)
            x = self._add(x, mlp(layer, y), mlp.out_of(layer), layer, BEHIND_MLP)
        return x

    def _through_streams(self, x: Tensor, tokens: Tensor, mix: Mix, routes: Tensor | None) -> Tensor:
        """Return embeddings [M, hidden] -> the sum of the residual streams behind all layers, [M, hidden]."""
        streams = self.streams
        x = x[:, None].repeat(1, self.cfg.hyper.streams, 1)
        for layer, mixer in self.mixers.items():
            y, *factors = streams.read(x, layer, "attention_streams")
            y = mix(mixer, layer, self._normed(y, layer, BEFORE))
            x = written(x, self.peers.add(linear(y, mixer.out_of(layer)[0])), *factors)
            y, *factors = streams.read(x, layer, "mlp_streams")
            y = self._normed(y, layer, BEFORE_MLP)
            x = written(x, self.experts[layer](layer, y, routes, tokens), *factors)
        return streams.joined(x)

    def _normed(self, x: Tensor, layer: int, name: str) -> Tensor:
        """Return x normalised, or unchanged in families without this norm."""
        return self.kit.norm(x, self.norms[layer, self.norm_rows.index(name)]) if name in self.norm_rows else x

    def _add(self, x: Tensor, y: Tensor, product: Product, layer: int, norm: str) -> Tensor:
        """Return x [M, hidden] + y weight^T + bias, summed over all ranks' shares of y and weight. Some families
        normalise the sum first, or scale it. Perhaps in place of x."""
        scale, (weight, bias) = self.cfg.scales.residual, product
        if self.peers.size == 1 and not self.cfg.traits.post_norms and scale == 1 and not self.cfg.invariant:
            x = add_linear(x, y, weight)
            return x if bias is None else x.add_(bias)
        out = self.peers.add(self.kit.linear(y, weight))
        if bias is not None:
            out += bias
        out = self._normed(out, layer, norm)
        return x.add_(out if scale == 1 else out * scale)
