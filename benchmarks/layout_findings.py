"""Public findings of results that silently depend on the layout, each by value: the wrong formula, and this project's.

    python -m benchmarks.layout_findings [--write]

Tiny models of `aligner check layouts` run on one, two or four processes of this machine. Columns: the quantity on one
rank, by the wrong formula, and here on the layout of the finding. A wrong formula is applied to the numbers of one
rank, or is put into the code that runs. `--write` puts the table into docs/explanation/layout-findings.md.
"""

from __future__ import annotations

import argparse
import math
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from aligner.config.resolve import compose
from aligner.config.sections.algorithm import AlgorithmConfig
from aligner.config.sections.batch import BatchConfig
from aligner.config.sections.model.config import ModelConfig
from aligner.config.sections.parallel import ParallelConfig
from aligner.ops.kernels.logprobs import token_logprobs
from aligner.ops.seeds import derive
from aligner.tools.layouts.cases import PLAIN_BATCH, LayoutCase
from aligner.tools.layouts.tiny import tiny_model
from aligner.types import TrainBatch
from tests.tools.layout_jobs import updated

PAGE = Path(__file__).parents[1] / "docs/explanation/layout-findings.md"
TABLE = re.compile(r"(<!-- python -m benchmarks\.layout_findings --write -->\n).*?(<!-- end -->\n)", re.DOTALL)
HEAD = ("finding", "what happens", "quantity", "one rank", "wrong", "here")
DIGITS = 4
DENSE, EXPERTS, SINKS = "qwen3_0.6b", "qwen3_30b_a3b", "gpt_oss_20b"  # presets whose tiny models run
AUX_COEF = 0.05
ONE_ROW = BatchConfig(micro_batch_samples=1, share_prompts=False)
TP2, SEQUENCE = ParallelConfig(tensor=2), ParallelConfig(tensor=2, sequence=True)
PP2, CP2, EP2 = ParallelConfig(pipeline=2), ParallelConfig(context=2), ParallelConfig(tensor=2, expert=2, sequence=True)
VOCABULARY, CAP = 101, 3.0  # two ranks pad it to 102; cap of logits
Run = Callable[..., Any]  # (function, number of ranks, arguments) -> result of rank 0
GITHUB = "https://github.com/"


@dataclass(frozen=True)
class Finding:
    """A finding with its numbers."""

    links: tuple[str, ...]  # owner/repository#number
    text: str
    quantity: str
    one: float  # on one rank
    wrong: float
    here: float

    @property
    def cells(self) -> tuple[str, ...]:
        links = ", ".join(f"[{link.partition('/')[2]}]({address(link)})" for link in self.links)
        numbers = (f"{x:.{DIGITS}g}" for x in (self.one, self.wrong, self.here))
        return links, self.text, self.quantity, *numbers


def address(link: str) -> str:
    """Return where a finding is: GitHub leads from /issues/ to a pull request of that number."""
    repository, _, number = link.partition("#")
    return f"{GITHUB}{repository}/issues/{number}"


def model_of(preset: str, aux_coef: float = 0.0) -> ModelConfig:
    model = tiny_model(compose([f"model={preset}"]).model)
    return replace(model, moe=replace(model.moe, aux_coef=aux_coef))


# --- what ranks run


def replayed(case: LayoutCase, order: Sequence[int]) -> dict[str, Any]:
    """Return what `updated` does. `order`: layers of the experts that each layer replays."""
    assert case.model is not None
    return updated(case, rows=partial(routed_rows, model=case.model, order=order))


def sinks_alone(case: LayoutCase) -> tuple[float, list[Tensor]]:
    """Return the gradient norm, as the optimizer computes it, of a model all of whose other gradients are set to 0,
    and the gradients of its attention sinks."""
    from aligner.tools.layouts.replay import build, own_share, training_rows, update

    model = build(case)
    config, seen = model.module.config, []
    finalize = config.finalize_model_grads_func

    def reduced(*arguments: Any, **named: Any) -> None:
        finalize(*arguments, **named)
        for name, parameter in model.module.named_parameters():
            if "sinks" in name:
                seen.append(parameter.main_grad.clone())
            else:
                parameter.main_grad.zero_()

    config.finalize_model_grads_func = reduced
    rows = own_share(training_rows(model.cfg.vocab_size), model)
    _, metrics = update("likelihood", model, rows, case.batch, AlgorithmConfig())
    return metrics["policy/grad_norm"], seen


