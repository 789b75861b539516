"""What vLLM's CPU build lacks, in torch: for tests of all that is around it. The variable IN_TORCH names the functions
of this module that a forked engine calls first."""

from __future__ import annotations

from unittest.mock import patch

import torch


def quantisation() -> None:
    from vllm import _custom_ops as ops

    def scaled_fp8_quant(x, scale=None, *args, **kwargs):
        if scale is None:
            scale = (x.abs().amax(-1, keepdim=True).float() / 448).clamp_min(1e-9)
        return (x.float() / scale).clamp(-448, 448).to(torch.float8_e4m3fn), scale

    ops.scaled_fp8_quant = scaled_fp8_quant


def ungated_experts() -> None:
    from vllm.model_executor.layers.fused_moe import config
    from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts

    checked = config.FusedMoEConfig.__post_init__

    def check(self):
        with patch.object(config.current_platform, "is_xpu", lambda: True):
            checked(self)

    config.FusedMoEConfig.__post_init__ = check

    gated = CPUUnquantizedExperts.apply, CPUUnquantizedExperts.process_weights_after_loading

    def apply(self, output, hidden_states, w1, w2, topk_weights, topk_ids, activation, **rest):
        if self.moe_config.is_act_and_mul:
            return gated[0](self, output, hidden_states, w1, w2, topk_weights, topk_ids, activation, **rest)
        assert activation.value == "relu2_no_mul" and not rest["apply_router_weight_on_input"]
        output.zero_()
        for weights, chosen in zip(topk_weights.T, topk_ids.T.long(), strict=True):
            inner = torch.einsum("nh,nfh->nf", hidden_states, w1[chosen]).relu().square()
            output += weights[:, None] * torch.einsum("nf,nhf->nh", inner, w2[chosen])

    def process(self, layer):
        if self.moe_config.is_act_and_mul:
            gated[1](self, layer)

    CPUUnquantizedExperts.apply, CPUUnquantizedExperts.process_weights_after_loading = apply, process
    CPUUnquantizedExperts._supports_no_act_and_mul = staticmethod(lambda: True)
    CPUUnquantizedExperts._supports_activation = staticmethod(lambda activation: True)
    CPUUnquantizedExperts._supports_grouped_gemm = classmethod(lambda cls, config: (True, None))


def whole_attention() -> None:
    """Attention to all tokens, as of rows no longer than what an indexer chooses. The indexers load their weights and
    are not asked; an update ends with a look at these."""
    from vllm.model_executor.models import deepseek_v2

    from aligner.engines.vllm.extension import Extension

    modules, take, finish = deepseek_v2.MLAModules, Extension.aligner_take, Extension.aligner_finish
    without = {"indexer": None, "indexer_rotary_emb": None, "is_sparse": False, "index_group_builder": None}
    deepseek_v2.MLAModules = lambda **fields: modules(**fields | without | {"topk_indices_buffer": None})
    deepseek_v2.DeepseekV32IndexerCache.get_kv_cache_spec = lambda self, config: None
    arrived = {}

    def noting(self, slots, hashed):
        indexed = (slot for slot in slots if ".indexer." in slot.name)
        arrived.update((slot.name, slot.view(self.aligner_buffer).clone()) for slot in indexed)
        return take(self, slots, hashed)

    def looking(self):
        finish(self)
        modules = self.model_runner.get_model().named_modules()
        indexers = {f"{name}.": module for name, module in modules if name.endswith(".indexer")}
        assert len(arrived) == 5 * len(indexers), (sorted(arrived), sorted(indexers))
        for at, indexer in indexers.items():
            joined = torch.cat((arrived[f"{at}wk.weight"], arrived[f"{at}weights_proj.weight"]))
            for linear, wanted in ((indexer.wk_weights_proj, joined), (indexer.wq_b, arrived[f"{at}wq_b.weight"])):
                assert torch.allclose(linear(torch.eye(linear.input_size))[0].T, wanted, atol=1e-6), at
            for which in ("weight", "bias"):
                assert torch.equal(getattr(indexer.k_norm, which), arrived[f"{at}k_norm.{which}"]), at
        arrived.clear()

    Extension.aligner_take, Extension.aligner_finish = noting, looking
