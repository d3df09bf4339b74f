"""Readers of initial weights: seeded random ones, or a Hugging Face directory's safetensors files."""

import hashlib
import json
from pathlib import Path
from typing import Any, Protocol

import torch

from grpo_operator.api.catalog.presets import PRESET
from grpo_worker.megatron.families.registry import family_of
from grpo_worker.quantization.fp8 import FP8_BLOCK, dequantise


class WeightReader(Protocol):
    """Source of Hugging Face tensors, read in boxes."""

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a whole tensor. Raises KeyError for an unknown name."""

    def read(self, name: str, dim: int, offset: int, length: int) -> torch.Tensor:
        """Read ``length`` entries from ``offset`` along ``dim``, everything along other dimensions."""


def weight_reader(path: str, hf: dict[str, Any], seed: int) -> WeightReader:
    """Return the reader of a preset's seeded weights, or of a Hugging Face directory."""
    return SeededWeights(hf, seed) if path.startswith(PRESET) else SafetensorsWeights(Path(path))


class SeededWeights:
    """Random weights that are the same in every layout.

    Each tensor has its own generator, seeded with the job's seed and the tensor's name.
    """

    def __init__(self, hf: dict[str, Any], seed: int) -> None:
        family = family_of(hf)
        self._shapes = family.shapes(hf)
        if hf.get("num_nextn_predict_layers"):
            self._shapes = self._shapes | family.mtp_shapes(hf)
        self._std = float(hf["initializer_range"])
        self._seed = seed

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a whole tensor. Raises KeyError for an unknown name."""
        return self._shapes[name]

    def read(self, name: str, dim: int, offset: int, length: int) -> torch.Tensor:
        """Draw a tensor and return ``length`` of its entries from ``offset`` along ``dim``."""
        return self._draw(name).narrow(dim, offset, length)

    def _draw(self, name: str) -> torch.Tensor:
        shape = self._shapes[name]
        if name.endswith("norm.weight"):
            return torch.ones(shape)
        if name.endswith("e_score_correction_bias"):
            return torch.zeros(shape)
        digest = hashlib.sha256(f"{self._seed}:{name}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:7], "little"))
        return torch.randn(shape, generator=generator) * self._std


class SafetensorsWeights:
    """Weights in a Hugging Face directory; only the bytes of a box are read.

    FP8 tensors with block scales (``NAME_scale_inv``, 128 x 128) are dequantised to fp32.
    Raises FileNotFoundError when the directory has no safetensors files.
    """

    def __init__(self, directory: Path) -> None:
        from safetensors import safe_open

        self._directory = directory
        self._open = safe_open
        index = directory / "model.safetensors.index.json"
        single = directory / "model.safetensors"
        if index.is_file():
            self._files: dict[str, str] = json.loads(index.read_text())["weight_map"]
        elif single.is_file():
            with safe_open(single, "pt") as handle:
                self._files = dict.fromkeys(handle.keys(), single.name)
        else:
            raise FileNotFoundError(f"spec.model.path: no safetensors files in {directory}")

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a whole tensor. Raises KeyError for an unknown name."""
        with self._open(self._file(name), "pt") as handle:
            return tuple(handle.get_slice(name).get_shape())

    def read(self, name: str, dim: int, offset: int, length: int) -> torch.Tensor:
        """Read ``length`` entries of a tensor from ``offset`` along ``dim``."""
        scales = f"{name}_scale_inv"
        if scales not in self._files:
            return self._box(name, dim, offset, length)
        # A block has one scale, so whole blocks are read and dequantised first.
        first, last = offset // FP8_BLOCK, -(-(offset + length) // FP8_BLOCK)
        start = first * FP8_BLOCK
        end = min(last * FP8_BLOCK, self.shape(name)[dim])
        values = self._box(name, dim, start, end - start).float()
        scale = self._box(scales, dim, first, last - first).float()
        return dequantise(values, scale).narrow(dim, offset - start, length)

    def _box(self, name: str, dim: int, offset: int, length: int) -> torch.Tensor:
        with self._open(self._file(name), "pt") as handle:
            whole = handle.get_slice(name)
            if not whole.get_shape():
                return handle.get_tensor(name)  # type: ignore[no-any-return]
            index = [slice(None)] * len(whole.get_shape())
            index[dim] = slice(offset, offset + length)
            return whole[tuple(index)]  # type: ignore[no-any-return]

    def _file(self, name: str) -> Path:
        if name not in self._files:
            raise KeyError(f"{name} is in none of the safetensors files of {self._directory}")
        return self._directory / self._files[name]
