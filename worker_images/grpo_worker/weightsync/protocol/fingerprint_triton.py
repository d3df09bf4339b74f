"""Triton kernel for the sums of a fingerprint, which reads every byte once."""

import torch
import triton
import triton.language as tl

_LANES = 128  # words whose bytes are added in lanes of 16 bits: 128 x 2 x 255 fits in one
_WARPS = 8


# Without a variant for each kind of number or address (1, multiples of 16): a compilation delays the first
# version.
@triton.jit(do_not_specialize=["weighted", "total", "nbytes"])  # type: ignore[untyped-decorator]
def _sums(  # type: ignore[no-untyped-def]  # Triton evaluates annotations
    data, weighted, total, nbytes, row: tl.constexpr, lanes: tl.constexpr, weight: tl.constexpr
):  # fmt: skip
    """Add one row per program to both sums; the last program adds what follows the rows."""
    number = tl.program_id(0).to(tl.int64)
    words = nbytes.to(tl.int64) // 8
    rows = words // row
    at = tl.arange(0, row // lanes)[:, None] * lanes + tl.arange(0, lanes)[None, :]
    place = number * row + at
    values = tl.load(data.to(tl.pointer_type(tl.int64)) + place, mask=place < words, other=0)
    # Signed bytes, each with 128 added, so that lanes of 16 bits hold their sums.
    shifted = values ^ -0x7F7F7F7F7F7F7F80
    lane_sums = tl.sum((shifted & 0x00FF00FF00FF00FF) + ((shifted >> 8) & 0x00FF00FF00FF00FF), axis=1)
    bytes_sum = (lane_sums & 0xFFFF) + ((lane_sums >> 16) & 0xFFFF)
    bytes_sum += ((lane_sums >> 32) & 0xFFFF) + ((lane_sums >> 48) & 0xFFFF)
    signed = tl.sum(bytes_sum, axis=0) - 128 * 8 * row
    if number < rows:
        part = tl.sum(tl.sum(values, axis=1), axis=0) * ((number + 1) * weight | 1)
    else:
        part = tl.sum(tl.sum(values * ((rows + at + 1) * weight | 1), axis=1), axis=0)
        end = tl.arange(0, 8)
        rest = words * 8 + end
        tail = tl.load(data + rest, mask=rest < nbytes, other=0)
        first = rows + words - rows * row + 1
        part += tl.sum(tail.to(tl.int64) * ((first + end) * weight | 1), axis=0)
        signed += tl.sum(tail.to(tl.int8, bitcast=True).to(tl.int64), axis=0)
    tl.atomic_add(weighted, part)
    tl.atomic_add(total, signed)


def add_sums(data: torch.Tensor, weighted: torch.Tensor, total: torch.Tensor, row: int, weight: int) -> None:
    """Add the weighted sum of the parts of ``data``, and the sum of its signed bytes.

    data: uint8 [bytes], aligned to 16 bytes. weighted, total: int64 [1]. ``row``: words of a part.
    """
    programs = len(data) // 8 // row + 1
    _sums[(programs,)](data, weighted, total, len(data), row, _LANES, weight, num_warps=_WARPS)
