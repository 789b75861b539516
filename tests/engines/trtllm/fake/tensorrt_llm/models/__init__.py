"""The Llama and Qwen classes as far as a build needs them: a config read from a folder, named parameters."""

import json
import os
from pathlib import Path
from types import SimpleNamespace

from tensorrt_llm.llmapi.llm_args import OLD

if not OLD:
    raise ImportError("No module named 'tensorrt_llm.models.modeling_utils'")


class PretrainedConfig:
    @classmethod
    def from_hugging_face(cls, hf_config_or_dir, dtype="auto", mapping=None, quant_config=None, **kwargs):
        assert mapping is None and quant_config is None and not kwargs, kwargs
        raw = json.loads((Path(hf_config_or_dir) / "config.json").read_text())
        actual = cls()
        actual.raw, actual.dtype, actual.architecture = raw, dtype, raw["architectures"][0]
        actual.vocab_size, actual.hidden_size = raw["vocab_size"], raw["hidden_size"]
        actual.intermediate_size, actual.hidden_act = raw["intermediate_size"], raw["hidden_act"]
        actual.num_hidden_layers, actual.num_attention_heads = raw["num_hidden_layers"], raw["num_attention_heads"]
        actual.num_key_value_heads = raw.get("num_key_value_heads", raw["num_attention_heads"])
        actual.head_size = raw.get("head_dim", raw["hidden_size"] // raw["num_attention_heads"])
        actual.norm_epsilon, actual.max_position_embeddings = raw["rms_norm_eps"], raw["max_position_embeddings"]
        lost = os.environ.get("FAKE_TRTLLM_TRANSFORMERS5")  # which has no config.rope_theta: the default is taken
        actual.rotary_base = 10000.0 if lost else raw.get("rope_theta", 10000.0)
        actual.rotary_scaling = raw.get("rope_scaling")
        return actual


class _Model:
    config_class = PretrainedConfig
    qwen = False

    def __init__(self, config):
        self.config = config

    @classmethod
    def from_config(cls, config):
        return cls(config)

    def named_parameters(self):
        for name, shape in self._shapes().items():
            yield name, SimpleNamespace(shape=shape, is_buffer=False)
        for name in ("embed_positions", "rotary_inv_freq", "embed_positions_for_gpt_attention"):
            yield name, SimpleNamespace(shape=(1, 1), is_buffer=True)

    def _shapes(self):
        c = self.config
        q, kv = c.num_attention_heads * c.head_size, c.num_key_value_heads * c.head_size
        kind = c.raw["model_type"] if self.qwen else ""
        out = {"transformer.vocab_embedding.weight": (c.vocab_size, c.hidden_size)}
        for i in range(c.num_hidden_layers):
            at = f"transformer.layers.{i}."
            out[at + "input_layernorm.weight"] = out[at + "post_layernorm.weight"] = (c.hidden_size,)
            out[at + "attention.qkv.weight"] = (q + 2 * kv, c.hidden_size)
            out[at + "attention.dense.weight"] = (c.hidden_size, q)
            if kind == "qwen2":
                out[at + "attention.qkv.bias"] = (q + 2 * kv,)
            if kind == "qwen3":
                out[at + "attention.q_layernorm.weight"] = out[at + "attention.k_layernorm.weight"] = (c.head_size,)
            out[at + "mlp.fc.weight"] = out[at + "mlp.gate.weight"] = (c.intermediate_size, c.hidden_size)
            out[at + "mlp.proj.weight"] = (c.hidden_size, c.intermediate_size)
        return out | {"transformer.ln_f.weight": (c.hidden_size,), "lm_head.weight": (c.vocab_size, c.hidden_size)}


class LLaMAForCausalLM(_Model):
    pass


class QWenForCausalLM(_Model):
    qwen = True


MODEL_MAP = {"LlamaForCausalLM": LLaMAForCausalLM, "MistralForCausalLM": LLaMAForCausalLM}
MODEL_MAP |= {"Qwen2ForCausalLM": QWenForCausalLM, "Qwen3ForCausalLM": QWenForCausalLM}
