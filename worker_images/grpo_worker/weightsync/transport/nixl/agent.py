"""NIXL agent of a process, for both ends of a read."""

import os
import uuid
from typing import Any, NamedTuple

_DRAM = "DRAM"
_READ_ENDED = b"read"  # notification to the owner of the bytes


class Region(NamedTuple):
    """A range of the memory of a process."""

    address: int
    nbytes: int


class Offer(NamedTuple):
    """Bytes that another process may read. ``metadata``: of the owner's NIXL agent, base64."""

    metadata: str
    address: int
    nbytes: int

    @property
    def region(self) -> Region:
        return Region(self.address, self.nbytes)


class NixlAgent:
    """A process's agent in NIXL. UCX finds the RDMA adapters, else it uses TCP. Thread-safe.

    NIXL's own progress thread is not used, because it polls without pauses and so occupies a core for each
    agent. Reads progress during calls of ``finished``; over TCP, reads by others progress during calls of
    ``progress``. Exceptions of NIXL are not converted: their only common base is Exception.
    """

    def __init__(self) -> None:
        os.environ.setdefault("NIXL_LOG_LEVEL", "WARN")
        # The import takes a second, which processes without NIXL need not wait for.
        from nixl_cu13._api import nixl_agent, nixl_agent_config, nixl_thread_sync_t

        strict = nixl_thread_sync_t.NIXL_THREAD_SYNC_STRICT
        config = nixl_agent_config(enable_prog_thread=False, backends=["UCX"], sync_mode=strict)
        self._agent = nixl_agent(uuid.uuid4().hex, config)

    def progress(self) -> bool:
        """Answer requests of other agents; return whether one has ended a read since the last call.

        RDMA adapters answer without it.
        """
        return bool(self._agent.get_new_notifs())

    def register(self, region: Region) -> Any:
        """Pin the bytes; return the handle for ``deregister``."""
        return self._agent.register_memory([(*region, 0, "")], _DRAM)

    def deregister(self, handle: Any) -> None:
        self._agent.deregister_memory(handle)

    def metadata(self) -> bytes:
        """Return the data with which other agents reach this agent and its registered regions."""
        return bytes(self._agent.get_agent_metadata())

    def add_peer(self, metadata: bytes) -> str:
        """Add another agent, or update its metadata; return its name."""
        name = self._agent.add_remote_agent(metadata)
        return name.decode() if isinstance(name, bytes) else str(name)

    def begin_read(self, peer: str, source: Region, to: Region) -> Any:
        """Start to read a peer's bytes; return the handle for ``finished`` and ``release``."""
        ends = [self._agent.get_xfer_descs([(*region, 0)], _DRAM) for region in (to, source)]
        handle = self._agent.initialize_xfer("READ", *ends, peer, _READ_ENDED)
        self._agent.transfer(handle)
        return handle

    def finished(self, handle: Any) -> bool:
        """Return whether all bytes have arrived. Raises ConnectionError when the read failed."""
        state = self._agent.check_xfer_state(handle)
        if state == "ERR":
            raise ConnectionError("NIXL: the transfer failed")
        return bool(state == "DONE")

    def release(self, handle: Any) -> None:
        self._agent.release_xfer_handle(handle)