def routed_rows(vocab_size: int, model: ModelConfig, order: Sequence[int]) -> TrainBatch:
    """Return rows with experts by lot for all tokens but the last of each row."""
    from aligner.tools.layouts.replay import training_rows

    rows = training_rows(vocab_size)
    places = (*rows.tokens.shape, model.num_layers, model.moe.num_experts)
    chosen = torch.rand(places, generator=torch.Generator().manual_seed(4)).topk(model.moe.top_k).indices
    known = torch.arange(rows.tokens.shape[1]) < rows.lengths[:, None] - 1
    return replace(rows, routing=(chosen[:, :, list(order)] * known[:, :, None, None]).to(torch.uint8))


def token_losses(case: LayoutCase) -> tuple[Tensor, TrainBatch]:
    """Return the negative log-likelihood of each token [B, T] on one rank, and the rows."""
    from aligner.roles.policy import Policy
    from aligner.tools.layouts.replay import build, training_rows

    model = build(case)
    rows = training_rows(model.cfg.vocab_size)
    return -Policy(model, case.batch).logprobs(rows), rows


def vocabulary() -> dict[str, float]:
    """Return mean logprob and gradient norm of logits, of capped ones on all tensor ranks of the world."""
    ranks, rank = dist.get_world_size(), dist.get_rank()
    shard = padded_logits(ranks).chunk(ranks, 1)[rank].detach().requires_grad_()
    group = dist.group.WORLD if ranks > 1 else None
    logprobs, _ = token_logprobs(shard, targets(), vocab_size=VOCABULARY, group=group)
    logprobs.mean().backward()
    assert shard.grad is not None
    square = shard.grad.double().square().sum()
    dist.all_reduce(square)
    return {"logprob": float(logprobs.detach().mean()), "norm": float(square.sqrt())}


def padded_logits(ranks: int) -> Tensor:
    """Return capped logits; a column that pads the vocabulary is as low as the cap lets it be."""
    logits = 4 * torch.randn(16, VOCABULARY, generator=torch.Generator().manual_seed(5)) - 12
    return CAP * torch.tanh(torch.nn.functional.pad(logits, (0, -VOCABULARY % ranks), value=-math.inf) / CAP)


def targets() -> Tensor:
    return torch.randint(VOCABULARY, (16,), generator=torch.Generator().manual_seed(6))


# --- findings


def measure(run: Run) -> list[Finding]:
    """Return all findings. `run` calls a function on a number of ranks."""
    findings = (of_denominators, of_norms, of_experts, of_routes, of_logits, of_dropout)
    return [finding for find in findings for finding in find(run)]


def of_denominators(run: Run) -> Iterator[Finding]:
    model = model_of(DENSE)
    one, dp2, cp2 = (run(updated, case.world, case=case) for case in _cases(model, None, ParallelConfig(), CP2))
    rows_alone = run(updated, 1, case=LayoutCase(batch=ONE_ROW, model=model))
    losses, rows = run(token_losses, 1, case=LayoutCase(model=model))
    masked, mask = losses * rows.loss_mask, rows.loss_mask
    each = masked.sum(1) / mask.sum(1)
    yield Finding(
        ("verl-project/verl#5863", "verl-project/verl#7321", "verl-project/verl#7200"),
        "Each micro-batch divides by its own tokens.",
        "loss, 8 micro-batches of a row",
        one["loss"],
        float(each.mean()),
        rows_alone["loss"],
    )
    yield Finding(
        ("verl-project/verl#5867", "areal-project/AReaL#1273"),
        "Megatron's schedule divides a loss by the number of micro-batches that is normalised already.",
        "gradient norm, 8 micro-batches",
        one["norm"],
        one["norm"] / len(mask),
        rows_alone["norm"],
    )
    halves = [masked[half].sum() / mask[half].sum() for half in (slice(None, 4), slice(4, None))]
    yield Finding(
        ("NVIDIA/Megatron-LM#7452", "verl-project/verl#3994", "pytorch/torchtitan#2206"),
        "Data ranks divide by their own tokens, and the results are averaged (finding 3: multi-token prediction).",
        "loss, dp2",
        one["loss"],
        float(sum(halves) / 2),
        dp2["loss"],
    )
    first = on_first_rank(rows)
    own = [(masked * on).sum() / (mask * on).sum() for on in (first, ~first)]
    yield Finding(
        ("NVIDIA/Megatron-LM#7452", "NVIDIA/Megatron-LM#7513", "verl-project/verl#6049"),
        "Context ranks divide by the tokens of their own chunks (finding 9).",
        "loss, cp2",
        one["loss"],
        float(sum(own) / 2),
        cp2["loss"],
    )
    yield Finding(
        ("NVIDIA/Megatron-LM#906", "NovaSky-AI/SkyRL#1751"),
        "The loss is multiplied by the number of context ranks, which nothing divides again.",
        "gradient norm, cp2",
        one["norm"],
        2 * one["norm"],
        cp2["norm"],
    )


