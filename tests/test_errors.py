"""Errors travel: one rank raises what another one found."""

import pickle

import pytest

from aligner import errors

ARGUMENTS = {
    errors.ConfigError: ("parallel.tensor", 2, "a divisor of 1", "Use fewer."),
    errors.LayoutError: ("parallel.tensor", 2, "a divisor of 1"),
    errors.UnknownKeyError: ("optim.lrr", "optim.lr"),
    errors.RunFailedError: ("what is wrong", 2),
    errors.MissingExtraError: ("tensorrt_llm", "trtllm", "engine=trtllm"),
}
KINDS = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, errors.AlignerError)]


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_every_error_survives_the_way_to_another_rank(kind):
    error = kind(*ARGUMENTS.get(kind, ("what is wrong",)))
    there = pickle.loads(pickle.dumps(error))
    assert (type(there), str(there), vars(there)) == (kind, str(error), vars(error))
    assert pickle.loads(pickle.dumps(there)).args == error.args
