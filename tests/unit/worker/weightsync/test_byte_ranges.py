"""An engine rank receives only the byte ranges it needs, bit for bit."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from grpo_worker.weightsync.protocol.byte_ranges import (
    ByteRange,
    Extent,
    from_json,
    merged,
    needed_ranges,
    to_json,
)
from grpo_worker.weightsync.protocol.transfer_plan import Message, Piece, TransferBucket, piece_views
from grpo_worker.weightsync.sglang_plugin.direct_receiver import scatter
from grpo_worker.weightsync.trainer.sender import Shards
from support.transfer_cases import cut_tensors, parts_of, specs, transfer_plan

byte_ranges = st.lists(st.tuples(st.floats(0, 1), st.floats(0, 1)), max_size=3)


def extents(bucket: TransferBucket) -> list[Extent]:
    return [Extent(spec.start, spec.nbytes, spec.shape[0]) for spec in specs(bucket)]


def arrive(bucket: TransferBucket, shards: list[Shards], cuts: list[list[ByteRange]]) -> torch.Tensor:
    """Return the bucket's bytes after only the needed ranges of each message arrived; the others are 255."""
    flat = torch.full((sum(s.nbytes for s in specs(bucket)),), 255, dtype=torch.uint8)
    for message, cut in zip(bucket.messages, cuts, strict=True):
        sent = torch.zeros(message.nbytes, dtype=torch.uint8)
        shards[message.source].fill(piece_views(sent, bucket, message))
        start = message.start
        here = torch.full_like(sent, 255) if start is None else flat[start : start + message.nbytes]
        for first, last in cut:
            here[first:last] = sent[first:last]
        if start is None:
            scatter(here, message, flat, specs(bucket), cut)
    return flat


@given(cuts=cut_tensors, limit=st.integers(16, 600), wishes=byte_ranges)
def test_needed_ranges_arrive_bit_for_bit(
    cuts: dict[str, tuple[list[int], int, int]], limit: int, wishes: list[tuple[float, float]]
) -> None:
    parts, _ = parts_of(cuts)
    shards = [Shards(p, False) for p in parts]
    for bucket in transfer_plan(parts, limit).buckets:
        size = sum(spec.nbytes for spec in specs(bucket))
        used = merged((int(min(wish) * size), int(max(wish) * size)) for wish in wishes)
        used = [byte_range for byte_range in used if byte_range[0] < byte_range[1]]
        needed = needed_ranges(bucket.messages, extents(bucket), used)
        everything = arrive(bucket, shards, [[(0, m.nbytes)] for m in bucket.messages])
        found = arrive(bucket, shards, from_json(to_json([needed]))[0])
        assert all(torch.equal(found[a:b], everything[a:b]) for a, b in used)
        assert bool(used) == any(needed), "a rank that needs nothing gets nothing"


def test_a_rank_gets_its_experts_and_every_unsharded_tensor() -> None:
    """Contiguous messages send only needed bytes; scattered ones send whole pieces."""
    kib = 1 << 10
    # Tensor 0 is cut by columns (each rank has half of each row), tensor 1 by rows.
    positions = [Extent(0, 256 * kib, 64), Extent(256 * kib, 256 * kib, 64), Extent(512 * kib, 512 * kib, 8)]
    columns, rows = Piece(0, 1, 32, 32, 128 * kib), Piece(1, 0, 32, 32, 128 * kib)
    messages = [
        Message(0, 512 * kib, (Piece(2, 0, 0, 8, 512 * kib),)),
        Message(1, None, (columns, rows)),
    ]
    in_place, scattered = needed_ranges(messages, positions, [(0, kib), (640 * kib, 768 * kib)])
    assert in_place == [(128 * kib, 256 * kib)] and scattered == [(0, 128 * kib)]
    assert needed_ranges(messages, positions, [(384 * kib, 385 * kib)])[1] == [(128 * kib, 256 * kib)]


def test_small_gaps_are_merged_and_ranges_are_aligned() -> None:
    assert merged([(300, 400), (0, 10)], gap=256, end=1000) == [(0, 512)]
    assert merged([(300, 400), (900, 950)], gap=255, end=1000) == [(256, 512), (768, 1000)]
    assert merged([(5, 7), (6, 9), (9, 12), (13, 14)]) == [(5, 12), (13, 14)]
