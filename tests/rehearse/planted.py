"""Rehearsals of programs with a fault in them: `python -m aligner.rehearse.rank`, where each case names its plant."""

import sys

import torch
import torch.distributed as dist

from aligner.rehearse import rank  # before all else of ours: it has to patch what others import

kept = []


def in_loss(change):
    """`change(logprobs, batch)` in the loss of stage sft."""
    from aligner.stages import sft
    from aligner.types import LossOutput

    make = sft.sft_loss

    def planted(minibatch, group):
        loss = make(minibatch, group)

        def with_fault(out, batch):
            found = loss(out, batch)
            return LossOutput(found.loss + 0 * change(out.logprobs, batch).sum(), found.means)

        return with_fault

    sft.sft_loss = planted


def nothing():
    pass


def cpu_tensor():
    in_loss(lambda logprobs, batch: logprobs * torch.ones(logprobs.shape))


def item():
    in_loss(lambda logprobs, batch: logprobs * logprobs.sum().item())


def wrong_shape():
    in_loss(lambda logprobs, batch: logprobs[:, :-1] * batch.loss_mask)


def float64():
    in_loss(lambda logprobs, batch: logprobs.double())


def per_token():
    def one_by_one(logprobs, batch):
        return torch.stack([column.exp().sum() for column in logprobs.unbind(1)])

    in_loss(one_by_one)


def skipped():
    """A sum over the pipeline that its last stage leaves out."""
    from aligner.megatron.train import ShardedModel

    step = ShardedModel.step

    def planted(self, *arguments):
        if not self.layout.is_last_stage:
            dist.all_reduce(torch.zeros(1, device=self.device), group=self.layout.pgs.pp)
        return step(self, *arguments)

    ShardedModel.step = planted


def grows():
    """The engine keeps a tensor for each token."""
    from aligner.engines.native.engine import NativeEngine

    step = NativeEngine.step

    def planted(self, plan, batch, sampling):
        kept.append(torch.zeros(1000, device=self.device))
        return step(self, plan, batch, sampling)

    NativeEngine.step = planted


def skipped_send():
    """Rank 0, which trains, sends its weights once, and not again."""
    from aligner.refit.exchange import Exchange

    travel = Exchange._travel

    def planted(self, *arguments):
        travel(self, *arguments)
        if self.rank == 0:
            self.steps = []

    Exchange._travel = planted


def cpu_engine():
    """The engine's rotations stay on the CPU."""
    from aligner.engines.native.model import NativeModel

    rotations = NativeModel.rotations

    def planted(self, *arguments):
        return rotations(self, *arguments).cpu()

    NativeModel.rotations = planted


def refused():
    """The engine holds other parts of the weights than the plan sends."""
    from aligner.engines.native.engine import NativeEngine

    view = NativeEngine.weight_view

    def planted(self, name, start, stop, *afresh):
        return view(self, name, start + 1, stop + 1, *afresh)

    NativeEngine.weight_view = planted


refused_beside = refused


def rehearse(case, device, collectives):
    globals()[case["plant"]]()
    _rehearse(case, device, collectives)


_rehearse, rank.rehearse = rank.rehearse, rehearse

if __name__ == "__main__":
    rank.main(sys.argv[1])
