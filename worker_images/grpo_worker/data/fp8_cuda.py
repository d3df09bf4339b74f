"""FP8 quantisation in blocks of 128 x 128 as one kernel: a pass over the matrix instead of ten."""

import torch
import triton
import triton.language as tl

_LARGEST = 448.0  # of e4m3


@triton.jit  # type: ignore[untyped-decorator]
def _quantise(  # type: ignore[no-untyped-def]  # Triton evaluates annotations
    values, out, scales, rows, columns, stride, block: tl.constexpr, largest_value: tl.constexpr
):
    """One program takes one block."""
    down = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    across = tl.program_id(1) * block + tl.arange(0, block)
    inside = (down[:, None] < rows) & (across[None, :] < columns)
    found = tl.load(values + down[:, None] * stride + across[None, :], mask=inside, other=0.0).to(tl.float32)
    largest = tl.max(tl.max(tl.abs(found), axis=1), axis=0)
    # Rounded as torch does it: the shards of a matrix must not depend on where they are quantised.
    scale = tl.where(largest > 0, tl.div_rn(largest, largest_value), 1.0)
    quotient = tl.div_rn(found, scale + tl.zeros_like(found))
    quotient = tl.minimum(tl.maximum(quotient, -largest_value), largest_value)
    tl.store(out + down[:, None] * columns + across[None, :], quotient.to(tl.float8e4nv), mask=inside)
    tl.store(scales + tl.program_id(0) * tl.num_programs(1) + tl.program_id(1), scale)


def quantise(values: torch.Tensor, block: int) -> tuple[torch.Tensor, torch.Tensor]:
    """values: [m, n] on a GPU, rows contiguous -> e4m3 [m, n], fp32 [ceil(m / block), ceil(n / block)]."""
    rows, columns = values.shape
    down, across = -(-rows // block), -(-columns // block)
    out = torch.empty(rows, columns, dtype=torch.float8_e4m3fn, device=values.device)
    scales = torch.empty(down, across, dtype=torch.float32, device=values.device)
    _quantise[(down, across)](values, out, scales, rows, columns, values.stride(0), block, _LARGEST)
    return out, scales
