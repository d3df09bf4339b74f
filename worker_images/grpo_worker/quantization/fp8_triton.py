"""Triton kernel for FP8 quantization in blocks of 128 x 128, launched once for many matrices."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import triton
import triton.language as tl

from grpo_worker.common.device_numbers import Numbers

_LARGEST = 448.0  # of e4m3
_LARGEST_INVERSE = torch.finfo(torch.bfloat16).max  # of a block of tiny values
_ALIGNED = 16  # bytes that a thread moves at once
_WARPS = 4
_TYPES = {torch.bfloat16: tl.bfloat16, torch.float32: tl.float32, torch.float16: tl.float16}


# Without a variant for each kind of number (1, multiples of 16): a compilation delays the first version.
@triton.jit(do_not_specialize=["sources", "rows", "columns", "stride"])  # type: ignore[untyped-decorator]
def _quantise(  # type: ignore[no-untyped-def]  # Triton evaluates annotations
    sources, ends, rows, columns, stride,
    kind: tl.constexpr, block: tl.constexpr, largest_value: tl.constexpr, largest_inverse: tl.constexpr,
    aligned: tl.constexpr,
):  # fmt: skip
    """Quantise one block per program.

    sources: int64 [matrices], addresses of values. ends: int64 [2, matrices], of e4m3 values and of scales.
    ``aligned``: all rows of both kinds of values begin at multiples of 16 bytes, so that a thread can move as
    many at once.
    """
    matrix, count = tl.program_id(2), tl.num_programs(2)
    values = tl.load(sources + matrix).to(tl.pointer_type(kind))
    out = tl.load(ends + matrix).to(tl.pointer_type(tl.float8e4nv))
    scales = tl.load(ends + count + matrix).to(tl.pointer_type(tl.float32))
    if aligned:
        values, out = tl.multiple_of(values, 16), tl.multiple_of(out, 16)
        # Triton derives what a thread can move at once from the product, but from no hint at an argument.
        columns, stride = columns // 16 * 16, stride // 16 * 16
    down = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    across = tl.program_id(1) * block + tl.arange(0, block)
    inside = (down[:, None] < rows) & (across[None, :] < columns)
    tile = tl.load(values + down[:, None] * stride + across[None, :], mask=inside, other=0.0).to(tl.float32)
    largest = tl.max(tl.abs(tile))
    # div_rn rounds as torch does: shards must have the same bits wherever they are quantised.
    inverse = tl.where(largest > 0, tl.div_rn(largest_value, largest), 1.0)
    inverse = tl.minimum(inverse, largest_inverse)
    product = tl.minimum(tl.maximum(tile * inverse, -largest_value), largest_value)
    tl.store(out + down[:, None] * columns + across[None, :], product.to(tl.float8e4nv), mask=inside)
    tl.store(scales + tl.program_id(0) * tl.num_programs(1) + tl.program_id(1), tl.div_rn(1.0, inverse))


@dataclass(frozen=True, slots=True)
class MatrixKind:
    """Values of matrices that one launch can quantise together.

    ``stride``: elements from the beginning of a row to that of the next one. ``aligned``: all rows of both
    kinds of values begin at multiples of 16 bytes.
    """

    dtype: torch.dtype
    rows: int
    columns: int
    stride: int
    aligned: bool

    @classmethod
    def of(cls, dtype: torch.dtype, shape: tuple[int, int], stride: int, *addresses: int) -> "MatrixKind":
        """Return the kind of a matrix; ``addresses``: of its values and of the quantised ones."""
        rows, columns = shape
        return cls(
            dtype, rows, columns, stride, not any(end % _ALIGNED for end in (columns, stride, *addresses))
        )


class BlockQuantiser:
    """Quantises matrices of one kind to the same places at each launch.

    sources: int64 [matrices] on the GPU, addresses of the values at the time of a launch. outs, scales: int64
    [matrices], addresses of e4m3 [rows, columns] and of fp32 [ceil(rows / block), ceil(columns / block)].
    """

    def __init__(self, kind: MatrixKind, sources: torch.Tensor, outs: Numbers, scales: Numbers) -> None:
        self._kind = kind
        self._sources = sources
        self._ends = torch.from_numpy(np.stack([outs, scales])).to(sources.device)

    def launch(self, block: int) -> None:
        """Quantise in blocks of ``block`` x ``block`` on the current stream."""
        kind, count = self._kind, len(self._sources)
        down, across = -(-kind.rows // block), -(-kind.columns // block)
        _quantise[(down, across, count)](
            self._sources, self._ends, kind.rows, kind.columns, kind.stride, _TYPES[kind.dtype], block,
            _LARGEST, _LARGEST_INVERSE, kind.aligned, num_warps=_WARPS,
        )  # fmt: skip


def quantise_all(matrices: Sequence[tuple[torch.Tensor, torch.Tensor, torch.Tensor]], block: int) -> None:
    """Quantise matrices on one GPU, with one launch for each kind.

    matrices: (values [m, n] with contiguous rows, out e4m3 [m, n], scales fp32 [ceil(m / block),
    ceil(n / block)]).
    """
    groups: dict[MatrixKind, list[tuple[int, int, int]]] = {}
    for values, out, scales in matrices:
        addresses = values.data_ptr(), out.data_ptr(), scales.data_ptr()
        shape = values.shape[0], values.shape[1]
        kind = MatrixKind.of(values.dtype, shape, values.stride(0), *addresses[:2])
        groups.setdefault(kind, []).append(addresses)
    for kind, rows in groups.items():
        of_values, outs, of_scales = np.ascontiguousarray(np.array(rows, dtype=np.int64).T)
        sources = torch.from_numpy(of_values).to(matrices[0][0].device)
        BlockQuantiser(kind, sources, outs, of_scales).launch(block)
