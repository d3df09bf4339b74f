"""A staged version is streamed in chunks: every byte is right and verified, and damage is named."""

import math
import subprocess
import sys
import threading
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from grpo_worker.quantization.fp8 import Part
from grpo_worker.weightsync.agent.blobs import LocalBlobs
from grpo_worker.weightsync.agent.fetcher import Fetcher
from grpo_worker.weightsync.agent.http_reader import FetchError
from grpo_worker.weightsync.agent.staged_version import StagedVersion, VersionStream
from grpo_worker.weightsync.protocol import digest as digests
from grpo_worker.weightsync.protocol.fingerprint import Fingerprint, fingerprint
from grpo_worker.weightsync.protocol.manifest import Manifest
from grpo_worker.weightsync.protocol.tiling import PlanError, make_plan
from grpo_worker.weightsync.protocol.transfer_plan import make_transfer_plan
from grpo_worker.weightsync.trainer.publisher import publish
from support.engine_server import serve

WORLD = 3
Layout = list[tuple[tuple[int, ...], int, int, int]]  # shape, dim, parts, first rank

layouts = st.lists(
    st.tuples(
        st.sampled_from([(6, 4), (12, 8), (24, 2), (6,), (2, 6, 4)]),
        st.integers(0, 1), st.sampled_from([1, 2]), st.integers(0, WORLD - 1),
    ),
    min_size=1, max_size=8,
)  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def small_pieces() -> Iterator[None]:
    """Slices of many pieces, as those of a real model."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(digests, "PIECE", 48)
        patch.setattr("grpo_worker.weightsync.agent.blobs.PIECE", 48)
        patch.setattr("grpo_worker.weightsync.agent.blobs._STEP", 40)
        patch.setattr("grpo_worker.weightsync.agent.blobs._RUN", 300)
        yield


def published(root: Path, version: int, layout: Layout) -> tuple[dict[str, torch.Tensor], list[Manifest]]:
    """Publish tensors split as in ``layout``; return them whole, and the ranks' manifests."""
    generator = torch.Generator().manual_seed(version)
    whole: dict[str, torch.Tensor] = {}
    parts: list[list[Part]] = [[] for _ in range(WORLD)]
    for number, (shape, dim, count, first) in enumerate(layout):
        name, axis = f"t{number}", min(dim, len(shape) - 1)
        whole[name] = torch.randn(shape, generator=generator)
        size = shape[axis] // count
        for piece, part in enumerate(torch.split(whole[name], size, axis)):
            parts[(first + piece) % WORLD].append((name, shape, axis, piece * size, part))
    return whole, [publish(root, version, rank, WORLD, parts[rank]) for rank in range(WORLD)]


def streamed(staged: StagedVersion, limit: int) -> tuple[list[bytes], list[int], str]:
    """Return the bytes of each bucket, their fingerprints and the checksum."""
    buckets, prints = [b"" for _ in staged.plan.buckets], []
    with VersionStream(staged, 5, limit) as stream:
        stream.wait_for_first()
        for ready in stream:
            assert ready.chunk.nbytes == len(ready.data) <= limit
            assert ready.chunk.start == len(buckets[ready.chunk.bucket])
            buckets[ready.chunk.bucket] += bytes(ready.data)
            if ready.fingerprint is not None:
                prints.append(ready.fingerprint)
    return buckets, prints, stream.checksum()


