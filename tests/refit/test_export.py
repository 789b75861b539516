"""Every family, whole: a random transformers model in, logits or scores equal (trainer and native engine), and out
again as a folder with the same bits that transformers loads."""

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import transformers

from aligner.config.sections.batch import BatchConfig
from aligner.config.sections.engine import EngineConfig
from aligner.config.sections.model.config import ModelConfig
from aligner.engines.native.load import engine_from_folder
from aligner.megatron.groups import build_layout
from aligner.megatron.model import Head
from aligner.megatron.train import ShardedModel
from aligner.models.safetensors_io import open_hf
from aligner.refit.export import export_hf
from aligner.roles.model_init import resolve
from aligner.roles.reward_model import RewardModel
from aligner.types import TrainBatch
from tests.megatron.models import ONE, plain_logits
from tests.tiny import MIXTRAL, MODELS, MOE, MORE, WINDOWS, batch, transformers_model, write_folder

pytestmark = pytest.mark.multirank
NEW = {
    name: MORE[name]
    for name in (
        "llama-biases",
        "gemma2",
        "gemma4",
        "gemma4-experts",
        "gemma4-inputs",
        "granite",
        "olmo2",
        "smollm3-windows",
        "phi3",
        "glm",
        "glm4",
        "glm4_moe",
        "deepseek_v32",
        "glm4_moe_lite",
        "glm_moe_dsa",
        "deepseek_v4",
        "ministral3",
        "qwen3_next",
        "nemotron_h",
        "qwen3_5",
        "qwen3_5_moe",
        "gpt_oss",
    )
}
FAMILIES = {
    name: replace(cfg, vocab_size=263, tie_embeddings=name in ("gemma3", "qwen3"), init_std=0.03)
    for name, cfg in (MODELS | WINDOWS | NEW | {"qwen3_moe": MOE, "mixtral": MIXTRAL}).items()
}


def through_folders(folder: Path, out: Path, head: str, tokens: torch.Tensor, lengths: torch.Tensor) -> tuple:
    """(logits or scores of the trainer, logprobs of the native engine); the model goes on to the folder `out`."""
    initial = resolve(ModelConfig(dtype="float32"), str(folder), 0)
    scored = Head() if head == "lm" else Head("score", 3)
    source = initial.source(scored)
    model = ShardedModel(initial.config, build_layout(ONE), scored, torch.float32, torch.device("cpu"), source)
    export_hf(model, out, initial.tokenizer, None, initial.origin)
    if head == "score":
        rows = TrainBatch(tokens, lengths, torch.zeros(len(tokens), 0))
        return RewardModel(model, BatchConfig()).raw_scores(rows), None
    engine = engine_from_folder(out, EngineConfig(), device="cpu", dtype=torch.float32, pad_id=0)
    return plain_logits(model, tokens, lengths), engine.logprobs(tokens, lengths)


@pytest.fixture(scope="module")
def small_files(tmp_path_factory):
    """What a folder of the hub has beside its weights."""
    from aligner.data.tokenizer import byte_tokenizer

    folder = tmp_path_factory.mktemp("files")
    byte_tokenizer(str(folder))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [1, 7], "temperature": 0.6}))
    (folder / "README.md").write_text("---\nlicense: apache-2.0\n---\n# A card\n")
    return folder


CASES = [(name, head) for name in FAMILIES for head in ("lm", "score")]
for name in (
    "gemma4",
    "gemma4-experts",
    "gemma4-inputs",
    "granite",
    "glm4_moe",
    "deepseek_v32",
    "glm4_moe_lite",
    "glm_moe_dsa",
    "deepseek_v4",
    "nemotron_h",
    "qwen3_5_moe",
):  # transformers has no such class
    CASES.remove((name, "score"))


@pytest.mark.parametrize("name, head", CASES)
def test_in_and_out(ranks, small_files, tmp_path, name, head):
    cfg = FAMILIES[name]
    model, raw = transformers_model(cfg, head, 3)
    raw |= {"time_step_limit": [0.0, math.inf]} if name == "nemotron_h" else {}  # as published
    folder, out = (
        Path(write_folder(model, raw | {"eos_token_id": [1, 7], "made_by": "x"}, tmp_path / "hf")),
        tmp_path / "out",
    )
    for path in small_files.iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    rows = batch(cfg, rows=4, width=19)
    job = {"folder": folder, "out": out, "head": head, "tokens": rows.tokens, "lengths": rows.lengths}
    got, engine = ranks.run(through_folders, **job)[0]
    real = torch.arange(19)[None] < rows.lengths[:, None]
    with torch.no_grad():
        wanted = model(rows.tokens, attention_mask=real.long()).logits
    if head == "lm":
        assert (got - wanted)[real].abs().max() <= 1e-4
        logprobs = wanted.log_softmax(-1)[:, :-1].gather(2, rows.tokens[:, 1:, None])[..., 0]
        assert (engine[:, 1:] - logprobs)[real[:, 1:]].abs().max() <= 1e-4
    else:
        assert got.shape == wanted.shape == (4, 3) and (got - wanted).abs().max() <= 1e-4
    assert wanted[real].std() > 0.3 if head == "lm" else wanted.std() > 0.1

    before, after = open_hf(folder), open_hf(out)
    assert set(before) == set(after) and all(torch.equal(before[n], after[n]) for n in before)
    loaded, info = type(model).from_pretrained(out, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    for (key, a), (_, b) in zip(model.state_dict().items(), loaded.state_dict().items(), strict=True):
        assert torch.equal(a, b), key
    for file in ("generation_config.json", "README.md", "chat_template.jinja"):
        assert (out / file).read_text() == (small_files / file).read_text()
    config = json.loads((out / "config.json").read_text())
    assert config["made_by"] == "x" and config["eos_token_id"] == [1, 7]
    tokenizer = transformers.AutoTokenizer.from_pretrained(out)
    assert tokenizer("a b").input_ids == transformers.AutoTokenizer.from_pretrained(small_files)("a b").input_ids
