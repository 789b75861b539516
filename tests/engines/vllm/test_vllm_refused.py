"""What the vLLM engine refuses, and what needs no vLLM to be shown."""

import ast
import json
import os
import subprocess
import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import save_file

import aligner.engines.child.engine as child
from aligner.config.resolve import compose
from aligner.config.sections.engine import EngineConfig
from aligner.config.sections.model.attention import AttentionConfig
from aligner.config.sections.model.config import ModelConfig
from aligner.config.sections.vllm import VllmConfig
from aligner.config.validate_model import check_node, validate_model
from aligner.engines import bridge
from aligner.engines.base import UpdateLedger
from aligner.engines.bridge import Bridge
from aligner.engines.child.process import interpreter
from aligner.engines.child.worker import KV_CACHE, WEIGHTS, Settings
from aligner.engines.native.fleet import Fleet
from aligner.engines.vllm.drafter import vllm_drafter
from aligner.engines.vllm.engine import INVARIANT, VARIABLES, VllmEngine
from aligner.engines.vllm.pages import Pages
from aligner.engines.vllm.sampling import sampling_arguments
from aligner.engines.vllm.worker import VllmWorker, engine_arguments, import_vllm
from aligner.errors import ConfigError, LayoutError, RefitError
from aligner.families.hf_config import hf_config
from aligner.types import SamplingParams
from tests.engines.vllm.setup import LINEAR, LLAMA, MODELS, PYTHON, make_engine, needs_vllm


def test_without_an_environment_one_line_says_how_to_get_it():
    expected = r"engine.vllm.python='/nowhere/python': expected the path of a Python.*launchers/engine_env.sh vllm"
    with pytest.raises(ConfigError, match=expected):
        make_engine(LLAMA, python="/nowhere/python")


@pytest.mark.slow
def test_an_interpreter_without_vllm():
    with pytest.raises(ConfigError, match=r"engine.vllm.python=.*expected an interpreter with vLLM.*engine_env.sh"):
        make_engine(LLAMA, python="", process=True)


def test_another_version_is_refused(monkeypatch):
    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(__version__="0.31.2"))
    with pytest.raises(ConfigError, match=r"expected vLLM 0.32.0. Installed is 0.31.2; launchers/engine_env.sh"):
        import_vllm()


def test_options_that_the_worker_sets_are_refused():
    """All of them, and no other."""
    settings = Settings("", None, 53, "float32", 64, 4, 1 << 24, *[False] * 4, 0, False)
    assert VllmConfig.SET.keys() == engine_arguments(settings).keys()
    expected = (
        r"engine.vllm.args.max_num_seqs=3: expected an option that this project does not set. Set engine.max_batch"
    )
    with pytest.raises(ConfigError, match=expected):
        compose(["stage=grpo", "engine=vllm", "engine.vllm.args.max_num_seqs=3"])


@pytest.mark.parametrize(
    ("option", "why"),
    [
        ("vllm.args.kv_transfer_config={}", "keys and values of old weights"),
        ("vllm.args.kv_offloading_backend=lmcache", "keys and values of old weights"),
        ("trtllm.args.kv_connector_config={}", "keys and values of old weights"),
        ("vllm.args.enable_eplb=true", "write experts to where they were"),
        ("vllm.args.eplb_config={}", "write experts to where they were"),
        ("vllm.args.enable_elastic_ep=true", "write experts to where they were"),
        ("vllm.args.prefill_context_parallel_size=2", "Set engine.tensor_parallel"),
    ],
)
def test_options_that_do_not_go_with_updates_are_refused(option, why):
    with pytest.raises(ConfigError, match=rf"engine.{option.partition('=')[0]}=.*{why}"):
        compose(["stage=grpo", f"engine.{option}"])


def test_the_end_of_an_update_empties_also_what_lies_outside_of_the_cache():
    worker = VllmWorker.__new__(VllmWorker)
    reset = lambda reset_connector=False: reset_connector  # noqa: E731
    worker.engine = SimpleNamespace(collective_rpc=lambda name, args: [None], reset_prefix_cache=reset)
    worker.finish()
    assert worker.whole


def test_batch_invariance_of_a_deterministic_run(monkeypatch):
    """On a GPU, unless the environment says otherwise."""
    engine, on_cpu = of_device(torch.device("cuda", 0)), of_device(torch.device("cpu"))
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
    assert engine._variables()[INVARIANT] == "1" and INVARIANT not in on_cpu._variables()
    monkeypatch.setenv(INVARIANT, "0")
    assert engine._variables()[INVARIANT] == "0"
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: False)
    assert INVARIANT not in engine._variables()


