"""Recipes of a process's models: recorded once for the tensors of a job, and kept over all its links."""

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from grpo_worker.weightsync.protocol.buffers import dtype_of
from grpo_worker.weightsync.protocol.link_exchange import TensorRow
from grpo_worker.weightsync.sglang_plugin.contents import CONTENTS
from grpo_worker.weightsync.sglang_plugin.recipe import Recipe, TensorSpec, record


@dataclass(slots=True)
class Recipes:
    """``recorded``: number of recordings, each of which overwrote the weights of a model."""

    recorded: int = 0
    _known: dict[tuple[int, str], Recipe] = field(default_factory=dict)  # by id of the model, digest of rows

    def of(self, model: Any, rows: Sequence[TensorRow], beat: Callable[[], None] = lambda: None) -> Recipe:
        """Return the model's recipe for tensors; record it if it is new or the parameters have moved.

        ``beat``: called while a model is recorded, which can take a minute.
        """
        ordered = sorted(rows, key=lambda row: row.name)
        text = json.dumps([[row.name, row.shape, row.dtype] for row in ordered])
        key = id(model), hashlib.sha256(text.encode()).hexdigest()
        known = self._known.get(key)
        if known is None or not known.valid(model):
            self.recorded += 1
            CONTENTS.overwritten()
            specs = [TensorSpec(row.name, row.shape, dtype_of(row.dtype)) for row in ordered]
            known = self._known[key] = record(model, specs, beat)
        return known


RECIPES = Recipes()  # of this rank of the engine
