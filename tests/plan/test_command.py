"""`aligner plan` and the check of `aligner submit`, as they are called."""

import json
import re
from dataclasses import replace

import pytest

from aligner.__main__ import main
from aligner.cluster.site import load_site
from aligner.config.resolve import compose
from aligner.config.sections.model.mtp import MtpConfig
from aligner.data.tokenizer import byte_tokenizer
from aligner.errors import ConfigError
from aligner.families.table import parameters
from aligner.models.shards import hf_tensors
from aligner.plan import command
from aligner.plan.shapes import kv_bytes

EIGHT = ["model=llama3_8b", "stage=grpo", "batch.prompts=64", "batch.group=16", "batch.minibatch_samples=512"]
TIGHT = ["parallel.tensor=2", "parallel.sequence=true", "model.recompute=full", "batch.micro_batch_tokens=4096"]


def test_a_plan_names_phases_and_exits_0(capsys):
    assert main(["plan", "--gpus", "16", *EIGHT, *TIGHT]) == 0
    out = capsys.readouterr().out
    assert all(f"\n{phase} " in out for phase in ("refit", "generate", "logprobs", "update", "save"))
    assert "tokens/s/GPU" in out and "tp2 dp8 seq, recompute" in out


def test_the_size_of_a_tokenizer_is_read(capsys, tmp_path):
    byte_tokenizer(str(tmp_path / "tokenizer"))
    (tmp_path / "train.jsonl").write_text("{}\n")
    tiny = ["model.hidden_size=64", "model.num_layers=2", "model.ffn_hidden_size=128", "data.max_tokens=32"]
    line = ["plan", "--gpus", "2", "stage=sft", *tiny, f"data.train={tmp_path / 'train.jsonl'}"]
    assert main([*line, f"model.tokenizer={tmp_path / 'tokenizer'}"]) == 0
    by_tokenizer = capsys.readouterr().out
    assert main([*line, "model.vocab_size=261"]) == 0
    assert by_tokenizer == capsys.readouterr().out
    assert "policy 0.0989M\n" in by_tokenizer and "(at most 31 + 1)" in by_tokenizer
    assert "\n1 optimizer step of 1 micro-batch, " in by_tokenizer
    assert "update is limited by batch.sequences (more samples" in by_tokenizer
    assert main([*line, f"model.tokenizer={tmp_path / 'nowhere'}"]) == 2
    assert "model.vocab_size=0: expected the size of the vocabulary, or model.tokenizer=" in capsys.readouterr().err


def test_prompts_that_only_teachers_read_are_named(capsys):
    settings = ["experiment=opsd", "model=qwen3_0.6b", "algorithm.distill.teacher=/nowhere"]
    settings.append("data.max_prompt_tokens=96")
    assert main(["plan", "--gpus", "1", *settings, "algorithm.distill.teacher_prompt='{prompt}{hint}'"]) == 0
    assert "(at most 96 + 64), teachers' prompts 80 (at most 160)\n" in capsys.readouterr().out


def test_json_is_what_programs_read(capsys):
    assert main(["plan", "--json", "--device", "h200", *EIGHT, *TIGHT]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["fits"] and data["parameters"]["policy"] == 8_030_261_248 and data["device"] == "h200"


def test_what_cannot_fit_is_refused_with_exit_1(capsys):
    assert main(["plan", *EIGHT, "batch.micro_batch_samples=64", "data.max_prompt_tokens=1024"]) == 1
    output = capsys.readouterr()
    assert output.err.startswith("error: the job does not fit: phase update") and output.err.count("\n") == 1
    assert "activations" in output.err and "model.recompute=full" in output.err
    assert "update" in output.out  # the table is shown all the same


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["model=tiny"], "model.vocab_size=0"),
        (["model.init=Qwen/Qwen2.5-0.5B"], "model.init='Qwen/Qwen2.5-0.5B': expected a folder on this machine"),
        (
            ["model=qwen3_30b_a3b", "stage=sft", "model.moe.ffn_hidden_size=780", "parallel.tensor=4"],
            "ffn_hidden_size=780",
        ),
        ([*EIGHT, "--criteria", "-1"], "--criteria=-1.0: expected a mean above 0"),
        ([*EIGHT, "engine.ranks=8"], "engine.ranks=8: expected less than the 8 ranks"),
        ([*EIGHT, "engine.ranks=3"], "batch.prompts=64"),
        ([*EIGHT, "engine.lag=1"], "engine.lag=1: expected 0 without engine.ranks"),
        (["model=llama3_8b", "--device", "p100"], "--device='p100': expected one of a100, h100"),
        (["model=llama3_8b", "--gpus", "12", "parallel.tensor=8"], "world size=12"),
        (["model=llama3_8b", "--gpus", "0"], "--gpus=0"),
        (["model=llama3_8b", "stage=grpo", "--gpus", "6"], "batch.prompts=32"),
    ],
)
def test_bad_input_exits_2(capsys, arguments, message):
    assert main(["plan", *arguments]) == 2
    assert message in capsys.readouterr().err


