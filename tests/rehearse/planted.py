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

    def planted(minibatch, group, *options):
        loss = make(minibatch, group, *options)

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


def mixed_product():
    in_loss(lambda logprobs, batch: logprobs.bfloat16() @ torch.ones(logprobs.shape[1], 1, device=logprobs.device))


def mixed_attention():
    """Values in float32 beside queries and keys in bfloat16."""
    from torch.nn import functional

    attend = functional.scaled_dot_product_attention

    def planted(query, key, value, *arguments, **options):
        return attend(query, key, value.float(), *arguments, **options)

    functional.scaled_dot_product_attention = torch._C._nn.scaled_dot_product_attention = planted


def mixed_varlen():
    """The same in the kernel for rows of any length."""
    from torch.nn.attention import varlen

    attend = varlen.varlen_attn
    varlen.varlen_attn = lambda query, key, value, *rows, **options: attend(query, key, value.float(), *rows, **options)


def before_a_step(change, axis="dp"):
    """`change(tensor, group)` before each optimizer step, of two data-parallel ranks or stages."""
    from aligner.megatron.train import ShardedModel

    step = ShardedModel.step

    def planted(self, *arguments):
        change(torch.zeros(4, 6, device=self.device), getattr(self.layout.pgs, axis))
        return step(self, *arguments)

    ShardedModel.step = planted


def strided():
    before_a_step(lambda x, group: dist.all_reduce(x.t(), group=group))


def mixed_gather():
    before_a_step(lambda x, group: dist.all_gather_into_tensor(x.new_empty(8, 6), x.bfloat16(), group=group))


def split_sizes():
    before_a_step(lambda x, group: dist.all_to_all_single(x, x.clone(), [3, 1], [2, 1], group=group))


def gathered(x, group):
    """Only the first stage has outputs."""
    dist.gather(x, [x.clone(), x.clone()] if group.rank() == 0 else None, group=group, group_dst=0)


def broadcast(x, group):
    """The first stage reads what it sends."""
    work = dist.broadcast(x, group=group, group_src=0, async_op=True)
    if group.rank() == 0:
        x + 1
    work.wait()
    x += 1


def collectives():
    """The honest ones."""
    both_at_once()
    before_a_step(gathered, "pp")
    before_a_step(broadcast, "pp")
    before_a_step(lambda x, group: dist.all_reduce(x.t().contiguous(), group=group))
    before_a_step(lambda x, group: dist.all_gather_into_tensor(x.new_empty(8, 6), x, group=group))
    before_a_step(lambda x, group: dist.all_to_all_single(x, x.clone(), [3, 1], [1, 3], group=group))


def slow_work():
    """Read and write 32 GiB in float32, add up 16 GiB of two data-parallel ranks, and multiply in float32."""
    before_a_step(lambda x, group: x.new_empty(1 << 33).add_(1))
    before_a_step(lambda x, group: dist.all_reduce(x.new_empty(1 << 32), group=group))
    before_a_step(lambda x, group: x.new_empty(16384, 16384) @ x.new_empty(16384, 16384))


def in_turn(first, second):
    x = torch.zeros(4, device="cuda")
    for group in (first, second):
        dist.all_reduce(x, group=group)


def pipeline_against_world():
    """Stages that sum over two groups, the later one in the other order."""
    from aligner.megatron.train import ShardedModel

    step = ShardedModel.step

    def planted(self, *arguments):
        groups = self.layout.pgs.pp, dist.group.WORLD
        in_turn(*(groups[::-1] if self.layout.is_last_stage else groups))
        return step(self, *arguments)

    ShardedModel.step = planted


def tensor_against_data():
    """Ranks of which each waits for the next one: 0 and 3 sum over tensor ranks first, 1 and 2 over data ranks."""
    from aligner.megatron.train import ShardedModel

    step = ShardedModel.step

    def planted(self, *arguments):
        groups = self.layout.pgs.tp, self.layout.pgs.dp
        in_turn(*(groups if dist.get_rank() in (0, 3) else groups[::-1]))
        return step(self, *arguments)

    ShardedModel.step = planted


def both_at_once():
    """Stages that wait after they have called both groups, in any order."""
    from aligner.megatron.train import ShardedModel

    step = ShardedModel.step

    def planted(self, *arguments):
        groups = self.layout.pgs.pp, dist.group.WORLD
        groups = groups[::-1] if self.layout.is_last_stage else groups
        works = [dist.all_reduce(torch.zeros(4, device="cuda"), group=group, async_op=True) for group in groups]
        for work in works:
            work.wait()
        return step(self, *arguments)

    ShardedModel.step = planted


def first_device():
    in_loss(lambda logprobs, batch: logprobs * torch.ones(logprobs.shape, device="cuda:0"))


def own_device():
    in_loss(lambda logprobs, batch: logprobs * torch.ones(logprobs.shape, device="cuda").cuda())


def moves_on_cpu():
    """Slots to move are on the CPU."""
    from aligner.engines.native.cache import SlotCache

    move = SlotCache.move

    def planted(self, source, target, length):
        return move(self, source.cpu(), target.cpu() + torch.zeros(1, dtype=torch.int64, device=target.device), length)

    SlotCache.move = planted


