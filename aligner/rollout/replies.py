"""Replies to questions by an engine: the run's own, with the weights that it has, or a judge's."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from aligner.data.templates import encode_prompts
from aligner.data.tokenizer import decode_responses, sampled_with
from aligner.engines.base import RolloutEngine
from aligner.errors import EngineError
from aligner.ops.agree import raised_together
from aligner.rewards.judge import Question, Reply
from aligner.rollout.sharing import share
from aligner.types import SamplingParams


@dataclass
class EngineReplies:
    """Replies for `rewards.judge.Ask`: greedy, so that a question has one reply. Collective over the peers, and over
    the world where one fails."""

    engine: Callable[[], RolloutEngine]  # made after the rewards
    tokenizer: Any
    peers: dist.ProcessGroup  # ranks with the same questions
    longest: int  # row of question and reply, in tokens
    own: bool = False  # only this object uses the engine: it sleeps between questions

    def __call__(self, questions: Sequence[Question], tokens: int) -> list[Reply]:
        """Return the replies, None to a question that is too long. A question is a user's turn where the tokenizer
        has a chat template."""
        own = questions[share(len(questions), self.peers.size(), self.peers.rank())]
        chat = self.tokenizer.chat_template is not None
        prompts = [[{"role": "user", "content": one.text}] if chat else one.text for one in own]
        rows = encode_prompts(self.tokenizer, prompts, ["reward.judges"] * len(own))
        fits = [i for i, row in enumerate(rows) if 0 < len(row) <= self.longest - tokens]
        sampling = SamplingParams(tokens, 0.0, **sampled_with(self.tokenizer))
        engine = self.engine()
        if self.own:
            engine.wake()
        with raised_together(EngineError):
            generations = engine.generate([tuple(rows[i]) for i in fits], [[0]] * len(fits), sampling)
        if self.own:
            engine.sleep()
        replies: list[Reply] = [None] * len(own)
        texts = decode_responses(self.tokenizer, generations.tokens, generations.lengths, sampling.stop_token_ids)
        for i, text in zip(fits, texts, strict=True):
            replies[i] = text
        if self.peers.size() == 1:
            return replies
        parts: list[list[Reply]] = [[] for _ in range(self.peers.size())]
        dist.all_gather_object(parts, replies, group=self.peers)
        return [reply for peers_replies in parts for reply in peers_replies]
