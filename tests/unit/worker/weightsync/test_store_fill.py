"""The version of a checkpoint is read from files: every byte verified, damage named, waits bounded."""

import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from grpo_worker.checkpointing.restart_point import CHECKPOINTS, RUN, RestartPoint
from grpo_worker.checkpointing.store import directory
from grpo_worker.quantization.fp8 import Part
from grpo_worker.weightsync.agent import file_reader, store_fill
from grpo_worker.weightsync.agent.blobs import DamageError
from grpo_worker.weightsync.agent.fetcher import Fetcher
from grpo_worker.weightsync.agent.file_reader import FileReader
from grpo_worker.weightsync.agent.http_reader import FetchError
from grpo_worker.weightsync.agent.refills import WaitingCalls
from grpo_worker.weightsync.agent.staged_version import StagedVersion, VersionStream
from grpo_worker.weightsync.agent.store_fill import StoreFill
from grpo_worker.weightsync.agent.writer_guard import WriterGuard
from grpo_worker.weightsync.protocol.stored_version import manifests_in, stored_blob
from grpo_worker.weightsync.protocol.tiling import PlanError
from grpo_worker.weightsync.trainer.publisher import publish
from support.stored_versions import JobStore

JOB, WORLD, STEP = "job-1", 2, 4


class Store:
    """A job's folder with the checkpoint of step 4, and the agent's reader of it."""

    def __init__(self, root: Path, timeout: float = 5) -> None:
        store = JobStore(root / "store")
        generator = torch.Generator().manual_seed(1)
        self.tensors = {
            name: torch.randn(64, 48, generator=generator) for name in ("rows", "columns", "whole")
        }
        for rank in range(WORLD):
            publish(root / "memory", STEP, rank, WORLD, self._parts(rank))
        store.keep(root / "memory", STEP, WORLD)
        self.folder, self.weights = store.folder, store.weights(STEP)
        self.calls, self.fetcher = WaitingCalls(), Fetcher(timeout)
        self.fill = StoreFill(self.folder, JOB, self.fetcher, 1 << 20, timeout, self.calls)

    def _parts(self, rank: int) -> list[Part]:
        parts: list[Part] = []
        for dim, name in enumerate(("rows", "columns")):
            half = self.tensors[name].chunk(WORLD, dim)[rank]
            parts.append((name, (64, 48), dim, half.shape[dim] * rank, half))
        if not rank:
            parts.append(("whole", (64, 48), 0, 0, self.tensors["whole"]))
        return parts

    def point(self) -> RestartPoint:
        found = self.fill.find(JOB)
        assert found is not None
        return found

    def streamed(self, staged: StagedVersion) -> bytes:
        data = b""
        with VersionStream(staged, 5, 4096) as stream:
            for ready in stream:
                data += bytes(ready.data)
        return data


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path)


def test_every_byte_of_the_checkpoints_version_is_read(store: Store) -> None:
    point = store.point()
    assert (point.attempt, point.version) == (1, STEP)
    staged = store.fill.open(point)
    wanted = b"".join(store.tensors[tensor.name].numpy().tobytes() for tensor in staged.plan.tensors)
    assert store.streamed(staged) == wanted and store.fetcher.received >= len(wanted)
    assert staged.digests and len(staged.digests) == WORLD


def test_only_the_agent_of_the_stores_job_reads_it(store: Store) -> None:
    assert store.fill.find("other") is None and store.fill.find(None) is None
    assert StoreFill(None, JOB, store.fetcher, 1 << 20, 5, store.calls).find(JOB) is None


def test_a_checkpoint_without_weights_is_nothing_to_read(store: Store) -> None:
    for file in manifests_in(store.weights):
        file.unlink()
    assert store.fill.find(JOB) is None


@pytest.mark.parametrize("rank", range(WORLD))
@pytest.mark.parametrize("place", [0, 3000, -1])
def test_a_flipped_bit_is_found_and_named_and_the_version_is_not_read_again(
    rank: int, place: int, store: Store
) -> None:
    blob = stored_blob(store.weights, rank)
    data = bytearray(blob.read_bytes())
    data[place] ^= 16
    blob.write_bytes(data)
    point = store.point()
    with pytest.raises(DamageError, match=rf"{blob}, slice at byte \d+: another digest than the manifest's"):
        store.streamed(store.fill.open(point))
    store.fill.set_aside(point)
    assert store.fill.find(JOB) is None


def test_a_damaged_manifest_is_named(store: Store) -> None:
    file = manifests_in(store.weights)[0]
    data = bytearray(file.read_bytes())
    data[20] ^= 1
    file.write_bytes(data)
    with pytest.raises(DamageError, match=f"{file}: another digest than in its name"):
        store.fill.open(store.point())


