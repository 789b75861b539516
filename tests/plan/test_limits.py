"""Words for what limits a phase."""

from dataclasses import replace

from aligner.config.resolve import compose
from aligner.plan.devices import DEVICES, Assumptions
from aligner.plan.job import job_of
from aligner.plan.limits import PARTS
from aligner.plan.prediction import predict

LINES = {
    "layouts": ["model=qwen3_30b_a3b", "parallel={tensor: 2, pipeline: 2, context: 2, expert: 2}", "stage=grpo"],
    "a tied embedding": ["model=qwen3_0.6b", "parallel.pipeline=2", "stage=sft", "batch.sequences=64"],
    "engines apart": ["model=qwen3_0.6b", "engine.ranks=8", "batch.prompts=64", "stage=grpo"],
    "a process": ["model=qwen3_0.6b", "engine.name=vllm", "engine.tensor_parallel=2", "stage=grpo"],
    "Muon": ["model=llama3_8b", "optim.name=muon", "optim.distributed=false", "stage=grpo"],
    "drafts": ["model=qwen3_8b", "engine.draft_model=Qwen/Qwen3-0.6B", "engine.draft_tokens=2", "stage=grpo"],
    "a judge": ["model=qwen3_0.6b", "reward.judges=[{question: '0123{response}'}]", "stage=grpo"],
}


def test_every_part_of_a_phase_has_words():
    parts, texts = set(), {}
    for name, line in LINES.items():
        job = job_of(compose(line), 16)
        if name == "drafts":
            job = replace(job, engine=replace(job.engine, accepted=2.0))
        prediction = predict(job, DEVICES["h100"], Assumptions(rollout_s=1e3, tensor_s=1.0))
        parts |= {kind.removeprefix("judges' ") for phase in prediction.phases.values() for kind in phase.parts}
        texts[name] = [str(limit) for limit in prediction.limits]
    assert parts == PARTS.keys()
    assert "refit is limited by the number of tensors (engine.name=native takes weights in place)" in texts["a process"]
    assert any(text.startswith("update is limited by batch.minibatch_samples") for text in texts["Muon"])
    assert "score is limited by the engine's own process (engine.name=native has none)" in texts["a process"]
