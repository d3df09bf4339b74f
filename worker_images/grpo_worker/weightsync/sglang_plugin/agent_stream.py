"""Stream from the agent to this engine rank."""

import socket

import torch

from grpo_worker.weightsync.planner.rank_parts import Table, pack_table
from grpo_worker.weightsync.protocol.agent_stream import BEAT, COUNT, FINGERPRINT, greeting
from grpo_worker.weightsync.sglang_plugin.staged_receiver import DirectLoadError

_CONNECT_SECONDS = 60.0
_PINNED = 32 << 20  # bytes on the way to a GPU


class AgentStream:
    """Connection of this rank to the agent that sends it staged versions."""

    def __init__(self, address: str, port: int, name: str, rank: int) -> None:
        """Connect. Raises OSError."""
        self._socket = socket.create_connection((address, port), _CONNECT_SECONDS)
        self._socket.sendall(greeting(name, rank))
        self._pinned: torch.Tensor | None = None

    def wait_at_most(self, seconds: float) -> None:
        """Set the seconds that this rank, and every later request to it, waits for a byte."""
        self._socket.settimeout(seconds)

    def beat(self) -> None:
        """Tell the agent that this rank makes progress. Raises DirectLoadError if the agent is gone."""
        self._write(COUNT.pack(BEAT))

    def send_kept(self, table: Table) -> None:
        """Send the regions that this rank keeps. Raises DirectLoadError if the agent is gone."""
        self._write(pack_table(table))

    def read_into(self, flat: torch.Tensor) -> None:
        """Fill ``flat`` (uint8 [bytes]) with the next bytes. Raises DirectLoadError if they do not come."""
        if not flat.is_cuda:
            self._read(flat.numpy().data)
            return
        if self._pinned is None:
            self._pinned = torch.empty(_PINNED, dtype=torch.uint8, pin_memory=True)
        for start in range(0, len(flat), _PINNED):
            target = flat[start : start + _PINNED]
            staged = self._pinned[: len(target)]
            self._read(staged.numpy().data)
            target.copy_(staged)  # returns when the bytes are there, so that they can be overwritten

    def read_fingerprint(self) -> int:
        """Return the fingerprint that follows a bucket. Raises DirectLoadError if it does not come."""
        data = bytearray(FINGERPRINT.size)
        self._read(memoryview(data))
        return int(FINGERPRINT.unpack(data)[0])

    def close(self) -> None:
        self._socket.close()

    def _write(self, data: bytes) -> None:
        try:
            self._socket.sendall(data)
        except OSError as error:
            raise DirectLoadError(f"the agent takes no bytes: {error!r}") from error

    def _read(self, to: memoryview) -> None:
        try:
            while len(to):
                got = self._socket.recv_into(to)
                if not got:
                    raise DirectLoadError("the agent ended the transfer")
                to = to[got:]
        except OSError as error:
            raise DirectLoadError(f"no bytes from the agent: {error!r}") from error
