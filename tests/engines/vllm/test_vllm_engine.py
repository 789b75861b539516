"""The vLLM engine over the real package on a CPU: the contract of all engines, and what is its own."""

import os
from copy import deepcopy
from pathlib import Path

import pytest
import torch
from torch.nn.utils.rnn import pad_sequence

from aligner.engines.vllm.engine import VARIABLES, has_linear_kernel
from aligner.engines.vllm.in_place import InPlaceVllmEngine
from aligner.engines.vllm.pages import Pages
from aligner.errors import ConfigError, EngineError
from aligner.families.table import family_table
from aligner.models.params import hf_dtypes
from aligner.models.shards import hf_tensors
from aligner.ops.kernels.checksum import tensor_checksum
from aligner.types import SamplingParams
from tests.engines.contract import (
    PROMPTS,
    ChildEngineContract,
    EngineContract,
    check_logprobs,
    fill,
    reference,
    responses,
    seeds_for,
)
from tests.engines.vllm.setup import LACKING, LINEAR, LLAMA, MODELS, Shared, make_engine, needs_vllm, server
from tests.tiny import hf_weights

pytestmark = [needs_vllm, pytest.mark.slow]


class TestVllmEngine(EngineContract):
    table = MODELS
    models = ("llama", "gemma3", "qwen3_moe")  # of the others below: each engine takes seconds to make
    batches = (3,)
    make_engine = staticmethod(make_engine)

    def test_a_row_that_can_never_fit_is_refused(self):
        model = reference(LLAMA)
        block = 32 * 2 * 2 * 2 * 32 * 4  # positions, layers, k and v, kv heads, head_dim, float32
        engine = fill(make_engine(LLAMA, kv_cache_bytes=3 * block), model)  # one is vLLM's own
        assert engine.generate([[1, 2, 3]], [[0]], SamplingParams(60)).tokens.shape == (1, 60)
        with pytest.raises(ConfigError, match=f"engine.kv_cache_bytes.*{4 * block} bytes"):
            engine.generate([[1, 2, 3]], [[0]], SamplingParams(61))
        engine.logprobs(torch.ones(1, 63, dtype=torch.int64), torch.tensor([63]))


def test_no_process_is_started_to_look_at_an_architecture():
    """What one finds vLLM keeps, in a folder of this name."""
    make_engine(LLAMA)
    assert not (Path(server()).parent / "modelinfos").exists()


def test_logprobs_with_options_of_the_package():
    model = reference(MODELS["qwen3_moe"])
    args = {"enable_expert_parallel": True, "attention_backend": "CPU_ATTN"}
    engine = fill(make_engine(MODELS["qwen3_moe"], args=args), model)
    check_logprobs(model, PROMPTS, 1, engine.generate(PROMPTS, seeds_for(PROMPTS), SamplingParams(6)))


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        (
            {"enable_expert_paralel": True},
            r"paralel=True: expected .*EngineArgs of vLLM 0.32.*`enable_expert_parallel`",
        ),
        ({"kv_cache_dtype": "fp9"}, r"kv_cache_dtype='fp9': expected what vLLM .* takes: Input should be 'auto'"),
        ({"enable_dbo": [1]}, r"enable_dbo=\[1\]: expected what vLLM .* takes: Input should be a valid boolean"),
    ],
)
def test_options_that_the_package_does_not_take(args, expected):
    with pytest.raises(ConfigError, match=rf"engine.vllm.args.\w*{expected}"):
        make_engine(LLAMA, args=args)


