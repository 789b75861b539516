"""Our settings for TRL's values."""

from __future__ import annotations

from math import ceil

from aligner.errors import ConfigError
from aligner.tools.translate import trl_losses as losses
from aligner.tools.translate.sheet import SCHEDULES, Sheet, share, sources
from aligner.tools.translate.source import Source
from aligner.tools.translate.trl import RENAMED, STAGES, command_of, vocabulary


def translate(source: Source, command: str, gpus: int) -> Sheet:
    command = command_of(source, command)
    values = {RENAMED.get(name, name): value for name, value in source.values.items()}
    labels = {RENAMED.get(name, name): name for name in source.values}
    sheet = Sheet(vocabulary(command), values, STAGES[command], labels)
    if gpus < 1:
        raise ConfigError(
            "--gpus", gpus, "the number of GPUs that the file was for", "TRL's batch sizes are per GPU: --gpus 8."
        )
    sheet.put("cluster.gpus", gpus)
    sheet.model("model_name_or_path")
    _data(sheet)
    updates = _rollout_batch(sheet, gpus) if STAGES[command] == "grpo" else _row_batch(sheet, gpus)
    _length(sheet, updates)
    _optimizer(sheet)
    _adapters(sheet)
    _rest(sheet)
    if STAGES[command] == "grpo":
        losses.generation(sheet)
        (losses.grpo if command == "grpo" else losses.rloo)(sheet)
        losses.rewards(sheet)
    else:
        {"sft": losses.sft, "dpo": losses.dpo, "reward": losses.reward, "kto": losses.kto}[command](sheet)
    return sheet


def _data(sheet: Sheet) -> None:
    """Set the data: one dataset, or a mixture of TRL or of the alignment handbook."""
    mixture = sheet["datasets"] or (sheet["dataset_mixture"] or {}).get("datasets")
    if not mixture:
        sheet.data("dataset_name", sheet["eval_strategy"] != "no")
        return
    name = "datasets" if sheet["datasets"] else "dataset_mixture"
    if not all(isinstance(entry, dict) and (entry.get("path") or entry.get("id")) for entry in mixture):
        raise ConfigError(name, mixture, "a list of mappings with a path each")
    folders = [sheet.folder(str(entry.get("path") or entry["id"])) for entry in mixture]
    sheet.put("data.sources", sources(folders), name)
    sheet.lack(("dataset_name",), f"{name} is read")
    sheet.without[f"splits, columns and shares of {name}"] = "data.sources[].columns and .weight; one split is read"


def _row_batch(sheet: Sheet, gpus: int) -> int:
    """Set the rows of an optimizer step; return the steps of ours that are one of TRL's."""
    names = ("per_device_train_batch_size", "gradient_accumulation_steps")
    sheet.put("batch.sequences", sheet[names[0]] * sheet[names[1]] * gpus, *names, note=f"x {gpus} GPUs")
    if sheet.written(names[0]):
        sheet.put("batch.micro_batch_samples", sheet[names[0]], names[0])
    return 1


