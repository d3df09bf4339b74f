"""Tensors packed into one buffer: alignment, dtype names and grouped copies."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # rollout agents import no torch: it takes 300 MiB
    import torch

ALIGNED = 256  # bytes; size of a device's memory transactions, and a multiple of every dtype's size

MARGIN = 64  # 1/MARGIN of a bucket is reserved for the temporary memory of a load


def aligned(nbytes: int, multiple: int = ALIGNED) -> int:
    """Round ``nbytes`` up to the next multiple of ``multiple``."""
    return -(-nbytes // multiple) * multiple


_ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "float8_e4m3fn": 1}


def dtype_name(dtype: "torch.dtype") -> str:
    """Return the name without its module: ``torch.float32`` -> ``float32``."""
    return str(dtype).removeprefix("torch.")


def dtype_of(name: str) -> "torch.dtype":
    """Return the dtype of a name: ``float32`` -> ``torch.float32``. Raises ValueError for an unknown name."""
    import torch

    item_bytes(name)
    return getattr(torch, name)  # type: ignore[no-any-return]


def item_bytes(name: str) -> int:
    """Return the bytes of one element of the dtype ``name``. Raises ValueError for an unknown name."""
    if name not in _ITEM_BYTES:
        raise ValueError(f"dtype must be one of {sorted(_ITEM_BYTES)}, got {name!r}")
    return _ITEM_BYTES[name]


def copy_all(targets: "Sequence[torch.Tensor]", sources: "Sequence[torch.Tensor]") -> None:
    """Copy sources[i] into targets[i], with one launch for all contiguous ones of the same dtypes."""
    import torch

    groups: dict[object, tuple[list[torch.Tensor], list[torch.Tensor]]] = {}
    for target, source in zip(targets, sources, strict=True):
        # A strided tensor would make torch copy its whole list one by one.
        together = target.is_contiguous() and source.is_contiguous()
        group = groups.setdefault((target.dtype, source.dtype, together), ([], []))
        group[0].append(target)
        group[1].append(source)
    for to, of in groups.values():
        torch._foreach_copy_(to, of)
