"""The table of engines: what a page says of it, and what one lacks is refused with its reason."""

from dataclasses import fields

import pytest

from aligner.config.engines import ENGINES, Capabilities, able
from aligner.config.resolve import compose
from aligner.config.validate import validate
from aligner.errors import ConfigError

# what asks for a capability: settings, and the key of the refusal
ASKS = {
    "apart": (["engine.ranks=1"], "engine.name"),
    "windows": (["engine.ranks=1", "engine.lag=1", "engine.window=4"], "engine.name"),
    "routing": (["mismatch.replay_routing=true"], "mismatch.replay_routing"),
    "merges_adapters": (["model.lora.rank=2", "refit.adapters=factors"], "refit.adapters"),
    "any_prompt": (["reward.judges=[{question: '{response}'}]"], "engine.name"),
    "repeats": (["run.deterministic=true"], "run.deterministic"),
    "tensor_parallel": (["engine.tensor_parallel=2"], "engine.tensor_parallel"),
    "sleep_weights": (["engine.sleep=true", "engine.sleep_weights=true"], "engine.sleep_weights"),
    "prefix_reuse": (["engine.{section}.prefix_reuse=true"], "engine.{section}.prefix_reuse"),
    "arguments": (["+engine.{section}.args.backend=x"], "engine.{section}.args"),
    "cuda_graphs": (["engine.cuda_graphs=true"], "engine.cuda_graphs"),
}
LACKING = [
    (name, capability)
    for name, entry in ENGINES.items()
    for capability in ASKS
    if not getattr(entry.can, capability) and not entry.can.replays
    if entry.section or "{section}" not in ASKS[capability][1]
]


@pytest.mark.parametrize(("name", "capability"), LACKING)
def test_what_an_engine_lacks_is_refused_with_its_reason(name, capability, tiny_data):
    settings, key = ASKS[capability]
    section = ENGINES[name].section
    asked = ["stage=grpo", "model=tiny", f"data.train={tiny_data / 'train.jsonl'}", "batch.prompts=4", "batch.group=2"]
    asked += ["run.deterministic=false", "reward.functions=[{path: math}]", f"engine={name}"]
    with pytest.raises(ConfigError) as caught:
        validate(compose([*asked, *(text.replace("{section}", section) for text in settings)]), 2)
    assert caught.value.key == key.format(section=section)
    assert name in str(caught.value) and ENGINES[name].reasons.get(capability, "") in str(caught.value)


def test_every_engine_has_a_column_and_every_capability_somebody_who_has_it():
    assert all(able(one.name) for one in fields(Capabilities))
    assert all(set(entry.reasons) <= {one.name for one in fields(Capabilities)} for entry in ENGINES.values())
    in_processes = {name for name, entry in ENGINES.items() if entry.can.own_process}
    assert in_processes == {name for name, entry in ENGINES.items() if entry.section}
