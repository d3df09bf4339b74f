"""Decoding of routed experts, the experts that an engine chose for each token."""

import base64
from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass(frozen=True, slots=True)
class ExpertLayers:
    """Expert layers of a model.

    ``layers``: number of all layers; ``moe``: indices of those with experts; ``topk``: experts per token.
    """

    layers: int
    moe: tuple[int, ...]
    topk: int

    def decode(self, meta: dict[str, Any], tokens: int) -> np.ndarray:
        """Return the experts in SGLang's ``meta_info`` as uint16 [tokens, expert layers, k].

        SGLang encodes int32 [tokens, layers, k] in base64. Raises ValueError when the experts are missing or
        have another size.
        """
        text = meta.get("routed_experts")
        if not text:
            raise ValueError("the engine returns no routed experts: set engine.returnRoutedExperts")
        flat = np.frombuffer(base64.b64decode(text), dtype=np.int32)
        shape = (tokens, self.layers, self.topk)
        if flat.size != tokens * self.layers * self.topk:
            raise ValueError(f"the engine returned {flat.size} routed experts, expected shape {shape}")
        return flat.reshape(shape)[:, list(self.moe)].astype(np.uint16)
