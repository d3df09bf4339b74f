"""A link over the network: one process group of all members, NCCL between GPUs and gloo between CPUs."""

import time
from collections.abc import Iterable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _abort_process_group

from grpo_worker.weightsync.transport import torch_group
from grpo_worker.weightsync.transport.rendezvous import (
    JOIN_SECONDS,
    TransferError,
    TransferGroup,
    link_errors,
)

_FOREVER = timedelta(days=1)  # NCCL's own watchdog would end the process; deadlines are kept here
# gloo waits five times as long for a connection as for anything else, and nothing can interrupt it.
_GLOO = timedelta(seconds=8)
_POLL = 0.0001  # seconds between two looks at a transfer


class GroupTransfer:
    """Bytes under way. Their tensors are kept until then."""

    def __init__(
        self, members: TransferGroup, works: Iterable[Any], tensors: Sequence[torch.Tensor], deadline: float
    ) -> None:
        self._members = members
        self._works = list(works)
        self._tensors = tensors
        self._deadline = deadline

    def wait(self) -> None:
        """Until the bytes are there, or have left. Raises LinkError at the deadline, or for a lost peer."""
        with link_errors():
            for work in self._works:
                self._wait(work)

    def _wait(self, work: Any) -> None:
        left = self._deadline - time.monotonic()
        if not self._tensors[0].is_cuda:
            work.wait(timedelta(seconds=max(left, 0.001)))
            return
        # Only what is looked at can be given up: a stream that waits for a dead peer waits for ever.
        self._members.wait_until(work.is_completed, self._deadline, _POLL)
        work.wait()


class CollectiveGroup(TransferGroup):
    """This process in the group ``name`` of ``world`` members, the first ``trainers`` of which send."""

    def __init__(
        self, store: Any, name: str, rank: int, world: int, trainers: int, device: torch.device
    ) -> None:
        """Returns when all are there. Raises LinkError."""
        super().__init__(store, name, rank, world, trainers, device)
        cuda = device.type == "cuda"
        limit = _FOREVER if cuda else _GLOO
        try:
            self.group = torch_group.join(self._store, name, rank, world, limit, "nccl" if cuda else "gloo")
            # Later transfers are between pairs: NCCL must have met all before. By a broadcast, which has
            # one algorithm: engines that sample reproducibly force another one of all-reduce than trainers
            # have, and would wait for ever.
            met = dist.broadcast(torch.ones(1, device=device), src=0, group=self.group, async_op=True)
            here = [torch.empty(0, device=device)]
            GroupTransfer(self, [met], here, time.monotonic() + JOIN_SECONDS).wait()
        except RuntimeError as error:
            raise TransferError(f"the group {name} did not form: {str(error)[:200]}") from error

    def send(self, pairs: Sequence[tuple[torch.Tensor, int]], deadline: float) -> GroupTransfer:
        return self._batch(dist.isend, pairs, deadline)

    def receive(self, pairs: Sequence[tuple[torch.Tensor, int]], deadline: float) -> GroupTransfer:
        return self._batch(dist.irecv, pairs, deadline)

    def _batch(self, what: Any, pairs: Sequence[tuple[torch.Tensor, int]], deadline: float) -> GroupTransfer:
        tensors = [tensor for tensor, _ in pairs]
        with link_errors():
            operations = [
                dist.P2POp(what, tensor, group=self.group, group_peer=peer) for tensor, peer in pairs
            ]
            return GroupTransfer(self, dist.batch_isend_irecv(operations), tensors, deadline)

    def close(self) -> None:
        """Leave. Others may be gone or waiting: NCCL must not wait for them."""
        if self._device.type == "cuda":
            _abort_process_group(self.group)
        else:
            dist.destroy_process_group(self.group)
