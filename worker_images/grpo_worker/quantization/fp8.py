"""DeepSeek's FP8 format: e4m3 values and one fp32 scale (``NAME_scale_inv``) per 128 x 128 block."""

import re
from collections.abc import Iterable, Iterator, Sequence

import torch

FP8_BLOCK = 128
FP8 = torch.float8_e4m3fn
_LARGEST = 448.0  # of e4m3
_LARGEST_INVERSE = torch.finfo(torch.bfloat16).max  # of a block of tiny values
_QUANTISED = re.compile(r".*\.(?!eh_)\w+_proj(_with_mqa)?\.weight")

Part = tuple[str, tuple[int, ...], int, int, torch.Tensor]  # name, whole shape, dim, offset, slice


class BlockCutError(ValueError):
    """A shard contains part of a block, so its scale would differ from that of the whole matrix."""


def is_quantised(name: str) -> bool:
    """Return whether this Hugging Face tensor is stored in FP8.

    Projections are; embeddings, norms and routers are not.
    """
    return _QUANTISED.fullmatch(name) is not None


def blocks(shape: Iterable[int]) -> tuple[int, ...]:
    """Return the shape of the scales of a tensor of ``shape``."""
    return tuple(-(-size // FP8_BLOCK) for size in shape)


def quantise(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise values [m, n], any float dtype; return e4m3 [m, n] and scales.

    The scales are fp32 [ceil(m / 128), ceil(n / 128)]: the inverse of 448 / a block's largest magnitude, or 1
    for a block of zeros. The result has the same bits on every device, and those of Transformer Engine's
    weights with fp8-block128.
    """
    if values.is_cuda and values.stride(1) == 1:
        out = torch.empty(values.shape, dtype=FP8, device=values.device)
        scales = values.new_empty(blocks(values.shape), dtype=torch.float32)
        quantise_into([(values, out, scales)])
        return out, scales
    rows, columns = values.shape
    down, across = blocks(values.shape)
    padded = torch.zeros(down * FP8_BLOCK, across * FP8_BLOCK, dtype=torch.float32, device=values.device)
    padded[:rows, :columns] = values
    tiled = padded.view(down, FP8_BLOCK, across, FP8_BLOCK)
    largest = tiled.abs().amax(dim=(1, 3))
    # A number divided by a tensor would be its product with the rounded reciprocal.
    inverse = torch.where(largest > 0, torch.full_like(largest, _LARGEST) / largest, 1.0)
    inverse = inverse.clamp(max=_LARGEST_INVERSE)
    # Rounding of the inverse may lift the largest product above e4m3's range, which would become NaN.
    product = (tiled * inverse[:, None, :, None]).clamp(-_LARGEST, _LARGEST)
    return product.view(padded.shape)[:rows, :columns].to(FP8).contiguous(), 1 / inverse


def dequantise(values: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Return values [m, n] fp32 times their block's scale [ceil(m / 128), ceil(n / 128)]."""
    for dim in (0, 1):
        scale = scale.repeat_interleave(FP8_BLOCK, dim).narrow(dim, 0, values.shape[dim])
    return values * scale


def quantised_parts(parts: Iterable[Part]) -> Iterator[Part]:
    """Return the parts as an FP8 engine loads them: e4m3 values and their scales in place of projections.

    The result of a shard equals that part of the quantised whole. Raises BlockCutError where it would not.
    """
    for name, shape, dim, offset, tensor in parts:
        if not is_quantised(name):
            yield name, shape, dim, offset, tensor
            continue
        check_blocks((name, shape, dim, offset, tensor))
        values, scale = quantise(tensor)
        yield name, shape, dim, offset, values
        yield f"{name}_scale_inv", blocks(shape), dim, offset // FP8_BLOCK, scale


def quantise_into(matrices: Sequence[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]) -> None:
    """Quantise values [m, n] into contiguous e4m3 [m, n] and fp32 scales, which are the others of a triple.

    On a GPU one kernel call quantises all matrices of a shape. See ``quantise``.
    """
    if matrices and all(values.is_cuda and values.stride(1) == 1 for values, _, _ in matrices):
        from grpo_worker.quantization import fp8_triton

        fp8_triton.quantise_all(matrices, FP8_BLOCK)
        return
    for values, out, scales in matrices:
        quotients, scale = quantise(values)
        out.copy_(quotients)
        scales.copy_(scale)


def check_blocks(part: Part) -> None:
    """Check that a shard consists of whole blocks. Raises BlockCutError if it does not."""
    name, shape, dim, offset, tensor = part
    end = offset + tensor.shape[dim]
    if offset % FP8_BLOCK or (end % FP8_BLOCK and end != shape[dim]):
        raise BlockCutError(
            f"{name}: rows {offset} to {end} of dimension {dim} cut through a block of {FP8_BLOCK}: use "
            "a smaller trainer.parallelism.tensor or expertTensor, or engines without quantization"
        )