def test_the_split_that_is_proposed_is_the_fastest_that_runs(capsys, tmp_path):
    """Of all numbers of ranks that only generate; with lengths as a file tells them."""
    (tmp_path / "lengths").write_text("64 1\n16 30\n")
    line = ["plan", "--json", "--lengths", str(tmp_path / "lengths"), *EIGHT, "engine.lag=1"]
    results = {}
    for ranks in range(1, 8):
        if main([*line, *TIGHT, f"engine.ranks={ranks}"]) == 0:
            results[ranks] = json.loads(capsys.readouterr().out)
    reports = {ranks: data["lag"] for ranks, data in results.items()}
    steps = {r: min(lag["step_s"], (lag["windows"] or lag)["step_s"]) for r, lag in reports.items()}
    assert len(steps) > 1 and all(data["tokens"]["response_mean"] == 544 / 31 for data in results.values())
    best = min(steps, key=steps.__getitem__)
    assert all(data["split"] == reports[best] for data in results.values())
    for ranks, words in ((best, " is the fastest"), (max(steps, key=steps.__getitem__), ", with engine.window=")):
        main([*[word for word in line if word != "--json"], *TIGHT, f"engine.ranks={ranks}"])
        assert f"\nengine.ranks={best}{words}" in capsys.readouterr().out


@pytest.mark.parametrize("text", ["", "12 x", "0", "5 0", "1 2 3", "65"])
def test_lengths_that_are_none_are_refused(capsys, tmp_path, text):
    (tmp_path / "lengths").write_text(text)
    assert main(["plan", "--lengths", str(tmp_path / "lengths"), *EIGHT]) == 2
    assert "--lengths=" in capsys.readouterr().err


def sweep_once(monkeypatch):
    """Let later reports of a test show its first sweep."""
    swept, run = [], command.Sweep.run
    monkeypatch.setattr(command.Sweep, "run", lambda *args: swept[0] if swept else swept.append(run(*args)) or swept[0])


def test_a_sweep_lists_what_fits_fastest_first(capsys, monkeypatch):
    sweep_once(monkeypatch)
    assert main(["plan", "--sweep", "--json", "--top", "5", *EIGHT, "batch.micro_batch_tokens=8192"]) == 0
    output = json.loads(capsys.readouterr().out)
    assert len(output) == 5 and all(row["fits"] for row in output)
    assert [row["step_s"] for row in output] == sorted(row["step_s"] for row in output)
    assert main(["plan", "--sweep", *EIGHT, "batch.micro_batch_tokens=8192"]) == 0
    best = capsys.readouterr().out.splitlines()[1]
    overrides = [word for word in best.split() if "=" in word]
    assert main(["plan", "--json", *EIGHT, "batch.micro_batch_tokens=8192", *overrides]) == 0
    assert json.loads(capsys.readouterr().out)["step_s"] == pytest.approx(output[0]["step_s"])
    monkeypatch.undo()
    assert main(["plan", "--sweep", "--gpus", "8", "model=llama3_70b", "stage=grpo"]) == 1
    assert "no layout of 8 GPUs fits" in capsys.readouterr().err