class Trainers:
    """Sidecars over one folder, and what reads from them."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.sources = serve(root, WORLD)
        self.fetcher = Fetcher(5)

    def staged(self, version: int, bucket: int = 1 << 20) -> StagedVersion:
        manifests = self.fetcher.manifests(self.sources, version)
        plan = make_transfer_plan(make_plan(manifests), bucket)
        blobs = self.fetcher.blobs(self.sources, manifests)
        return StagedVersion(version, plan, [m.digest for m in manifests], blobs)


@pytest.fixture(scope="module")
def trainers(tmp_path_factory: pytest.TempPathFactory) -> Trainers:
    return Trainers(tmp_path_factory.mktemp("published"))


_number = iter(range(1, 10_000))


@settings(deadline=None, max_examples=60)
@given(layout=layouts, bucket=st.sampled_from([128, 512, 1 << 20]), limit=st.sampled_from([96, 200, 1 << 20]))
def test_buckets_have_every_byte_and_the_checksum_is_their_sum(
    trainers: Trainers, layout: Layout, bucket: int, limit: int
) -> None:
    version = next(_number)
    whole, manifests = published(trainers.root, version, layout)
    remote = trainers.staged(version, bucket)
    files = {m.rank: trainers.root / f"v{version}" / f"rank-{m.rank}.bin" for m in manifests}
    local = LocalBlobs({rank: np.fromfile(file, dtype=np.uint8) for rank, file in files.items()})
    for staged in (remote, StagedVersion(version, remote.plan, remote.digests, local)):
        buckets, prints, checksum = streamed(staged, limit)
        for data, tensors, found in zip(buckets, staged.plan.buckets, prints, strict=True):
            wanted = b"".join(whole[tensor.name].numpy().tobytes() for tensor in tensors)
            assert data == wanted
            assert found == int(fingerprint(torch.frombuffer(bytearray(data), dtype=torch.uint8)))
        everything = b"".join(tensor.numpy().tobytes() for tensor in whole.values())
        assert (
            checksum == f"{len(everything)}:{sum(np.frombuffer(everything, np.int8).tolist()) % 2**64:016x}"
        )


@settings(deadline=None, max_examples=50)
@given(size=st.integers(1, 200_000), cuts=st.lists(st.floats(0, 1), max_size=5), seed=st.integers(0, 9))
def test_a_fingerprint_made_in_any_order_equals_that_of_the_whole(
    size: int, cuts: list[float], seed: int
) -> None:
    data = np.random.default_rng(seed).integers(0, 256, size, dtype=np.uint8)
    bounds = sorted({0, size, *(int(cut * size) for cut in cuts)})
    pieces = list(pairwise(bounds))
    made = Fingerprint(size)
    for first, last in np.random.default_rng(seed).permutation(pieces):
        made.add(int(first), data[first:last])
    assert made.value() == int(fingerprint(torch.from_numpy(data)))


MANY: Layout = [((64, 8), 0, 2, 0), ((64, 8), 1, 2, 1), ((64, 8), 1, 1, 2)]


@pytest.mark.parametrize("rank", range(WORLD))
@pytest.mark.parametrize("place", [0, -1])
def test_any_flipped_byte_ends_the_stream(trainers: Trainers, rank: int, place: int) -> None:
    version = next(_number)
    published(trainers.root, version, MANY)
    staged = trainers.staged(version)
    blob = trainers.root / f"v{version}" / f"rank-{rank}.bin"
    data = bytearray(blob.read_bytes())
    data[place] ^= 1
    blob.write_bytes(data)
    with pytest.raises(FetchError, match=rf"{version}/{rank}.bin, slice at byte \d+: another digest"):
        streamed(staged, 256)


def test_a_version_overwritten_while_it_is_read_ends_the_stream_and_the_newer_one_is_whole(
    trainers: Trainers,
) -> None:
    """The publisher reuses the files of old versions while the agent still reads them."""
    version = next(_number)
    published(trainers.root, version, MANY)
    staged = trainers.staged(version)
    with VersionStream(staged, 5, 256) as stream:
        next(iter(stream))
        for newer in (version + 1, version + 2):
            next(_number)
            whole, _ = published(trainers.root, newer, MANY)
        with pytest.raises(FetchError, match=r"HTTP 404|another digest"):
            list(stream)
    buckets, _, _ = streamed(trainers.staged(version + 2), 256)
    wanted = sum(math.prod(tensor.shape) * 4 for tensor in whole.values())
    assert sum(map(len, buckets)) == wanted


def test_an_interrupted_stream_can_be_read_again(trainers: Trainers) -> None:
    version = next(_number)
    published(trainers.root, version, MANY)
    staged = trainers.staged(version)
    with VersionStream(staged, 5, 256) as stream:
        next(iter(stream))
    assert streamed(staged, 256)[2] == streamed(trainers.staged(version), 1 << 20)[2]


def test_a_row_larger_than_a_chunk_is_refused(trainers: Trainers) -> None:
    version = next(_number)
    published(trainers.root, version, [((2, 6, 4), 1, 2, 0)])
    with pytest.raises(PlanError, match="t0: a row of 96 bytes does not fit into 64 bytes"):
        streamed(trainers.staged(version), 64)


def test_only_two_chunks_are_in_memory(trainers: Trainers, monkeypatch: pytest.MonkeyPatch) -> None:
    """While one is sent, one is fetched, and no further one begins."""
    version = next(_number)
    published(trainers.root, version, MANY)
    staged = trainers.staged(version)
    filled = threading.Semaphore(0)
    original = type(staged.blobs).fill

    def fill(self: Any, *arguments: Any) -> None:
        original(self, *arguments)
        filled.release()

    monkeypatch.setattr(type(staged.blobs), "fill", fill)
    with VersionStream(staged, 5, 256) as stream:
        first = next(iter(stream))
        kept = bytes(first.data)
        assert filled.acquire(timeout=5) and filled.acquire(timeout=5)
        assert not filled.acquire(timeout=0.3), "a third chunk was fetched"
        assert kept == bytes(first.data), "overwritten before it was sent"


def test_a_misaligned_tensor_is_refused(tmp_path: Path) -> None:
    parts: list[Part] = [
        ("a", (3,), 0, 0, torch.ones(3, dtype=torch.bfloat16)), ("b", (2,), 0, 0, torch.ones(2))
    ]  # fmt: skip
    found = [publish(tmp_path, 1, 0, 1, parts)]
    with pytest.raises(ValueError, match="b: byte 6 is not aligned to float32"):
        make_transfer_plan(make_plan(found), 100)


def test_an_agent_imports_no_torch() -> None:
    """Torch alone takes 300 MiB."""
    code = (
        "import sys; from grpo_worker.weightsync.agent import agent, http, whole_blobs;"
        "from grpo_worker.weightsync.trainer import agent; sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
