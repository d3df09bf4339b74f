"""Trainer side of NIXL: offers the blobs in the pod's memory to other pods, which read them by RDMA."""

import atexit
import base64
import mmap
import os
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from grpo_worker.weightsync.transport.nixl.agent import NixlAgent, Offer, Region

_QUIET_SECONDS = 600.0  # since the last offer or the end of a read: no reader is left
_POLL_SECONDS = 0.0005  # costs a hundredth of a core


@dataclass(slots=True)
class _Held:
    """A registered file. The trainer reuses its files for later versions, under other names."""

    file: BinaryIO
    memory: mmap.mmap
    region: Region
    handle: Any


class Exporter:
    """Registers each file once, and deregisters it when it was deleted. Thread-safe.

    Without RDMA, reads by others only progress while this process polls. A helper thread polls until
    ``_QUIET_SECONDS`` after the last offer or the end of the last read. Readers read blobs in parts, so reads
    end as long as a blob progresses.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._agent: NixlAgent | None = None
        self._held: dict[int, _Held] = {}  # by inode
        self._offered = threading.Event()
        self._ended = threading.Event()
        self._until = 0.0  # end of the polling, of time.monotonic()

    def offer(self, path: Path) -> Offer:
        """Return the offer of a non-empty file. Raises OSError when there is none."""
        path.stat()  # raises before NIXL is started for a missing file
        with self._lock:
            agent = self._agent or self._start()
            self._deregister_deleted(agent)
            self._until = time.monotonic() + _QUIET_SECONDS
            self._offered.set()
            held = self._register(agent, path)
            return Offer(base64.b64encode(agent.metadata()).decode(), *held.region)

    def _start(self) -> NixlAgent:
        self._agent = NixlAgent()
        helper = threading.Thread(target=self._poll, args=(self._agent,), daemon=True)
        helper.start()

        def end() -> None:
            self._ended.set()
            self._offered.set()
            helper.join()

        # If the interpreter ends the thread inside NIXL, the whole process crashes.
        atexit.register(end)
        return self._agent

    def _poll(self, agent: NixlAgent) -> None:
        while not self._ended.is_set():
            self._offered.wait()
            self._offered.clear()
            while time.monotonic() < self._until and not self._ended.is_set():
                if agent.progress():
                    self._until = time.monotonic() + _QUIET_SECONDS
                time.sleep(_POLL_SECONDS)

    def _register(self, agent: NixlAgent, path: Path) -> _Held:
        file = path.open("r+b")
        inode = os.fstat(file.fileno()).st_ino
        if inode in self._held:
            file.close()
            return self._held[inode]
        memory = mmap.mmap(file.fileno(), 0)
        region = Region(np.frombuffer(memory, np.uint8).ctypes.data, len(memory))
        self._held[inode] = held = _Held(file, memory, region, agent.register(region))
        return held

    def _deregister_deleted(self, agent: NixlAgent) -> None:
        """Deregister files that were deleted: a mapped file keeps its memory."""
        gone = [inode for inode, held in self._held.items() if os.fstat(held.file.fileno()).st_nlink == 0]
        for inode in gone:
            held = self._held.pop(inode)
            agent.deregister(held.handle)
            held.memory.close()
            held.file.close()
