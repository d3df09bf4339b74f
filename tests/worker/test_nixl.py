"""Blobs read out of another process's memory by NIXL; no adapter here, so over TCP."""

import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch

from grpo_worker.weightsync.agent.fetcher import Fetcher
from grpo_worker.weightsync.agent.http_reader import FetchError
from grpo_worker.weightsync.agent.whole_blobs import WholeBlobs
from grpo_worker.weightsync.protocol.manifest import Manifest
from grpo_worker.weightsync.trainer.publisher import publish
from grpo_worker.weightsync.transport.nixl import exporter, importer
from grpo_worker.weightsync.transport.nixl.agent import NixlAgent
from grpo_worker.weightsync.transport.nixl.exporter import Exporter
from grpo_worker.weightsync.transport.nixl.importer import Importer, ReadError
from support.engine_server import free_port
from support.processes import spinning_threads

RANKS, ROWS = 2, 1024
os.environ["UCX_TLS"] = "tcp"  # on one host it would copy from process to process


class Source:
    """A trainer's agent in a separate process, with weights in shared memory."""

    def __init__(self, root: Path, **environment: str) -> None:
        self.root = root
        self.port = free_port()
        self._environment = os.environ | environment
        self.start()

    def start(self) -> None:
        command = [sys.executable, "-m", "grpo_worker.weightsync.main", "trainer"]
        command += ["--weights", str(self.root), "--host", "127.0.0.1", "--port", str(self.port)]
        self.process = subprocess.Popen(command, env=self._environment)
        deadline = time.monotonic() + 60
        while True:
            try:
                httpx.get(f"http://127.0.0.1:{self.port}/healthz")
                return
            except httpx.HTTPError:
                assert time.monotonic() < deadline
                time.sleep(0.1)

    def urls(self) -> dict[int, str]:
        return dict.fromkeys(range(RANKS), f"http://127.0.0.1:{self.port}")

    def publish(self, version: int, rows: int = ROWS) -> dict[int, Manifest]:
        """Publish a version with random weights, as a trainer does."""
        generator = torch.Generator().manual_seed(version)
        found = {}
        for rank in range(RANKS):
            weight = torch.randn(rows, 1024, generator=generator).bfloat16()
            part = (f"w{rank}", tuple(weight.shape), 0, 0, weight)
            found[rank] = publish(self.root, version, rank, RANKS, [part])
        return found

    def deleted(self) -> int:
        """Count the deleted files that the process still maps."""
        maps = Path(f"/proc/{self.process.pid}/maps").read_text().splitlines()
        return sum(str(self.root) in line and "(deleted)" in line for line in maps)

    def end(self) -> None:
        self.process.kill()
        self.process.wait()


@pytest.fixture
def source(tmp_path: Path) -> Iterator[Source]:
    made = Source(tmp_path / "weights")
    yield made
    made.end()


def _pull(whole: WholeBlobs, source: Source, version: int) -> dict[int, bytes]:
    manifests = Fetcher(30).manifests(source.urls(), version)
    return {rank: bytes(blob) for rank, blob in whole.fetch(source.urls(), manifests).items()}


def _over_nixl(caplog: pytest.LogCaptureFixture) -> bool:
    """Return whether nothing was read over HTTP since the last call."""
    fell_back = "over HTTP" in caplog.text
    caplog.clear()
    return not fell_back


