"""Between the ranks of one executor: every rank's executor does what the first one's is asked to."""

import os
from datetime import timedelta
from typing import Any

import torch.distributed as dist

ACTION_S = float(os.environ.get("FAKE_TRTLLM_ACTION_S", "300"))


class TorchDist:
    def __init__(self, ranks: int):
        assert dist.is_initialized(), "torch.distributed should be initialized before TorchDist"
        self.cluster_info = None
        self.rank = dist.get_rank()
        if [len(each) for each in self._get_cluster_info()] != [2] * ranks:
            raise RuntimeError(f"{self.cluster_info}: expected a node and a device of each of {ranks} ranks")
        self.requests, self.group = dist.new_group(), dist.new_group()
        self.store, self.actions = dist.distributed_c10d._get_default_store(), 0

    def _get_cluster_info(self):
        raise RuntimeError("Ray is not initialized")

    def broadcast(self, value: Any = None) -> Any:
        values = [value]
        dist.broadcast_object_list(values, src=0, group=self.requests)
        return values[0]

    def agree(self, value: Any, what: str) -> None:
        values = [None] * dist.get_world_size()
        dist.all_gather_object(values, value, group=self.group)
        if len(set(values)) > 1:
            raise RuntimeError(f"ranks differ in {what}: {values}")

    def enter(self) -> None:
        """A control action, which all ranks must enter."""
        self.actions += 1
        names = [f"action {self.actions} of rank {rank}" for rank in range(dist.get_world_size())]
        self.store.set(names[self.rank], "")
        try:
            self.store.wait(names, timedelta(seconds=ACTION_S))
        except dist.DistStoreError:
            raise RuntimeError(f"not all ranks entered control action {self.actions}") from None