def test_a_sweep_varies_the_ranks_of_an_engine(capsys):
    """Of a small model one rank is faster than two; a large one does not fit one."""
    line = ["plan", "--json", "--gpus", "2", "model=qwen3_1.7b", "stage=grpo", "engine.tensor_parallel=2"]

    def best(*more):
        assert main([*line, *more]) == 0
        return json.loads(capsys.readouterr().out)

    (swept, *_), (named, *_) = best("--sweep"), best("--sweep", "--engine-tensor-parallel=2")
    assert [row["sizes"]["engine.tensor_parallel"] for row in (swept, named)] == [1, 2]
    keys = [f"{key}={value}" for key, value in swept["sizes"].items()]
    keys += [f"parallel.{key}={swept['layout'][key]}" for key in ("tensor", "pipeline", "context", "sequence")]
    keys += [f"model.recompute={swept['layout']['recompute']}"]
    assert best(*keys)["step_s"] == pytest.approx(swept["step_s"]) and swept["step_s"] < named["step_s"]
    large = ["plan", "--json", "--sweep", "--gpus", "2", "model=qwen3_32b", "model.lora.rank=8", "stage=grpo"]
    assert main(large) == 0
    assert {row["sizes"]["engine.tensor_parallel"] for row in json.loads(capsys.readouterr().out)} == {2}


def test_a_sweep_gives_pipelines_more_stages_where_that_is_faster(capsys):
    line = ["plan", "--json", "--gpus", "32", "stage=sft", "model=llama3_70b", "batch.sequences=32"]
    assert main([*line, "--sweep", "data.max_tokens=4096"]) == 0
    best = next(row for row in json.loads(capsys.readouterr().out) if row["layout"]["virtual"] > 1)
    sizes = [f"{key}={value}" for key, value in best["sizes"].items()]
    layout = [f"parallel.{key}={best['layout'][key]}" for key in ("tensor", "pipeline", "context", "sequence")]
    line += [*sizes, *layout, "data.max_tokens=4096", f"model.recompute={best['layout']['recompute']}"]
    steps = {}
    for virtual in (1, best["layout"]["virtual"]):
        assert main([*line, f"parallel.virtual_stages={virtual}"]) == 0
        steps[virtual] = json.loads(capsys.readouterr().out)["step_s"]
    assert steps[best["layout"]["virtual"]] == pytest.approx(best["step_s"]) and best["step_s"] < 0.99 * steps[1]


def test_a_sweep_of_layers_that_get_more_than_hidden_states_has_no_stages_and_recomputes_nothing(capsys):
    line = ["stage=sft", "model=gemma4_e2b", "batch.sequences=4", "data.max_tokens=16384"]
    assert main(["plan", "--sweep", "--gpus", "4", *line]) == 0
    output = capsys.readouterr().out
    assert "parallel.context=2" in output and "pipeline" not in output and "recompute" not in output


def test_a_plan_says_what_limits_each_phase(capsys):
    """The value that is named is one with which the phase takes the time that is told, and fits."""
    line = ["plan", "--json", "--gpus", "16", *EIGHT, *TIGHT, "sampling.max_response_tokens=2048"]

    def planned(*more):
        assert main([*line, *more]) == 0
        return json.loads(capsys.readouterr().out)

    few = planned("engine.kv_cache_bytes=1073741824")
    limits = {limit["phase"]: limit for limit in few["limits"]}
    assert limits.keys() == few["time"].keys()
    cache = limits["generate"]
    assert cache["key"] == "engine.kv_cache_bytes" and 1 << 33 < cache["value"] < few["limit_bytes"]
    overrides = planned(f"engine.kv_cache_bytes={cache['value']}")
    assert overrides["time"]["generate"]["seconds"] == pytest.approx(cache["then_s"])
    assert cache["then_s"] < 0.5 * cache["seconds"]
    assert few["sizes"]["engine.kv_cache_bytes"] == 1 << 30
    rows = next(x for x in planned("engine.max_batch=4")["limits"] if x["phase"] == "generate")
    assert rows["key"] == "engine.max_batch" and rows["value"] == 8
    assert main([*(word for word in line if word != "--json"), "engine.kv_cache_bytes=1073741824"]) == 0
    assert f"generate is limited by engine.kv_cache_bytes: {cache['value']} takes" in capsys.readouterr().out