def test_a_missing_rank_and_a_missing_or_short_blob_are_named(store: Store) -> None:
    point, blob = store.point(), stored_blob(store.weights, 1)
    data = blob.read_bytes()
    blob.write_bytes(data[:-8])
    with pytest.raises(FetchError, match=f"{blob}: it ends at byte {len(data) - 8}"):
        store.streamed(store.fill.open(point))
    blob.unlink()
    with pytest.raises(FetchError, match=f"No such file or directory: '{blob}'"):
        store.streamed(store.fill.open(point))
    blob.write_bytes(data)
    store.streamed(store.fill.open(point))
    next(file for file in manifests_in(store.weights) if file.name.startswith("rank-1")).unlink()
    with pytest.raises(PlanError, match=r"manifests of ranks \[0\], expected 0 to 1"):
        store.fill.open(point)


def test_the_version_of_another_step_is_refused(store: Store) -> None:
    later = directory(store.folder / CHECKPOINTS, STEP + 1)
    store.weights.parent.rename(later)
    point = store.point()
    assert point.version == STEP + 1
    with pytest.raises(DamageError, match=f"version {STEP} is there, not {STEP + 1}"):
        store.fill.open(point)


def test_a_checkpoint_that_is_removed_while_it_is_read_ends_the_reading(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    original, reads = FileReader.get, list[str]()

    def get(self: FileReader, url: str, part: tuple[int, int]) -> Any:
        reads.append(url)
        if len(reads) == 3:
            for file in store.weights.iterdir():
                file.unlink()
        return original(self, url, part)

    staged = store.fill.open(store.point())
    monkeypatch.setattr(FileReader, "get", get)
    with pytest.raises(FetchError, match="No such file or directory"):
        store.streamed(staged)
    assert len(reads) >= 3
    assert store.fill.find(JOB) is None


def test_calls_of_the_job_end_a_reading_but_one_that_asks_for_this_version(store: Store) -> None:
    point = store.point()
    with store.calls.waiting(STEP):
        assert store.streamed(store.fill.open(point))
        assert store.fill.find(JOB) is None, "the call may begin at once"
    for version in (STEP + 1, None):
        staged = store.fill.open(point)
        with (
            store.calls.waiting(version),
            pytest.raises(FetchError, match="a call of the job needs the engine"),
        ):
            store.streamed(staged)


@pytest.fixture
def impatient(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Store:
    monkeypatch.setattr(file_reader, "_LOOK_SECONDS", 0.05)
    monkeypatch.setattr(store_fill, "_LOOK_SECONDS", 0.3)
    return Store(tmp_path, timeout=0.5)


def hang(file: Path) -> None:
    """Let every open of a file wait, like a file system whose server is away."""
    file.unlink()
    os.mkfifo(file)


def release(file: Path) -> None:
    """Let those who wait go on, and read nothing."""
    os.close(os.open(file, os.O_WRONLY))


def test_a_read_that_hangs_ends_at_its_deadline_and_leaves_the_agent_free(impatient: Store) -> None:
    staged = impatient.fill.open(impatient.point())
    blob = stored_blob(impatient.weights, 1)
    hang(blob)
    began = time.monotonic()
    with pytest.raises(FetchError, match=rf"{blob}: no answer of the store for 0.5 s"):
        impatient.streamed(staged)
    assert time.monotonic() - began < 10
    release(blob)


def test_a_call_of_the_job_does_not_wait_for_a_read_that_hangs(impatient: Store) -> None:
    blob, hour = stored_blob(impatient.weights, 1), 3600
    hang(blob)
    reader = FileReader(ThreadPoolExecutor(1), hour, lambda: impatient.calls.other_than(STEP))
    with impatient.calls.waiting(), pytest.raises(FetchError, match="a call of the job needs the engine"):
        reader.run("the blob", lambda: os.open(blob, os.O_RDONLY))
    release(blob)


def test_a_look_that_hangs_is_not_repeated_and_its_late_answer_is_not_used(impatient: Store) -> None:
    record = impatient.folder / RUN
    text = record.read_text()
    hang(record)
    threads = threading.active_count()
    assert impatient.fill.find(JOB) is None
    began = time.monotonic()
    for _ in range(20):
        assert impatient.fill.find(JOB) is None
    assert time.monotonic() - began < 0.2, "nobody waits for it again"
    assert threading.active_count() <= threads + 1
    look = impatient.fill._look
    assert look is not None and not look.done()
    release(record)
    record.unlink()
    record.write_text(text)
    deadline = time.monotonic() + 10
    while not look.done():
        assert time.monotonic() < deadline
    assert impatient.point().version == STEP


def test_damaged_records_of_the_job_are_nothing_to_trust(store: Store) -> None:
    (store.folder / RUN).write_text("{")
    assert store.fill.find(JOB) is None


def test_newer_weights_of_the_same_attempt_make_a_version_outdated_but_not_those_of_an_older_one() -> None:
    guard = WriterGuard(JOB)
    assert not guard.outdated(1, 4)
    guard.note(1, 6)
    assert guard.outdated(1, 4) and not guard.outdated(1, 6) and not guard.outdated(2, 4)
    guard.note(2, 5)
    assert guard.outdated(2, 4) and guard.outdated(1, 6) and not guard.outdated(2, 5)
    guard.bind("other")
    assert not guard.outdated(0, 0)
