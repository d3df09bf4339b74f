"""Trainer side of NIXL: blobs in the pod's memory, for other pods to read without this one's CPU."""

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

_LONGEST_READ = 600.0  # seconds
_REST = 0.0005  # between two looks: a hundredth of a core


@dataclass(slots=True)
class _Held:
    """A registered file. The trainer writes later versions into the same ones, under other names."""

    file: BinaryIO
    memory: mmap.mmap
    region: Region
    handle: Any


class Exporter:
    """Registers each file once, and lets it go when it is deleted. Thread-safe.

    Without RDMA the reads of others need a hand, which they get for a while after each offer.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._agent: NixlAgent | None = None
        self._held: dict[int, _Held] = {}  # by inode
        self._asked = threading.Event()
        self._ended = threading.Event()
        self._until = 0.0  # of time.monotonic(): when the last read must have ended

    def offer(self, path: Path) -> Offer:
        """How to read a file that is not empty. Raises OSError when there is none."""
        path.stat()  # raises: nobody needs NIXL for a file that is not there
        with self._lock:
            agent = self._agent or self._start()
            self._let_go(agent)
            self._until = time.monotonic() + _LONGEST_READ
            self._asked.set()
            held = self._hold(agent, path)
            return Offer(base64.b64encode(agent.metadata()).decode(), *held.region)

    def _start(self) -> NixlAgent:
        self._agent = NixlAgent()
        helper = threading.Thread(target=self._lend_a_hand, args=(self._agent,), daemon=True)
        helper.start()

        def end() -> None:
            self._ended.set()
            self._asked.set()
            helper.join()

        # A thread that the interpreter ends inside of NIXL takes the whole process with it.
        atexit.register(end)
        return self._agent

    def _lend_a_hand(self, agent: NixlAgent) -> None:
        while not self._ended.is_set():
            self._asked.wait()
            self._asked.clear()
            while time.monotonic() < self._until and not self._ended.is_set():
                agent.progress()
                time.sleep(_REST)

    def _hold(self, agent: NixlAgent, path: Path) -> _Held:
        file = path.open("r+b")
        inode = os.fstat(file.fileno()).st_ino
        if inode in self._held:
            file.close()
            return self._held[inode]
        memory = mmap.mmap(file.fileno(), 0)
        region = Region(np.frombuffer(memory, np.uint8).ctypes.data, len(memory))
        self._held[inode] = held = _Held(file, memory, region, agent.register(region))
        return held

    def _let_go(self, agent: NixlAgent) -> None:
        """A file that was deleted keeps its memory until nobody maps it any more."""
        gone = [inode for inode, held in self._held.items() if os.fstat(held.file.fileno()).st_nlink == 0]
        for inode in gone:
            held = self._held.pop(inode)
            agent.deregister(held.handle)
            held.memory.close()
            held.file.close()