def test_sleep_on_a_cpu():
    with pytest.raises(ConfigError, match=r"engine.sleep=True: expected false on a CPU"):
        make_engine(LLAMA, sleep=True, python=sys.executable)


def test_linear_layers_in_float32_on_a_cpu(monkeypatch):
    monkeypatch.setattr("aligner.engines.vllm.engine.has_linear_kernel", lambda: True)
    with pytest.raises(ConfigError, match=r"engine.dtype='float32': expected bfloat16 for linear layers"):
        make_engine(LINEAR["qwen3_5"], python=sys.executable)
    monkeypatch.setattr("aligner.engines.vllm.engine.has_linear_kernel", lambda: False)
    with pytest.raises(ConfigError, match=r"engine.name='vllm': expected native. This CPU has no AVX-512"):
        make_engine(LINEAR["qwen3_5"], python=sys.executable)


@pytest.mark.parametrize(
    ("width", "nodes", "own", "parts"),
    [
        (2, (3, 3), 0, None),
        (8, (4, 4), 0, None),
        (2, (3, 3), 2, None),
        (4, (2, 4), 4, None),
        (4, (4, 2, 2), 4, None),
        (8, (4, 4, 4), 8, None),
        (2, (3, 3), 4, [1, 2]),
        (4, (1, 3, 1), 4, [3]),
        (4, (4, 2, 2, 4), 12, []),
    ],
)
def test_a_replica_on_ranks_of_its_own_has_equal_parts_on_nodes(width, nodes, own, parts):
    """Of which each gets all weights. Whether the parts of all nodes are equal (`parts` is empty if not) is known when
    they meet."""
    cfg = compose(["stage=grpo", "engine=vllm", f"engine.tensor_parallel={width}", f"engine.ranks={own}"])
    of_node = [number for number, size in enumerate(nodes) for _ in range(size)]
    ranks = [range(of_node.index(number), of_node.index(number) + size) for number, size in enumerate(nodes)]
    group = SimpleNamespace(rank=lambda: 0, size=lambda: len(of_node))
    apart = Bridge(group, None, None, len(of_node) - own, width)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bridge, "gathered", lambda value, group: of_node)
        if parts is not None:
            with pytest.raises(LayoutError, match=rf"engine.tensor_parallel={width}: expected equal parts of .*of \["):
                apart.fill_by_node()
        elif own:
            apart.fill_by_node()
            assert apart.filled_together == min(width, nodes[-1])
    refused = []
    for node in ranks:
        try:
            check_node(cfg, node, len(of_node))
        except LayoutError as error:
            refused.append(str(error))
    assert bool(refused) == bool(parts)
    if parts:
        assert f"of a node, are {' and '.join(map(str, parts))} of a replica" in refused[0]


def test_ranks_that_cannot_share_its_heads():
    cfg = compose(["stage=grpo", "engine=vllm", "engine.tensor_parallel=4"])
    with pytest.raises(LayoutError, match=r"model.num_kv_heads=3: expected a divisor of engine.tensor_parallel=4"):
        validate_model(cfg, replace(LLAMA, num_heads=12, num_kv_heads=3, head_dim=16, max_position=4096))


def test_experts_that_no_ranks_share_have_any_width():
    model = replace(MODELS["qwen3_moe"], max_position=4096, num_kv_heads=4)
    model, options = replace(model, moe=replace(model.moe, ffn_hidden_size=25)), ["stage=grpo", "engine=vllm"]
    with pytest.raises(ConfigError, match=r"ffn_hidden_size=25: .*tensor_parallel=4.*enable_expert_parallel=true"):
        validate_model(compose([*options, "engine.tensor_parallel=4"]), model)
    whole = "engine.vllm.args.enable_expert_parallel=true"
    validate_model(compose([*options, "engine.tensor_parallel=4", whole]), model)


@pytest.mark.parametrize(
    ("shares", "name", "expected"),
    [
        (3, "qwen3_moe", r"data_parallel_size=3: expected a divisor of engine.tensor_parallel=4"),
        ("two", "qwen3_moe", r"data_parallel_size='two': expected a divisor"),
        (2, "llama", r"data_parallel_size=2: expected 1 for a model without experts.*more replicas"),
    ],
)
def test_shares_of_a_replica_with_requests_of_their_own(shares, name, expected):
    options = ["stage=grpo", "engine=vllm", "engine.tensor_parallel=4", f"engine.vllm.args.data_parallel_size={shares}"]
    model = replace(MODELS[name], max_position=4096, num_kv_heads=4)
    with pytest.raises(ConfigError, match=rf"engine.vllm.args.{expected}"):
        validate_model(compose(options), model)
    validate_model(compose([*options[:-1], "engine.vllm.args.data_parallel_size=1"]), model)


