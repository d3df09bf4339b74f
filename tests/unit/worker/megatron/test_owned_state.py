"""Pieces of parameters that data-parallel ranks keep, and the rank that saves each parameter."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from grpo_worker.megatron.checkpoint.pieces import (
    Owners,
    Piece,
    chunk_count,
    clipped,
    piece_of,
    pieces,
)


@pytest.mark.parametrize(
    ("start", "end", "bucket", "shard", "expected"),
    [
        (0, 10, 0, 16, [Piece(0, 0, 10)]),
        (0, 32, 0, 16, [Piece(0, 0, 16), Piece(1, 16, 32)]),
        (10, 40, 0, 16, [Piece(0, 0, 6), Piece(1, 6, 22), Piece(2, 22, 30)]),
        (64, 72, 64, 4, [Piece(0, 0, 4), Piece(1, 4, 8)]),
        (16, 17, 0, 16, [Piece(1, 0, 1)]),
    ],
)
def test_pieces_follow_the_ranges_of_the_ranks(
    start: int, end: int, bucket: int, shard: int, expected: list[Piece]
) -> None:
    assert pieces(start, end, bucket, shard) == expected


def test_the_rank_with_the_largest_piece_saves_the_first_parameter() -> None:
    assert Owners().choose(pieces(10, 40, 0, 16)) == 1
    assert Owners().choose(pieces(0, 32, 0, 16)) == 0, "the first of equal ones"


@given(
    st.lists(st.integers(1, 60), min_size=1, max_size=80), st.integers(1, 8), st.integers(8, 40)
)  # fmt: skip
def test_ranks_save_about_what_they_keep(sizes: list[int], ranks: int, shard: int) -> None:
    owners, kept, saved = Owners(), Counter[int](), Counter[int]()
    bucket = start = 0
    for size in sizes:
        if start + size > bucket + ranks * shard:
            bucket = start = bucket + ranks * shard
        if size > ranks * shard:
            continue
        parts = pieces(start, start + size, bucket, shard)
        start += size
        for part in parts:
            kept[part.rank] += part.end - part.start
        saved[owners.choose(parts)] += size
    assert all(abs(saved[rank] - kept[rank]) <= 2 * max(sizes) for rank in range(ranks))


def test_a_chunk_has_its_part_of_the_pieces() -> None:
    parts = pieces(10, 40, 0, 16)
    assert clipped(parts, 0, 10) == [Piece(0, 0, 6), Piece(1, 6, 10)]
    assert clipped(parts, 20, 30) == [Piece(1, 20, 22), Piece(2, 22, 30)]
    assert piece_of(parts, 2) == Piece(2, 22, 30) and piece_of(parts, 3) is None


@pytest.mark.parametrize(
    ("shape", "expected"),
    [
        ((129280, 7168), 64),  # 56 would do, but do not divide the rows
        ((2048, 7168), 1),
        ((7168,), 1),
        ((10**6,), 1),
        ((99991, 7168), 1),  # a prime number of rows
        ((), 1),
    ],
)
def test_large_parameters_are_cut_into_equal_chunks_of_rows(shape: tuple[int, ...], expected: int) -> None:
    assert chunk_count(shape, 2**24) == expected
