"""Control of the KL coefficient; its state is part of every checkpoint."""

from typing import Any

from grpo_operator.api.v1alpha1.algorithm import KlControl


class KlController:
    """KL coefficient, fixed or adaptive (arXiv 1909.08593, section 2.2)."""

    def __init__(self, config: KlControl) -> None:
        self._config = config
        self.value = config.kl_coef

    def update(self, current_kl: float, samples: int) -> None:
        """Adapt the coefficient to ``target_kl``. ``samples``: number of samples in this step."""
        if self._config.type == "fixed":
            return
        error = min(max(current_kl / self._config.target_kl - 1.0, -0.2), 0.2)
        self.value *= 1.0 + error * samples / self._config.horizon

    def state_dict(self) -> dict[str, Any]:
        """Return the state for a checkpoint."""
        return {"value": self.value, "initial": self._config.kl_coef}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the state of a checkpoint, unless that is of a job with another coefficient."""
        own = self._config.kl_coef
        if self._config.type == "adaptive" and state.get("initial", own) == own:
            self.value = float(state["value"])
