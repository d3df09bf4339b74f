"""Triton kernel for FP8 quantization in blocks of 128 x 128, launched once for many matrices."""

from collections import defaultdict
from collections.abc import Sequence

import torch
import triton
import triton.language as tl

_LARGEST = 448.0  # of e4m3
_SMALLEST = 2.0**-100  # scale that is multiplied by its inverse
_ALIGNED = 16  # bytes that a thread moves at once
_WARPS = 8
_TYPES = {torch.bfloat16: tl.bfloat16, torch.float32: tl.float32, torch.float16: tl.float16}


# Without a variant for each kind of number (1, multiples of 16): a compilation delays the first version.
@triton.jit(do_not_specialize=["count", "rows", "columns", "stride"])  # type: ignore[untyped-decorator]
def _quantise(  # type: ignore[no-untyped-def]  # Triton evaluates annotations
    pointers, count, rows, columns, stride,
    kind: tl.constexpr, block: tl.constexpr, largest_value: tl.constexpr, smallest: tl.constexpr,
    aligned: tl.constexpr,
):  # fmt: skip
    """Quantise one block per program. pointers: int64 [3, count] to values, quotients and scales.

    ``aligned``: all rows of values and quotients begin at multiples of 16 bytes, so that a thread can move as
    many at once.
    """
    matrix = tl.program_id(2)
    values = tl.load(pointers + matrix).to(tl.pointer_type(kind))
    out = tl.load(pointers + count + matrix).to(tl.pointer_type(tl.float8e4nv))
    scales = tl.load(pointers + 2 * count + matrix).to(tl.pointer_type(tl.float32))
    if aligned:
        values, out = tl.multiple_of(values, 16), tl.multiple_of(out, 16)
        columns, stride = tl.multiple_of(columns, 16), tl.multiple_of(stride, 16)
    down = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    across = tl.program_id(1) * block + tl.arange(0, block)
    inside = (down[:, None] < rows) & (across[None, :] < columns)
    tile = tl.load(values + down[:, None] * stride + across[None, :], mask=inside, other=0.0).to(tl.float32)
    largest = tl.max(tl.abs(tile))
    # div_rn rounds as torch does: shards must have the same bits wherever they are quantised.
    scale = tl.where(largest > 0, tl.div_rn(largest, largest_value), 1.0)
    scales_of_tile = scale + tl.zeros_like(tile)
    if scale < smallest:  # its inverse would be infinite
        quotient = tl.div_rn(tile, scales_of_tile)
    else:
        # A division takes longer than reading the tile. The product with the rounded inverse and one step of
        # Newton's method give the same, rounded quotient.
        inverse = tl.div_rn(1.0, scale)
        estimate = tile * inverse
        quotient = tl.fma(tl.fma(-estimate, scales_of_tile, tile), inverse + tl.zeros_like(tile), estimate)
    quotient = tl.minimum(tl.maximum(quotient, -largest_value), largest_value)
    tl.store(out + down[:, None] * columns + across[None, :], quotient.to(tl.float8e4nv), mask=inside)
    tl.store(scales + tl.program_id(0) * tl.num_programs(1) + tl.program_id(1), scale)


def quantise_all(matrices: Sequence[tuple[torch.Tensor, torch.Tensor, torch.Tensor]], block: int) -> None:
    """Quantise matrices on one GPU, with one launch for each shape.

    matrices: (values [m, n] with contiguous rows, out e4m3 [m, n], scales fp32 [ceil(m / block),
    ceil(n / block)]).
    """
    groups = defaultdict(list)
    for values, out, scales in matrices:
        kind = (values.dtype, values.shape, values.stride(0))
        groups[kind].append((values.data_ptr(), out.data_ptr(), scales.data_ptr()))
    for (dtype, (rows, columns), stride), addresses in groups.items():
        down, across = -(-rows // block), -(-columns // block)
        pointers = torch.tensor(addresses, device="cpu").t().contiguous().pin_memory()
        on_device = pointers.to(matrices[0][0].device, non_blocking=True)
        ends = columns, stride, *(end for values, out, _ in addresses for end in (values, out))
        _quantise[(down, across, len(addresses))](
            on_device, len(addresses), rows, columns, stride, _TYPES[dtype], block, _LARGEST,
            _SMALLEST, not any(end % _ALIGNED for end in ends), num_warps=_WARPS,
        )  # fmt: skip
