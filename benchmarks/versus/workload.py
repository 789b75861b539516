"""What both contestants get: one folder with random weights, a tokenizer and rows, and response lengths by a formula.

Imports nothing of the project: the peer's environment does not have it.
"""

from __future__ import annotations

import json
import random
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

PAD, EOS, UNKNOWN = 0, 1, 2
SPECIAL = ("<pad>", "<eos>", "<unk>")


@dataclass(frozen=True)
class Size:
    layers: int
    hidden: int
    ffn: int
    heads: int
    kv_heads: int
    vocab: int
    samples: int = 128  # of a rollout


SIZES = {
    "3m": Size(5, 192, 512, 6, 2, 4096),
    "30m": Size(8, 512, 1408, 8, 4, 8192, samples=64),
    "120m": Size(12, 768, 2048, 12, 4, 32768, samples=16),
}


@dataclass(frozen=True)
class Work:
    """One comparison."""

    stage: str  # grpo, generate, sft, rm, ppo, dpo, kto
    size: str
    dtype: str  # float32, bfloat16
    prompt_tokens: int
    folder: str
    threads: int
    group: int = 8
    max_response: int = 128
    sequences: int = 32  # sft, kto: rows of a step; rm, dpo: pairs
    micro_batch: int = 16
    epochs: int = 4  # ppo
    even: bool = False  # dpo, kto: all answers are of one length, so that padding costs nothing
    seed: int = 0

    @property
    def samples(self) -> int:
        """Samples of a rollout. PPO goes four times over them, with two models."""
        return SIZES[self.size].samples // (2 if self.stage == "ppo" else 1)

    @property
    def key(self) -> str:
        return f"{self.stage}.{self.size}.{self.dtype}.{self.prompt_tokens}{'.even' * self.even}"

    def write(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self)))

    @classmethod
    def read(cls, path: Path) -> Work:
        return cls(**json.loads(path.read_text()))


def long_tailed(count: int, longest: int, seed: int) -> list[int]:
    """Return `count` lengths from 1 to `longest`, exponential with a mean of a quarter of it."""
    rng = random.Random(seed)
    return [max(1, min(longest, round(rng.expovariate(4 / longest)))) for _ in range(count)]


def response_lengths(work: Work, call: int) -> list[int]:
    """Return the length of every row of the `call`-th generation."""
    return long_tailed(work.samples, work.max_response, 1000 * work.seed + call)


def force_lengths(logits: torch.Tensor, last: torch.Tensor) -> torch.Tensor:
    """Return logits [n, V] with which rows with `last` (bool [n]) can only end, and the others cannot. In place."""
    logits[:, PAD] = -torch.inf
    logits[:, EOS] = torch.where(last, 0.0, -torch.inf).to(logits.dtype)
    others = torch.zeros(logits.shape[1], dtype=torch.bool, device=logits.device)
    others[EOS] = True
    return logits.masked_fill_(last[:, None] & ~others, -torch.inf)


def score(text: str) -> float:
    """Return a cheap reward that differs between samples."""
    return (len(text.split()) % 7) / 7


def rewarded(samples: list) -> list[float]:
    """Return `score` for samples, as the project calls it."""
    return [score(sample.response) for sample in samples]


def build(work: Work) -> None:
    """Write the rows, and the models where they are not there yet."""
    folder = Path(work.folder)
    size = SIZES[work.size]
    if not (folder / "model" / "config.json").exists():
        _models(folder, size, work)
    rng = random.Random(work.seed)

    def words(count: int) -> str:
        return " ".join(f"w{rng.randrange(len(SPECIAL), size.vocab)}" for _ in range(count))

    if work.stage == "sft":
        lengths = [max(16, n) for n in long_tailed(4096, 512, work.seed)]
        rows = [{"prompt": words(n // 4) + " ", "completion": words(n - n // 4)} for n in lengths]
    elif work.stage in ("rm", "dpo", "kto"):
        rows = []
        lengths = (([64] * 4096) if work.even else long_tailed(4096, 256, seed) for seed in (work.seed, work.seed + 1))
        for a, b in zip(*lengths, strict=True):
            prompt = words(work.prompt_tokens) + " "
            answers = words(max(2, a)), words(max(2, b))
            if work.stage == "kto":
                rows += [{"prompt": prompt, "completion": x, "label": i == 0} for i, x in enumerate(answers)]
            else:
                rows.append({"prompt": prompt, "chosen": answers[0], "rejected": answers[1]})
    else:
        rows = [{"prompt": words(work.prompt_tokens)} for _ in range(2048)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def _models(folder: Path, size: Size, work: Work) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, LlamaForSequenceClassification, PreTrainedTokenizerFast

    torch.manual_seed(work.seed)
    config = LlamaConfig(
        vocab_size=size.vocab,
        hidden_size=size.hidden,
        intermediate_size=size.ffn,
        num_hidden_layers=size.layers,
        num_attention_heads=size.heads,
        num_key_value_heads=size.kv_heads,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
        pad_token_id=PAD,
        eos_token_id=EOS,
        bos_token_id=None,
        attention_bias=False,
    )
    model = LlamaForCausalLM(config)
    reward = LlamaForSequenceClassification(LlamaConfig(**{**config.to_dict(), "num_labels": 1}))
    reward.model.load_state_dict(model.model.state_dict())
    vocabulary = {token: i for i, token in enumerate((*SPECIAL, *(f"w{n}" for n in range(len(SPECIAL), size.vocab))))}
    words = Tokenizer(models.WordLevel(vocabulary, unk_token=SPECIAL[UNKNOWN]))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token=SPECIAL[PAD], eos_token=SPECIAL[EOS], unk_token=SPECIAL[UNKNOWN]
    )
    for name, kind in (("model", model), ("reward", reward)):
        kind.save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)
