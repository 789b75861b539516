"""Record what each stage computes, bit by bit, and compare two versions of the code.

    python -m tests.digests FOLDER [--only sft,grpo-tp2] [--against OTHER] [--inputs INPUTS]

FOLDER gets a file for each case: the hashes of steps.jsonl (batch, losses, weights), the metrics without times, and the
hashes of exported weights and samples. With `--against`, a folder that another version wrote, each difference is
printed and the exit code is 1. Both have to start from the same data and models: those of `--inputs`, which are made if
they are missing. Bits are those of one machine: record both sides on it. `--close 1e-3` compares a GPU with a CPU: the
metrics alone, each within this share of the other's. `--set model.dtype=bfloat16` goes to every case.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

if __name__ == "__main__":  # before torch
    os.environ.update(OMP_NUM_THREADS="1", TOKENIZERS_PARALLELISM="false", NO_PROXY="127.0.0.1")

from aligner.run.metrics import read_jsonl
from aligner.shakedown.jobs import distances
from tests import soak, stages

TP2, PP2, CP2 = ([f"parallel.{name}=2"] for name in ("tensor", "pipeline", "context"))
LORA = ["model.lora.rank=2"]
DORA = [*LORA, "model.lora.dora=true"]
EXPERTS = ["model.init=random", "model.family=qwen3_moe", "model.qk_norm=true", "model.moe.num_experts=4"]
EXPERTS += ["model.moe.top_k=2", "model.moe.ffn_hidden_size=24"]
WINDOW = ["engine.window=3", "sampling.max_response_tokens=10"]
RANDOM = ["model.init=random"]
# name -> ranks, stage, overrides; `dice` is grpo with turns
CASES: dict[str, tuple[int, str, list[str]]] = {name: (1, name, []) for name in soak.STAGES[:9]}
CASES |= {f"{name}-dp2": (2, name, []) for name in ("sft", "kto", "distill", "grpo", "online_dpo")}
CASES |= {f"{name}-tp2": (2, name, TP2) for name in ("sft", "rm", "dpo", "distill", "grpo", "ppo")}
CASES |= {f"{name}-pp2": (2, name, PP2) for name in ("sft", "dpo", "grpo", "ppo")}
CASES |= {f"{name}-cp2": (2, name, CP2) for name in ("sft", "kto", "grpo")}
CASES |= {f"{name}-experts-ep2": (2, name, [*EXPERTS, "parallel.expert=2"]) for name in ("sft", "grpo")}
CASES["grpo-experts-routing"] = (1, "grpo", [*EXPERTS, "mismatch.replay_routing=true"])
CASES |= {f"{name}-lora": (1, name, LORA) for name in ("sft", "dpo", "grpo")}
CASES["ppo-dora-tp2-trunk"] = (2, "ppo", [*TP2, *DORA, "critic.trunk=policy"])
CASES |= {f"grpo-lag{lag}": (2, "grpo", ["engine.ranks=1", f"engine.lag={lag}"]) for lag in (0, 1, 2)}
CASES["ppo-lag1"] = (2, "ppo", ["engine.ranks=1", "engine.lag=1"])
CASES["online_dpo-lag0"] = (2, "online_dpo", ["engine.ranks=1"])
CASES["grpo-lag1-two"] = (4, "grpo", ["engine.ranks=2", "engine.lag=1"])
CASES["grpo-lag1-window"] = (2, "grpo", ["engine.ranks=1", "engine.lag=1", *WINDOW])
CASES["ppo-lag2-window-two"] = (3, "ppo", ["engine.ranks=2", "engine.lag=2", *WINDOW])
CASES["grpo-lora-lag1-window"] = (2, "grpo", [*LORA, "engine.ranks=1", "engine.lag=1", *WINDOW])
CASES["grpo-filter"] = (1, "grpo", ["algorithm.filter_groups=true"])
CASES["grpo-recycle"] = (1, "grpo", ["batch.epochs=2", "batch.minibatch_samples=8", "reward.normalize=true"])
CASES["dice"] = (1, "dice", [])
CASES["dice-dp2"] = (2, "dice", [])
CASES["dice-tp2"] = (2, "dice", TP2)
CASES["dice-lag1"] = (2, "dice", ["engine.ranks=1", "engine.lag=1"])
CASES["dice-lag2-window"] = (2, "dice", ["engine.ranks=1", "engine.lag=2", "engine.window=3"])
CASES["dice-window-two"] = (3, "dice", ["engine.ranks=2", "engine.lag=1", "engine.window=4"])
CASES["agents"] = (1, "agents", [])
CASES["agents-lag1"] = (2, "agents", ["engine.ranks=1", "engine.lag=1"])
CASES["sample-dp2"] = (2, "sample", [])
GEMMA = [*RANDOM, "model.family=gemma3_text", "model.qk_norm=true", "model.attention.window=6"]
GEMMA += ["model.attention.global_every=2", "model.attention.local_rope_base=100"]
LATENT = [*RANDOM, "model.family=deepseek_v3", "model.num_kv_heads=4", "model.latent.kv_rank=24"]
LATENT += [f"model.latent.{name}_dim={size}" for name, size in (("plain", 12), ("rotary", 6), ("value", 10))]
LATENT += [
    "model.moe.num_experts=8",
    "model.moe.top_k=2",
    "model.moe.ffn_hidden_size=20",
    "model.moe.dense_layers=[0]",
    "model.moe.shared_ffn_hidden_size=20",
]
LINEAR = [*EXPERTS, "model.family=qwen3_next", "model.linear.attention_every=2", "model.moe.shared_ffn_hidden_size=20"]
LINEAR += [f"model.linear.{n}={x}" for n, x in (("key_heads", 2), ("value_heads", 4), ("conv", 4))]
LINEAR += ["model.linear.key_head_dim=8", "model.linear.value_head_dim=6"]
MAMBA = [*EXPERTS, "model.family=nemotron_h", "model.pattern=ME*-", "model.num_layers=4", "model.tie_embeddings=false"]
MAMBA += ["model.moe.shared_ffn_hidden_size=20", "model.linear.rule=mamba2", "model.qk_norm=false", *LINEAR[-5:]]
GPT_OSS = [*RANDOM, "model.family=gpt_oss", "model.qkv_bias=true", "model.attention.window=6"]
GPT_OSS += [
    "model.attention.global_every=2",
    "model.moe.num_experts=4",
    "model.moe.top_k=2",
    "model.ffn_hidden_size=48",
]
GPT_OSS += ["model.moe.ffn_hidden_size=48"]
FAMILIES = {"gemma3": GEMMA, "deepseek": LATENT, "qwen3_next": LINEAR, "nemotron_h": MAMBA, "gpt_oss": GPT_OSS}
for name, own in FAMILIES.items():
    CASES[f"sft-{name}"] = (1, "sft", own)
    CASES[f"grpo-{name}-tp2"] = (2, "grpo", [*own, *([] if own is LINEAR else TP2)])
REMOTE, TOP_P = ["engine.ranks=1", "engine.lag=1"], ["sampling.top_p=0.9", "sampling.temperature=0.8"]
CASES["grpo-remax"] = (1, "grpo", ["algorithm.advantage=remax"])
CASES["grpo-routing-lag1"] = (2, "grpo", [*EXPERTS, "mismatch.replay_routing=true", *REMOTE])
CASES["grpo-top_p"] = (1, "grpo", TOP_P)
CASES["grpo-top_p-lag1"] = (2, "grpo", [*TOP_P, *REMOTE])
CASES["grpo-top_p-window-dp2"] = (3, "grpo", [*TOP_P, *REMOTE, *WINDOW])
CASES["grpo-filter-dp2"] = (2, "grpo", ["algorithm.filter_groups=true", "reward.normalize=true"])
CASES["dice-lag0"] = (2, "dice", ["engine.ranks=1"])
CASES["dice-top_p"] = (1, "dice", TOP_P)
CASES["dice-top_p-lag1"] = (2, "dice", [*TOP_P, *REMOTE])
CASES["dice-filter"] = (1, "dice", ["algorithm.filter_groups=true"])
CASES["dice-lag1-dp2"] = (3, "dice", REMOTE)
CASES["dice-window-tp2"] = (3, "dice", [*REMOTE, *TP2, "engine.window=4"])
COMMON = ["run.steps=3", "run.eval_every=2", "logging.progress=false", "optim.schedule=cosine", "optim.warmup_steps=2"]
COMMON += ["checkpoint.every=0", "eval.prompts=4"]


class Inputs:
    """Data and models that the cases start from, in `folder`."""

    def __init__(self, folder: Path):
        self.data, self.dice, self.sft, self.rm = (folder / name for name in ("data", "dice", "sft", "rm"))
        if folder.exists():
            return
        making = folder.with_name(f"{folder.name}-making")
        shutil.rmtree(making, ignore_errors=True)
        stages.make_data(making / "data")
        stages.make_dice(making / "dice")
        stages.stage("sft", making / "data", making / "sft", "run.steps=20")
        stages.stage("rm", making / "data", making / "rm", "run.steps=10", f"model.init={making / 'sft'}")
        making.rename(folder)

    def overrides(self, stage: str, run: Path, own: list[str]) -> list[str]:
        if stage in ("dice", "agents"):
            settings = stages.DICE
            if stage == "agents":
                settings = [x for x in settings if "environment.path" not in x and "max_turns" not in x]
                settings = [*settings, "environment.agent=tests/assets/agents.py:seeded"]
            else:
                settings = [x.replace(":Dice", ":Clock") for x in settings]
            settings = [*COMMON, *settings, "run.eval_every=0", f"model.init={self.dice / 'sft'}", *own]
            return stages.overrides("grpo", self.dice, run, *settings)
        settings = list(COMMON)
        settings += [] if stage == "sft" or "model.init=random" in own else [f"model.init={self.sft}"]
        if stage == "ppo":
            settings.append(f"reward.model={self.rm}")
        if stage == "sample":
            settings = [x for x in settings if not x.startswith(("run.eval", "optim", "checkpoint", "eval"))] + [
                "batch.prompts=6"
            ]
        if stage == "distill":
            settings += [f"algorithm.distill.teacher={self.sft}", "algorithm.distill.on_policy=0.5"]
            settings[settings.index(f"model.init={self.sft}")] = "model.init=random"
        if stage in ("dpo", "kto"):
            settings.append(f"data.eval={self.data / ('pairs' if stage == 'dpo' else 'labels')}.jsonl")
        elif stage not in ("rm", "sample"):
            settings.append(f"data.eval={self.data / 'eval.jsonl'}")
        return stages.overrides(stage, self.data, run, *settings, *own)


def digest(run: Path) -> dict[str, Any]:
    """What `run` left behind and a change that keeps the numbers leaves as it is."""
    steps = [{k: v for k, v in r.items() if k != "chain"} for r in read_jsonl(run / "steps.jsonl") if "start" not in r]
    files = [*run.glob("hf*/*.safetensors"), *run.glob("sampled/*.jsonl")]
    hashes = {str(path.relative_to(run)): hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(files)}
    return {"steps": steps, "metrics": stages.timeless(run), "files": hashes}


def differences(new: Any, old: Any, where: str = "") -> list[str]:
    if isinstance(new, dict) and isinstance(old, dict):
        names = [*old, *(name for name in new if name not in old)]
        return [text for n in names for text in differences(new.get(n), old.get(n), f"{where}/{n}")]
    if isinstance(new, list) and isinstance(old, list) and len(new) == len(old):
        return [
            text for i, (x, y) in enumerate(zip(new, old, strict=True)) for text in differences(x, y, f"{where}/{i}")
        ]
    return [] if json.dumps(new) == json.dumps(old) else [f"{where}: {new!s:.80} instead of {old!s:.80}"]


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--only", default=",".join(CASES), help=f"of {','.join(CASES)}")
    parser.add_argument("--against", type=Path, help="a folder that another version wrote")
    parser.add_argument("--close", type=float, metavar="SHARE", help="compare metrics, not bits, within this share")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="in every case; repeatable")
    parser.add_argument("--inputs", type=Path, help="data and models; beside FOLDER unless given")
    args = parser.parse_args(argv)
    inputs = (args.inputs or args.folder.absolute().with_name("inputs")).absolute()
    if not inputs.exists():  # in a process of its own: this one forks, and shall have no threads
        os.waitpid(soak.fork(lambda: Inputs(inputs) and None, inputs.with_suffix(".log")), 0)
    source, bad = Inputs(inputs), 0
    args.folder.mkdir(parents=True, exist_ok=True)
    for name in args.only.split(","):
        world, stage, own = CASES[name]
        scratch, started = Path(tempfile.mkdtemp(prefix="digests-")), time.monotonic()
        cfg = soak.frozen(source.overrides(stage, scratch / "run", [*own, *args.set]), world)
        soak.attempt(cfg, world, scratch / "log", None)
        result = json.loads(json.dumps(digest(scratch / "run")))
        (args.folder / f"{name}.json").write_text(json.dumps(result, indent=1))
        shutil.rmtree(scratch)
        text = "recorded"
        if args.against:
            other = json.loads((args.against / f"{name}.json").read_text())
            wrong = (
                distances(result["metrics"], other["metrics"], args.close, floor=1e-3)
                if args.close
                else differences(result, other)
            )
            bad += bool(wrong)
            text = "\n  ".join([f"{len(wrong)} differences", *wrong[:8]]) if wrong else "the same"
        print(f"{name}: {text} ({time.monotonic() - started:.0f} s)", flush=True)
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
