"""Refit methods that are added to the class of vLLM's workers, of which each rank of the engine has one.

vLLM lays a layer's weights out for its kernels, and on a CPU frees the originals. So they are only replaced through
its reload, which collects a layer's tensors, lays them out again and copies them to where the kernels read them.
"""

from __future__ import annotations

import gc
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from aligner.engines.child.buckets import Memory, Slot, checksums
from aligner.errors import RefitError

# inputs of Mamba-2, in the order of the matrix that vLLM keeps
MAMBA = {f".in_proj_{name}.": (".in_proj.", i) for i, name in enumerate(("z", "x", "B", "C", "dt"))}


class Extension:
    """Methods for vLLM's worker class. Their names are prefixed: that class has many of its own."""

    aligner_loading = False

    def aligner_open(self, memory: Memory, lasting: bool) -> None:
        """Open the memory of the trainer's tensors. `lasting`: tensors stay there until the update has ended."""
        self.aligner_buffer = memory.tensor(self.model_runner.device.index or 0)
        self.aligner_lasting = lasting
        model = self.model_runner.get_model()
        self.aligner_models = [(model, self.model_config)]
        drafts, self.aligner_ahead = self.vllm_config.speculative_config, None
        if drafts is not None and drafts.method == "mtp":  # which has embedding and output matrix of the model
            self.aligner_ahead = self.model_runner.get_draft_model()
            self.aligner_models.append((self.aligner_ahead, drafts.draft_model_config))
        self.aligner_stacks = _stacks_experts(model)
        self.aligner_sinks = {name: p for name, p in model.named_parameters() if name.endswith(".sinks")}
        _take_single_projections(model)

    def aligner_begin(self) -> None:
        from vllm.config import set_current_vllm_config
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

        with set_current_vllm_config(self.vllm_config):
            for model, config in self.aligner_models if self.aligner_loading else ():
                finalize_layerwise_reload(model, config)  # tensors of an abandoned update would count as loaded
            for model, _ in self.aligner_models:
                initialize_layerwise_reload(model)
                if self.model_runner.device.type == "cpu":
                    _forget_packed_experts(model)
        self.aligner_loading = True
        self.aligner_pairs: dict[str, dict[str, Tensor]] = {}

    def aligner_take(self, slots: list[Slot], hashed: bool) -> dict[str, int]:
        """Load a bucket; return checksums of the tensors as they arrived, if they are `hashed`."""
        from vllm.config import set_current_vllm_config

        if not self.aligner_loading:
            raise RefitError("a bucket came outside of an update")
        sums = checksums(slots, self.aligner_buffer) if hashed else {}
        model, ahead = self.model_runner.get_model(), self.aligner_ahead
        with torch.no_grad(), set_current_vllm_config(self.vllm_config):
            if ahead is not None and (own := _of_layer_ahead(slots, model.config, ahead.config)):
                ahead.load_weights(self._aligner_tensors(own))
            tensors = self._aligner_tensors(slots)
            model.load_weights(self._aligner_stacked(tensors) if self.aligner_stacks else tensors)
        if self.aligner_buffer.is_cuda:
            torch.cuda.synchronize()
        return sums

    def _aligner_tensors(self, slots: list[Slot]) -> Iterator[tuple[str, Tensor]]:
        """Yield one tensor after the other. vLLM keeps them until a layer has all of its own, perhaps in a later
        bucket. If the next bucket overwrites them, they are copies; otherwise vLLM copies a rank's share to the
        device."""
        for slot in slots:
            tensor = slot.view(self.aligner_buffer)
            yield slot.name, tensor if self.aligner_lasting else tensor.to(self.model_runner.device, copy=True)

    def _aligner_stacked(self, tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Yield an expert's matrices as its files stack them: transposed, columns of gate and up by turns. Its loader
        copies sinks past the reload, so they are written where the kernels read them."""
        names = self.model_runner.get_model().hf_to_vllm_mapper
        for name, tensor in tensors:
            block, _, kind = name.rpartition(".")
            expert, _, matrix = block.rpartition(".")
            end = "_bias" if kind == "bias" else ""
            if kind == "sinks":
                sinks = self.aligner_sinks[names.map_name(name)]
                sinks.copy_(tensor.view(-1, len(sinks))[self.rank % self.parallel_config.tensor_parallel_size])
            elif ".experts." not in name:
                yield name, tensor
            elif matrix == "down_proj":
                yield f"{expert}.{matrix}{end}", tensor.t()
            else:
                pair = self.aligner_pairs.setdefault(f"{expert}.gate_up_proj{end}", {})
                pair[matrix] = tensor.t()
                if len(pair) == 2:
                    both = torch.stack((pair.pop("gate_proj"), pair.pop("up_proj")), -1)
                    yield f"{expert}.gate_up_proj{end}", both.flatten(-2)

    def aligner_finish(self) -> None:
        from vllm.config import set_current_vllm_config
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

        if not self.aligner_loading:
            raise RefitError("finish came outside of an update")
        with torch.no_grad(), set_current_vllm_config(self.vllm_config):
            for model, config in self.aligner_models:
                finalize_layerwise_reload(model, config)
            if self.model_runner.device.type == "cpu":
                _pack_tied_head(self.model_runner.get_model())
        gc.collect()
        if self.model_runner.device.type == "cuda":  # the trainer shares the device
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
        self.aligner_loading = False

    def aligner_temper(self, temperature: float) -> None:
        """Temper the distribution of the logprobs of prompts from now on."""
        prompts = getattr(self.model_runner, "prompt_logprobs_worker", None)
        if prompts is not None:  # of the second model runner
            compute = type(prompts).compute_prompt_logprobs
            prompts.compute_prompt_logprobs = lambda logits_of, *rest: compute(
                prompts, lambda hidden: logits_of(hidden) / temperature, *rest
            )
            return
        plain = type(self.model_runner.sampler).compute_logprobs
        self.model_runner.sampler.compute_logprobs = lambda logits: plain(logits / temperature)


def _of_layer_ahead(slots: list[Slot], config: Any, ahead: Any) -> list[Slot]:
    """Return tensors of the layer for multi-token prediction, with the layer's number in the config of the model that
    drafts: some of vLLM's count their layers from 0."""
    before, after = (f"model.layers.{count}." for count in (config.num_hidden_layers, ahead.num_hidden_layers))
    own = (slot for slot in slots if slot.name.startswith((before, "mtp.")))  # Qwen3.5's have no number
    return [replace(slot, name=slot.name.replace(before, after)) for slot in own]


def _stacks_experts(model: torch.nn.Module) -> bool:
    """Return whether the model's class knows the experts' matrices only as files of gpt-oss have them."""
    suffixes = getattr(getattr(model, "hf_to_vllm_mapper", None), "orig_to_new_suffix", {})
    return ".gate_up_proj_bias" in suffixes


def _take_single_projections(model: torch.nn.Module) -> None:
    """Let the inputs of linear layers come one by one. vLLM only knows them joined, as files have them: queries, keys
    and values of Qwen3.5, and all of Mamba-2."""
    for module in model.modules():
        mapper = getattr(module, "hf_to_vllm_mapper", None)
        into, shards = getattr(mapper, "orig_to_new_stacked", {}).get(".in_proj_qkv", ("", ()))
        if shards:
            single = {f".in_proj_{name}.": (f"{into}.", shard) for name, shard in zip("qkv", shards, strict=True)}
            module.hf_to_vllm_mapper = mapper | type(mapper)(orig_to_new_stacked=single)
        elif "A_log" in getattr(mapper, "orig_to_new_substr", ()):
            module.hf_to_vllm_mapper = mapper | type(mapper)(orig_to_new_stacked=MAMBA)


def _forget_packed_experts(model: torch.nn.Module) -> None:
    """Let experts be padded and packed again. vLLM does both only when it makes their kernel, not when weights are
    reloaded."""
    for module in model.modules():
        method = getattr(module, "quant_method", None)
        if getattr(method, "moe_kernel", None) is not None:
            method.moe_kernel = None


def _pack_tied_head(model: torch.nn.Module) -> None:
    """Pack a tied head again. A head that shares the embedding's weight gets no tensor of its own in a reload. It
    would keep the old copy that was packed for its product."""
    from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm

    head = getattr(model, "lm_head", None)
    if head is not None and getattr(model.config, "tie_word_embeddings", False):
        dispatch_cpu_unquantized_gemm(head, remove_weight=False)