def _rollout_batch(sheet: Sheet, gpus: int) -> int:
    """Set the samples of a rollout and of an optimizer step; return the optimizer steps of a rollout."""
    micro, accumulation = "per_device_train_batch_size", "gradient_accumulation_steps"
    step = sheet[micro] * gpus * sheet[accumulation]
    names = [micro, "generation_batch_size"]
    samples = sheet["generation_batch_size"]
    if samples is None:
        names[1] = "steps_per_generation" if sheet["steps_per_generation"] else accumulation
        samples = sheet[micro] * gpus * (sheet["steps_per_generation"] or sheet[accumulation])
    group = sheet["num_generations"]
    if samples % group or samples % step:
        raise ConfigError(
            "num_generations" if samples % group else "generation_batch_size",
            group if samples % group else samples,
            f"a divisor of the {samples} samples of a generation" if samples % group else f"a multiple of {step}",
            f"With --gpus {gpus}.",
        )
    note = f"{samples} samples of {gpus} GPUs / {group}"
    sheet.put("batch.prompts", samples // group, *names, "num_generations", note=note)
    sheet.take("num_generations")
    if step < samples:
        sheet.put("batch.minibatch_samples", step, micro, accumulation, note=f"x {gpus} GPUs")
    if sheet.written(micro):
        sheet.put("batch.micro_batch_samples", sheet[micro], micro)
    sheet.take("num_iterations")
    return samples // step * sheet["num_iterations"]


def _length(sheet: Sheet, updates: int) -> None:
    """Set the number of steps, and what happens after how many. `updates`: optimizer steps of one of our steps."""
    note = f"{updates} optimizer steps are one rollout" if updates > 1 else ""
    if sheet["max_steps"] > 0:
        sheet.put("run.steps", ceil(sheet["max_steps"] / updates), "max_steps", note=note)
    else:
        sheet.put("run.epochs", sheet["num_train_epochs"], "num_train_epochs")
    for strategy, steps, key in (
        ("eval_strategy", "eval_steps", "run.eval_every"),
        ("save_strategy", "save_steps", "checkpoint.every"),
    ):
        every = sheet[steps]
        if sheet[strategy] == "steps" and every is not None and every >= 1:
            sheet.put(key, max(1, round(every / updates)), steps, note=note)
            sheet.drop((strategy,), "")
        elif sheet[strategy] == "no" or (sheet[strategy] == "steps" and every is None):
            sheet.drop((strategy, steps), f"{key}=0: at the end")
        else:
            sheet.lack((strategy, steps), f"write {key} in steps; without it: at the end")
    sheet.take("save_total_limit")


def _optimizer(sheet: Sheet) -> None:
    sheet.take("learning_rate")
    sheet.take("lr_scheduler_type", SCHEDULES.get)
    extra = sheet["lr_scheduler_kwargs"] or {}
    if "min_lr_rate" in extra or "min_lr" in extra:
        floor = float(extra.get("min_lr") or share(sheet["learning_rate"], float(extra["min_lr_rate"])))
        sheet.put("optim.min_lr", floor, "lr_scheduler_kwargs", "learning_rate")
    elif extra:
        sheet.lack(("lr_scheduler_kwargs",), "optim.schedule, optim.min_lr and optim.decay_from are all")
    sheet.put(
        "optim.warmup_steps",
        sheet["warmup_ratio"] or sheet["warmup_steps"],
        *losses.first_written(sheet, "warmup_ratio", "warmup_steps"),
    )
    sheet.take("weight_decay")
    sheet.put("optim.betas", [sheet["adam_beta1"], sheet["adam_beta2"]], "adam_beta1", "adam_beta2")
    sheet.take("adam_epsilon")
    sheet.take("max_grad_norm")
    if (name := sheet["optim"]) and name.startswith("adamw") and "bit" not in name:
        sheet.drop(("optim",), "optim.name=adam is AdamW")
    else:
        sheet.lack(("optim",), "optim.name is adam (AdamW in float32) or muon")


def _adapters(sheet: Sheet) -> None:
    if not sheet["use_peft"]:
        return
    sheet.put("model.lora.rank", sheet["lora_r"], "use_peft", "lora_r")
    sheet.take("lora_alpha")
    sheet.take("lora_dropout")
    targets = sheet["lora_target_modules"]
    if targets:
        targets = ["all-linear"] if targets == ["all-linear"] else targets
        sheet.put("model.lora.targets", targets, "lora_target_modules")
    else:
        sheet.put("model.lora.targets", ["q_proj", "v_proj"], "use_peft", note="peft's default for most models")
    for name in ("use_rslora", "use_dora"):
        sheet.take(name)
    for name in ("load_in_4bit", "load_in_8bit"):
        if sheet[name]:
            sheet.take(name)


def _rest(sheet: Sheet) -> None:
    for name in ("seed", "full_determinism", "router_aux_loss_coef", "run_name"):
        sheet.take(name)
    if sheet["output_dir"]:
        sheet.take("output_dir")
    sheet.take("gradient_checkpointing", lambda on: "full" if on else "none")
    if sheet["bf16"]:
        sheet.take("bf16")
    sheet.drop(("bf16",), "model.dtype=auto: float32 on a CPU, bfloat16 on a GPU")
    if sheet["fp16"]:
        sheet.lack(("fp16",), "model.dtype is bfloat16 or float32")
    sheet.track("report_to", sheet["report_to"] or [], "project")
    sheet.drop(("report_to", "project"), "logging.trackers=[tensorboard]")
    if sheet["label_smoothing_factor"]:
        sheet.lack(("label_smoothing_factor",), "the loss of a token is nll or dft (algorithm.sft_loss)")
    sheet.drop(("disable_dropout",), "nothing but adapters has dropout (model.lora.dropout)")
