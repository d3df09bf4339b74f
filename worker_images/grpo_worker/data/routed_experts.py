"""The experts that an engine took for each token, as SGLang returns them."""

import base64
from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass(frozen=True, slots=True)
class ExpertLayers:
    """Which layers of a model have experts. ``layers``: of all layers; ``topk``: experts of a token."""

    layers: int
    moe: tuple[int, ...]
    topk: int

    def decode(self, meta: dict[str, Any], tokens: int) -> np.ndarray:
        """[tokens, expert layers, k] uint16 out of ``meta_info`` (base64 of int32 [tokens, layers, k]).

        Raises ValueError when the engine does not say, or says something of another size.
        """
        text = meta.get("routed_experts")
        if not text:
            raise ValueError("the engine returns no routed experts: set engine.returnRoutedExperts")
        flat = np.frombuffer(base64.b64decode(text), dtype=np.int32)
        shape = (tokens, self.layers, self.topk)
        if flat.size != tokens * self.layers * self.topk:
            raise ValueError(f"{flat.size} routed experts are not of shape {shape}")
        return flat.reshape(shape)[:, list(self.moe)].astype(np.uint16)
