"""Byte copies: many copies between places of a GPU's memory, listed once and launched together.

A launch of torch copies a limited number of tensors, and each of them costs Python some microseconds. A
version has thousands.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from grpo_worker.common.device_numbers import Numbers

_WORDS = (8, 4, 2, 1)  # bytes that a thread may move at once
_TILE = 2048  # words of one program of the kernel


@dataclass(frozen=True, slots=True)
class Piece:
    """Rows of bytes that are copied together.

    ``source``, ``target``: first byte, as an address or from the beginning of a buffer.
    ``source_pitch``, ``target_pitch``: bytes from the beginning of a row to that of the next one.
    """

    source: int
    target: int
    rows: int
    width: int
    source_pitch: int
    target_pitch: int

    @property
    def word(self) -> int:
        """Most bytes that a thread can move at once: every row begins and ends at a multiple of them."""
        ends = self.source | self.target | self.width
        if self.rows > 1:
            ends |= self.source_pitch | self.target_pitch
        return next(word for word in _WORDS if ends % word == 0)


@dataclass(slots=True)
class _Launch:
    """Copies of the pieces ``numbers`` in words of ``word`` bytes; see ``tables``."""

    word: int
    numbers: Numbers
    tiles: torch.Tensor
    sources: torch.Tensor
    places: torch.Tensor


class ByteCopies:
    """Copies of ``pieces`` on the GPU ``device``."""

    def __init__(self, pieces: Sequence[Piece], device: torch.device) -> None:
        self._launches: list[_Launch] = []
        of_word = np.array([piece.word if piece.rows * piece.width else 0 for piece in pieces])
        for word in _WORDS:
            numbers = np.flatnonzero(of_word == word)
            if len(numbers):
                made = tables([pieces[number] for number in numbers], word, _TILE)
                self._launches.append(_Launch(word, numbers, *(torch.from_numpy(t).to(device) for t in made)))

    @property
    def count(self) -> int:
        """Number of pieces that have bytes."""
        return sum(len(each.numbers) for each in self._launches)

    def launch(self, source: int = 0, target: int = 0) -> None:
        """Start the copies on the current stream.

        ``source``, ``target``: addresses of the buffers in which bytes of the pieces are counted.
        """
        from grpo_worker.weightsync.protocol import byte_copies_triton

        for each in self._launches:
            byte_copies_triton.copy(
                each.tiles, each.sources, each.places, source, target, each.word, _TILE
            )  # fmt: skip

    def read_sources(self, numbers: torch.Tensor) -> None:
        """Read the pieces' sources from ``numbers`` from now on: int64 [count] on the GPU."""
        start = 0
        for each in self._launches:
            each.sources = numbers[start : start + len(each.numbers)]
            start += len(each.numbers)

    def sources_of(self, sources: Numbers) -> Numbers:
        """Return what the kernel reads for pieces that begin elsewhere, aligned as before: int64 [count].

        ``sources``: int64 [pieces], the first byte of each.
        """
        parts = [sources[each.numbers] // each.word for each in self._launches]
        return np.concatenate([np.zeros(0, dtype=np.int64), *parts])


def tables(
    pieces: Sequence[Piece], word: int, tile: int
) -> tuple[npt.NDArray[np.int32], Numbers, Numbers]:  # fmt: skip
    """Return the tables of the kernel, in words of ``word`` bytes.

    tiles: int32 [programs], the piece of which each program copies ``tile`` words. sources: int64 [pieces].
    places: int64 [6, pieces]: target, width, pitch of source and of target, first program, words in all.
    """
    places = np.array(
        [[p.target, p.width, p.source_pitch, p.target_pitch, 0, p.rows * p.width] for p in pieces],
        dtype=np.int64,
    ).T
    places //= word
    programs = -(-places[5] // tile)
    places[4] = np.cumsum(programs) - programs
    sources = np.array([piece.source // word for piece in pieces], dtype=np.int64)
    return np.repeat(np.arange(len(pieces), dtype=np.int32), programs), sources, np.ascontiguousarray(places)


def compile_for(device: torch.device) -> None:
    """Compile the kernels for a GPU, so that the first version does not wait for the compiler."""
    if device.type != "cuda":
        return
    memory = torch.zeros(4 * _WORDS[0], dtype=torch.uint8, device=device)
    start = memory.data_ptr()
    for word in _WORDS:
        ByteCopies([Piece(start, start + 2 * _WORDS[0], 1, word, 0, 0)], device).launch()
