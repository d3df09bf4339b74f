"""Contents of this rank's parameters: a complete version and the recipes that say where it lies, or none."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from grpo_worker.weightsync.sglang_plugin.recipe import Recipe


@dataclass(frozen=True, eq=False, slots=True)
class Complete:
    """One complete version; no other one is equal to it.

    ``models``: the served model, then those that draft for it. ``recipes``: of each of them.
    ``written``: after which a GPU has the bytes in its memory; None on a CPU.
    """

    models: Sequence[Any]
    recipes: Sequence[Recipe]
    written: torch.cuda.Event | None


class Contents:
    """Says whether the parameters hold a complete version. Whoever writes them reports before and after.

    A thread that reads them looks before and after it: if ``complete`` is the same object, no byte that it
    read has changed meanwhile.
    """

    def __init__(self) -> None:
        self.complete: Complete | None = None

    def overwritten(self) -> None:
        """Note that parameters are about to be written."""
        self.complete = None

    def completed(self, models: Sequence[Any], recipes: Sequence[Recipe]) -> None:
        """Note that a version is complete on all ranks of the engine."""
        written = None
        if any(parameter.is_cuda for parameter in models[0].parameters()):
            written = torch.cuda.Event()  # type: ignore[no-untyped-call]
            written.record()
        self.complete = Complete(tuple(models), tuple(recipes), written)


CONTENTS = Contents()  # of this rank of the engine
