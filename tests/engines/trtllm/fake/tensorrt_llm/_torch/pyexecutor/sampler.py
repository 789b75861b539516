"""The default sampler, and what takes its place where drafting is part of the model."""


class TorchSampler:
    pass


class SpecSampler(TorchSampler):
    pass
