"""The GPU's kernels move the same bytes as torch; Triton's interpreter runs them here."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from grpo_worker.weightsync.protocol.byte_copies import Piece, tables

TESTS = Path(__file__).parents[3]


@pytest.mark.parametrize("program", ["pack", "unpack", "words"])
def test_kernels_move_the_same_bytes_as_torch(program: str) -> None:
    path = os.pathsep.join([str(TESTS), os.environ.get("PYTHONPATH", "")])
    answer = subprocess.run(
        [sys.executable, "-m", "support.gpu_kernels", program],
        check=False,
        capture_output=True,
        text=True,
        env=os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": path},
    )
    assert answer.returncode == 0, answer.stderr[-2000:]
    assert json.loads(answer.stdout) == []


def test_a_thread_moves_as_many_bytes_as_all_rows_allow() -> None:
    assert Piece(16, 32, 1, 64, 0, 0).word == 8
    assert Piece(16, 32, 2, 64, 68, 64).word == 4, "the second row begins at 84"
    assert Piece(16, 32, 1, 64, 3, 3).word == 8, "a single row has no pitch"
    assert Piece(1, 32, 1, 64, 0, 0).word == 1


def test_every_tile_belongs_to_the_piece_whose_words_it_copies() -> None:
    pieces = [Piece(0, 0, 1, 8 * 5, 0, 0), Piece(64, 64, 3, 8 * 4, 80, 80)]
    tiles, sources, places = tables(pieces, 8, 4)
    assert tiles.tolist() == [0, 0, 1, 1, 1]
    assert sources.tolist() == [0, 8]
    assert places.T.tolist() == [[0, 5, 0, 0, 0, 5], [8, 4, 10, 10, 2, 12]]
