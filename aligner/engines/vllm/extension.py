"""What a refit does in vLLM's workers, one process for each rank of the engine: methods that it adds to their class.

vLLM lays a layer's weights out for its kernels, and on a CPU frees what it was given: they are only replaced through
its reload, which collects a layer's tensors, lays them out again and copies them to where the kernels read them.
"""

from __future__ import annotations

import torch
from torch import Tensor

from aligner.engines.child.buckets import Memory, Slot
from aligner.errors import RefitError


class Extension:
    """Names are prefixed: the worker's class has many of its own."""

    aligner_loading = False

    def aligner_open(self, memory: Memory) -> None:
        """Where the trainer's tensors come."""
        self.aligner_buffer = memory.tensor()

    def aligner_begin(self) -> None:
        from vllm.config import set_current_vllm_config
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

        with set_current_vllm_config(self.vllm_config):
            if self.aligner_loading:  # what an update that was given up has left would count as loaded
                finalize_layerwise_reload(self.model_runner.get_model(), self.model_config)
            initialize_layerwise_reload(self.model_runner.get_model())
        if self.model_runner.device.type == "cpu":
            _forget_packed_experts(self.model_runner.get_model())
        self.aligner_loading = True

    def aligner_take(self, slots: list[Slot]) -> None:
        """Copies: a layer whose tensors come in several buckets is laid out when the last has come."""
        from vllm.config import set_current_vllm_config

        if not self.aligner_loading:
            raise RefitError("a bucket came outside of an update")
        device = self.model_runner.device
        tensors: list[tuple[str, Tensor]] = [
            (slot.name, slot.view(self.aligner_buffer).to(device, copy=True)) for slot in slots
        ]
        with torch.no_grad(), set_current_vllm_config(self.vllm_config):
            self.model_runner.get_model().load_weights(tensors)
        if self.aligner_buffer.is_cuda:
            torch.cuda.synchronize()

    def aligner_finish(self) -> None:
        from vllm.config import set_current_vllm_config
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

        if not self.aligner_loading:
            raise RefitError("finish came outside of an update")
        model = self.model_runner.get_model()
        with torch.no_grad(), set_current_vllm_config(self.vllm_config):
            finalize_layerwise_reload(model, self.model_config)
            if self.model_runner.device.type == "cpu":
                _pack_tied_head(model)
        if self.aligner_buffer.is_cuda:
            torch.cuda.synchronize()
        self.aligner_loading = False

    def aligner_temper(self, temperature: float) -> None:
        """Logprobs of prompts are of the distribution tempered by it from now on."""
        plain = type(self.model_runner.sampler).compute_logprobs
        self.model_runner.sampler.compute_logprobs = lambda logits: plain(logits / temperature)


def _forget_packed_experts(model: torch.nn.Module) -> None:
    """Experts are padded and packed for their kernel together with its making only, not when weights come again."""
    for module in model.modules():
        method = getattr(module, "quant_method", None)
        if getattr(method, "moe_kernel", None) is not None:
            method.moe_kernel = None


def _pack_tied_head(model: torch.nn.Module) -> None:
    """A head that shares the embedding's weight gets no tensor of its own in a reload, and goes on with the copy that
    was packed for its product before."""
    from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm

    head = getattr(model, "lm_head", None)
    if head is not None and getattr(model.config, "tie_word_embeddings", False):
        dispatch_cpu_unquantized_gemm(head, remove_weight=False)
