"""Triton kernel of byte copies: each program copies one tile of a piece."""

import torch
import triton
import triton.language as tl

_TYPES = {8: tl.int64, 4: tl.int32, 2: tl.int16, 1: tl.int8}
_WARPS = 8


# Without a variant for each kind of number (1, multiples of 16): a compilation delays the first version.
@triton.jit(do_not_specialize=["sources", "count", "source", "target"])  # type: ignore[untyped-decorator]
def _copy(  # type: ignore[no-untyped-def]  # Triton evaluates annotations
    tiles, sources, places, count, source: tl.int64, target: tl.int64,
    kind: tl.constexpr, tile: tl.constexpr,
):  # fmt: skip
    """Copy the tile of words that the table ``tiles`` gives to this program."""
    number = tl.program_id(0)
    chosen = tl.load(tiles + number)
    piece = places + chosen
    begin, end = tl.load(sources + chosen), tl.load(piece)
    width = tl.load(piece + count).to(tl.int32)
    pitch, end_pitch = tl.load(piece + 2 * count), tl.load(piece + 3 * count)
    first, words = tl.load(piece + 4 * count), tl.load(piece + 5 * count)
    at = ((number - first) * tile).to(tl.int32) + tl.arange(0, tile)
    row = at // width
    column = at - row * width
    inside = at < words
    source, target = source.to(tl.int64), target.to(tl.int64)
    values = tl.load(source.to(tl.pointer_type(kind)) + begin + row * pitch + column, mask=inside)
    tl.store(target.to(tl.pointer_type(kind)) + end + row * end_pitch + column, values, mask=inside)


def copy(
    tiles: torch.Tensor, sources: torch.Tensor, places: torch.Tensor, source: int, target: int, word: int,
    tile: int,
) -> None:  # fmt: skip
    """Start copies; see ``byte_copies.tables``."""
    count = places.shape[1]
    _copy[(len(tiles),)](
        tiles, sources, places, count, source, target, _TYPES[word], tile, num_warps=_WARPS
    )  # fmt: skip
