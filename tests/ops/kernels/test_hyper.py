"""Several residual streams, against transformers' modules."""

import pytest
import torch
from transformers.models.deepseek_v4.configuration_deepseek_v4 import DeepseekV4Config
from transformers.models.deepseek_v4.modeling_deepseek_v4 import DeepseekV4HyperConnection, DeepseekV4HyperHead

from aligner.config.sections.model.hyper import HyperConfig
from aligner.ops.kernels.hyper import StreamWeights, joined, read, written

EPS = 1e-4


def module(kind, streams: int, iterations: int = 1):
    config = DeepseekV4Config(hidden_size=10, hc_mult=streams, hc_sinkhorn_iters=iterations, hc_eps=1e-3)
    config.rms_norm_eps = EPS
    made, g = kind(config), torch.Generator().manual_seed(streams)
    for p in made.parameters():
        p.data = torch.randn(p.shape, generator=g)
    return made, HyperConfig(streams, iterations, 1e-3)


@pytest.mark.parametrize("streams, iterations", [(1, 1), (2, 1), (4, 20)])
def test_values_and_gradients_are_those_of_transformers(streams, iterations):
    theirs, shape = module(DeepseekV4HyperConnection, streams, iterations)
    x = torch.randn(7, streams, 10, generator=torch.Generator().manual_seed(1)).requires_grad_()
    y = torch.randn(7, 10, generator=torch.Generator().manual_seed(2))
    post, mix, wanted = (out[0] for out in theirs(x[None]))
    streams_behind = post[:, :, None] * y[:, None] + mix.mT @ x
    inputs = [x, *theirs.parameters()]
    wanted_grads = torch.autograd.grad((streams_behind.sin().sum() + wanted.cos().sum()), inputs)

    own, post, mix = read(x, StreamWeights(theirs.fn, theirs.base, theirs.scale), shape, EPS)
    behind = written(x, y, post, mix)
    torch.testing.assert_close(own, wanted, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(behind, streams_behind, rtol=1e-5, atol=1e-5)
    if iterations > 10:
        torch.testing.assert_close(mix.sum(2), torch.ones(7, streams), rtol=0, atol=0.02)
    for actual, grad in zip(
        torch.autograd.grad((behind.sin().sum() + own.cos().sum()), inputs), wanted_grads, strict=True
    ):
        torch.testing.assert_close(actual, grad, rtol=1e-4, atol=1e-4)


def test_the_end_is_that_of_transformers():
    theirs, shape = module(DeepseekV4HyperHead, 3)
    x = torch.randn(5, 3, 10, generator=torch.Generator().manual_seed(1))
    own = joined(x, StreamWeights(theirs.hc_fn, theirs.hc_base, theirs.hc_scale), shape, EPS)
    torch.testing.assert_close(own, theirs(x[None])[0], rtol=1e-5, atol=1e-5)
