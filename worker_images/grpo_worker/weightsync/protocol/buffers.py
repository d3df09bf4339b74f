"""Tensors packed into one buffer: alignment, dtype names, views and copies."""

from collections.abc import Mapping, Sequence

import torch

ALIGNED = 256  # bytes; what devices read and write at once, and where every dtype may begin

MARGIN = 64  # this part of a bucket is spared for what is needed beside it


def aligned(nbytes: int) -> int:
    """So many bytes, or the next number that leaves what follows aligned."""
    return -(-nbytes // ALIGNED) * ALIGNED


_DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float8_e4m3fn": torch.float8_e4m3fn,
}


def dtype_name(dtype: torch.dtype) -> str:
    """``torch.float32`` -> ``float32``."""
    return str(dtype).removeprefix("torch.")


def dtype_of(name: str) -> torch.dtype:
    """``float32`` -> ``torch.float32``. Raises ValueError for other names than the known ones."""
    if name not in _DTYPES:
        raise ValueError(f"dtype must be one of {sorted(_DTYPES)}, got {name!r}")
    return _DTYPES[name]


def copy_all(places: Sequence[torch.Tensor], tensors: Sequence[torch.Tensor]) -> None:
    """places[i] = tensors[i], those of one type by one launch."""
    groups: Mapping[torch.dtype, list[int]] = {
        dtype: [i for i, place in enumerate(places) if place.dtype == dtype]
        for dtype in {place.dtype for place in places}
    }
    for members in groups.values():
        torch._foreach_copy_([places[i] for i in members], [tensors[i].detach() for i in members])
