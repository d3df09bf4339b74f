"""Local group: gloo process group of an agent (rank 0, the sender) and its engine's ranks.

Only engines that cannot load directly need it. It imports torch.
"""

import threading
from collections.abc import Iterator
from datetime import timedelta

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore
from torch.distributed.distributed_c10d import PrefixStore

from grpo_worker.weightsync.agent.engine_client import Engine
from grpo_worker.weightsync.agent.staged_version import StagedVersion, VersionStream
from grpo_worker.weightsync.transport import torch_group


class LocalGroup:
    """Process group over which one engine receives staged versions.

    ``address``: at which the engine's ranks reach the store that this process opens; ranks on further hosts
    need another one than the loopback. SGLang's ``init_custom_process_group`` determines the store's prefix
    and the group's name.
    """

    def __init__(
        self, engine: Engine, name: str, engine_ranks: int, timeout: float, address: str = "127.0.0.1"
    ) -> None:
        self.name = name
        self._engine = engine
        self._timeout = timeout
        world = engine_ranks + 1
        limit = timedelta(seconds=timeout)
        # Port 0: the store picks a free port, which no earlier agent still listens on.
        store = TCPStore(address, 0, world, True, limit, wait_for_workers=False)
        failure: list[Exception] = []

        def join() -> None:
            try:
                engine.join_group(address, store.port, name, world)
            except Exception as error:  # noqa: BLE001 - raised again in the calling thread
                failure.append(error)

        thread = threading.Thread(target=join, daemon=True)
        thread.start()
        try:
            self._group = torch_group.join(PrefixStore(name, store), name, 0, world, limit, "gloo")
        finally:
            thread.join(timeout)
        if failure:
            raise failure[0]
        self._store = store

    def send_all(self, staged: StagedVersion, stream: VersionStream) -> Iterator[None]:
        """Send each bucket for a request of its own; yield after each one."""
        parts: list[npt.NDArray[np.uint8]] = []
        for ready in stream:
            parts.append(ready.data.copy())
            if ready.fingerprint is None:
                continue
            index, flat = ready.chunk.bucket, np.concatenate(parts)
            parts = []
            last = index == len(staged.plan.buckets) - 1
            sender = threading.Thread(target=self.send, args=(flat,), daemon=True)
            sender.start()
            tensors = staged.plan.buckets[index]
            self._engine.receive(self.name, tensors, str(staged.version) if last else None)
            sender.join(self._timeout)
            yield

    def send(self, flat: npt.NDArray[np.uint8]) -> None:
        """Broadcast one bucket (uint8, 1-D) to the engine's ranks."""
        dist.broadcast(torch.from_numpy(flat), src=0, group=self._group)

    def close(self) -> None:
        """Leave the group; the engine may already be gone."""
        dist.destroy_process_group(self._group)
