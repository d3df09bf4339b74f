"""Cheap checksum of a tensor's bytes, computed in one pass on a GPU or a CPU."""

import torch

_ROW = 4096  # words that are summed before the sum is weighted by its position
_WEIGHT = 0x1E3779B97F4A7C15  # odd, so that multiplication by a row's weight is invertible


def fingerprint(data: torch.Tensor) -> torch.Tensor:
    """Return a checksum of ``data`` (uint8 [bytes], contiguous): int64 [] on the same device, unsynchronized.

    It changes with any single 8-byte word and with the order of the rows. It does not protect against
    forgery.
    """
    if data.storage_offset() % 8:
        data = data.clone()  # a view as int64 needs alignment to 8 bytes
    whole = len(data) // 8 * 8
    words = data[:whole].view(torch.int64)
    rows = len(words) // _ROW
    # Sums of int64 wrap around in the same way on every device.
    sums = words[: rows * _ROW].view(rows, _ROW).sum(dim=1)
    rest = torch.cat([words[rows * _ROW :], data[whole:].to(torch.int64)])
    parts = torch.cat([sums, rest])
    positions = torch.arange(1, len(parts) + 1, device=data.device, dtype=torch.int64)
    return (parts * (positions * _WEIGHT | 1)).sum() ^ len(data)
