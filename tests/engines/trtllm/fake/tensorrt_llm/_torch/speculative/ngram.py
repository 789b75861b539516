"""Prompt lookup: what followed the first occurrence of a row's last tokens, in its own text; of a common pool, in any.

The sampler draws a token behind each drafted one, and keeps those that are equal. Drafts are filled up with token 0.
"""


def follows(text: list, tail: list, count: int) -> list:
    """What followed the first occurrence of `tail` but the last."""
    starts = (i for i in range(len(text) - len(tail)) if text[i : i + len(tail)] == tail)
    at = next(starts, None)
    return [] if at is None else text[at + len(tail) :][:count]


class NGramDrafter:
    def __init__(self, spec_config):
        self.config, self.texts = spec_config, {}

    def prepare_draft_tokens(self, name: int, tokens: list) -> list:
        """A draft of the row, whose tokens are known so far."""
        self.texts[name] = tokens
        texts = list(self.texts.values()) if self.config.is_public_pool else [tokens]
        count = self.config.max_draft_len
        for size in range(min(self.config.max_matching_ngram_size, len(tokens) - 1), 0, -1):
            for text in texts:
                if draft := follows(text, tokens[-size:], count):
                    return draft + [0] * (count - len(draft))
        return [0] * count

    def accepted(self, name: int, prompt: list, response: list) -> list:
        """The places in a response of tokens that were drafted, and the number of passes."""
        done, passes, drafted = 1, 1, []
        while done < len(response):
            draft, n = self.prepare_draft_tokens(name, prompt + response[:done]), 0
            while n < len(draft) and done + n < len(response) - 1 and draft[n] == response[done + n]:
                n += 1
            drafted += range(done, done + n)
            done, passes = done + n + 1, passes + 1
        return [drafted, passes]