def test_models_that_it_does_not_serve():
    cfg = compose(["stage=grpo", "engine=vllm"])
    model = replace(LLAMA, max_position=4096)
    validate_model(cfg, model)
    with pytest.raises(ConfigError, match=r"model.family='glm': .*llama.*no single matrices.*engine=native serves it"):
        validate_model(cfg, replace(model, family="glm", qkv_bias=True))
    some = AttentionConfig(window=6, global_layers=[0])
    with pytest.raises(ConfigError, match=r"model.attention.window=6: expected 0, or all layers local.*qwen3"):
        validate_model(cfg, replace(model, family="qwen3", qk_norm=True, attention=some))
    with pytest.raises(ConfigError, match=r"model.head_dim=64: expected hidden_size / num_heads = 32"):
        validate_model(cfg, replace(model, family="qwen2", qkv_bias=True, head_dim=64))
    deep = replace(MODELS["deepseek_v3"], max_position=4096)
    validate_model(cfg, deep)
    with pytest.raises(ConfigError, match=r"model.tie_embeddings=True: expected False with engine.name=vllm"):
        validate_model(cfg, replace(deep, tie_embeddings=True))
    oss = replace(MODELS["gpt_oss"], max_position=4096)
    validate_model(cfg, oss)
    with pytest.raises(ConfigError, match=r"model.norm_eps=1e-06: expected 1e-05 with engine.name=vllm"):
        validate_model(cfg, replace(oss, norm_eps=1e-6))
    with pytest.raises(ConfigError, match=r"model.attention.global_every=0: expected 2"):
        validate_model(cfg, replace(oss, attention=AttentionConfig(window=6)))
    with pytest.raises(ConfigError, match=r"model.latent.neighbours=False: expected True with engine.name=vllm"):
        validate_model(cfg, replace(deep, latent=replace(deep.latent, neighbours=False)))


def test_latent_attention_of_other_sizes_on_a_cpu():
    deep = MODELS["deepseek_v3"]
    with pytest.raises(ConfigError, match=r"model.latent.kv_rank=24: expected 512 with engine.name=vllm on a CPU"):
        make_engine(replace(deep, latent=replace(deep.latent, kv_rank=24)), python=sys.executable)


@pytest.mark.parametrize(
    ("cfg", "lacks"),
    [
        (MODELS["deepseek_v32"], "attention to what an indexer chooses"),
        (MODELS["nemotron_h"], "experts without a gate"),
    ],
)
def test_what_the_cpu_build_lacks(cfg, lacks):
    """Said before a process is started."""
    with pytest.raises(ConfigError, match=rf"engine.name='vllm': expected native. vLLM's CPU build has no {lacks}"):
        make_engine(cfg, python=sys.executable)


@needs_vllm
def test_on_a_gpu_an_indexer_has_the_matrices_that_it_has_in_the_tests():
    """And joins the same of ours. That class needs kernels that only a GPU has."""
    assert attributes("models/deepseek_v32/attention.py", "DeepseekV32Indexer") == attributes(DEEP, "Indexer")
    own = attributes("models/deepseek_v32/attention.py", "DeepseekV32Attention")
    assert own == attributes(DEEP, "DeepseekV2MLAAttention") - {"kv_a_proj_with_mqa", "q_proj", "kv_b_proj", "mla_attn"}
    joined = [joins("models/deepseek_v32/nvidia/model.py", "DeepseekV32Model"), joins(DEEP, "DeepseekV2Model")]
    assert joined[0] < joined[1] and ("wk_weights_proj", "wk", 0) in joined[0]
    for file in ("models/deepseek_v32/attention.py", DEEP):  # of GLM-5, whose layers may share a choice
        assert "index_topk_pattern[layer_id] == 'S'" in ast.unparse(tree(file))


