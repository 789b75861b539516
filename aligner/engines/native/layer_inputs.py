"""What tokens give each layer beside the residual stream: rows of a table, and a projection of their embeddings."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch.nn.functional as F
from torch import Tensor

from aligner.engines.native.block_inputs import BlockContext
from aligner.families.rows import in_layer
from aligner.families.table import family_table
from aligner.models.params import rounded_root
from aligner.ops.kernels.products import linear


class LayerInputTable:
    """This rank's share of the table, which has `tokens` rows, and all other matrices whole."""

    def __init__(self, kit: BlockContext, tokens: int):
        cfg = kit.cfg
        layers, size, hidden = cfg.num_layers, cfg.layer_input_size, cfg.hidden_size
        self.kit, self.sizes = kit, (layers, size)
        self.table = kit.empty(tokens, layers * size)
        self.context, self.norm = kit.empty(layers * size, hidden), kit.empty(size)
        self.gate, self.onto = kit.empty(layers, size, hidden), kit.empty(layers, hidden, size)
        self.factors = rounded_root(size, kit.dtype), hidden**-0.5, 2**-0.5

    def matrices(self) -> Mapping[str, Sequence[Tensor]]:
        return {}

    def views(self) -> dict[str, Tensor]:
        hf, at = {spec.canonical: spec.hf[0] for spec in family_table(self.kit.cfg)}, "embedding.layer_inputs."
        own = {"table": self.table, "projection": self.context, "norm": self.norm}
        views = {hf[f"{at}{name}.weight"]: tensor for name, tensor in own.items()}
        for name, tensors in (("gate", self.gate), ("projection", self.onto)):
            row = in_layer(f"layer_input.{name}.weight")
            views |= {hf[row.format(layer=layer)]: tensor for layer, tensor in enumerate(tensors)}
        return views

    def __call__(self, tokens: Tensor, embeddings: Tensor, look_up: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
        """Return [M, layers, size] of tokens int64 [M] with these embeddings [M, hidden]. `look_up`: rows of a table
        of which ranks have shares."""
        of_token, projected, both = self.factors
        context = self.kit.norm((linear(embeddings, self.context) * projected).unflatten(1, self.sizes), self.norm)
        return context.add_(look_up(self.table, tokens).unflatten(1, self.sizes), alpha=of_token).mul_(both)

    def addend(self, layer: int, x: Tensor, inputs: Tensor) -> Tensor:
        """Return x [M, hidden], inputs [M, layers, size] -> what comes to x, before its norm."""
        gates = F.gelu(linear(x, self.gate[layer]), approximate="tanh")
        return linear(gates.mul_(inputs[:, layer]), self.onto[layer])
