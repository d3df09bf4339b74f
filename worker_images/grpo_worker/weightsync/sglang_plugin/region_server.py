"""Region server: a thread of an engine rank that answers its agent's requests for bytes of the parameters.

The engine generates meanwhile. The thread ends with its connection, which it closes when the parameters are
written.
"""

import logging
import socket
from threading import Thread

import torch
import xxhash

from grpo_worker.weightsync.planner.rank_parts import pack_table, table_of
from grpo_worker.weightsync.protocol.agent_stream import COUNT, greeting
from grpo_worker.weightsync.protocol.region_stream import (
    MOST,
    PART_BYTES,
    TENSORS,
    RegionPart,
    digest_of_tensors,
    pack_tensors,
    unpack_parts,
)
from grpo_worker.weightsync.sglang_plugin.contents import Complete, Contents
from grpo_worker.weightsync.sglang_plugin.region_reader import RegionReader
from grpo_worker.weightsync.sglang_plugin.side_thread import own_stream, short_turns

log = logging.getLogger(__name__)
_CONNECT_SECONDS = 60.0


class RegionServer:
    """Serves what rank ``rank`` holds now to the agent at ``address`` and ``port``, until it is overwritten.

    Raises UnreadableError, and OSError if the agent cannot be reached.
    """

    def __init__(
        self, contents: Contents, complete: Complete, address: str, port: int, name: str, rank: int,
        device: torch.device,
    ) -> None:  # fmt: skip
        self._contents = contents
        self._complete = complete
        self._device = device
        self._reader = RegionReader(complete)
        self._rank = rank
        self._answer = torch.empty(0, dtype=torch.uint8)
        self._socket = socket.create_connection((address, port), _CONNECT_SECONDS)
        self._socket.settimeout(None)  # the agent may ask at any time
        self._socket.sendall(greeting(name, rank))
        Thread(target=self._run, daemon=True, name="serve-weights").start()

    def _run(self) -> None:
        try:
            self._describe()
            with torch.no_grad(), own_stream(self._device), short_turns():
                self._serve()
        except OSError as error:
            log.info("the agent reads no more weights: %r", error)
        except Exception:  # the thread ends, and the agent notices it; the engine serves on
            log.exception("reading weights failed")
        finally:
            self._socket.close()

    def _describe(self) -> None:
        """Tell the agent what this rank keeps."""
        packed = pack_tensors(self._reader.rows)
        sent = packed if self._rank == 0 else b""
        self._socket.sendall(TENSORS.pack(digest_of_tensors(packed), len(sent)) + sent)
        table = table_of([row.name for row in self._reader.rows], self._reader.kept)
        self._socket.sendall(pack_table(table))

    def _serve(self) -> None:
        if self._complete.written is not None:
            torch.cuda.current_stream().wait_event(self._complete.written)
        while (count := self._receive(COUNT.size)) is not None:
            parts = self._receive(COUNT.unpack(count)[0] * PART_BYTES)
            if parts is None:
                return
            answer = self._read(unpack_parts(parts))
            if answer is None:
                return
            self._socket.sendall(answer)
            self._socket.sendall(xxhash.xxh3_128_digest(answer))

    def _read(self, parts: list[RegionPart]) -> memoryview | None:
        """Return the bytes of ``parts``, or None if the parameters are not those of the version any more."""
        size = sum(part.nbytes for part in parts)
        if size > MOST:
            raise ValueError(f"{size} bytes are asked for, and at most {MOST} are sent at a time")
        if self._contents.complete is not self._complete:
            return None
        if not len(self._answer):
            pinned = self._device.type == "cuda"
            self._answer = torch.empty(MOST, dtype=torch.uint8, pin_memory=pinned)
        position = 0
        for part in parts:
            self._reader.read(part, self._answer[position : position + part.nbytes])
            position += part.nbytes
        if self._device.type == "cuda":
            torch.cuda.current_stream().synchronize()
        # A write that begins now cannot change what was copied.
        if self._contents.complete is not self._complete:
            return None
        return self._answer.numpy()[:size].data

    def _receive(self, size: int) -> bytes | None:
        """Return the next ``size`` bytes; None at the end of the connection."""
        data = bytearray(size)
        rest = memoryview(data)
        while rest:
            got = self._socket.recv_into(rest)
            if not got:
                return None
            rest = rest[got:]
        return bytes(data)
