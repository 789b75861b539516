"""Check of a model that drafts (`engine.draft_model`) before a run."""

from __future__ import annotations

from typing import Any

from aligner.data.tokenizer import load_tokenizer
from aligner.errors import ConfigError, DataError
from aligner.families.draft_folder import KEY, drafting, eagle_head, exported


def check_tokens(folder: str, tokenizer: Any, heads: bool = False) -> None:
    """Raise ConfigError unless the model in a folder can draft, and has the tokens of this tokenizer. `heads`: so can
    an EAGLE-3 head, which is published without a tokenizer."""
    if heads and eagle_head(folder) is not None:
        return
    drafting(folder)
    try:
        theirs = load_tokenizer(str(exported(folder)), announce=False).get_vocab()
    except DataError as error:
        raise ConfigError(KEY, folder, "a folder with the model's tokenizer", str(error)) from error
    own = tokenizer.get_vocab()
    if own != theirs:
        hint = f"{len(theirs)} tokens there, {len(own)} here, {len(own.items() & theirs.items())} of them the same"
        raise ConfigError(KEY, folder, "a model with the same tokenizer: drafts are its tokens", hint)