def test_a_pipeline_with_few_micro_batches_is_told_of_smaller_ones(capsys):
    line = [
        "plan",
        "--json",
        "--gpus",
        "16",
        "stage=sft",
        "model=llama3_8b",
        "parallel.pipeline=4",
        "model.recompute=full",
    ]
    assert main([*line, "batch.sequences=64", "batch.micro_batch_tokens=16384"]) == 0
    update = next(x for x in json.loads(capsys.readouterr().out)["limits"] if x["phase"] == "update")
    assert (
        update["key"] == "batch.micro_batch_tokens" and update["value"] < 16384 and update["then_s"] < update["seconds"]
    )


def test_auto_is_what_the_device_has_room_for(capsys):
    results = {}
    for device in ("h100", "h200"):
        line = ["plan", "--json", "--device", device, "--gpus", "16", *EIGHT, "parallel.tensor=2", "batch.prompts=1024"]
        assert main([*line, "parallel.sequence=true", "sampling.max_response_tokens=4096"]) == 0
        results[device] = json.loads(capsys.readouterr().out)
        assert results[device]["fits"]
    small, large = (results[name]["sizes"]["engine.kv_cache_bytes"] for name in ("h100", "h200"))
    assert large > 2 * small > 1 << 34 and results["h200"]["step_s"] < results["h100"]["step_s"]


def test_a_sweep_varies_cache_and_micro_batches(capsys, monkeypatch):
    sweep_once(monkeypatch)
    line = ["plan", "--sweep", "--json", "--top", "3", "--gpus", "16", *EIGHT, "sampling.max_response_tokens=2048"]
    assert main([*line, "engine.kv_cache_bytes=1073741824", "batch.micro_batch_samples=1"]) == 0
    best = json.loads(capsys.readouterr().out)[0]
    assert best["sizes"]["engine.kv_cache_bytes"] > 1 << 33 and best["sizes"]["batch.micro_batch_tokens"] >= 2048
    assert main([*(word for word in line if word != "--json"), "engine.kv_cache_bytes=1073741824"]) == 0
    assert f"engine.kv_cache_bytes={best['sizes']['engine.kv_cache_bytes']}" in capsys.readouterr().out.splitlines()[1]


def test_a_sweep_of_experts_shards_them(capsys):
    moe = ["model=qwen3_30b_a3b", "stage=sft", "batch.sequences=64", "batch.micro_batch_tokens=4096"]
    assert main(["plan", "--sweep", "--json", "--gpus", "16", *moe]) == 0
    output = json.loads(capsys.readouterr().out)
    assert all(row["layout"]["expert"] * row["layout"]["tensor"] * row["layout"]["pipeline"] > 1 for row in output)


