"""One NIXL agent, as both ends of a read need it."""

import os
import uuid
from typing import Any, NamedTuple

_DRAM = "DRAM"


class Region(NamedTuple):
    """Bytes in the memory of a process."""

    address: int
    nbytes: int


class Offer(NamedTuple):
    """Bytes that another process may read. ``metadata``: of the NIXL agent that has it, base64."""

    metadata: str
    address: int
    nbytes: int

    @property
    def region(self) -> Region:
        return Region(self.address, self.nbytes)


class NixlAgent:
    """A process's part in NIXL: UCX finds the adapters, else it takes TCP. Thread-safe.

    NIXL's own thread for progress polls without a rest, a core for each agent, and is not used: reads go on
    while they are asked about, and what others read over TCP while ``progress`` is called.
    Whatever NIXL raises comes out as it is: its exceptions have no common base but Exception.
    """

    def __init__(self) -> None:
        os.environ.setdefault("NIXL_LOG_LEVEL", "WARN")
        # Takes a second that most need not wait.
        from nixl_cu13._api import nixl_agent, nixl_agent_config, nixl_thread_sync_t

        strict = nixl_thread_sync_t.NIXL_THREAD_SYNC_STRICT
        config = nixl_agent_config(enable_prog_thread=False, backends=["UCX"], sync_mode=strict)
        self._agent = nixl_agent(uuid.uuid4().hex, config)

    def progress(self) -> None:
        """Answer what has arrived. Adapters with RDMA need none of it."""
        self._agent.get_new_notifs()

    def register(self, region: Region) -> Any:
        """Pin the bytes; what ``deregister`` takes."""
        return self._agent.register_memory([(*region, 0, "")], _DRAM)

    def deregister(self, handle: Any) -> None:
        self._agent.deregister_memory(handle)

    def metadata(self) -> bytes:
        """How others reach this agent and the regions that it has registered."""
        return bytes(self._agent.get_agent_metadata())

    def meet(self, metadata: bytes) -> str:
        """Learn of another agent, or what has become of it; its name."""
        name = self._agent.add_remote_agent(metadata)
        return name.decode() if isinstance(name, bytes) else str(name)

    def begin_read(self, peer: str, source: Region, to: Region) -> Any:
        """Start reading a peer's bytes; what ``finished`` and ``release`` take."""
        ends = [self._agent.get_xfer_descs([(*region, 0)], _DRAM) for region in (to, source)]
        handle = self._agent.initialize_xfer("READ", *ends, peer)
        self._agent.transfer(handle)
        return handle

    def finished(self, handle: Any) -> bool:
        """Is all there? Raises when it never will be."""
        state = self._agent.check_xfer_state(handle)
        if state == "ERR":
            raise ConnectionError("NIXL: the transfer failed")
        return bool(state == "DONE")

    def release(self, handle: Any) -> None:
        self._agent.release_xfer_handle(handle)