def on_first_rank(rows: TrainBatch) -> Tensor:
    """Return bool [B, T]: the first of two context ranks, with chunks 0 and 3 of 4, predicts the token."""
    predicting = torch.arange(rows.tokens.shape[1]) - 1
    chunk = predicting // -(-rows.lengths[:, None] // 4)
    return (chunk == 0) | (chunk == 3)


def of_norms(run: Run) -> Iterator[Finding]:
    model = model_of(DENSE)
    one, tp2, sequence, pp2 = (run(updated, case.world, case=case) for case in _cases(model, None, TP2, SEQUENCE, PP2))
    yield Finding(
        ("ROCm/TransformerEngine#715",),
        "Weights that are whole on each tensor rank count once for each.",
        "gradient norm, tp2",
        one["norm"],
        math.hypot(one["norm"], norm_of(one, "norm.weight")),
        tp2["norm"],
    )
    yield Finding(
        ("NVIDIA/Megatron-LM#7227",),
        "A tied embedding counts on the first and on the last stage.",
        "gradient norm, pp2",
        one["norm"],
        math.hypot(one["norm"], norm_of(one, "embed_tokens")),
        pp2["norm"],
    )
    unsummed = run(updated, 2, case=LayoutCase(2, SEQUENCE, model=model), unsummed=True)
    yield Finding(
        ("NVIDIA/TransformerEngine#435", "NVIDIA/Megatron-LM#443"),
        "With sequence parallelism tensor ranks do not sum the gradients of norms.",
        "gradient of the last norm, tp2",
        *(norm_of(result, "model.norm.weight") for result in (one, unsummed, sequence)),
    )
    (alone, sinks), (tp2, _) = (run(sinks_alone, case.world, case=case) for case in _cases(model_of(SINKS), None, TP2))
    yield Finding(
        ("NVIDIA/Megatron-LM#7452", "NVIDIA/Megatron-LM#7530"),
        "Attention sinks count on the first tensor rank only (finding 8).",
        "gradient norm of the sinks, tp2",
        alone,
        math.hypot(*(float(t.chunk(2)[0].norm()) for t in sinks)),
        tp2,
    )