def test_versions_read_through_nixl_equal_those_over_http(
    source: Source, caplog: pytest.LogCaptureFixture
) -> None:
    """The trainer writes the third version into the first one's memory; the fourth has another size."""
    fetcher = WholeBlobs(30, importer=Importer())
    for version, rows in ((1, ROWS), (2, ROWS), (3, ROWS), (4, ROWS // 2), (5, ROWS // 2)):
        source.publish(version, rows)
        blobs = _pull(fetcher, source, version)
        assert _over_nixl(caplog)
        assert blobs == _pull(WholeBlobs(30), source, version) and len(blobs) == RANKS
        assert fetcher.received == sum(len(blob) for blob in blobs.values())


def test_known_blobs_are_not_read_again(source: Source) -> None:
    fetcher = WholeBlobs(30, importer=Importer())
    source.publish(1)
    first = _pull(fetcher, source, 1)
    assert _pull(fetcher, source, 1) == first and fetcher.received == 0
    fetcher.forget()
    assert _pull(fetcher, source, 1) == first and fetcher.received > 0


def test_both_ends_are_idle_between_versions(source: Source) -> None:
    """NIXL's own progress thread would poll without a pause and use a core at each end."""
    fetcher = WholeBlobs(30, importer=Importer())
    source.publish(1)
    _pull(fetcher, source, 1)
    assert spinning_threads([source.process.pid, os.getpid()]) == []


def test_memory_of_deleted_blobs_is_released(source: Source) -> None:
    fetcher = WholeBlobs(30, importer=Importer())
    for version in range(1, 7):  # each size is new, so no file is written over
        source.publish(version, ROWS + version)
        _pull(fetcher, source, version)
    assert source.deleted() <= RANKS


def test_a_restarted_source_is_reconnected(source: Source, caplog: pytest.LogCaptureFixture) -> None:
    fetcher = WholeBlobs(30, importer=Importer())
    source.publish(1)
    _pull(fetcher, source, 1)
    source.end()
    source.start()
    source.publish(2)
    assert _pull(fetcher, source, 2) == _pull(WholeBlobs(30), source, 2) and _over_nixl(caplog)


def test_without_a_common_transport_blobs_are_read_over_http(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    source = Source(tmp_path / "weights", UCX_TLS="self")
    try:
        source.publish(1)
        assert _pull(WholeBlobs(30, importer=Importer()), source, 1) == _pull(WholeBlobs(30), source, 1)
        assert not _over_nixl(caplog)
    finally:
        source.end()


def _stop(source: Source) -> None:
    source.process.send_signal(signal.SIGSTOP)


@pytest.mark.parametrize("fault", [_stop, Source.end])
def test_a_read_from_an_unresponsive_source_times_out(
    source: Source, fault: Callable[[Source], None]
) -> None:
    """The source's process is frozen or killed after the offer."""
    importer, fetcher = Importer(), WholeBlobs(30)
    manifests = source.publish(1, 16 * ROWS)
    into = {rank: np.zeros(m.blob_bytes, dtype=np.uint8) for rank, m in manifests.items()}
    offers = {rank: fetcher.offer(source.urls(), m) for rank, m in manifests.items()}
    fault(source)
    started = time.monotonic()
    with pytest.raises(ReadError):
        importer.read(offers, into, 3)
    assert time.monotonic() - started < 10
    before = {rank: blob.copy() for rank, blob in into.items()}
    source.process.send_signal(signal.SIGCONT)
    time.sleep(1)
    assert all(np.array_equal(into[rank], before[rank]) for rank in into), "written after the read had ended"


def test_a_read_may_take_longer_than_both_ends_wait(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each part that arrives is progress to the reader, and to the source, which polls while readers read."""
    monkeypatch.setattr(exporter, "_QUIET_SECONDS", 1.0)
    monkeypatch.setattr(importer, "_PART", 1 << 20)
    monkeypatch.setattr(importer, "_READS", 1)
    begin = NixlAgent.begin_read

    def begin_slowly(*arguments: Any) -> Any:
        time.sleep(0.4)
        return begin(*arguments)

    monkeypatch.setattr(NixlAgent, "begin_read", begin_slowly)
    (tmp_path / "blob").write_bytes(os.urandom(8 << 20))
    offer = Exporter().offer(tmp_path / "blob")
    into = np.zeros(8 << 20, dtype=np.uint8)
    started = time.monotonic()
    Importer().read({0: offer}, {0: into}, 1.0)
    assert time.monotonic() - started > 2
    assert into.tobytes() == (tmp_path / "blob").read_bytes()


@pytest.mark.fault(
    row="15",
    point="a bit flips in memory that NIXL reads",
    witness="the message names the digest",
    bound="in the same read",
    partial="no engine, no repair, nothing compared",
)
def test_a_flipped_bit_is_detected(source: Source, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    source.publish(1)
    file = source.root / "v1" / "rank-1.bin"
    with file.open("r+b") as handle:
        handle.seek(100)
        byte = handle.read(1)
        handle.seek(100)
        handle.write(bytes([byte[0] ^ 1]))
    with pytest.raises(FetchError, match="another digest"):
        _pull(WholeBlobs(30, importer=Importer()), source, 1)


def test_a_process_with_an_agent_exits_cleanly(tmp_path: Path) -> None:
    """Its thread must not be inside NIXL when the interpreter exits."""
    (tmp_path / "blob").write_bytes(b"x" * 4096)
    code = (
        "import pathlib, sys, time; from grpo_worker.weightsync.transport.nixl.exporter import Exporter;"
        "exporter = Exporter(); exporter.offer(pathlib.Path(sys.argv[1])); time.sleep(0.1)"
    )
    for _ in range(3):
        command = [sys.executable, "-c", code, str(tmp_path / "blob")]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr[-2000:]
