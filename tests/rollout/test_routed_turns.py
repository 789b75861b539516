"""The engine's routing of samples of several turns and windows: what transformers' routers choose with the weights that
first read each token."""

from dataclasses import replace

import pytest
import torch

from aligner.answers import AnswerLog
from aligner.config.sections.engine import EngineConfig
from aligner.data.tool_calls import Call
from aligner.engines.native import NativeEngine
from aligner.environments.pool import Pool
from aligner.ops.packing.turns import TAIL, common
from aligner.rollout.store import InFlight, read_samples, write_samples
from aligner.rollout.trajectory_generator import TrajectoryContext, TrajectoryGenerator, TurnAdmission
from aligner.types import SamplingParams
from tests.engines.contract import MODELS, fill, reference
from tests.engines.test_routing import routers_choice
from tests.rollout.test_pauses import CFG, TURNS, talkers

SAMPLING = SamplingParams(16, stop_token_ids=tuple(range(0, 261, 9)))
SHAPE = replace(MODELS["qwen3_moe"], vocab_size=261, max_position=4096)


class Chosen:
    """The experts of each token of a trajectory, a turn at a time: [layers, top_k] each."""

    def __init__(self, models):
        self.models, self.rows, self.tokens, self.last = models, [[]], (), 0

    def turn(self, turn):
        """Each token generated was computed from all tokens before it, read anew by weights that had not."""
        tokens = (*turn.prompt, *turn.output)
        kept = common(self.tokens, turn.prompt)
        if self.tokens and len(self.tokens) - kept >= min(TAIL, self.last):  # rendered anew
            self.rows.append(self.rows[-1])
        experts = self.rows[-1][: max(0, kept - 1)]
        for fed, version in enumerate(turn.versions, len(turn.prompt)):
            if fed > len(experts):
                experts = [*experts, *routers_choice(self.models[version], list(tokens))[len(experts) : fed]]
        self.rows[-1], self.tokens, self.last = experts, tokens, len(turn.output)


@pytest.mark.parametrize("window, stored_after", [(5, 3), (40, 0)])
def test_tokens_keep_the_experts_of_the_weights_that_made_them(tmp_path, world, monkeypatch, window, stored_after):
    """Other weights in each window. In a long one turns continue rows that the engine kept. After the window
    `stored_after` another process continues what is stored."""
    monkeypatch.setattr("aligner.data.dialogue.read_calls", lambda text, *_: (text, [Call("roll", {})]))
    tokenizer, dialogue, requests = talkers(tmp_path, "one", "another")
    config = EngineConfig(window=window)
    engine = NativeEngine(SHAPE, config, device="cpu", dtype=torch.float32, pad_id=0, reports_routing=True)
    models, paused, held = {}, 0, 0  # three of them in turns

    def generator():
        pool = Pool(CFG, dialogue.tools, AnswerLog(tmp_path / "run", 0))
        settings = {"window": window, "pace": TurnAdmission.COUNTS}
        outside = TrajectoryContext(pool, dialogue, CFG, 500, True)
        return TrajectoryGenerator(engine, tokenizer, SAMPLING, world, outside=outside, **settings)

    source = generator()
    fresh = states = source.fresh_of([0, 1], requests)
    while any(state.open for state in states):
        version = len(models) + 1
        models[version] = models.get(version - 3) or reference(SHAPE, version)
        fill(engine, models[version], version)
        (served,) = source.serve([[state for state in states if state.open]])
        by_key = {(state.group, state.index): state for state in served}
        states = [by_key.get((state.group, state.index), state) for state in states]
        paused, held = paused + sum(state.begun is not None for state in states), held + engine.stats.held_tokens
        if version == stored_after:
            write_samples(tmp_path / "stored", InFlight(3, [0, 1], states))
            read = read_samples(tmp_path / "stored", [0, 1], InFlight(3, [0, 1], fresh))
            source, states = generator(), [*read[0], *read[1]]
    assert paused > 2 and (window < 40 or held > 100) and max(len(state.turns) for state in states) == TURNS
    generations = source.ended(requests, states).generations
    for row, state in enumerate(states):
        chosen = Chosen(models)
        for turn in state.turns:
            chosen.turn(turn)
        expected = [torch.nn.functional.pad(torch.stack(one), (0, 0, 0, 0, 0, 1)) for one in chosen.rows]  # its end
        actual = generations.routing[row].long().sort(-1).values
        assert torch.equal(actual[: sum(map(len, expected))], torch.cat(expected))
        assert sum(map(len, expected)) == len(state.prompt.tokens) + generations.lengths[row]
        assert not actual[sum(map(len, expected)) :].any()
        total = sum(len(turn.routing) for turn in state.turns)  # what is stored of each token: once
        assert total < sum(map(len, expected)) + 2 * len(state.turns)