@needs_vllm
def test_the_faults_for_which_deepseek_v4_is_refused():
    """In a refit parameters have no data until a layer is whole, and weights are loaded bucket by bucket."""
    classes = {node.name: node for node in tree(V4).body if isinstance(node, ast.ClassDef)}
    assert "params_dict[name][:n].copy_(narrow_weight)" in ast.unparse(classes["DeepseekV4Model"])
    assert "layer.hc_attn_fn_broadcast.copy_(broadcast)" in ast.unparse(classes["DeepseekV4Model"])
    bodies = {node.name: ast.unparse(node) for node in classes["DeepseekV4ForCausalLM"].body if hasattr(node, "name")}
    assert "self.process_weights_after_loading()" in bodies["load_weights"]
    assert "self.model.finalize_mhc_broadcast_weights()" in bodies["process_weights_after_loading"]
    assert "use_fp8_ds_mla_layout: ClassVar[bool] = True" in ast.unparse(tree("models/deepseek_v4/attention.py"))
    kernel = "ComputeSWAIndicesAndLensKernel"
    assert f"class {kernel}" in ast.unparse(tree("v1/attention/backends/mla/sparse_swa.py"))
    assert kernel not in ast.unparse(tree("platforms/cpu.py"))  # which has those that do without Triton


V4, DEEP = "models/deepseek_v4/nvidia/model.py", "model_executor/models/deepseek_v2.py"


def attributes(file: str, name: str) -> set[str]:
    """The attributes of a class that are modules with weights."""
    (own,) = (node for node in tree(file).body if getattr(node, "name", "") == name)
    made = (node for node in ast.walk(own) if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call))
    targets = ((node.targets[0], ast.unparse(node.value.func)) for node in made)
    return {t.attr for t, kind in targets if kind.endswith(("Linear", "Norm", "q_proj_cls", "Wrapper")) and is_own(t)}


def is_own(target: ast.AST) -> bool:
    return isinstance(target, ast.Attribute) and ast.unparse(target.value) == "self"


def joins(file: str, name: str) -> set[tuple]:
    """What a class' `load_weights` joins: its matrix, ours, which part."""
    (own,) = (node for node in tree(file).body if getattr(node, "name", "") == name)
    (load,) = (node for node in own.body if getattr(node, "name", "") == "load_weights")
    texts = [ast.unparse(node) for node in ast.walk(load) if isinstance(node, ast.Tuple) and len(node.elts) == 3]
    return {ast.literal_eval(text) for text in texts if text.startswith("('")}


@needs_vllm
@pytest.mark.parametrize("file", ["deepseek_v2", "glm4_moe_lite", "glm4_moe", "gpt_oss", "qwen3_next"])
def test_classes_that_do_not_know_a_tied_head(file):
    assert "tie_word_embeddings" not in ast.unparse(tree(f"model_executor/models/{file}.py"))


def test_pages_of_latent_attention_and_of_heads_of_two_kinds():
    """Each rank has the whole latent, and the keys of indexers; pages are as large as those of the layers that need the
    most, and layers without attention need none."""
    indexed = Pages.of(MODELS["deepseek_v32"], torch.bfloat16, 2, 64, states=1)
    assert indexed.bytes == 3 * 64 * ((512 + 64) * 2 + 132)
    shared = Pages.of(MODELS["glm_moe_dsa"], torch.bfloat16, 2, 64, states=1)  # by two of four layers
    assert shared.bytes == 4 * 64 * (512 + 64) * 2 + 2 * 64 * 132
    mamba = Pages.of(MODELS["nemotron_h-dense"], torch.float32, 1, 32, states=1)  # two layers beside one, and an MLP
    assert (mamba.groups, mamba.kept) == (1, 3)
    assert Pages.of(MODELS["deepseek_v3"], torch.bfloat16, 2, 64, states=1).bytes == 3 * 64 * (512 + 64) * 2
    gemma = MODELS["gemma4-experts"]  # 4 heads of 32, or 2 of 64
    wide = replace(gemma, attention=replace(gemma.attention, global_head_dim=128))
    sizes = [Pages.of(cfg, torch.float32, 1, 32, states=1).bytes for cfg in (gemma, wide)]
    assert sizes == [4 * 32 * 2 * 4 * 32 * 4, 4 * 32 * 2 * 2 * 128 * 4]