def no_refill():
    """Rows that join others are on the CPU."""
    from aligner.engines.native.engine import NativeEngine

    admit = NativeEngine._admit

    def planted(self, plan, batch, heard):
        joins = batch.active > 0
        return [logits.cpu() if joins else logits for logits in admit(self, plan, batch, heard)]

    NativeEngine._admit = planted


def side_stream(waits, returns):
    """A side stream that reads what the first one writes, and is read by it."""

    def doubled(logprobs, batch):
        stream, first = torch.cuda.Stream(), torch.cuda.current_stream()
        if waits:
            stream.wait_stream(first)
        with torch.cuda.stream(stream):
            twice = logprobs * 2
            event = stream.record_event()
        if returns:
            first.wait_event(event)
        return twice + 1

    in_loss(doubled)


def unawaited_stream():
    side_stream(waits=False, returns=True)


def unawaited_event():
    side_stream(waits=True, returns=False)


def awaited_streams():
    side_stream(waits=True, returns=True)


def freed_early(keep):
    """A tensor that a side stream reads while it is freed, and another that takes memory."""

    def doubled(logprobs, batch):
        stream, first = torch.cuda.Stream(), torch.cuda.current_stream()
        shared = logprobs.detach() + 1
        stream.wait_stream(first)
        with torch.cuda.stream(stream):
            twice = shared * 2
        keep(shared, stream)
        del shared
        other = logprobs.detach() + 1
        first.wait_stream(stream)
        return logprobs * twice * other

    in_loss(doubled)


def freed_tensor():
    freed_early(lambda shared, stream: None)


def recorded_tensor():
    freed_early(lambda shared, stream: shared.record_stream(stream))


def awaited_tensor():
    freed_early(lambda shared, stream: torch.cuda.current_stream().wait_stream(stream))


def to_host(wait, read):
    """A copy to the host, which does not wait for it."""

    def copied(logprobs, batch):
        there = logprobs.detach().to("cpu", non_blocking=True)
        wait()
        return logprobs * float(len(read(there)))

    in_loss(copied)


def unfinished_copy():
    to_host(nothing, lambda copy: copy + 1)


def unfinished_list():
    to_host(nothing, lambda copy: copy.tolist())


def finished_copy():
    to_host(lambda: torch.cuda.current_stream().record_event().synchronize(), lambda copy: (copy + 1).tolist())


def polled_copy():
    to_host(lambda: torch.cuda.current_stream().record_event().query(), lambda copy: copy + 1)


def pageable_copy():
    """A copy into memory that is not pinned, for which CUDA waits, beside a second stream."""

    def copied(logprobs, batch):
        torch.cuda.Stream()
        there = torch.zeros(logprobs.shape).copy_(logprobs.detach(), non_blocking=True)
        return logprobs * float(len(there + 1))

    in_loss(copied)


def reused(wait, fill=lambda buffer: buffer.fill_(2)):
    """A pinned buffer that is filled again."""
    buffer = []

    def uploaded(logprobs, batch):
        buffer[:] = buffer or [torch.ones(logprobs.shape, pin_memory=True)]
        factor = buffer[0].to(logprobs.device, non_blocking=True)
        wait()
        fill(buffer[0])
        return logprobs * factor

    in_loss(uploaded)


def overwritten_buffer():
    reused(nothing)


def overwritten_list():
    reused(nothing, lambda buffer: torch._foreach_mul_([buffer], 2))


def reused_buffer():
    reused(torch.cuda.synchronize)


def polled_buffer():
    reused(lambda: torch.cuda.current_stream().query())


def unawaited_sum():
    """A sum that is read before it has come, on all ranks."""

    def summed(x, group):
        work = dist.all_reduce(x, group=group, async_op=True)
        x += 1
        work.wait()

    before_a_step(summed)


def unawaited_messages():
    """Received weights are read before they have come."""
    from aligner.refit.exchange import Exchange

    arrive = Exchange._arrive

    def planted(self, works, message, words, engine):
        arrive(self, [], message, words, engine)
        for work in works:
            work.wait()

    Exchange._arrive = planted


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


def grows_within():
    """The engine keeps a tensor for each token until its rollout ends."""
    from aligner.engines.native.engine import NativeEngine

    step = NativeEngine.step

    def planted(self, plan, batch, sampling):
        batch.planted = [*getattr(batch, "planted", []), torch.zeros(1000, device=self.device)]
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
        return tuple(rope.cpu() for rope in rotations(self, *arguments))

    NativeModel.rotations = planted


def refused():
    """The engine holds other parts of the weights than the plan sends."""
    from aligner.engines.native.engine import NativeEngine

    view = NativeEngine.weight_view

    def planted(self, name, start, stop, *afresh):
        return view(self, name, start + 1, stop + 1, *afresh)

    NativeEngine.weight_view = planted


refused_beside = refused
nothing_beside = nothing_in_short_rows = nothing_in_many_rows = nothing


def honest():
    """All that is right in a loss, one behind the other."""
    for plant in (own_device, awaited_streams, recorded_tensor, awaited_tensor, finished_copy, polled_copy):
        plant()
    for plant in (pageable_copy, reused_buffer, polled_buffer):
        plant()


def rehearse(case, device, collectives):
    globals()[case["plant"]]()
    _rehearse(case, device, collectives)


_rehearse, rank.rehearse = rank.rehearse, rehearse

if __name__ == "__main__":
    rank.main(sys.argv[1])