def test_prompts_of_more_tokens_than_a_pass_takes():
    model = reference(LLAMA)
    engine = fill(make_engine(LLAMA, max_batch=2048, kv_cache_bytes=1 << 28), model)
    prompts = [[1 + i // 8, 1 + i % 8, *range(1, 20)] for i in range(64)]  # 16 times 1,344 tokens; a pass takes 8,192
    out = engine.generate(prompts, seeds_for(prompts, 16), SamplingParams(3))
    check_logprobs(model, prompts, 16, out, 1.0)


@pytest.mark.parametrize("name", [name for name in MODELS if name not in (*TestVllmEngine.models, *LACKING)])
def test_logprobs_of_every_family_after_every_update(name):
    check_updates(MODELS[name])


@pytest.fixture(scope="module")
def beside_stand_ins():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Shared, "lent", None)
        patch.setitem(VARIABLES, "IN_TORCH", "ungated_experts whole_attention")
        patch.setattr("aligner.engines.vllm.engine.check_on_cpu", lambda model, dtype: None)
        yield


@pytest.mark.parametrize("name", LACKING)
def test_logprobs_of_families_whose_kernels_the_cpu_build_lacks(beside_stand_ins, name):
    check_updates(MODELS[name])


def check_updates(cfg) -> None:
    engine, lengths = make_engine(cfg), torch.tensor([12, 5, 1, 9])
    for version in (1, 2):
        model = reference(cfg, version)
        fill(engine, model, version)
        out = engine.generate(PROMPTS, seeds_for(PROMPTS, 3), SamplingParams(20, temperature=0.7, stop_token_ids=(3,)))
        check_logprobs(model, PROMPTS, 3, out, 0.7)
        tokens = torch.randint(0, 53, (4, 12), generator=torch.Generator().manual_seed(version))
        with torch.no_grad():
            wanted = model(tokens).logits.log_softmax(-1)[:, :-1].gather(2, tokens[:, 1:, None])[..., 0]
        logprobs = engine.logprobs(tokens, lengths)[:, 1:]
        assert torch.allclose(logprobs, wanted * (torch.arange(1, 12) < lengths[:, None]), atol=1e-4)


@pytest.mark.skipif(not has_linear_kernel(), reason="vLLM's linear layers need AVX-512 on a CPU")
@pytest.mark.parametrize("name", LINEAR)
def test_logprobs_of_linear_layers_after_every_update(name):
    """As near to those of the same weights in float32 as transformers' in bfloat16, whether a pass reads a prompt or
    a state goes from token to token."""
    cfg = LINEAR[name]
    pages = Pages.of(cfg, torch.bfloat16, 1, 32, states=1)
    engine = make_engine(cfg, dtype=torch.bfloat16, kv_cache_bytes=pages.bytes * (pages.kept + 1))
    prompts = [prompt for prompt in PROMPTS if len(prompt) > 1]  # vLLM fails on a CPU at a pass that reads one token
    for version in (2, 3):
        half = reference(cfg, version).to(torch.bfloat16)
        fill(engine, half, version)
        kept = hf_dtypes(family_table(cfg), torch.bfloat16)
        assert engine.checksums() == {n: tensor_checksum(t.to(kept[n])) for n, t in hf_weights(half).items()}
        out = engine.generate(prompts, seeds_for(prompts), SamplingParams(12))
        rows = [[*prompt, *answer] for prompt, answer in zip(prompts, responses(out), strict=True)]
        exact, rounded = of_rows(deepcopy(half).float(), rows), of_rows(half, rows)
        lengths = torch.tensor([len(row) for row in rows])
        tokens = pad_sequence([torch.tensor(row) for row in rows], batch_first=True)
        scores = [row[1:n] for row, n in zip(engine.logprobs(tokens, lengths), lengths, strict=True)]
        noise = apart(rounded, exact)
        assert apart(scores, exact) < 2 * noise
        assert apart(out.logprobs, [row[-12:] for row in exact]) < 2 * noise
    with pytest.raises(ConfigError, match=r"engine.kv_cache_bytes"):
        engine.generate([[1, 2]], [[0]], SamplingParams(pages.tokens - 2))


def test_logprobs_of_fp8_after_every_update(monkeypatch):
    """VLLM quantises when it loads: with its layers, and the one function of them that its CPU build lacks."""
    monkeypatch.setattr(Shared, "lent", None)
    monkeypatch.setitem(VARIABLES, "IN_TORCH", "quantisation")
    of_some_cpus = "CPUFP8W8A8ScaledMMLinearKernel,CPUFp8PerTensorScaledMMLinearKernel"
    monkeypatch.setitem(VARIABLES, "VLLM_DISABLED_KERNELS", of_some_cpus)
    engine = make_engine(LLAMA, dtype=torch.bfloat16, args={"quantization": "fp8"})
    rows = [[*prompt, *range(10, 30)] for prompt in PROMPTS]
    lengths, tokens = torch.tensor([len(row) for row in rows]), pad_sequence([torch.tensor(row) for row in rows], True)
    for version in (1, 2):
        half = reference(LLAMA, version).to(torch.bfloat16)
        fill(engine, half, version)
        exact, rounded = of_rows(deepcopy(half).float(), rows), of_rows(half, rows)
        scores = [row[1:n] for row, n in zip(engine.logprobs(tokens, lengths), lengths, strict=True)]
        other = of_rows(reference(LLAMA, 3 - version), rows)
        assert 2 * apart(rounded, exact) < apart(scores, exact) < apart(other, exact) / 6


def of_rows(model, rows: list[list[int]]) -> list[torch.Tensor]:
    """Return the logprobs of the tokens of each row but its first."""
    with torch.no_grad():
        each = [model(torch.tensor([row])).logits[0, :-1].float().log_softmax(-1) for row in rows]
    return [logprobs.gather(1, torch.tensor(row[1:])[:, None])[:, 0] for logprobs, row in zip(each, rows, strict=True)]


def apart(ours, wanted) -> float:
    """Return the mean difference."""
    return float((torch.cat(list(ours)) - torch.cat(list(wanted))).abs().mean())


def test_prefixes_of_old_weights_are_not_reused_and_an_update_may_be_given_up():
    """A prompt of several blocks, known before; half of an update before a whole one."""
    engine, prompt = fill(make_engine(LLAMA), reference(LLAMA)), [1 + i % 50 for i in range(150)]
    sampling = SamplingParams(8, temperature=0)
    engine.generate([prompt] * 3, [[0]] * 3, sampling)
    other = reference(LLAMA, 1)
    engine.begin_update(2)
    engine.update_weights(list(hf_weights(other).items())[::2])
    out = fill(engine, other, 3).generate([prompt] * 3, [[0]] * 3, sampling)
    check_logprobs(other, [prompt] * 3, 1, out)


def test_parts_that_are_written_in_place_equal_whole_tensors():
    model = reference(LLAMA)
    engine, held = make_engine(LLAMA, kind=InPlaceVllmEngine), hf_weights(model)
    engine.begin_update(1)
    for tensor in hf_tensors(LLAMA):
        whole, middle = held[tensor.name], tensor.length // 2
        for a, b in ((middle, tensor.length), (0, middle)):
            engine.weight_view(tensor.name, a, b).copy_(whole.narrow(tensor.axis, a, b - a))
    engine.finish_update()
    check_logprobs(model, PROMPTS, 1, engine.generate(PROMPTS, seeds_for(PROMPTS), SamplingParams(6)))


def test_a_request_that_fails_is_an_error_and_the_engine_goes_on():
    """A token that the embedding does not have."""
    engine = fill(make_engine(LLAMA), reference(LLAMA))
    wanted = responses(engine.generate(PROMPTS, seeds_for(PROMPTS), SamplingParams(5)))
    with pytest.raises(EngineError, match="vLLM engine: generate failed"):
        engine.generate([[1], [10**6]], [[0], [0]], SamplingParams(4))
    assert responses(engine.generate(PROMPTS, seeds_for(PROMPTS), SamplingParams(5))) == wanted


def test_an_interruption_lets_the_requests_go():
    """Two rows at a time, of which the first to end stops the call: the others are not generated to their end."""
    engine = fill(make_engine(LLAMA, max_batch=2), reference(LLAMA))
    messages = []
    telling = engine._channel.connection.recv

    def stop(done, total):
        raise KeyboardInterrupt

    def recv():
        messages.append(telling())
        return messages[-1]

    engine._channel.connection.recv = recv
    with pytest.raises(KeyboardInterrupt):
        engine.generate([[1 + i % 50] for i in range(100)], [[i] for i in range(100)], SamplingParams(30), stop)
    engine._channel.connection.recv = telling
    assert messages[-1] == ("ok", None)


def test_bfloat16_logprobs_agree_with_their_scores():
    model = reference(LLAMA).to(torch.bfloat16)
    engine = fill(make_engine(LLAMA, dtype=torch.bfloat16), model)
    out = engine.generate(PROMPTS, seeds_for(PROMPTS), SamplingParams(6))
    scored = engine.logprobs(torch.cat([torch.tensor([[5, 9, 2]]), out.tokens[:1]], dim=1), torch.tensor([9]))
    assert torch.allclose(scored[0, 3:], out.logprobs[0], atol=0.1)


class Killing:
    """A connection whose other end is gone when it gets the `count`th of these calls."""

    def __init__(self, lent, name, count):
        self.lent, self.name, self.count = lent, name, count

    def send(self, message):
        self.count -= message[0] == self.name
        if message[0] == self.name and not self.count:
            os.kill(self.lent.child.process.pid, 6)
        self.lent.send(message)

    def __getattr__(self, name):
        return getattr(self.lent, name)


class TestKilled(ChildEngineContract):
    table = MODELS
    last_words = "vllm"

    def make_crashing(self, where):
        engine = make_engine(LLAMA)
        name, count = {"generate": ("generate", 1), "refit": ("bucket", 2)}[where]
        engine._channel.connection = Killing(engine._channel.connection, name, count)
        return engine

    def test_the_end_of_the_process_at_its_start(self):
        def start(device, python):
            lent, _ = Shared.start(device, python)
            os.kill(lent.child.process.pid, 6)
            return lent, lent

        with pytest.raises(EngineError, match="ended by signal 6 in start"):
            make_engine(LLAMA, start=start)