@pytest.mark.parametrize(
    ("seen", "value"),
    [
        ({1: ""}, "1"),
        ({2: "", 3: ""}, "2,3"),
        ({1: "4,5,6", 2: "4,5,6"}, "5,6"),
        ({3: "", 0: ""}, "3,0"),  # neighbours in the job need not be neighbours on the node
        ({0: "GPU-7a", 1: "GPU-7a,GPU-7b"}, "GPU-7a,GPU-7b"),
    ],
)
def test_the_child_sees_the_devices_of_its_ranks(monkeypatch, seen, value):
    """In the order of the ranks, each of which sees some of its node's devices."""
    results = {}

    def spawn(worker, environ, python, section):
        results.update(environ)

    monkeypatch.setattr(child, "spawn", spawn)
    names = []
    for rank, visible in seen.items():
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        names.append(of_device(torch.device("cuda", rank))._device_name())
    engine = of_device(torch.device("cuda", min(seen)))
    engine._devices = names
    engine._process(engine.device, "")
    assert results["CUDA_VISIBLE_DEVICES"] == value and results["VLLM_ENABLE_V1_MULTIPROCESSING"] == "0"


def of_device(device):
    engine = VllmEngine.__new__(VllmEngine)
    engine.options, engine.device, engine._group = VllmConfig(), device, None
    return engine


def test_ranks_that_see_their_own_device_alone_are_no_replica():
    """Each calls its own 0, so that a child cannot be given all of them."""
    engine = of_device(torch.device("cuda", 0))
    engine._devices = ["0", "0"]
    expected = (
        r"engine.tensor_parallel=2: expected ranks that see each other's devices; theirs are 0, 0.*--gpu-bind=none"
    )
    with pytest.raises(ConfigError, match=expected):
        engine._process(engine.device, "")


def test_one_of_several_replicas_is_asked_as_a_native_one_is(monkeypatch):
    """It has no weights yet, and says so."""
    engine = VllmEngine.__new__(VllmEngine)
    engine.tensor_parallel, engine._ledger = 1, UpdateLedger({})
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 0)
    with pytest.raises(RefitError, match="no complete weights"):
        engine._generate_share(Fleet(1), [], [], [[]], SamplingParams(1), None)


class Recorder:
    """Notes what is called of vLLM's engine."""

    def __init__(self):
        self.calls = []

    def __getattr__(self, name):
        return lambda *a, **k: self.calls.append((name, *a, *k.values()))


def test_what_sleep_would_call_on_a_gpu():
    """Order and arguments; that vLLM has them is below, that they give memory back was not seen."""
    worker = VllmWorker.__new__(VllmWorker)
    worker.engine, worker.whole = Recorder(), True
    worker.sleep([KV_CACHE])
    worker.wake([KV_CACHE])
    assert worker.whole
    worker.sleep([KV_CACHE, WEIGHTS])
    worker.wake([WEIGHTS])
    assert not worker.whole
    kept = [("sleep", 0), ("release_kv_cache_memory",), ("wake_up", ["kv_cache"])]
    assert worker.engine.calls == [*kept, ("sleep", 2), ("wake_up", ["weights"])]


CHECK = """import json, sys
from types import SimpleNamespace
from aligner.engines.vllm.worker import engine_arguments, import_vllm
import_vllm()
from vllm.engine.arg_utils import EngineArgs
from vllm.v1.worker.utils import request_memory

settings = SimpleNamespace(**json.loads(sys.argv[1]))
arguments = engine_arguments(settings)
for left in (arguments, {k: v for k, v in arguments.items() if k != "gpu_memory_utilization"}):
    snapshot = SimpleNamespace(total_memory=80 << 30, free_memory=8 << 30, device_="cuda:0")
    try:
        request_memory(snapshot, EngineArgs(**left))
        print("starts")
    except ValueError as error:
        print(error)"""


HEAD = {"architectures": ["Eagle3LlamaForCausalLM"], "num_attention_heads": 4, "hidden_size": 128, "vocab_size": 53}
NESTED = HEAD | {"transformer_layer_config": HEAD, "target_hidden_size": 64}  # as `speculators` writes them


