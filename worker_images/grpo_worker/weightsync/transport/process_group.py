"""Transfer group over the network: one process group of all members, NCCL between GPUs, gloo between CPUs."""

import time
from collections.abc import Iterable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, _abort_process_group

from grpo_operator.api.weight_path import Backend
from grpo_worker.common.versions import nccl_version
from grpo_worker.weightsync.transport import torch_group
from grpo_worker.weightsync.transport.rendezvous import (
    Pairs,
    TransferError,
    TransferGroup,
    transfer_errors,
)

_TIMEOUT = {
    # NCCL's watchdog would end the process at its timeout; this module keeps the deadlines itself.
    Backend.NCCL: timedelta(days=1),
    # gloo waits for a connection five times as long as for anything else, and nothing can interrupt it.
    Backend.GLOO: timedelta(seconds=8),
}
_DEVICE_TYPE = {Backend.NCCL: "cuda", Backend.GLOO: "cpu"}
_POLL_SECONDS = 0.0001  # between two checks of an NCCL transfer


class GroupTransfer:
    """A transfer in progress. It keeps its tensors alive until it ends."""

    def __init__(
        self, group: TransferGroup, works: Iterable[Any], tensors: Sequence[torch.Tensor], deadline: float
    ) -> None:
        self._group = group
        self._works = list(works)
        self._tensors = tensors
        self._deadline = deadline

    def wait(self) -> None:
        """Wait until the bytes were sent or received.

        Raises TransferError at the deadline or for a lost peer.
        """
        with transfer_errors():
            for work in self._works:
                self._wait(work)

    def _wait(self, work: Any) -> None:
        left = self._deadline - time.monotonic()
        if not self._tensors[0].is_cuda:
            work.wait(timedelta(seconds=max(left, 0.001)))
            return
        # Poll first: a CUDA stream that waits for a dead peer can never be interrupted.
        self._group.wait_until(work.is_completed, self._deadline, _POLL_SECONDS)
        work.wait()


class CollectiveGroup(TransferGroup):
    """This process as a member of a process group; the first ``trainers`` members send."""

    def __init__(
        self,
        backend: Backend,
        store: Any,
        name: str,
        rank: int,
        world: int,
        trainers: int,
        device: torch.device,
    ) -> None:
        """Join; returns when all members have joined. Raises TransferError."""
        if device.type != _DEVICE_TYPE[backend]:
            raise TransferError(f"{name}: {backend} cannot transfer weights on {device.type}")
        if backend is Backend.NCCL:
            _check_version(PrefixStore(name, store))
        super().__init__(store, name, rank, world, trainers, device)
        self._backend = backend
        try:
            self.group = torch_group.join(self._store, name, rank, world, _TIMEOUT[backend], backend)
            # All later transfers are between pairs, before which NCCL needs one collective of all members. A
            # broadcast has only one algorithm. An all-reduce would block: deterministic engines pin an
            # algorithm of all-reduce that differs from the trainers'.
            first = dist.broadcast(torch.ones(1, device=device), src=0, group=self.group, async_op=True)
            assert first is not None, "this process is a member"
            self.beat()  # NCCL has connected this member
            self.wait_for(
                first.is_completed, lambda: "the first collective did not end, nor a member begin it"
            )
            first.wait()
        except RuntimeError as error:
            raise TransferError(f"the group {name} did not form: {str(error)[:200]}") from error

    def exchange(self, sends: Pairs, receives: Pairs, deadline: float) -> GroupTransfer:
        tensors = [tensor for tensor, _ in (*sends, *receives)]
        with transfer_errors():
            batch = [
                dist.P2POp(operation, tensor, group=self.group, group_peer=peer)
                for operation, pairs in ((dist.isend, sends), (dist.irecv, receives))
                for tensor, peer in pairs
            ]
            return GroupTransfer(self, dist.batch_isend_irecv(batch), tensors, deadline)

    def close(self) -> None:
        # Other members may be gone, or wait in a transfer: a regular shutdown of NCCL would wait for them.
        if self._backend is Backend.NCCL:
            _abort_process_group(self.group)
        else:
            dist.destroy_process_group(self.group)


def _check_version(store: Any) -> None:
    """Compare this process's NCCL with that of the first member that came to the group's ``store``.

    Members with different versions would wait for each other without an end. Raises TransferError.
    """
    ours = nccl_version()
    with transfer_errors():
        first = store.compare_set("nccl", "", ours).decode()
    if first != ours:
        raise TransferError(
            f"this process has NCCL {ours}, another member of the group {first}: build the images of "
            "trainers and engines with the same version"
        )
