"""What a refit does in vLLM's workers, one process for each rank of the engine: methods that it adds to their class.

vLLM lays a layer's weights out for its kernels, and on a CPU frees what it was given: they are only replaced through
its reload, which collects a layer's tensors, lays them out again and copies them to where the kernels read them.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator

import torch
from torch import Tensor

from aligner.engines.child.buckets import Memory, MemoryFile, Slot, checksums
from aligner.errors import RefitError


class Extension:
    """Names are prefixed: the worker's class has many of its own."""

    aligner_loading = False

    def aligner_open(self, memories: list[Memory], lasting: bool) -> None:
        """Where the trainer's tensors come: of each rank, or the same one for all. `lasting`: what comes stays there
        until the update has ended."""
        memory = memories[self.rank]
        self.aligner_buffer = memory.tensor(self.model_runner.device.index or 0)
        self.aligner_lasting = lasting
        self.aligner_hashes = self.rank == 0 or not isinstance(memory, MemoryFile)

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

    def aligner_take(self, slots: list[Slot], hashed: bool) -> dict[str, int]:
        """Checksums of the tensors as they arrived here, if they are `hashed` and no other rank has the same memory."""
        from vllm.config import set_current_vllm_config

        if not self.aligner_loading:
            raise RefitError("a bucket came outside of an update")
        found = checksums(slots, self.aligner_buffer) if hashed and self.aligner_hashes else {}
        with torch.no_grad(), set_current_vllm_config(self.vllm_config):
            self.model_runner.get_model().load_weights(self._aligner_tensors(slots))
        if self.aligner_buffer.is_cuda:
            torch.cuda.synchronize()
        return found

    def _aligner_tensors(self, slots: list[Slot]) -> Iterator[tuple[str, Tensor]]:
        """One after the other. vLLM keeps them until a layer has all of its own, perhaps in a later bucket: where the
        next bucket takes their place, they are copies. Where it does not, it copies a rank's share to the device."""
        for slot in slots:
            tensor = slot.view(self.aligner_buffer)
            yield slot.name, tensor if self.aligner_lasting else tensor.to(self.model_runner.device, copy=True)

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
        gc.collect()
        if self.model_runner.device.type == "cuda":  # the trainer shares the device
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
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
