"""Pieces of parameters that data-parallel ranks keep, and the rank that saves each parameter."""

import pytest

from grpo_worker.megatron.checkpoint.pieces import (
    Piece,
    chunk_count,
    clipped,
    owner_of,
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


def test_the_rank_with_the_largest_piece_saves_a_parameter() -> None:
    assert owner_of(pieces(10, 40, 0, 16)) == 1
    assert owner_of(pieces(0, 32, 0, 16)) == 0, "the first of equal ones"


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
