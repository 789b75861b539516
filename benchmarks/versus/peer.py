"""TRL's side, in its own environment: its trainers, stopped at every step by a callback.

python peer.py WORK.json
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from gate import Gate, Over
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    LogitsProcessor,
    LogitsProcessorList,
    TrainerCallback,
)
from workload import EOS, PAD, Work, force_lengths, response_lengths, score

STEPS = 1_000_000


class Forced(LogitsProcessor):
    """A processor that forces the responses of one `generate` to the lengths of `response_lengths`."""

    def __init__(self, work: Work, call: int, prompt_tokens: int, rows: slice):
        self.lengths = torch.tensor(response_lengths(work, call))[rows]
        self.prompt_tokens = prompt_tokens

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        done = input_ids.shape[1] - self.prompt_tokens
        return force_lengths(scores, done + 1 >= self.lengths)


def force(model: torch.nn.Module, work: Work) -> None:
    """Replace `model.generate` by one with forced lengths; a rollout may come in several calls."""
    generate, rows_done = model.generate, 0

    def forced(*args, input_ids, **kwargs):
        nonlocal rows_done
        call, first = divmod(rows_done, work.samples)
        rows_done += len(input_ids)
        rows = slice(first, first + len(input_ids))
        processor = LogitsProcessorList([Forced(work, call, input_ids.shape[1], rows)])
        return generate(*args, input_ids=input_ids, logits_processor=processor, **kwargs)

    model.generate = forced


class Steps(TrainerCallback):
    def __init__(self, gate: Gate):
        self.gate = gate

    def on_train_begin(self, *args, **kwargs):
        self.gate()

    def on_step_end(self, *args, **kwargs):
        self.gate()


def common(work: Work) -> dict:
    return {
        "output_dir": f"{work.folder}/peer",
        "report_to": "none",
        "save_strategy": "no",
        "use_cpu": True,
        "bf16": work.dtype == "bfloat16",
        "gradient_checkpointing": False,
        "learning_rate": 1e-6,
        "dataloader_pin_memory": False,
        "disable_tqdm": True,
        "logging_steps": 1,
        "seed": work.seed,
    }


def micro(work: Work, rows: int) -> dict:
    size = min(work.micro_batch, rows)
    return {"per_device_train_batch_size": size, "gradient_accumulation_steps": rows // size}


def rows(work: Work):
    from datasets import load_dataset

    return load_dataset("json", data_files=f"{work.folder}/rows.jsonl", split="train", cache_dir=f"{work.folder}/cache")


def reward(completions: list[str], **_) -> list[float]:
    return [score(text) for text in completions]


def grpo(work: Work, gate: Gate, model, tokenizer) -> None:
    from trl import GRPOConfig, GRPOTrainer

    force(model, work)
    config = GRPOConfig(
        **common(work),
        **micro(work, work.samples),
        num_generations=work.group,
        max_completion_length=work.max_response,
        beta=0.0,
        max_steps=STEPS,
    )
    GRPOTrainer(
        model, reward, args=config, train_dataset=rows(work), processing_class=tokenizer, callbacks=[Steps(gate)]
    ).train()


def sft(work: Work, gate: Gate, model, tokenizer) -> None:
    from trl import SFTConfig, SFTTrainer

    # packed rows of up to 512 tokens: as many tokens a step as `sequences` rows have on average
    packed = max(1, round(work.sequences * 128 / 512))
    config = SFTConfig(**common(work), **micro(work, packed), max_length=512, packing=True, max_steps=STEPS)

    class Counted(SFTTrainer):
        tokens = 0

        def training_step(self, model, inputs, *args, **kwargs):
            mask = inputs.get("attention_mask")
            Counted.tokens += int(inputs["input_ids"].numel() if mask is None else mask.sum())
            return super().training_step(model, inputs, *args, **kwargs)

    class CountedSteps(Steps):
        def on_step_end(self, *args, **kwargs):
            self.gate(tokens=Counted.tokens)
            Counted.tokens = 0

    Counted(
        model, args=config, train_dataset=rows(work), processing_class=tokenizer, callbacks=[CountedSteps(gate)]
    ).train()


def rm(work: Work, gate: Gate, model, tokenizer) -> None:
    from trl import RewardConfig, RewardTrainer

    model = AutoModelForSequenceClassification.from_pretrained(f"{work.folder}/reward", dtype=torch.float32)
    config = RewardConfig(**common(work), **micro(work, work.sequences), max_length=1024, max_steps=STEPS)
    RewardTrainer(
        model, args=config, train_dataset=rows(work), processing_class=tokenizer, callbacks=[Steps(gate)]
    ).train()


def dpo(work: Work, gate: Gate, model, tokenizer) -> None:
    from trl import DPOConfig, DPOTrainer

    config = DPOConfig(**common(work), **micro(work, work.sequences), max_length=1024, max_steps=STEPS)
    DPOTrainer(
        model, args=config, train_dataset=rows(work), processing_class=tokenizer, callbacks=[Steps(gate)]
    ).train()


def kto(work: Work, gate: Gate, model, tokenizer) -> None:
    from trl import KTOConfig, KTOTrainer

    config = KTOConfig(**common(work), **micro(work, work.sequences), max_length=1024, max_steps=STEPS)
    KTOTrainer(
        model, args=config, train_dataset=rows(work), processing_class=tokenizer, callbacks=[Steps(gate)]
    ).train()


def ppo(work: Work, gate: Gate, model, tokenizer) -> None:
    from trl.experimental.ppo import PPOConfig, PPOTrainer

    force(model, work)
    values, scores = (
        AutoModelForSequenceClassification.from_pretrained(f"{work.folder}/reward", dtype=torch.float32)
        for _ in range(2)
    )
    reference = AutoModelForCausalLM.from_pretrained(f"{work.folder}/model", dtype=torch.float32)
    config = PPOConfig(
        **common(work),
        **micro(work, work.samples),
        total_episodes=STEPS * work.samples,
        num_ppo_epochs=work.epochs,
        num_mini_batches=1,
        local_rollout_forward_batch_size=work.samples,
        response_length=work.max_response,
        stop_token="eos",
        temperature=1.0,
        num_sample_generations=0,
    )
    data = rows(work)
    data = data.map(lambda row: {"input_ids": tokenizer(row["prompt"])["input_ids"]}, remove_columns=data.column_names)
    PPOTrainer(
        config, tokenizer, model, reference, scores, data, values, eval_dataset=data.select(range(8)),
        callbacks=[Steps(gate)],
    ).train()  # fmt: skip


def generate(work: Work, gate: Gate, model, tokenizer) -> None:
    model.to(getattr(torch, work.dtype)).eval()
    force(model, work)
    prompts = tokenizer(list(rows(work)["prompt"]))["input_ids"]
    count_, at = work.samples // work.group, 0
    while True:
        gate()
        picked = [prompts[(at + i) % len(prompts)] for i in range(count_) for _ in range(work.group)]
        ids = torch.tensor(picked)
        with torch.no_grad():
            model.generate(
                input_ids=ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=work.max_response,
                do_sample=True,
                top_k=0,
                pad_token_id=PAD,
                eos_token_id=EOS,
            )
        at += count_


def main() -> None:
    work = Work.read(Path(sys.argv[1]))
    gate = Gate(work.threads)
    torch.set_num_threads(work.threads)
    model = AutoModelForCausalLM.from_pretrained(f"{work.folder}/model", dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(f"{work.folder}/model", padding_side="left")
    stages = {"grpo": grpo, "sft": sft, "rm": rm, "ppo": ppo, "dpo": dpo, "kto": kto, "generate": generate}
    try:
        stages[work.stage](work, gate, model, tokenizer)
    except Over:
        return


if __name__ == "__main__":
    main()
