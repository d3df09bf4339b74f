"""Routed experts, the experts that an engine chose for each token: their files and references.

The engine writes the experts of a sample to a file in its pod and returns a reference. The controller passes
references on; trainer ranks read their layers and tokens from the pod's agent.

A file holds the CRC-32 of each layer, uint32 [layers], and then the experts, [layers, tokens, k], as uint8,
or uint16 if the model has more than 256 experts.
"""

import base64
import json
import zlib
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from grpo_worker.common.known_fields import known

Spans = Sequence[tuple[int, int]]  # (first token, end) of consecutive tokens
SpansOf = Callable[[int], Spans]  # tokens of a sample -> those that a rank needs
PROBLEM = "problem"  # key of a response whose experts could not be kept
_CRC = 4  # bytes


class ExpertsError(ValueError):
    """Experts are missing or damaged."""


class ExpertsLostError(OSError):
    """Pods that held the routed experts of samples are gone."""


@dataclass(frozen=True, slots=True)
class RoutedExperts:
    """Reference to the experts of one sample.

    ``location``: URL of the agent that holds them, or the path of a file, where they begin at ``offset``.
    ``tokens``: prompt and response tokens but the last one, from which nothing was computed.
    ``digest``: CRC-32 of the layers' CRCs.
    """

    location: str
    key: str
    tokens: int
    layers: int
    topk: int
    digest: int
    wide: bool = False
    offset: int = 0

    @property
    def dtype(self) -> np.dtype[Any]:
        """Type of an expert's index."""
        return np.dtype(np.uint16 if self.wide else np.uint8)

    @property
    def layer_bytes(self) -> int:
        """Bytes of one layer."""
        return self.tokens * self.topk * self.dtype.itemsize

    @property
    def nbytes(self) -> int:
        """Bytes of the whole record."""
        return self.layers * (_CRC + self.layer_bytes)

    @property
    def in_file(self) -> bool:
        """True if the experts are in a file, which outlives the engine."""
        return not self.location.startswith("http")

    def to_json(self) -> dict[str, Any]:
        """Return the reference as a JSON object."""
        return asdict(self)

    def ranges(self, layers: Sequence[int], spans: Spans) -> list[tuple[int, int]]:
        """Return the byte ranges (start, length) of the CRCs, and of the tokens ``spans`` of ``layers``."""
        size, first = self.topk * self.dtype.itemsize, self.layers * _CRC
        found = [(0, first)]
        for layer in layers:
            base = first + layer * self.layer_bytes
            found += [(base + start * size, (end - start) * size) for start, end in self.within(spans)]
        return found

    def within(self, spans: Spans) -> list[tuple[int, int]]:
        """Return the parts of ``spans`` that have experts."""
        cut = [(start, min(end, self.tokens)) for start, end in spans]
        return [(start, end) for start, end in cut if start < end]

    def parse(self, data: bytes, layers: Sequence[int], spans: Spans) -> np.ndarray:
        """Return the bytes of ``ranges`` as [layers, tokens, k]; other tokens are 0.

        Raises ExpertsError if the bytes are damaged: always noticed for whole layers.
        """
        head = self.layers * _CRC
        spans = self.within(spans)
        if len(data) != sum(length for _, length in self.ranges(layers, spans)):
            raise ExpertsError(f"the experts of {self.key} have {len(data)} bytes: a wrong size")
        if zlib.crc32(data[:head]) != self.digest:
            raise ExpertsError(f"the experts of {self.key} have another digest than their reference")
        crcs = np.frombuffer(data[:head], np.uint32)
        result = np.zeros((len(layers), self.tokens, self.topk), self.dtype)
        place = head
        for number, layer in enumerate(layers):
            for start, end in spans:
                size = (end - start) * self.topk
                part = np.frombuffer(data, self.dtype, size, place)
                if end - start == self.tokens and zlib.crc32(part.tobytes()) != crcs[layer]:
                    raise ExpertsError(f"the experts of {self.key} are damaged in layer {layer}")
                result[number, start:end] = part.reshape(-1, self.topk)
                place += part.nbytes
        return result


def record_of(experts: np.ndarray) -> tuple[bytes, int]:
    """Return the record of a sample and its digest. experts: [layers, tokens, k], uint8 or uint16."""
    crcs = np.array([zlib.crc32(layer.tobytes()) for layer in experts], np.uint32).tobytes()
    return crcs + experts.tobytes(), zlib.crc32(crcs)


def read_ranges(path: Path, offset: int, ranges: Sequence[tuple[int, int]]) -> bytes:
    """Return byte ranges of a record that begins at ``offset`` of a file."""
    parts = []
    with path.open("rb") as file:
        for start, length in ranges:
            file.seek(offset + start)
            parts.append(file.read(length))
    return b"".join(parts)


@dataclass(frozen=True, slots=True)
class ExpertLayers:
    """Expert layers of a model.

    ``layers``: number of all layers; ``moe``: indices of those with experts; ``topk``: experts per token.
    """

    layers: int
    moe: tuple[int, ...]
    topk: int

    def reference(self, meta: dict[str, Any], tokens: int) -> RoutedExperts:
        """Return the reference in SGLang's ``meta_info``, where our plugin puts it, encoded in base64.

        Raises ExpertsError when it is missing or the experts have another shape.
        """
        text = meta.get("routed_experts")
        if not text:
            raise ExpertsError("the engine returns no routed experts: set engine.returnRoutedExperts")
        try:
            fields = json.loads(base64.b64decode(text))
            if PROBLEM in fields:
                raise ExpertsError(f"the engine cannot keep routed experts: {fields[PROBLEM]}")
            found = RoutedExperts(**known(RoutedExperts, fields))
        except ExpertsError:
            raise
        except (ValueError, TypeError) as error:
            raise ExpertsError(
                "the engine returns routed experts instead of a reference: its image lacks grpo-worker's "
                "plugin for SGLang"
            ) from error
        shape = found.tokens, found.layers, found.topk
        if shape != (tokens, self.layers, self.topk):
            raise ExpertsError(
                f"the engine returned routed experts of shape {shape}, expected "
                f"{(tokens, self.layers, self.topk)}"
            )
        return found
