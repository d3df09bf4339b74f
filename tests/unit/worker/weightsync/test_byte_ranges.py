"""What an engine's rank does not keep does not travel to it; what it keeps comes bit for bit."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from grpo_worker.weightsync.protocol.byte_ranges import ByteRange, Extent, from_json, merged, to_json, wanted
from grpo_worker.weightsync.protocol.transfer_plan import Message, Piece, TransferBucket, places
from grpo_worker.weightsync.sglang_plugin.direct_receiver import deal_out
from grpo_worker.weightsync.trainer.sender import Shards
from support.transfer_cases import cut_tensors, parts_of, specs, transfer_plan

byte_ranges = st.lists(st.tuples(st.floats(0, 1), st.floats(0, 1)), max_size=3)


def extents(bucket: TransferBucket) -> list[Extent]:
    return [Extent(spec.start, spec.nbytes, spec.shape[0]) for spec in specs(bucket)]


def arrive(bucket: TransferBucket, shards: list[Shards], cuts: list[list[ByteRange]]) -> torch.Tensor:
    """The bucket's bytes when of each message only its cuts have come; the others are 255."""
    flat = torch.full((sum(s.nbytes for s in specs(bucket)),), 255, dtype=torch.uint8)
    for message, cut in zip(bucket.messages, cuts, strict=True):
        sent = torch.zeros(message.nbytes, dtype=torch.uint8)
        shards[message.source].fill(places(sent, bucket, message))
        start = message.start
        here = torch.full_like(sent, 255) if start is None else flat[start : start + message.nbytes]
        for first, last in cut:
            here[first:last] = sent[first:last]
        if start is None:
            deal_out(here, message, flat, specs(bucket), cut)
    return flat


@given(cuts=cut_tensors, limit=st.integers(16, 600), wishes=byte_ranges)
def test_what_is_kept_comes_bit_for_bit(
    cuts: dict[str, tuple[list[int], int, int]], limit: int, wishes: list[tuple[float, float]]
) -> None:
    parts, _ = parts_of(cuts)
    shards = [Shards(p, False) for p in parts]
    for bucket in transfer_plan(parts, limit).buckets:
        size = sum(spec.nbytes for spec in specs(bucket))
        kept = merged((int(min(wish) * size), int(max(wish) * size)) for wish in wishes)
        kept = [byte_range for byte_range in kept if byte_range[0] < byte_range[1]]
        told = wanted(bucket.messages, extents(bucket), kept)
        everything = arrive(bucket, shards, [[(0, m.nbytes)] for m in bucket.messages])
        found = arrive(bucket, shards, from_json(to_json([told]))[0])
        assert all(torch.equal(found[a:b], everything[a:b]) for a, b in kept)
        assert bool(kept) == any(told), "whoever keeps nothing gets nothing"


def test_a_rank_gets_its_own_experts_and_all_of_what_it_cannot_cut() -> None:
    """Of a message in its place the kept bytes; of one that is dealt out whole pieces."""
    kib = 1 << 10
    # Tensor 0 is cut by columns (each rank has half of each row), tensor 1 by rows.
    places_ = [Extent(0, 256 * kib, 64), Extent(256 * kib, 256 * kib, 64), Extent(512 * kib, 512 * kib, 8)]
    columns, rows = Piece(0, 1, 32, 32, 128 * kib), Piece(1, 0, 32, 32, 128 * kib)
    messages = [
        Message(0, 512 * kib, (Piece(2, 0, 0, 8, 512 * kib),)),
        Message(1, None, (columns, rows)),
    ]
    own, dealt = wanted(messages, places_, [(0, kib), (640 * kib, 768 * kib)])
    assert own == [(128 * kib, 256 * kib)] and dealt == [(0, 128 * kib)]
    assert wanted(messages, places_, [(384 * kib, 385 * kib)])[1] == [(128 * kib, 256 * kib)]


def test_small_gaps_are_sent_too_and_stretches_begin_where_devices_like_it() -> None:
    assert merged([(300, 400), (0, 10)], gap=256, end=1000) == [(0, 512)]
    assert merged([(300, 400), (900, 950)], gap=255, end=1000) == [(256, 512), (768, 1000)]
    assert merged([(5, 7), (6, 9), (9, 12), (13, 14)]) == [(5, 12), (13, 14)]
