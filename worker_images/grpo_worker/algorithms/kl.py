"""Controllers of the KL coefficient; their state is part of every checkpoint."""

from typing import Any

from grpo_operator.api.v1alpha1.algorithm import KlControl


class KlController:
    """Fixed, or adaptive after arXiv 1909.08593, section 2.2."""

    def __init__(self, config: KlControl) -> None:
        self._config = config
        self.value = config.kl_coef

    def update(self, current_kl: float, samples: int) -> None:
        """Move the coefficient towards ``target_kl``; ``samples`` were drawn in this step."""
        if self._config.type == "fixed":
            return
        error = min(max(current_kl / self._config.target_kl - 1.0, -0.2), 0.2)
        self.value *= 1.0 + error * samples / self._config.horizon

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.value = float(state["value"])
