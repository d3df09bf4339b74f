"""Cheap checksums of bytes, computed in one pass on a GPU, or piece by piece on a CPU without torch."""

from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:  # rollout agents import no torch
    import torch

_ROW = 4096  # words that are summed before the sum is weighted by its position
_WEIGHT = 0x1E3779B97F4A7C15  # odd, so that multiplication by a row's weight is invertible
_WORD = 8  # bytes
_ALIGNED = 16  # bytes; of the kernel's loads
_MODULUS = 1 << 64
_kept_weights: list["torch.Tensor"] = []  # of the parts of a fingerprint on a CPU, at most one; it grows


def fingerprint(data: "torch.Tensor") -> "torch.Tensor":
    """Return a checksum of ``data`` (uint8 [bytes], contiguous): int64 [] on the same device, unsynchronized.

    It changes with any single 8-byte word and with the order of the rows. It does not protect against
    forgery.
    """
    return _on_gpu(data)[0] if data.is_cuda else _on_cpu(data)


def checks(data: "torch.Tensor") -> "tuple[torch.Tensor, torch.Tensor]":
    """Return the fingerprint of ``data``, and the sum of its signed bytes: int64 [] too."""
    import torch

    if data.is_cuda:
        return _on_gpu(data)
    return _on_cpu(data), data.view(torch.int8).sum(dtype=torch.int64)


def compile_for(device: "torch.device") -> None:
    """Compile the kernel for a GPU, so that the first version does not wait for the compiler."""
    import torch

    checks(torch.zeros(_ALIGNED, dtype=torch.uint8, device=device))


def write_checks(data: "torch.Tensor", check: "torch.Tensor", total: "torch.Tensor | None" = None) -> None:
    """Write what ``checks`` returns to ``check`` and ``total``, int64 [1]; None: the sum is not needed.

    It takes fewer calls, for thousands of messages.
    """
    import torch

    if data.is_cuda:
        _write_on_gpu(data, check, torch.empty_like(check) if total is None else total)
    elif total is None:
        check.copy_(_on_cpu(data).view(1))
    else:
        for result, value in zip((check, total), checks(data), strict=True):
            result.copy_(value.view(1))


def _on_gpu(data: "torch.Tensor") -> "tuple[torch.Tensor, torch.Tensor]":
    import torch

    result = torch.empty(2, dtype=torch.int64, device=data.device)
    _write_on_gpu(data, result[:1], result[1:])
    return result[0], result[1]


def _write_on_gpu(data: "torch.Tensor", check: "torch.Tensor", total: "torch.Tensor") -> None:
    from grpo_worker.weightsync.protocol import fingerprint_triton

    if data.data_ptr() % _ALIGNED:
        data = data.clone()
    total.zero_()
    check.zero_()
    fingerprint_triton.add_sums(data, check, total, _ROW, _WEIGHT)
    check.bitwise_xor_(len(data))


def _on_cpu(data: "torch.Tensor") -> "torch.Tensor":
    import torch

    if data.storage_offset() % _WORD:
        data = data.clone()  # a view as int64 needs alignment to 8 bytes
    whole = len(data) // _WORD * _WORD
    words = data[:whole].view(torch.int64)
    rows = len(words) // _ROW
    # Sums of int64 wrap around in the same way on every device.
    sums = words[: rows * _ROW].view(rows, _ROW).sum(dim=1)
    rest = torch.cat([words[rows * _ROW :], data[whole:].to(torch.int64)])
    parts = torch.cat([sums, rest])
    return (parts * _weights(len(parts))).sum() ^ len(data)


def _weights(count: int) -> "torch.Tensor":
    """Return the weights of the parts of a fingerprint: int64 [count]."""
    import torch

    if not _kept_weights or len(_kept_weights[0]) < count:
        _kept_weights[:] = [torch.arange(1, 2 * count + 1, dtype=torch.int64) * _WEIGHT | 1]
    return _kept_weights[0][:count]


class Fingerprint:
    """The same checksum of ``nbytes`` bytes that arrive in pieces, in any order. Not thread-safe."""

    def __init__(self, nbytes: int) -> None:
        self._nbytes = nbytes
        self._words = nbytes // _WORD
        self._rows = self._words // _ROW
        self._sum = 0

    def add(self, position: int, data: npt.NDArray[np.uint8]) -> None:
        """Add the bytes ``data`` at byte ``position``. Every byte must be added exactly once."""
        # The checksum is linear: bytes that are missing in a word count as zeros.
        inside = max(0, min(position + len(data), self._words * _WORD) - position)
        if inside:
            before = position % _WORD
            head = data[:inside]
            if before or inside % _WORD:
                padding = -(before + inside) % _WORD
                head = np.pad(head, (before, padding))
            self._add_words(position // _WORD, head.view(np.uint64))
        tail = data[inside:].astype(np.uint64)
        if len(tail):
            first = position + inside - self._words * _WORD
            self._add_parts(self._rows + self._words - self._rows * _ROW + first, tail)

    def value(self) -> int:
        """Return the checksum as a signed number, as ``fingerprint`` does."""
        found = (self._sum ^ self._nbytes) % _MODULUS
        return found - _MODULUS if found >= _MODULUS // 2 else found

    def _add_words(self, first: int, words: npt.NDArray[np.uint64]) -> None:
        in_rows = max(0, min(first + len(words), self._rows * _ROW) - first)
        if in_rows:
            before = min(-first % _ROW, in_rows)
            after = before + (in_rows - before) // _ROW * _ROW
            sums = words[before:after].reshape(-1, _ROW).sum(axis=1)
            for start, part in ((0, words[:before]), (after, words[after:in_rows])):
                if len(part):
                    self._add_parts((first + start) // _ROW, part.sum(keepdims=True))
            self._add_parts((first + before) // _ROW, sums)
        rest = words[in_rows:]
        if len(rest):
            self._add_parts(self._rows + first + in_rows - self._rows * _ROW, rest)

    def _add_parts(self, first: int, parts: npt.NDArray[np.uint64]) -> None:
        positions = np.arange(first + 1, first + 1 + len(parts), dtype=np.uint64)
        weights: Any = positions * np.uint64(_WEIGHT) | np.uint64(1)
        self._sum = (self._sum + int((parts * weights).sum(dtype=np.uint64))) % _MODULUS
