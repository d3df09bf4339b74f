"""Deltas restore the new blob byte for byte; damaged or foreign deltas are refused."""

import io
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from grpo_worker.weightsync.protocol.delta_codec import DeltaError, Read, apply, encode
from grpo_worker.weightsync.protocol.digest import PIECE, Bounds, piece_digests, pieces_of
from grpo_worker.weightsync.protocol.manifest import rank_file
from grpo_worker.weightsync.trainer.publisher import publish


def pair(size: int, changed: float, seed: int) -> tuple[np.ndarray, np.ndarray]:
    generator = np.random.default_rng(seed)
    old = generator.integers(0, 256, size, dtype=np.uint8)
    new = old.copy()
    where = generator.random(size) < changed
    new[where] = generator.integers(0, 256, int(where.sum()), dtype=np.uint8)
    return old, new


def bounds_of(blob: np.ndarray) -> list[Bounds]:
    return list(pieces_of([(0, len(blob))]))


def digests_of(blob: np.ndarray) -> bytes:
    return piece_digests(blob.data, bounds_of(blob))


def reader(data: bytes) -> Read:
    """Return a reader of a delta in memory."""
    stream = io.BytesIO(data)

    def read(to: memoryview) -> None:
        if stream.readinto(to) < len(to):
            raise EOFError(f"{len(data)} bytes")

    return read


def delta_of(old: np.ndarray, new: np.ndarray) -> bytes:
    found, parts = encode(old, new, "a", bounds_of(new))
    assert found == digests_of(new)
    assume(parts is not None)  # of a few bytes, one is many
    assert parts is not None
    return b"".join(parts)


@settings(deadline=None, max_examples=60)
@given(
    size=st.integers(0, 800_000), changed=st.sampled_from([0.0, 0.0001, 0.01, 0.04]), seed=st.integers(0, 99)
)
def test_a_delta_applied_to_the_base_gives_the_new_blob(size: int, changed: float, seed: int) -> None:
    old, new = pair(size, changed, seed)
    delta, changes = delta_of(old, new), int((old != new).sum())
    found, length = apply(old, "a", bounds_of(old), reader(delta))
    assert np.array_equal(old, new) and found == digests_of(new) and length == len(delta)
    assert len(delta) < 300 + size // (2 * 255) + 3 * changes


@pytest.mark.parametrize("size", [PIECE, PIECE + 1, 2 * PIECE - 1, 2 * PIECE + 3])
def test_deltas_apply_across_piece_boundaries(size: int) -> None:
    old, new = pair(size, 0.01, size)
    new[-1] ^= 1
    assert apply(old, "a", bounds_of(old), reader(delta_of(old, new)))[0] == digests_of(new)
    assert np.array_equal(old, new)


def test_too_many_changes_make_no_delta() -> None:
    old, new = pair(100_000, 0.6, 1)
    assert encode(old, new, "a", bounds_of(new)) == (digests_of(new), None)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda d: b"XXXX" + d[4:], "no delta: it begins with"),
        (lambda d: d.replace(b'"words": ', b'"wordz": '), "no delta: 'words'"),
        (lambda d: d.replace(b'"words": [', b'"words":[-'), "of the pieces"),
        (lambda d: d.replace(b'"words": [', b'"words":[9'), "of the pieces"),
        (lambda d: d.replace(b'"nbytes": 70000', b'"nbytes": 70002'), "70002 bytes"),
    ],
)
def test_a_damaged_delta_is_refused_before_any_write(damage: object, message: str) -> None:
    old, new = pair(70_000, 0.01, 2)
    before = old.copy()
    with pytest.raises(DeltaError, match=message):
        apply(old, "a", bounds_of(old), reader(damage(delta_of(old, new))))  # type: ignore[operator]
    assert np.array_equal(old, before)


@pytest.mark.parametrize("size", [3, 30, -1])
def test_a_piece_is_written_only_when_complete(size: int) -> None:
    old, new = pair(70_000, 0.01, 2)
    before = old.copy()
    with pytest.raises(EOFError):
        apply(old, "a", bounds_of(old), reader(delta_of(old, new)[:size]))
    assert np.array_equal(old, before)


@pytest.mark.parametrize(
    ("at", "value", "message"), [(0, 255, "words with places"), (-1, 254, "a place for")]
)
def test_offsets_that_do_not_match_the_words_are_refused(at: int, value: int, message: str) -> None:
    old, new = pair(70_000, 0.01, 2)
    delta = bytearray(delta_of(old, new))
    first = delta.index(b"}") + 1
    count = json.loads(delta[8:first])["gaps"][0]
    delta[first + at % count] = value
    with pytest.raises(DeltaError, match=message):
        apply(old, "a", bounds_of(old), reader(bytes(delta)))


def test_a_delta_of_another_base_is_refused() -> None:
    old, new = pair(1000, 0.01, 3)
    with pytest.raises(DeltaError, match=r"a delta of a .* not of c"):
        apply(old, "c", bounds_of(old), reader(delta_of(old, new)))
    with pytest.raises(DeltaError, match="have no delta"):
        encode(old, new[:-1], "a", [])


def test_a_published_delta_is_named_by_its_base(tmp_path: Path) -> None:
    """Only the last version's delta is kept, and none is written if it would not save bytes."""
    tensor = torch.arange(4000, dtype=torch.float32)
    found = []
    for version in (1, 2, 3, 4):
        tensor[version] += 1
        part = ("w", (4000,), 0, 0, tensor if version < 4 else tensor * 1.1)
        found.append(publish(tmp_path, version, 0, 1, [part], deltas=True))
    assert [list(tmp_path.glob(f"v{v}/*delta*")) for v in (1, 2, 3, 4)] == [[], [], [], []]
    publish(tmp_path, 5, 0, 1, [("w", (4000,), 0, 0, tensor * 1.1)], deltas=True)
    file = rank_file(tmp_path, 5, 0, f"{found[3].digest}.delta")
    assert list(tmp_path.glob("v*/*delta*")) == [file] and len(file.read_bytes()) < 300
    publish(tmp_path, 6, 0, 1, [("w", (4000,), 0, 0, tensor)])
    assert not list(tmp_path.glob("v*/*delta*")), "nobody asked for it"