def of_experts(run: Run) -> Iterator[Finding]:
    plain, balanced = model_of(EXPERTS), model_of(EXPERTS, AUX_COEF)
    without = run(updated, 1, case=LayoutCase(model=plain))
    one, ep2, cp2 = (run(updated, case.world, case=case) for case in _cases(balanced, None, EP2, CP2))
    second = [f"experts.{expert}." for expert in range(plain.moe.num_experts // 2, plain.moe.num_experts)]
    yield Finding(
        ("NVIDIA/Megatron-LM#5916", "NVIDIA/Megatron-LM#6470"),
        "Experts of tensor ranks other than the first are left out, though each rank has others.",
        "gradient norm, ep2+tp2",
        one["norm"],
        math.sqrt(one["norm"] ** 2 - norm_of(one, *second) ** 2),
        ep2["norm"],
    )
    with_share = partial(_router, without, one)
    _, rows = run(token_losses, 1, case=LayoutCase(model=plain))
    for links, text, layout, share, result in (
        (
            ("NVIDIA/Megatron-LM#5047", "NVIDIA/Megatron-LM#3768"),
            "The auxiliary loss shrinks with the number of tensor ranks.",
            "ep2+tp2",
            0.5,
            ep2,
        ),
        (
            ("NVIDIA/Megatron-LM#7452",),
            "The sum of counts over tensor ranks replaces a rank's own: the auxiliary loss doubles (finding 10).",
            "ep2+tp2",
            2.0,
            ep2,
        ),
        (
            ("verl-project/verl#6609", "verl-project/verl#6836"),
            "The auxiliary loss is never divided by the number of tokens.",
            "cp2",
            float(rows.loss_mask.sum()),
            cp2,
        ),
    ):
        quantity = f"gradient of the routers, {layout}"
        yield Finding(links, text, quantity, with_share(1.0), with_share(share), norm_of(result, "mlp.gate."))


def _router(without: Mapping[str, Any], full: Mapping[str, Any], share: float) -> float:
    """Return the norm of the routers' gradient with a share of what the auxiliary loss adds to it."""
    names = [name for name in full["gradient"] if "mlp.gate." in name]
    mixed = (torch.lerp(without["gradient"][n], full["gradient"][n], share) for n in names)
    return math.hypot(*(float(t.norm()) for t in mixed))


def of_routes(run: Run) -> Iterator[Finding]:
    model = model_of(EXPERTS)
    order = tuple(range(model.num_layers))
    half = order[: len(order) // 2]
    one, wrong = (run(replayed, 1, case=LayoutCase(model=model), order=o) for o in (order, (*half, *half)))
    pp2 = run(replayed, 2, case=LayoutCase(2, PP2, model=model), order=order)
    yield Finding(
        ("verl-project/verl#7106", "verl-project/verl#7805"),
        "A stage replays the experts of the first layers, as it counts layers from its own first one.",
        "loss, pp2, replayed experts",
        *(result["loss"] for result in (one, wrong, pp2)),
    )


def of_logits(run: Run) -> Iterator[Finding]:
    one, tp2 = (run(vocabulary, world) for world in (1, 2))
    rows = torch.arange(len(targets()))
    unmasked = float(padded_logits(2).log_softmax(1)[rows, targets()].mean())
    yield Finding(
        ("unslothai/unsloth#10616",),
        "A cap of logits makes the columns that pad the vocabulary likely.",
        "mean logprob, tp2, 101 tokens",
        one["logprob"],
        unmasked,
        tp2["logprob"],
    )
    logits = padded_logits(1)
    gradient = (torch.nn.functional.one_hot(targets(), VOCABULARY) - logits.softmax(1)) / len(logits)
    low = torch.arange(VOCABULARY) < (VOCABULARY + 1) // 2
    owned = low == (targets()[:, None] < (VOCABULARY + 1) // 2)  # columns of the rank that has the token's
    yield Finding(
        ("modelscope/ms-swift#9947",),
        "A logprob's gradient does not reach the columns of other tensor ranks.",
        "gradient norm of logits, tp2",
        one["norm"],
        float((gradient * owned).norm()),
        tp2["norm"],
    )


def of_dropout(run: Run) -> Iterator[Finding]:
    def equal(seeds: Sequence[int]) -> float:
        masks = [torch.rand(1 << 16, generator=torch.Generator().manual_seed(seed)) < 0.5 for seed in seeds]
        return float((masks[0] == masks[1]).double().mean())

    yield Finding(
        ("huggingface/transformers#31412", "tenstorrent/tt-metal#55947"),
        "All data ranks drop alike, as they have one seed.",
        "share of equal choices of two data ranks, p = 0.5",
        0.5,
        equal((0, 0)),
        equal([derive(0, "dropout", 0, rank, 0) for rank in (0, 1)]),
    )


def norm_of(result: Mapping[str, Any], *parts: str) -> float:
    """Return the norm of the gradients of all tensors whose names contain one of these texts."""
    named = [t for name, t in result["gradient"].items() if any(text in name for text in parts)]
    assert named, parts
    return math.hypot(*(float(t.norm()) for t in named))


def _cases(model: ModelConfig, *parallels: ParallelConfig | None) -> Iterator[LayoutCase]:
    """Yield a case for each, on two ranks; None: on one."""
    for parallel in parallels:
        yield LayoutCase(1 if parallel is None else 2, parallel or ParallelConfig(), PLAIN_BATCH, model=model)


# --- the page


def markdown(findings: Sequence[Finding]) -> str:
    lines = [HEAD, ("---",) * len(HEAD), *(finding.cells for finding in findings)]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def on_page() -> list[list[str]]:
    """Return the cells of the page's table, without its head."""
    match = TABLE.search(PAGE.read_text(encoding="utf-8"))
    assert match is not None, f"{PAGE} has no table"
    return [[cell.strip() for cell in line.split("|")[1:-1]] for line in match[0].splitlines()[1:-1]][2:]


def main(arguments: list[str]) -> int:
    from tests.ranks import Ranks

    parser = argparse.ArgumentParser(prog="python -m benchmarks.layout_findings", description=__doc__.splitlines()[0])
    parser.add_argument("--write", action="store_true", help="put the table into the page")
    options = parser.parse_args(arguments)
    pool = Ranks(size=2)

    def run(function: Callable, world: int, **arguments: Any) -> Any:
        module = function.__module__.replace("__main__", "benchmarks.layout_findings")
        return pool.run(f"{module}:{function.__name__}", world=world, **arguments)[0]

    text = markdown(measure(run))
    pool.close()
    print(text)
    if options.write:
        page = PAGE.read_text(encoding="utf-8")
        PAGE.write_text(TABLE.sub(lambda match: f"{match[1]}{text}{match[2]}", page), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