@pytest.mark.parametrize(
    ("raw", "options", "expected"),
    [
        (None, {}, "a Hugging Face folder"),
        ({"model_type": "bert"}, {}, "a language model of a supported family"),
        (MODELS["gemma3"], {}, "a model whose layers all have the same window, or none"),
        (LINEAR["qwen3_next"], {}, "a model whose states can go back"),
        (replace(LLAMA, family="glm"), {}, "a model that vLLM serves"),
        (replace(LLAMA, vocab_size=54), {}, "vocab_size=53 in its config.json with engine.name=vllm, not 54"),
        (HEAD | {"vocab_size": 60}, {}, "vocab_size=53 in its config.json with engine.name=vllm, not 60"),
        (HEAD | {"hidden_size": 64}, {}, "a head for hidden states of 128 numbers, not of 64"),
        (NESTED, {}, "a head for hidden states of 128 numbers, not of 64"),
        (HEAD | {"vocab_size": "x"}, {}, r"a readable config\.json"),
        (HEAD, {"tensor_parallel": 3}, "heads that 3 ranks can share, not 4 with 4 of keys"),
        (HEAD, {"bare": True}, "a folder with the head's weights"),
        (LLAMA, {}, r"a folder with the weights of its config\.json. .* lack model\.embed_tokens"),
    ],
)
def test_folders_that_cannot_draft_are_refused_before_vllm_starts(raw, options, expected, tmp_path):
    """By a Python that has no vLLM."""
    if isinstance(raw, ModelConfig):
        raw = hf_config(raw, bos_token_id=None, eos_token_id=None, pad_token_id=0)
    if raw is not None:
        (tmp_path / "config.json").write_text(json.dumps(raw))
        if not options.get("bare"):
            save_file({}, tmp_path / "model.safetensors")
    with pytest.raises(ConfigError, match=rf"^engine\.draft_model='{tmp_path}': expected {expected}"):
        ranks = options.get("tensor_parallel", 1)
        vllm_drafter(EngineConfig(name="vllm", draft_tokens=4, draft_model=str(tmp_path), tensor_parallel=ranks), LLAMA)


@needs_vllm
@pytest.mark.slow
def test_vllms_own_check_lets_an_engine_start_beside_a_trainer(tmp_path):
    """The GPU worker's, with a tenth of the device free; by vLLM's default it would not start."""
    (tmp_path / "config.json").write_text("{}")
    settings = Settings(str(tmp_path), None, 53, "float32", 64, 4, 1 << 24, *[False] * 4, 0, False, block=32)
    python, environ = interpreter(str(PYTHON), dict(os.environ) | VARIABLES, "engine.vllm")
    command = [python, "-c", CHECK, json.dumps(vars(settings) | {"max_num_tokens": settings.max_num_tokens})]
    done = subprocess.run(command, env=environ, capture_output=True, text=True)
    assert not done.returncode, done.stderr
    ours, default = done.stdout.splitlines()[-2:]
    assert ours == "starts" and "is less than desired GPU memory utilization (0.92" in default


@needs_vllm
def test_the_gpu_worker_makes_that_check_whatever_the_cache():
    """So that a package which makes another is seen."""
    calls = []
    for node in ast.walk(tree("v1/worker/gpu_worker.py")):
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "request_memory":
            calls.append([ast.unparse(argument) for argument in node.args])
    assert calls and all(call[1] == "self.cache_config" for call in calls)


def tree(file):
    (source,) = PYTHON.parents[1].glob(f"lib/python*/site-packages/vllm/{file}")
    return ast.parse(source.read_text())


@needs_vllm
def test_the_gpu_worker_reads_the_variable_of_batch_invariance():
    """On a CPU its kernels cannot run."""
    names = {node.value for node in ast.walk(tree("envs.py")) if isinstance(node, ast.Constant)}
    assert INVARIANT in names
    (start,) = (n for n in tree("v1/worker/gpu_worker.py").body if "init_worker_distributed" in getattr(n, "name", ""))
    assert "init_batch_invariance()" in ast.unparse(start)


@needs_vllm
def test_the_package_has_what_a_gpu_would_need():
    (engine,) = (n for n in tree("v1/engine/llm_engine.py").body if getattr(n, "name", "") == "LLMEngine")
    by_name = {n.name: [a.arg for a in n.args.args] for n in engine.body if isinstance(n, ast.FunctionDef)}
    assert "reset_connector" in by_name["reset_prefix_cache"]
    assert "level" in by_name["sleep"] and "tags" in by_name["wake_up"] and "release_kv_cache_memory" in by_name


def test_greedy_sampling_is_not_cut_and_ends_at_stop_tokens_alone():
    actual = sampling_arguments(SamplingParams(7, temperature=0, top_p=0.5, top_k=3, stop_token_ids=(4,)))
    assert (actual["temperature"], actual["top_p"], actual["top_k"], actual["min_p"]) == (0, 1.0, 0, 0.0)
    assert actual["max_tokens"] == 7 and actual["stop_token_ids"] == [4] and actual["ignore_eos"]
    cut = sampling_arguments(SamplingParams(7, temperature=0.5, top_p=0.5, top_k=3, min_p=0.1))
    assert (cut["temperature"], cut["top_p"], cut["top_k"], cut["min_p"]) == (0.5, 0.5, 3, 0.1)
