"""State of the controller that checkpoints contain."""

from typing import Any

from grpo_worker.algorithms.kl import KlController
from grpo_worker.checkpointing.fork import DATA, data_of
from grpo_worker.controller.loop_state import LoopState
from grpo_worker.data.prompts import PromptSource


class ControllerState:
    """Collects and restores the number of steps, the KL coefficient and the position in the prompts."""

    def __init__(self, state: LoopState, kl: KlController, source: PromptSource) -> None:
        self._state, self._kl, self._source = state, kl, source
        self._initial = self.collect()

    def collect(self) -> dict[str, Any]:
        """Return the state for a checkpoint."""
        kl, source = self._kl.state_dict(), self._source.state_dict()
        return {"step": self._state.step, "kl": kl, "source": source, DATA: data_of(self._state.spec)}

    def restore(self, saved: dict[str, Any] | None, position: dict[str, Any] | None) -> None:
        """Restore a checkpoint's state; None: the initial one.

        ``position``: of the source of prompts, after a rollback. The loop itself restores its step.
        """
        saved = saved or self._initial
        self._kl.load_state_dict(saved["kl"])
        # Another job's position is left out if it is one in other data.
        self._source.load_state_dict(saved.get("source") or self._initial["source"])
        if position is not None:
            self._source.load_state_dict(position)