def test_submit_refuses_what_the_sites_gpus_cannot_hold(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.jsonl").write_text("{}\n")
    job = ["submit", "--dry-run", "stage=sft", "model=llama3_70b", "data.train=train.jsonl"]
    assert main([*job, "--site", "dgx_infiniband"]) == 1
    assert "the job does not fit" in capsys.readouterr().err and not (tmp_path / "runs").exists()
    layout = ["parallel.tensor=8", "parallel.pipeline=4", "parallel.sequence=true", "model.recompute=full"]
    assert main([*job, *layout, "batch.micro_batch_samples=1", "--site", "dgx_infiniband", "--nodes", "8"]) == 0
    assert main([*job, "--site", "generic"]) == 0  # names no GPU
    experts = ["model=qwen3_30b_a3b", "model.moe.ffn_hidden_size=780", "parallel.tensor=4"]
    assert main([*job, *experts, "--site", "dgx_infiniband"]) == 2
    assert "model.moe.ffn_hidden_size=780" in capsys.readouterr().err
    assert main([*job, *experts, "--site", "generic", "--nodes", "4"]) == 0


def test_engines_on_other_gpus_are_held_to_theirs(tmp_path, monkeypatch, capsys):
    """Weights and a cache of 100 GB: on the trainer's h200 they would fit, and its update would not on an a100."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.jsonl").write_text("{}\n")
    job = ["submit", "--dry-run", "--site", "site.yaml", "--engine-nodes", "1", "data.train=train.jsonl", *EIGHT]
    job += ["reward.functions=[{path: math}]", "model.recompute=full", "batch.micro_batch_tokens=65536"]
    job += ["engine.ranks=8", "engine.max_batch=128", "sampling.max_response_tokens=8192"]
    for trainer, engine, cache, code in (
        ("h200", "h200", 100_000_000_000, 0),
        ("h200", "a100", 100_000_000_000, 1),
        ("h200", "a100", 10_000_000_000, 0),
        ("a100", "h200", 100_000_000_000, 1),
    ):
        site = f"description: x\ngpus_per_node: 8\ngpu: {trainer}\nengines: {{gpu: {engine}}}\n"
        (tmp_path / "site.yaml").write_text(site)
        assert main([*job, f"engine.kv_cache_bytes={cache}"]) == code, (trainer, engine, cache)
        output = capsys.readouterr().err
        assert ("of a100" in output) == bool(code), output


def test_a_site_names_a_device_of_the_table(tmp_path):
    path = tmp_path / "site.yaml"
    path.write_text("description: x\ngpu: h900\n")
    with pytest.raises(ConfigError, match=r"gpu='h900'.*h100"):
        load_site(str(path))


@pytest.mark.parametrize(
    "model, faster",
    [
        (["model=llama3_8b", "parallel.tensor=4", "engine.tensor_parallel=2"], True),
        (["model=llama3_8b", "parallel.tensor=4", "engine.tensor_parallel=2", "engine=vllm"], False),
        (["model=qwen3_1.7b"], False),  # whose decode steps are CUDA graphs here, too
        (
            ["model=gpt_oss_20b", "parallel.tensor=4", "engine.tensor_parallel=2"],
            False,
        ),  # vLLM was not tried
    ],
)
def test_a_plan_names_vllm_where_it_would_be_faster(model, faster, capsys):
    long = ["--response-tokens", "2000", "sampling.max_response_tokens=8192", "parallel.sequence=true"]
    main(["plan", "--gpus", "64", "stage=grpo", *model, *long, "batch.prompts=128", "batch.group=16"])
    assert ("engine=vllm would be faster: step " in capsys.readouterr().out) == faster


def test_a_layer_that_drafts_takes_memory_and_time(capsys):
    """As one more layer of the engine's weights and cache; prompt lookup takes none."""
    job = ["plan", "--gpus", "64", "stage=grpo", "model=glm4.7_flash", "engine.max_batch=512", "parallel.expert=8"]
    job += [
        "engine.tensor_parallel=4",
        "engine.kv_cache_bytes=8000000000",
        "batch.prompts=64",
        "batch.group=8",
        "--json",
    ]
    plans, drafts = {}, ["engine.draft_tokens=3", "--acceptance-length", "2"]
    sources = {"lookup": [], "layer": ["model.mtp.layers=1"], "model": ["engine.draft_model=Qwen/Qwen3-0.6B"]}
    for name, options in sources.items():
        assert main([*job, *drafts, *options]) == 0
        plans[name] = json.loads(capsys.readouterr().out)
    lookup, layer, smaller = (plan["memory"]["generate"]["items"] for plan in plans.values())
    assert smaller["engine weights"] == lookup["engine weights"]
    shape = replace(compose(["model=glm4.7_flash"]).model, mtp=MtpConfig(1))
    own = [tensor for tensor in hf_tensors(shape) if tensor.spec.canonical.startswith("ahead.")]
    share = sum((high - low) * t.entry_numel for t in own for low, high in [t.interval(4, 0)])
    assert layer["engine weights"] - lookup["engine weights"] == pytest.approx(2 * share, rel=1e-3)
    assert layer["kv cache"] / lookup["kv cache"] == pytest.approx(1 + 1 / shape.num_layers)
    own = compose(["model=qwen3_0.6b"]).model  # whole on each GPU
    assert smaller["draft model"] == pytest.approx(2 * parameters(own), rel=1e-3)
    update = plans["model"]["memory"]["update"]["items"]  # it stays where the engine's weights go
    assert update["draft model"] == smaller["draft model"] and "engine weights" not in update
    ratio = kv_bytes(own, 2) / kv_bytes(shape, 2, 4) * (1 + 1 / shape.num_layers)
    assert smaller["kv cache"] / lookup["kv cache"] == pytest.approx(1 + ratio, rel=0.02)
    lookup, layer, smaller = (plan["time"]["generate"]["parts"] for plan in plans.values())
    assert smaller["decode"] == lookup["decode"] and layer["drafts"] != smaller["drafts"] > 0
    assert "drafts" not in lookup and layer["decode"] == lookup["decode"] > layer["drafts"] > 0
    main([*job, *drafts, *sources["model"], "engine=vllm"])  # on which each GPU has a share of it
    shared = json.loads(capsys.readouterr().out)["memory"]["generate"]["items"]["draft model"]
    assert shared == pytest.approx(plans["model"]["memory"]["generate"]["items"]["draft model"] / 4, rel=1e-2)


def test_an_eagle_head_takes_the_memory_of_its_weights(capsys, tmp_path):
    """A head as published: its matrices multiply twice the hidden state, and `fc` three of them."""
    size, ffn, heads, kv, width, known = 4096, 14336, 32, 8, 128, 32000
    raw = {"architectures": ["LlamaForCausalLMEagle3"], "num_attention_heads": heads, "num_key_value_heads": kv}
    raw |= {"hidden_size": size, "intermediate_size": ffn, "vocab_size": 128256, "draft_vocab_size": known}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    weights = 2 * size * (heads + 2 * kv) * width + heads * width * size + 3 * size * ffn + 3 * size**2 + known * size
    job = ["plan", "--gpus", "8", "stage=grpo", "model=llama3_8b", "engine=vllm", "engine.draft_tokens=3", "--json"]
    job += ["parallel.tensor=2", "parallel.sequence=true", "engine.dtype=bfloat16"]
    items, seconds = {}, {}
    for name, options in {"lookup": [], "head": [f"engine.draft_model={tmp_path}"]}.items():
        assert main([*job, *options, "--acceptance-length", "2"]) == 0
        plan = json.loads(capsys.readouterr().out)
        items[name], seconds[name] = plan["memory"]["generate"]["items"], plan["time"]["generate"]["parts"]
    assert items["head"]["draft model"] == pytest.approx(2 * weights, rel=1e-3)
    assert items["head"]["engine weights"] == items["lookup"]["engine weights"]
    assert seconds["head"]["drafts"] > 0 and "drafts" not in seconds["lookup"]


def test_a_plan_names_the_acceptance_from_which_drafts_pay(capsys):
    """A step of few rows reads weights, whatever they are multiplied with."""
    job = ["plan", "--gpus", "8", "stage=grpo", "model=qwen3_1.7b", "sampling.max_response_tokens=2048"]
    job += ["engine.draft_tokens=7", "engine.max_batch=512", "batch.prompts=128", "batch.group=8"]
    seconds = []
    for length in ("0", "1", "3"):
        assert main([*job, "--acceptance-length", length, "--json"]) == 0
        seconds.append(json.loads(capsys.readouterr().out)["step_s"])
    main(job)
    text = r"engine.draft_tokens=7 pays above engine/mean_acceptance_length (\S+) with 1 row and (\S+) with 64 rows"
    one, many = map(float, re.search(text, capsys.readouterr().out).groups())
    assert 1 <= one < 1.2 and one < many < 8
    assert seconds[2] < seconds[0] < seconds[1]
    assert main([*job, "--acceptance-length", "9"]) == 2
    assert "--acceptance-length=9.0: expected 1 to 8, with engine.draft_tokens=7" in capsys.readouterr().err


def test_vllm_keeps_a_state_for_each_draft_and_has_kernels_of_its_own(capsys):
    job = ["plan", "--gpus", "8", "stage=grpo", "model=qwen3.5_9b", "parallel.tensor=4", "engine=vllm"]
    held = []
    for drafts in ([], ["model.mtp.layers=1", "engine.draft_tokens=3"]):
        main([*job, *drafts])
        text = capsys.readouterr().out
        held.append(float(re.search(r"linear attention remembers on an engine's GPU (\S+) MB", text)[1]))
    assert held[1] == pytest.approx(4 * held[0], rel=1e-2)
    paying = {}
    for engine in ("native", "vllm"):  # without flash-linear-attention, which the native engine would read states with
        main([*job, *drafts, f"engine={engine}"])
        paying[engine] = float(re.search(r"1 row and (\S+) with", capsys.readouterr().out)[1])
    assert paying["vllm"] < 0.6 * paying["native"]
